from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError, UnsupportedModelError
from cpomdp_ppl.inference import BACKENDS, ParticleFilter, as_backend
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid, Office
from cpomdp_ppl.state import map_state
from tests.programs import EyesOpen, Plates, Walk

SERVED = {
    LightDark: {"smc", "ekf", "ukf", "grid"},
    LineGrid: {"smc", "exact"},
    ContextualTiger: {"smc", "exact"},
    Beacons: {"smc", "ekf", "ukf"},
    Office: {"smc", "exact"},
}


def at(values, t):
    return {site: value[:, t] for site, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("make", SERVED)
def test_every_backend_serves_its_models_and_refuses_the_others(make, name):
    model = make()
    episodes = simulate(model, RandomPolicy(model.num_actions), 5, contexts="balanced", seed=0)
    if name not in SERVED[make]:
        with pytest.raises(UnsupportedModelError, match="state"):
            as_backend(name).run(model, episodes)
        return
    filtering = as_backend(name).run(model, episodes, seed=0)
    B, T, C = 5, model.horizon, model.num_contexts
    assert filtering.log_likelihood.shape == (B, C)
    assert filtering.increments.shape == filtering.expected_reward.shape == (B, T, C)
    assert filtering.posterior().shape == (B, T + 1, C)
    torch.testing.assert_close(filtering.posterior().sum(-1), torch.ones(B, T + 1, dtype=torch.float64))
    assert filtering.increments.dtype == torch.float64
    assert not bool(filtering.increments.isnan().any())


ONLINE = [(make, name) for make, names in SERVED.items() for name in sorted(names)]
ONLINE += [(EyesOpen, name) for name in ("smc", "ekf", "ukf", "grid")]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), ONLINE)
def test_step_by_step_gives_the_numbers_of_the_batch(make, name):
    model, backend = make(), as_backend(name)
    episodes = simulate(model, RandomPolicy(model.num_actions), 5, contexts="balanced", seed=0)
    batch = backend.run(model, episodes, seed=7)
    online = backend.online(model, 5, seed=7)
    if model.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
    for t in range(model.horizon):
        close = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}
        torch.testing.assert_close(online.posterior, batch.posterior()[:, t], **close)
        expected = online.expected_reward(episodes.actions[:, t])
        torch.testing.assert_close(expected, batch.expected_reward[:, t], **close)
        online.observe(episodes.actions[:, t], at(episodes.observations, t), at(episodes.observed, t))
        mean = map_state(lambda leaf, t=t: leaf[:, t + 1], batch.state_mean)
        map_state(
            lambda x, y, close=close: torch.testing.assert_close(x, y, **close), online.state_mean, mean
        )
    assert online.time == model.horizon
    torch.testing.assert_close(online.log_likelihood, batch.log_likelihood)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smc", "ekf", "ukf", "grid"])
def test_one_by_one_is_the_batch(name):
    """Deterministic backends to rounding; SMC within five standard errors."""
    episodes = simulate(LightDark(), RandomPolicy(3), 3, seed=0)
    backend = ParticleFilter(4000) if name == "smc" else as_backend(name)
    batch = backend.run(LightDark(), episodes, seed=0)
    for b in range(3):
        one = backend.run(LightDark(), episodes[b], seed=b)
        c = int(batch.log_likelihood[b].argmax())
        limit = 5 * 2**0.5 * float(batch.standard_error[b, c]) if name == "smc" else 1e-5
        assert abs(one.log_likelihood[0, c] - batch.log_likelihood[b, c]) <= limit


def test_beliefs_that_were_handed_out_stay_as_they_were():
    online = ParticleFilter(50).online(LightDark(), seed=0)
    online.observe("observe", {"z": 3.0})
    before = online.belief.weights.values.clone(), online.belief.state.clone()
    kept = online.belief
    for _ in range(3):
        online.observe("observe", {"z": -2.0})
    assert torch.equal(kept.weights.values, before[0])
    assert torch.equal(kept.state, before[1])


