"""Recordings of episodes that end, and of actions that are real numbers."""

from __future__ import annotations

import json
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, RandomPolicy
from cpomdp_ppl.actions import Box
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.report import record
from tests.programs import Reef, Sail


class Dial(CPOMDP):
    """Turning a dial tells of the context by a lamp, and by whether it breaks, which pays on the way."""

    contexts, horizon, discount = 2, 3, 0.5
    actions = Box((0.5, -1.0), (2.0, 1.0), names=("turn", "pull"))

    def initial(self, context):
        return torch.zeros(())

    def transition(self, state, action, context):
        return state + 1

    def observation(self, state, action, context):
        pyro.sample("lamp", dist.Bernoulli(torch.sigmoid((2.0 * context - 1) * action[..., 0])))

    def ends(self, state, action, context):
        return torch.where(context == 0, 0.4, 0.4 + 0.3 * action[..., 1])

    def reward(self, state, action, context, next_state):
        return next_state * action[..., 0] + context * action[..., 1]


def bits(*chances):
    return -sum(p * math.log2(p) for p in chances if p > 0)


def told_by(turn, pull, p):
    """`I(C; lamp, ended)` of an action, if contexts have probabilities p, by the sum over what is seen.

    And the deviation of the entropy that a single outcome leaves.
    """
    by_context = []
    for c in (0, 1):
        lamp = 1 / (1 + math.exp(-(2 * c - 1) * turn))
        end = 0.4 + 0.3 * c * pull
        by_context.append([x * y for x in (lamp, 1 - lamp) for y in (end, 1 - end)])
    mixed = [sum(p[c] * by_context[c][k] for c in (0, 1)) for k in range(4)]
    left = [bits(*(p[c] * by_context[c][k] / mixed[k] for c in (0, 1))) for k in range(4)]
    mean = sum(q * h for q, h in zip(mixed, left, strict=True))
    deviation = math.sqrt(sum(q * (h - mean) ** 2 for q, h in zip(mixed, left, strict=True)))
    return bits(*p) - mean, deviation


def spread_out(history):
    """Normal, about values that differ by episode."""
    mean = torch.tensor([1.0, 0.1]).expand(history.num_episodes, 2)
    return dist.Normal(mean, torch.tensor([0.05, 0.2])).to_event(1)


@pytest.mark.slow
def test_what_continuous_actions_promise():
    """Of the action that was taken, and of the middle and the ends of every axis."""
    K = 400
    recording = record(
        Dial(), spread_out, num_episodes=4, likelihood=ParticleFilter(50), num_outcomes=K, seed=2
    )
    tried = {"middle": (1.25, 0.0), "turn lowest": (0.5, 0.0), "turn highest": (2.0, 0.0)}
    tried |= {"pull lowest": (1.25, -1.0), "pull highest": (1.25, 1.0)}
    assert recording.action_names == ("as chosen", *tried)
    episodes = recording.episodes
    assert len(set(episodes.lengths.tolist())) > 1
    for b, length in enumerate(episodes.lengths.tolist()):
        for t in range(length):
            p = recording.posterior[b, t].tolist()
            actions = [episodes.actions[b, t].tolist(), *tried.values()]
            for a, (turn, pull) in enumerate(actions):
                reward = (t + 1) * turn + p[1] * pull
                assert float(recording.expected_reward[b, t, a]) == pytest.approx(reward, rel=1e-4)
                told, deviation = told_by(turn, pull, p)
                found = float(recording.expected_information[b, t, a])
                assert abs(found - told) < 4.5 * deviation / K**0.5 + 1e-5


