from __future__ import annotations

import base64
import json
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, RandomPolicy
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter, as_backend
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.report import record
from cpomdp_ppl.report.parts import MAX_CLOUD_NUMBERS, MAX_COMPONENTS
from tests.conftest import fixed_actions
from tests.programs import Dice, EyesOpen, Plates, Walk

FINITE = {"line grid": LineGrid, "tiger": ContextualTiger}


def h2(p: float) -> float:
    """Entropy of a coin, in bits."""
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)


def through_json(recording):
    return json.loads(json.dumps(recording.as_dict(), allow_nan=False))


@pytest.mark.parametrize("kind", FINITE)
def test_beliefs_rewards_and_finite_states_are_those_of_the_filter(kind):
    model = FINITE[kind]()
    prior = torch.arange(1.0, model.num_contexts + 1) / sum(range(1, model.num_contexts + 1))
    recording = record(
        model, RandomPolicy(3), num_episodes=6, likelihood="exact", prior=prior, num_outcomes=2, seed=4
    )
    filtering = ObservableOperator().run(model, recording.episodes)
    posterior = filtering.posterior(prior)
    torch.testing.assert_close(recording.posterior, posterior)
    torch.testing.assert_close(recording.posterior.sum(-1), torch.ones(6, model.horizon + 1).double())
    expected = (posterior[:, :-1] * filtering.expected_reward).sum(-1)  # of the actions taken
    taken = recording.expected_reward.gather(2, recording.episodes.actions[..., None]).squeeze(-1)
    torch.testing.assert_close(taken, expected)
    (part,) = recording.parts
    assert part.kind == "finite"
    states = torch.arange(model.states, dtype=torch.float64)
    p = part.probabilities  # [B, T+1, C, states]
    torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:-1]).double())
    torch.testing.assert_close((p * states).sum(-1), filtering.state_mean)
    torch.testing.assert_close(part.deviation[..., 0], filtering.state_variance.sqrt())
    assert torch.equal(part.true[..., 0], recording.episodes.states)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["ekf", "ukf", "grid"])
def test_trying_outcomes_leaves_no_trace_in_the_filter(likelihood):
    """Filters that draw nothing believe what they believe without the outcomes that were tried in between."""
    model = LightDark(horizon=8)
    recording = record(
        model, RandomPolicy(3), num_episodes=4, likelihood=likelihood, num_particles=5, num_outcomes=3, seed=6
    )
    filtering = as_backend(likelihood).run(model, recording.episodes)
    torch.testing.assert_close(recording.posterior, filtering.posterior())
    torch.testing.assert_close(recording.parts[0].mean[..., 0], filtering.state_mean)
    torch.testing.assert_close(recording.parts[0].deviation[..., 0], filtering.state_variance.sqrt())


def test_the_filter_does_what_it_would_do_unwatched():
    """What is drawn for show has random numbers of its own: with more of it, beliefs stay the same."""
    model = LightDark(horizon=6)
    few, many = (
        record(model, RandomPolicy(3), num_episodes=4, num_particles=n, num_outcomes=n, seed=1)
        for n in (3, 50)
    )
    assert torch.equal(few.posterior, many.posterior)
    assert torch.equal(few.parts[0].mean, many.parts[0].mean)
    assert many.parts[0].cloud.shape == (4, 7, 2, 50, 1)


def test_many_finite_states_are_numbers_on_a_line():
    model = LineGrid(horizon=3, num_cells=101, start=50)
    (part,) = record(model, fixed_actions(0, 1, 1), num_episodes=2, num_particles=5, num_outcomes=1).parts
    assert part.kind == "line"
    assert part.probabilities is None
    assert part.true[0, :, 0].tolist() == [50, 49, 50, 51]
    assert bool((part.cloud == part.true[:, :, None, None]).all())  # nothing is random here


def test_frequencies_of_particles_stand_for_probabilities():
    """By the particle filter, probabilities of states are those of the exact one, up to its noise."""
    model, N = ContextualTiger(horizon=3), 4000
    smc, exact = (
        record(model, fixed_actions(0, 0, 0), num_episodes=6, likelihood=backend, num_outcomes=1, seed=5)
        for backend in (ParticleFilter(N), "exact")
    )
    assert torch.equal(smc.episodes.observations["left_ear"], exact.episodes.observations["left_ear"])
    # Two sources of error: the filter's, with so many effective particles, and that of 1,000 draws from it.
    effective = float(ParticleFilter(N).run(model, smc.episodes, seed=0).ess.min())
    error = 0.5 * (1 / 1000 + 1 / effective) ** 0.5
    difference = (smc.parts[0].probabilities - exact.parts[0].probabilities).abs().max()
    assert difference < 4.5 * error


