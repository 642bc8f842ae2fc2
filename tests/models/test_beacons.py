from __future__ import annotations

import math

import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.models import Beacons
from tests.conftest import assert_mean, assert_variance, fixed_actions

FORWARD, TURN_LEFT, TURN_RIGHT, RANGE, BEARING = range(5)


def test_moves_have_their_moments():
    model = Beacons(horizon=3)
    episodes = simulate(model, fixed_actions(TURN_LEFT, FORWARD, TURN_RIGHT), 20_000, seed=0)
    position, heading = episodes.states["position"], episodes.states["heading"]
    assert_mean(heading[:, 1], math.pi / 6, "heading after a left turn")
    assert_variance(heading[:, 1], 0.01 + 0.003, "heading after a left turn")
    assert_mean(heading[:, 3], 0.0, "heading after turning back")
    # E cos θ = exp(−σ²/2) cos μ for a normal angle
    shrink = 0.8 * math.exp(-0.013 / 2)
    assert_mean(position[:, 2, 0], shrink * math.cos(math.pi / 6), "x after a stride")
    assert_mean(position[:, 2, 1], shrink * math.sin(math.pi / 6), "y after a stride")
    assert_variance(position[:, 1, 0], 0.01 + 0.01, "x after a turn on the spot")


@pytest.mark.parametrize("context", range(4))
def test_the_context_names_the_goal_and_the_bad_sensor(context):
    model = Beacons(horizon=2)
    episodes = simulate(model, fixed_actions(RANGE, BEARING), 20_000, contexts=context, seed=1)
    goal = torch.tensor([[3.0, 2.0], [3.0, -2.0]])[context // 2]
    assert episodes.observed["range"].all(0).tolist() == [True, False]
    assert episodes.observed["bearing"].all(0).tolist() == [False, True]

    offset = goal - episodes.states["position"][:, 1]
    noise = episodes.observations["range"][:, 0] - offset.norm(dim=-1)
    assert_mean(noise, 0.0, "range")
    assert_variance(noise, 0.04 * (25 if context % 2 == 0 else 1), "range")

    offset = goal - episodes.states["position"][:, 2]
    angle = torch.atan2(offset[:, 1], offset[:, 0]) - episodes.states["heading"][:, 2]
    for i, component in enumerate((angle.cos(), angle.sin())):
        noise = episodes.observations["bearing"][:, 1, i] - component
        assert_mean(noise, 0.0, "bearing")
        assert_variance(noise, 0.04 * (25 if context % 2 == 1 else 1), "bearing")


@pytest.mark.parametrize("context", range(4))
def test_rewards_are_at_the_goal_and_penalties_at_the_other(context):
    model = Beacons()
    position = torch.tensor([[3.0, 2.0], [3.0, -2.0], [0.0, 0.0]])
    state = {"position": position, "heading": torch.zeros(3)}
    reward = model.reward(state, torch.tensor(0), torch.tensor(context))
    assert reward.tolist() == ([1.0, -1.0, 0.0] if context < 2 else [-1.0, 1.0, 0.0])


def test_beacons_may_be_given_as_integers_and_moved():
    model = Beacons(beacons=((3, 2), (3, -2)))
    assert model.beacons.dtype == torch.float32
    model.double().check()
    assert simulate(model, fixed_actions(*[FORWARD] * 20), 2, seed=0).rewards.dtype == torch.float64