@pytest.mark.slow
def test_how_far_a_policy_spreads_its_actions():
    recording = record(Dial(), spread_out, num_episodes=3, num_outcomes=1, likelihood="smc")
    spread = recording.action_spread
    assert spread.shape == (3, 3, 2, 2)
    expected = torch.tensor([[-1.645], [1.645]]) * torch.tensor([0.05, 0.2]) + torch.tensor([1.0, 0.1])
    # The standard error of a 5 % quantile of 200 draws is √(0.05 · 0.95 / 200) / 0.103 = 0.15 deviations.
    assert bool(((spread - expected).abs() < 4.5 * 0.15 * torch.tensor([0.05, 0.2])).all())
    certain = record(
        Dial(), lambda history: torch.ones(history.num_episodes, 2), num_outcomes=1, likelihood="smc"
    )
    assert bool(certain.action_spread.isnan().all())
    # Looking at the policy's draws changes nothing of what it then does.
    alone = record(Dial(), spread_out, num_episodes=3, num_outcomes=2, num_particles=5, likelihood="smc")
    assert torch.equal(alone.episodes.actions, recording.episodes.actions)


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda B: dist.Categorical(torch.ones(B, 3)), r"event shape \[2\]"),
        (lambda B: dist.Normal(torch.zeros(B, 2), 1.0), r"event shape \[2\]"),
        (lambda B: torch.full((B, 2), math.nan), r"expected within Box"),
        (lambda B: torch.full((B, 2), 7.0), r"expected within Box"),
        (lambda B: torch.ones(B, 3), r"real actions of shape \[2, 2\]"),
    ],
)
def test_decisions_that_are_no_actions_of_the_box(decide, message):
    with pytest.raises(ValueError, match=message):
        record(Sail(), lambda history: decide(history.num_episodes), num_episodes=2, likelihood="smc")


def test_finite_beliefs_of_episodes_that_end():
    model = Reef()
    recording = record(model, RandomPolicy(2), num_episodes=6, likelihood="exact", num_outcomes=2, seed=4)
    filtering = ObservableOperator().run(model, recording.episodes)
    torch.testing.assert_close(recording.posterior, filtering.posterior())
    expected = (recording.posterior[:, :-1] * filtering.expected_reward).sum(-1)
    taken = recording.expected_reward.gather(2, recording.episodes.actions[..., None]).squeeze(-1)
    alive = recording.episodes.alive
    torch.testing.assert_close(taken[alive], expected[alive])  # rewards are for where it lands


@pytest.mark.parametrize(("model", "likelihood"), [(Reef(), "exact"), (Sail(), "smc")])
def test_series_go_to_the_end_of_their_episode(model, likelihood):
    recording = record(
        model, RandomPolicy(model.actions), num_episodes=8, likelihood=likelihood, num_outcomes=1
    )
    data = json.loads(json.dumps(recording.as_dict(), allow_nan=False))
    episodes = recording.episodes
    assert data["length"] == episodes.lengths.tolist()
    assert data["can_end"]
    assert len(set(data["length"])) > 1
    assert set(data["seen"]) == set(episodes.observations) - {"ended"}
    times = [data["posterior"], data["entropy"], *data["seen"].values()]
    (part,) = data["parts"]
    times += [part[name] for name in ("true", "mean", "deviation")]
    steps = [data[name] for name in ("action", "reward", "action_probabilities")]
    steps += [data["expected_reward"], data["expected_information"]]
    for b, length in enumerate(data["length"]):
        assert {len(series[b]) for series in times} == {length + 1}
        assert {len(series[b]) for series in steps} == {length}
        assert data["ended"][b] == (float(episodes.observations["ended"][b, length - 1]) == 1)
        worth = sum(model.discount**t * float(episodes.rewards[b, t]) for t in range(length))
        assert data["return"][b] == pytest.approx(worth, rel=1e-4)
    if model.box is not None:
        assert data["axes"][1] == {"name": "drive", "low": 0.0, "high": 3.0}
        assert data["action"][0][0] == pytest.approx(episodes.actions[0, 0].tolist(), rel=1e-3)
        assert part["site"] == "z"  # the site `ended` is no rival
    else:
        assert data["axes"] is data["action_spread"] is None