def test_moments_of_the_cloud():
    """The cloud has the mean and the deviation that the filter tells: here, of a Gaussian."""
    model, M = LightDark(horizon=4), 2000
    recording = record(
        model, RandomPolicy(3), num_episodes=2, likelihood="ekf", num_particles=M, num_outcomes=1, seed=0
    )
    (part,) = recording.parts
    assert part.kind == "line"
    assert part.site == "z"
    z = (part.cloud.mean(3) - part.mean) / (part.deviation / M**0.5)
    assert z.abs().max() < 4.5
    # The standard error of a Gaussian's standard deviation is σ / √(2M).
    z = (part.cloud.std(3) / part.deviation - 1) * (2 * M) ** 0.5
    assert z.abs().max() < 4.5


def test_information_of_a_noisy_report():
    """`sense` is a binary symmetric channel: `I = H(report) - H(accuracy)`, and moves tell nothing."""
    model, K = LineGrid(horizon=4, accuracy=0.8), 400
    recording = record(
        model, fixed_actions(2, 2, 2, 2), num_episodes=6, likelihood="exact", num_outcomes=K, seed=0
    )
    told = recording.expected_information
    torch.testing.assert_close(told[..., :2], torch.zeros(6, 4, 2).double(), atol=1e-9, rtol=0)
    # From even odds both reports leave the same entropy, so that the estimate has no error at all.
    torch.testing.assert_close(told[:, 0, 2], torch.full((6,), 1 - h2(0.8)).double())
    for b in range(6):
        for t in range(4):
            p = float(recording.posterior[b, t, 0])
            right = 0.8 * p + 0.2 * (1 - p)
            left = [h2(0.8 * p / right), h2(0.2 * p / (1 - right))]
            error = abs(left[0] - left[1]) * (right * (1 - right) / K) ** 0.5
            assert abs(float(told[b, t, 2]) - (h2(right) - h2(0.8))) < 4.5 * error + 1e-9


def test_information_needs_no_more_memory_than_the_filter_allows(monkeypatch):
    """In pieces, the outcomes tell the same."""
    settings = dict(num_episodes=3, likelihood="exact", num_outcomes=5, seed=0)
    whole = record(ContextualTiger(horizon=3), RandomPolicy(3), **settings)
    monkeypatch.setattr(ObservableOperator, "episodes_at_once", lambda *_: 7)
    pieces = record(ContextualTiger(horizon=3), RandomPolicy(3), **settings)
    torch.testing.assert_close(whole.expected_information, pieces.expected_information)


def test_probabilities_of_actions():
    model = LightDark(horizon=3)
    p = torch.tensor([0.2, 0.3, 0.5])

    def decide(history):
        return dist.Categorical(probs=p.expand(history.num_episodes, 3))

    recording = record(model, decide, num_episodes=3, num_outcomes=1)
    torch.testing.assert_close(recording.action_probabilities, p.expand(3, 3, 3))
    certain = record(model, fixed_actions(0, 1, 2), num_episodes=3, num_outcomes=1)
    assert bool(certain.action_probabilities.isnan().all())
    assert certain.episodes.actions[0].tolist() == [0, 1, 2]
    assert through_json(certain)["action_probabilities"][0][0] == [None] * 3


def test_contexts_are_balanced_among_those_that_are_possible():
    settings = dict(num_episodes=4, likelihood="exact", num_outcomes=1)
    balanced = record(ContextualTiger(), RandomPolicy(3), **settings)
    assert balanced.episodes.contexts.tolist() == [0, 1, 2, 0]
    sure = record(ContextualTiger(), RandomPolicy(3), prior=[0.0, 0.25, 0.75], **settings)
    assert sure.episodes.contexts.tolist() == [1, 2, 1, 2]
    assert through_json(sure)["posterior"][0][0] == [0.0, 0.25, 0.75]
    assert bool(torch.isfinite(sure.expected_reward).all())
    assert bool(torch.isfinite(sure.expected_information).all())


def test_as_json(model):
    """Plain, finite, rounded, and with what happened in it."""
    B, T, C, A = 3, model.horizon, model.num_contexts, model.num_actions
    recording = record(model, RandomPolicy(A), num_episodes=B, num_particles=20, num_outcomes=2)
    data = through_json(recording)
    assert data["contexts"] == list(model.context_names)
    assert np.shape(data["posterior"]) == (B, T + 1, C)
    np.testing.assert_allclose(data["posterior"], recording.posterior, rtol=6e-4)
    np.testing.assert_allclose(np.sum(data["posterior"], -1), 1, atol=1e-3 * C)
    np.testing.assert_allclose(np.sum(data["action_probabilities"], -1), 1, atol=1e-3 * A)
    np.testing.assert_allclose(data["reward"], recording.episodes.rewards, rtol=6e-4)
    for site, values in data["seen"].items():
        flags, truth = recording.episodes.observed[site], recording.episodes.observations[site]
        for b in range(B):
            assert values[b][0] is None  # there is no initial observation
            for t in range(T):
                if flags[b, t]:
                    expected = truth[b, t].reshape(-1)
                    np.testing.assert_allclose(values[b][t + 1], expected, rtol=6e-4, atol=1e-12)
                else:
                    assert values[b][t + 1] is None
    for shown, part in zip(data["parts"], recording.parts, strict=True):
        np.testing.assert_allclose(shown["true"], part.true, rtol=6e-4, atol=1e-12)
        assert (shown["cloud"] is None) == (part.kind == "finite")
        if shown["cloud"] is not None:
            cloud = shown["cloud"]
            levels = np.frombuffer(base64.b64decode(cloud["levels"]), "<u2").reshape(cloud["shape"])
            unit = (cloud["high"] - cloud["low"]) / 65535
            np.testing.assert_allclose(cloud["low"] + unit * levels, part.cloud, atol=0.51 * unit + 1e-9)


