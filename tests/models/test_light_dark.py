"""Simulated moments against closed forms. Fixed seeds; limits are 4.5 standard errors."""

from __future__ import annotations

import math

import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.models import LightDark
from tests.conftest import assert_mean, assert_variance, fixed_actions

N = 20_000
LEFT, RIGHT, OBSERVE = 0, 1, 2


def phi(x: float) -> float:
    """Standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def assert_reward(samples: torch.Tensor, depth: float, sd: float, what: str) -> None:
    """Mean reward at a normal depth into the light."""
    gain, loss = 1 - phi((1 - depth) / sd), phi(-depth / sd)
    assert_mean(samples, gain - loss, what, sd=math.sqrt(gain + loss - (gain - loss) ** 2))


SEQUENCES = [
    (OBSERVE,) * 4,
    (RIGHT, OBSERVE, RIGHT, OBSERVE, RIGHT, RIGHT, OBSERVE),
    (LEFT, OBSERVE, LEFT, LEFT, RIGHT, OBSERVE),
]


@pytest.mark.parametrize("context", [0, 1])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_states_observations_and_rewards_have_their_moments(sequence, context):
    model = LightDark(horizon=len(sequence))
    episodes = simulate(model, fixed_actions(*sequence), N, contexts=context, seed=1)
    side = 1 - 2 * context
    mean, variance = 0.0, 0.09
    for t, action in enumerate(sequence):
        x = episodes.states[:, t]
        assert_mean(x, mean, f"x_{t}")
        assert_variance(x, variance, f"x_{t}")
        assert_reward(episodes.rewards[:, t], side * mean, math.sqrt(variance), f"r_{t}")

        mean += {LEFT: -1.0, RIGHT: 1.0, OBSERVE: 0.0}[action]
        variance += 0.0 if action == OBSERVE else 0.1
        assert bool((episodes.observed["z"][:, t] == (action == OBSERVE)).all())
        if action == OBSERVE:
            lit = phi(side * mean / math.sqrt(variance))
            assert_mean(episodes.observations["z"][:, t], mean, f"z_{t + 1}")
            noise = episodes.observations["z"][:, t] - episodes.states[:, t + 1]
            assert_variance(noise, lit * 1.0 + (1 - lit) * 8.0, f"z_{t + 1} - x_{t + 1}")
    assert_mean(episodes.states[:, -1], mean, "last state")


def test_an_observation_moves_nothing():
    episodes = simulate(LightDark(), fixed_actions(*[OBSERVE] * 20), 50, seed=0)
    assert torch.equal(episodes.states, episodes.states[:, :1].expand(-1, 21))


@pytest.mark.parametrize("context", [0, 1])
def test_going_right_whatever_happens_pays_its_closed_form(context):
    episodes = simulate(LightDark(), fixed_actions(*[RIGHT] * 20), N, contexts=context, seed=3)
    expected = 0.0
    for t in range(20):
        depth, sd = (1 - 2 * context) * t, math.sqrt(0.09 + 0.1 * t)
        expected += 1 - phi((1 - depth) / sd) - phi(-depth / sd)
    assert_mean(episodes.returns, expected, "return")
    if context == 0:
        assert abs(expected - 17.96) < 0.01  # the known value of knowing the context


def test_every_constant_is_an_argument():
    model = LightDark(
        horizon=2, step=2.0, process_variance=0.5, light_variance=0.25, initial_variance=1.0, goal=3.0
    )
    episodes = simulate(model, fixed_actions(RIGHT, RIGHT), N, contexts=0, seed=2)
    assert_mean(episodes.states[:, 2], 4.0, "two steps of 2")
    assert_variance(episodes.states[:, 2], 1.0 + 2 * 0.5, "two steps")
    assert float(model.reward(torch.tensor(2.5), torch.tensor(0), torch.tensor(0))) == 0.0
    assert float(model.reward(torch.tensor(3.5), torch.tensor(0), torch.tensor(0))) == 1.0


@pytest.mark.parametrize("discount", [0.8, 1.0])
def test_who_knows_the_context_earns_what_the_model_says(discount):
    model = LightDark()
    model.discount = discount
    episodes = simulate(model, fixed_actions(*[RIGHT] * 20), N, contexts=0, seed=4)
    assert_mean(episodes.returns, float(model.context_known_return()[0]), "return")