def test_a_prior_is_taken_into_account():
    online = ParticleFilter(50).online(LightDark(), prior=[0.9, 0.1], seed=0)
    assert online.posterior.tolist()[0] == pytest.approx([0.9, 0.1])
    online.observe("left")
    assert online.posterior.tolist()[0] == pytest.approx([0.9, 0.1])


def test_an_impossible_step_leaves_the_filter_where_it_was():
    online = as_backend("exact").online(LineGrid())
    with pytest.raises(DegenerateWeightsError, match="time 1 of episode 0"):
        online.observe("sense", {"side": 0.5})
    assert online.time == 0
    online.observe("sense", {"side": 1.0})
    assert online.posterior.tolist()[0] == pytest.approx([0.85, 0.15])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (("up",), "action: expected names out of"),
        ((["up"],), "action: expected names out of"),
        ((True,), "action: expected integer indices or names"),
        ((0.5,), "action: expected integer indices or names"),
        ((5,), r"action: expected 0 to 2 \(left, right, observe\), got 5"),
        ((None,), "action: expected an action, got None"),
        (([0, 1],), r"action: expected an index, a name, or either for each: \[1\]"),
        (("observe", {"y": 1.0}), r"observations: expected sites out of \['z'\]"),
        (("observe", {"z": [1.0, 2.0]}), r"observations\['z'\]: expected shape \[1\]"),
        (("observe", {"z": float("nan")}), r"observations\['z'\]: expected finite values"),
        (("observe", {"z": "a"}), r"observations\['z'\]: expected an array of real numbers"),
        (("observe", 1.0), "observations: expected a mapping from sites"),
        (("observe", {"z": 1.0}, True), "observed: expected a mapping from sites"),
        (("observe", {"z": 1.0}, {"y": True}), r"observed: expected sites out of \['z'\], got \['y'\]"),
        (("observe", {"z": 1.0}, {"z": "yes"}), r"observed\['z'\]: expected an array of real numbers"),
        (("observe", {"z": 1.0}, {"z": 1}), r"observed\['z'\]: expected booleans, got 1"),
        (("observe", {"z": 1.0}, {"z": None}), r"observed\['z'\]: expected"),
        (("observe", {"z": 1.0}, {"z": [True, True]}), r"observed\['z'\]: expected shape \[1\], got \[2\]"),
        (("observe", {}, {"z": True}), r"observed\['z'\]: expected False: it is not in observations"),
    ],
)
def test_bad_steps_are_named(step, message):
    with pytest.raises(ValueError, match=message):
        ParticleFilter(10).online(LightDark()).observe(*step)


class Readings(Walk):
    """An integer, and a table of numbers."""

    def observation(self, state, action, context):
        pyro.sample("door", dist.Categorical(torch.ones(3)))
        mean = state[..., None, None].expand(*state.shape, 2, 3)
        pyro.sample("table", dist.Normal(mean, 1.0).to_event(2))


TABLE = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("B", "observations", "message"),
    [
        (1, {"table": TABLE.T}, r"observations\['table'\]: expected shape \[1, 2, 3\], got \[3, 2\]"),
        (1, {"table": TABLE.T[None]}, r"expected shape \[1, 2, 3\], got \[1, 3, 2\]"),
        (1, {"table": TABLE.flatten()}, r"expected shape \[1, 2, 3\], got \[6\]"),
        (2, {"table": torch.zeros(3, 2, 2)}, r"expected shape \[2, 2, 3\], got \[3, 2, 2\]"),
        (2, {"table": TABLE}, r"expected shape \[2, 2, 3\], got \[2, 3\]"),
        (3, {"door": 1}, r"observations\['door'\]: expected shape \[3\], got \[\]"),
        (1, {"door": 1.5}, r"observations\['door'\]: expected values of torch.int64, got 1.5 at episode 0"),
        (
            1,
            {"door": float("nan")},
            r"observations\['door'\]: expected finite values where observed, got nan",
        ),
        (1, {"table": TABLE.double() * 1e300}, r"observations\['table'\]: expected values of torch.float32"),
    ],
)
def test_values_must_fit_their_site(B, observations, message):
    online = ParticleFilter(10).online(Readings(), B, seed=0)
    with pytest.raises(ValueError, match=message):
        online.observe(0, observations)
    assert online.time == 0


