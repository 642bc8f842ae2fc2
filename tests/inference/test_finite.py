"""The exact backend against a sum over all paths of states."""

from __future__ import annotations

from itertools import product

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError, DensityError, UnsupportedModelError
from cpomdp_ppl.inference.finite import ObservableOperator
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from tests.programs import Walk

M = 3  # values of the categorical observation


def sparse(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Random probabilities along the last axis, some of them exactly zero."""
    weights = generator.random(shape) * (generator.random(shape) < 0.7)
    np.put_along_axis(weights, generator.integers(shape[-1], size=(*shape[:-1], 1)), 0.5, -1)
    return weights / weights.sum(-1, keepdims=True)


class Random(CPOMDP):
    """A finite CPOMDP with random tables and two sensors, each of which works for some actions."""

    def __init__(self, seed: int, C: int, N: int, A: int, T: int, initial_observation: bool = False):
        super().__init__()
        self.contexts, self.actions, self.states, self.horizon = C, A, N, T
        self.initial_observation = initial_observation
        generator = np.random.default_rng(seed)
        self.tables = {
            "start": sparse(generator, C, N),
            "move": sparse(generator, C, A, N, N),
            "bit": sparse(generator, C, A + 1, N, 2)[..., 1],  # the last "action" is None, at the start
            "sign": sparse(generator, C, A + 1, N, M),
            "value": generator.normal(size=(C, A, N)),
            "sees_bit": generator.random(A + 1) < 0.7,
            "sees_sign": generator.random(A + 1) < 0.7,
        }
        for name, table in self.tables.items():
            self.register_buffer(name, torch.as_tensor(table))

    def initial(self, context):
        return pyro.sample("s", dist.Categorical(self.start[context]))

    def transition(self, state, action, context):
        return pyro.sample("s", dist.Categorical(self.move[context, action, state]))

    def observation(self, state, action, context):
        a = torch.tensor(self.actions) if action is None else action
        where = (context, a, state)
        pyro.sample("bit", dist.Bernoulli(self.bit[where]).mask(self.sees_bit[a]))
        pyro.sample("sign", dist.Categorical(self.sign[where]).mask(self.sees_sign[a]))

    def reward(self, state, action, context):
        return self.value[context, action, state]


def random_episodes(model: Random, seed: int, B: int) -> Episodes:
    """Any actions and observations at all, ragged, with gaps; they may be impossible."""
    generator = np.random.default_rng(seed)
    T, A = model.horizon, model.actions
    actions = generator.integers(A, size=(B, T))
    seen = {site: model.tables[f"sees_{site}"] for site in ("bit", "sign")}

    def some(shape):
        return generator.random(shape) < 0.8

    extra = {}
    if model.initial_observation:
        extra = dict(
            initial_observations={
                "bit": generator.integers(2, size=B),
                "sign": generator.integers(M, size=B),
            },
            initially_observed={site: flags[A] & some(B) for site, flags in seen.items()},
        )
    return Episodes.from_arrays(
        model,
        actions=actions,
        observations={
            "bit": generator.integers(2, size=(B, T)),
            "sign": generator.integers(M, size=(B, T)),
        },
        observed={site: flags[actions] & some((B, T)) for site, flags in seen.items()},
        lengths=generator.integers(1, T + 1, size=B),
        **extra,
    )


def weight_of_observation(model: Random, c: int, a: int, s: int, bit: int | None, sign: int | None) -> float:
    weight = 1.0
    if bit is not None:
        p = model.tables["bit"][c, a, s]
        weight *= p if bit == 1 else 1 - p
    if sign is not None:
        weight *= model.tables["sign"][c, a, s, sign]
    return weight


def paths(model: Random, episodes: Episodes, b: int, c: int, steps: int) -> dict[tuple[int, ...], float]:
    """`p(s_{0:t}, o_{1:t} | a, c)` of every path of states with t steps."""

    def seen(t: int, site: str) -> int | None:  # t = 0 is before the first action
        if t == 0:
            known = episodes.initially_observed is not None and bool(episodes.initially_observed[site][b])
            return int(episodes.initial_observations[site][b]) if known else None
        known = bool(episodes.observed[site][b, t - 1])
        return int(episodes.observations[site][b, t - 1]) if known else None

    weights = {}
    for path in product(range(model.states), repeat=steps + 1):
        weight = model.tables["start"][c, path[0]]
        weight *= weight_of_observation(model, c, model.actions, path[0], seen(0, "bit"), seen(0, "sign"))
        for t in range(steps):
            a = int(episodes.actions[b, t])
            weight *= model.tables["move"][c, a, path[t], path[t + 1]]
            weight *= weight_of_observation(model, c, a, path[t + 1], seen(t + 1, "bit"), seen(t + 1, "sign"))
        weights[path] = weight
    return weights


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    C=st.integers(1, 3),
    N=st.integers(2, 4),
    A=st.integers(1, 3),
    T=st.integers(1, 4),
    initial_observation=st.booleans(),
)
def test_equals_the_sum_over_all_paths(seed, C, N, A, T, initial_observation):
    model = Random(seed, C, N, A, T, initial_observation)
    B = 3
    episodes = random_episodes(model, seed, B)
    likelihood = np.zeros((B, T + 1, C))
    reward = np.zeros((B, T, C))
    smoothed = np.zeros((B, T + 1, C, N))
    for b, c, t in product(range(B), range(C), range(T + 1)):
        length = int(episodes.lengths[b])
        weights = paths(model, episodes, b, c, min(t, length))
        total = likelihood[b, t, c] = sum(weights.values())
        if total > 0 and t < length:
            a = int(episodes.actions[b, t])
            reward[b, t, c] = sum(w * model.tables["value"][c, a, p[t]] for p, w in weights.items()) / total
        if total > 0 and t == T:
            for path, weight in weights.items():
                for u in range(T + 1):
                    smoothed[b, u, c, path[min(u, length)]] += weight / total

    if not (likelihood[:, -1].max(-1) > 0).all():
        with pytest.raises(DegenerateWeightsError):
            ObservableOperator().run(model, episodes)
        with pytest.raises(DegenerateWeightsError):
            ObservableOperator().smooth(model, episodes)
        return
    found, smoothing = ObservableOperator().run(model, episodes), ObservableOperator().smooth(model, episodes)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_likelihood, increments = np.log(likelihood[:, -1]), np.diff(np.log(likelihood), axis=1)
    np.testing.assert_allclose(found.log_likelihood, log_likelihood, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.initial_increment.exp(), likelihood[:, 0], rtol=0, atol=1e-10)
    possible = likelihood > 0
    before = possible[:, :-1]
    np.testing.assert_allclose(found.increments[before], increments[before], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.expected_reward[before], reward[before], rtol=0, atol=1e-10)
    assert not found.increments.isnan().any()
    assert found.posterior().isfinite().all()
    assert smoothing.method == "forward-backward"
    assert smoothing.probabilities.shape == (B, T + 1, C, N)
    in_the_end = possible[:, -1]  # [B, C]
    expected = np.moveaxis(smoothed, 2, 1)[in_the_end]
    np.testing.assert_allclose(
        smoothing.probabilities.movedim(2, 1)[in_the_end], expected, rtol=0, atol=1e-10
    )
    index = np.arange(N)
    mean = expected @ index
    np.testing.assert_allclose(smoothing.state_mean.movedim(2, 1)[in_the_end], mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        smoothing.state_variance.movedim(2, 1)[in_the_end], expected @ index**2 - mean**2, rtol=0, atol=1e-9
    )
    np.testing.assert_allclose(smoothing.state_mean[:, -1], found.state_mean[:, -1], rtol=0, atol=1e-12)


def test_an_impossible_context_is_minus_infinity_and_hurts_no_other():
    model = Random(0, 2, 3, 1, 2)
    for name in ("sees_bit", "sees_sign"):
        model.tables[name][:] = True
        getattr(model, name).fill_(True)
    model.bit[0], model.bit[1] = 0.0, 0.5  # context 0 never says 1
    ones, zeros = torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.long)
    ones[3] = 0.0
    model.sign.fill_(1 / M)
    episodes = Episodes.from_arrays(model, actions=zeros, observations={"bit": ones, "sign": zeros})
    found = ObservableOperator().run(model, episodes)
    assert (found.log_likelihood[:3, 0] == -torch.inf).all()
    assert found.log_likelihood[:, 1] == pytest.approx(np.full(4, 2 * np.log(0.5 / M)), abs=1e-12)
    assert found.log_likelihood[3, 0] == pytest.approx(2 * np.log(1 / M), abs=1e-12)
    assert found.expected_reward.isfinite().all()
    assert found.state_mean.isfinite().all()
    assert ObservableOperator().smooth(model, episodes).probabilities.isfinite().all()


class Slippery(CPOMDP):
    """Several sites to a step, one of them in a plate, and a state that is a function of them."""

    contexts, actions, horizon, states, max_plate_nesting = 2, 2, 3, 5, 1

    def initial(self, context):
        return {"cell": torch.zeros(1, dtype=torch.long)}

    def transition(self, state, action, context):
        far = pyro.sample("far", dist.Categorical(torch.tensor([0.5, 0.25, 0.25])))
        with pyro.plate("legs", 2):
            slip = pyro.sample("slip", dist.Bernoulli(torch.where(far == 2, 0.0, 0.25)))
        slips = slip.sum(-1, keepdim=True).long()
        return {"cell": (state["cell"] + action + far + slips) % 5}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(0.1 + 0.2 * state["cell"]))

    def reward(self, state, action, context):
        return state["cell"].float()


def test_several_sites_are_enumerated_together():
    expected = np.zeros((2, 5, 5))
    for a, s in product(range(2), range(5)):
        for far, p in enumerate((0.5, 0.25, 0.25)):
            q = 0.0 if far == 2 else 0.25
            for left, right in product(range(2), repeat=2):
                weight = p * (q if left else 1 - q) * (q if right else 1 - q)
                expected[a, s, (s + a + far + left + right) % 5] += weight
    recursion = ObservableOperator().recursion(Slippery())
    for c in range(2):
        np.testing.assert_allclose(recursion.transition[c], expected, atol=1e-15)
    episodes = simulate(Slippery(), RandomPolicy(2), 4, seed=0)
    found = ObservableOperator().run(Slippery(), episodes)
    assert found.state_mean["cell"].shape == (4, 4, 2, 1)


class Coins(Slippery):
    """Independent components of one site."""

    max_plate_nesting = 0

    def initial(self, context):
        return pyro.sample("coins", dist.Bernoulli(torch.tensor([0.5, 0.25, 0.0])).to_event(1)).sum(-1).long()

    def transition(self, state, action, context):
        one_hot = pyro.sample("to", dist.OneHotCategorical(torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0])))
        return pyro.deterministic("cell", one_hot.argmax(-1))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(0.1 + 0.2 * state))

    def reward(self, state, action, context):
        return state.float()


def test_components_of_a_site_are_independent():
    recursion = ObservableOperator().recursion(Coins())
    expected = torch.tensor([0.375, 0.5, 0.125, 0.0, 0.0], dtype=torch.float64)
    assert torch.allclose(recursion.initial, expected.expand(2, -1), rtol=0, atol=1e-15)
    expected = torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0], dtype=torch.float64)
    assert torch.allclose(recursion.transition, expected.expand(2, 2, 5, -1), rtol=0, atol=1e-15)


def test_no_noise_means_exact_tables():
    recursion = ObservableOperator().recursion(LineGrid())
    assert set(recursion.transition.flatten().tolist()) == {0.0, 1.0}
    assert recursion.initial[:, 3].tolist() == [1.0, 1.0]
    tiger = ObservableOperator().recursion(ContextualTiger())
    assert torch.equal(tiger.transition[0, 0], torch.eye(2, dtype=torch.float64))


def test_line_grid_in_closed_form():
    model = LineGrid()
    episodes = simulate(model, lambda h: torch.full((20,), 2), 20, contexts=0, seed=0)
    right = episodes.observations["side"].double().sum(1)
    expected = right * np.log(0.85) + (10 - right) * np.log(0.15)
    found = ObservableOperator().run(model, episodes).log_likelihood
    assert found[:, 0] == pytest.approx(expected, abs=1e-12)


class Poissonian(Random):
    def transition(self, state, action, context):
        return pyro.sample("hops", dist.Poisson(1.0)).long().clamp(max=1)


class Outside(Random):
    def transition(self, state, action, context):
        return state + 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LightDark(), "LightDark does not say"),
        (Beacons(), "states = N"),
        (Walk(), "states = N"),
        (Poissonian(0, 1, 2, 1, 1), r"transition: site 'hops' \(Poisson\) has no finite support"),
        (Outside(0, 1, 2, 1, 1), "returns state 2 from state 1"),
    ],
)
def test_refuses_what_is_not_finite(model, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        ObservableOperator().recursion(model)
    assert torch.get_default_dtype() == torch.float32


class Improper(Slippery):
    """Probabilities and rates that are none."""

    def __init__(self, program, value):
        super().__init__()
        self.program, self.value = program, value

    def initial(self, context):
        p = self.value if self.program == "initial" else 0.5
        return pyro.sample("first", dist.Bernoulli(p)).long()

    def transition(self, state, action, context):
        p = self.value if self.program == "transition" else 0.5
        return pyro.sample("next", dist.Bernoulli(p)).long()

    def observation(self, state, action, context):
        rate = self.value if self.program == "observation" else 1.0
        pyro.sample("z", dist.Poisson(torch.where(state == 1, rate, 1.0)))


@pytest.mark.parametrize("value", [-0.5, float("nan")])
@pytest.mark.parametrize(
    ("program", "site"), [("initial", "first"), ("transition", "next"), ("observation", "z")]
)
def test_parameters_that_make_no_sense(program, site, value):
    episodes = Episodes(torch.tensor([[0]]), {"z": torch.tensor([[0.0]])}, {"z": torch.tensor([[True]])})
    with pytest.raises(DensityError, match=f"{program}: site '{site}' .* = {value}"):
        ObservableOperator().run(Improper(program, value), episodes)