def test_parts_of_named_states():
    recording = record(Beacons(horizon=2), RandomPolicy(5), num_episodes=4, num_particles=10, num_outcomes=1)
    position, heading = recording.parts
    assert (position.name, position.kind, position.true.shape) == ("position", "plane", (4, 3, 2))
    assert (heading.name, heading.kind, heading.true.shape) == ("heading", "line", (4, 3, 1))
    assert position.cloud.shape == (4, 3, 4, 10, 2)
    assert position.site is None


class Nested(Walk):
    """A dict in a dict, and a vector too long to be drawn at once."""

    def initial(self, context):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        return {"pose": {"x": x}, "many": x[..., None] * torch.arange(10.0)}

    def transition(self, state, action, context):
        x = pyro.sample("x", dist.Normal(state["pose"]["x"] + action, 1.0 + context))
        return {"pose": {"x": x}, "many": x[..., None] * torch.arange(10.0)}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["pose"]["x"], 1.0))

    def reward(self, state, action, context):
        return state["pose"]["x"] * context


def test_parts_of_nested_states():
    recording = record(Nested(), RandomPolicy(2), num_episodes=2, num_particles=10, num_outcomes=2)
    names = [part.name for part in recording.parts]
    assert names == ["pose.x", *(f"many[{i}]" for i in range(MAX_COMPONENTS))]
    assert {part.kind for part in recording.parts} == {"line"}
    torch.testing.assert_close(recording.parts[4].true, 3 * recording.parts[0].true)
    torch.testing.assert_close(recording.parts[4].cloud, 3 * recording.parts[0].cloud)
    through_json(recording)


@pytest.mark.parametrize("program", [Walk, Plates, EyesOpen, Dice], ids=lambda program: program.__name__)
def test_other_programs(program):
    """Plates, partial masks, initial observations, discrete sites: all are shown."""
    model: CPOMDP = program()
    data = through_json(record(model, RandomPolicy(model.num_actions), num_episodes=2, num_outcomes=3))
    for values in data["seen"].values():
        assert [len(each) for each in values] == [model.horizon + 1] * 2
    if program is Plates:
        z = data["seen"]["z"][0][1]
        assert z[1] is None  # of three sensors, the second does not work
        assert isinstance(z[0], float)
        assert data["parts"][0]["kind"] == "plane"
    if program is EyesOpen:
        assert data["seen"]["z"][0][0] is not None
        assert data["seen"]["w"][0][0] is None
    if program is Dice:
        assert len(data["seen"]["pair"][0][0]) == 2


@pytest.mark.slow
def test_long_recordings_keep_fewer_particles():
    recording = record(LightDark(horizon=150), fixed_actions(*[1] * 150), num_episodes=12, num_outcomes=1)
    cloud = recording.parts[0].cloud
    assert 0.9 * MAX_CLOUD_NUMBERS < cloud.numel() <= MAX_CLOUD_NUMBERS
    assert cloud.shape[3] < 200


@pytest.mark.slow
def test_the_first_episodes():
    recording = record(LineGrid(), RandomPolicy(3), num_episodes=4, likelihood="exact", num_outcomes=1)
    few, all_of_them = recording.first(2).as_dict(), recording.as_dict()
    for name in ("true_context", "action", "reward", "posterior", "expected_information"):
        assert few[name] == all_of_them[name][:2]
    assert few["parts"][0]["probabilities"] == all_of_them["parts"][0]["probabilities"][:2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_episodes=0), "num_episodes: expected a positive integer"),
        (dict(num_particles=-1), "num_particles: expected a positive integer"),
        (dict(num_outcomes=0), "num_outcomes: expected a positive integer"),
        (dict(prior=[0.5, 0.6]), "prior: expected non-negative probabilities"),
        (dict(prior=torch.full((12, 2), 0.5)), r"prior: expected shape \[2\]"),
        (dict(seed=-1), "seed: expected"),
        (dict(likelihood="best"), "likelihood"),
    ],
)
def test_arguments_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        record(LightDark(), RandomPolicy(3), **settings)