def test_values_may_differ_by_axes_of_size_one():
    def likelihood(B, observations, observed=None):
        online = ParticleFilter(10).online(Readings(), B, seed=0)
        online.observe(0, observations, observed)
        return online.log_likelihood

    one = likelihood(1, {"door": [1], "table": TABLE[None]})
    for door, table in ((1, TABLE), (1.0, TABLE[..., None]), ([[1]], TABLE.numpy())):
        assert torch.equal(likelihood(1, {"door": door, "table": table}), one)
    two = likelihood(2, {"door": [1, 2]})
    assert torch.equal(likelihood(2, {"door": [[1], [2]]}), two)
    nothing = likelihood(2, {"door": [float("nan"), 2.0]}, {"door": [False, True]})
    assert nothing[0].tolist() == [0.0, 0.0]
    assert torch.equal(nothing[1], two[1])


def test_flags_fit_episodes_and_plates():
    def likelihood(B, flags):
        online = ParticleFilter(10).online(Plates(), B, seed=0)
        online.observe(0, {"z": torch.ones(B, 3)}, {"z": flags})
        return online.log_likelihood

    sees = [True, False, True]
    assert torch.equal(likelihood(1, sees), likelihood(1, [sees]))
    assert likelihood(2, [False, False]).tolist() == [[0.0, 0.0]] * 2
    assert likelihood(2, [[False] * 3, sees])[0].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"observed\['z'\]: expected shape \[2, 3\], got \[3\]"):
        likelihood(2, sees)


def test_actions_may_be_names():
    online = ParticleFilter(10).online(LightDark(), 2, seed=0)
    for action in (["left", "observe"], ("left", "observe"), np.array(["left", "observe"]), [0, 2]):
        expected = online.expected_reward(torch.tensor([0, 2]))
        assert torch.equal(online.expected_reward(action), expected)
    online.observe(["left", "observe"], {"z": [0.0, 1.0]}, {"z": [False, True]})
    assert online.log_likelihood[0].tolist() == [0.0, 0.0]


class Exclusive(Walk):
    """Context 0 says 0, context 1 says 1."""

    def observation(self, state, action, context):
        pyro.sample("side", dist.Bernoulli(context.expand(state.shape).float()))


def test_a_prior_that_excludes_what_is_possible_is_an_error():
    online = ParticleFilter(10).online(Exclusive(), 2, prior=[1.0, 0.0], seed=0)
    online.observe(0, {"side": [0.0, 0.0]})
    assert online.posterior.tolist() == [[1.0, 0.0]] * 2
    online = ParticleFilter(10).online(Exclusive(), 2, prior=[1.0, 0.0], seed=0)
    online.observe(0, {"side": [0.0, 1.0]})
    with pytest.raises(DegenerateWeightsError, match="time 1 of episode 1: the prior excludes"):
        online.posterior  # noqa: B018


def test_an_initial_observation_comes_first():
    online = ParticleFilter(10).online(EyesOpen())
    with pytest.raises(ValueError, match="action: expected None, with the initial observation, first"):
        online.observe(1, {"z": 0.0})
    online.observe(None, {"z": 0.0})
    online.observe(1, {"z": 0.0, "w": 0.0})
    assert online.time == 1


def test_backends_have_names():
    assert as_backend("smc") == ParticleFilter()
    backend = ParticleFilter(10)
    assert as_backend(backend) is backend
    with pytest.raises(ValueError, match=r"likelihood: expected one of .*got magic"):
        as_backend("magic")
    for wrong in (["smc"], ParticleFilter, None, {"smc": 1}):
        with pytest.raises(ValueError, match="likelihood: expected one of"):
            as_backend(wrong)
