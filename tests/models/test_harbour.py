"""The harbour against its rules, written out for one boat. Fixed seeds; limits are 4.5 standard errors."""

from __future__ import annotations

import math

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.models import Harbour
from tests.conftest import assert_mean, assert_variance, fixed_actions

EAST, NORTH_EAST, NORTH, LOOK, LISTEN = 0, 1, 2, 8, 9
PASSAGES = [(5.0, 3.0), (5.0, -3.0)]
BERTHS = [(10.0, 4.5), (10.0, 1.5), (10.0, -1.5), (10.0, -4.5)]


def test_it_is_a_proper_model():
    Harbour().check()
    Harbour().double().check()


def test_moves_have_their_moments():
    sequence = (EAST, NORTH_EAST, NORTH, LOOK)
    position = simulate(Harbour(horizon=4), fixed_actions(*sequence), 20_000, seed=0).states
    diagonal = math.sqrt(0.5)
    expected = [(0.0, 0.0), (1.0, 0.0), (1 + diagonal, diagonal), (1 + diagonal, 1 + diagonal)]
    for t, mean in enumerate([*expected, expected[-1]]):
        for i in range(2):
            assert_mean(position[:, t, i], mean[i], f"coordinate {i} at {t}")
            assert_variance(position[:, t, i], 0.04 + 0.02 * t, f"coordinate {i} at {t}")


@pytest.mark.parametrize("context", range(8))
def test_the_context_names_the_passage_and_the_berth(context):
    episodes = simulate(Harbour(horizon=2), fixed_actions(LOOK, LISTEN), 10_000, contexts=context, seed=1)
    places = {"passage": PASSAGES[context // 4], "berth": BERTHS[context % 4]}
    for t, (site, place) in enumerate(places.items()):
        assert episodes.observed[site].all(0).tolist() == [t == 0, t == 1]
        offset = torch.tensor(place) - episodes.states[:, t + 1]
        noise = episodes.observations[site][:, t] - offset
        scaled = noise / (0.1 + 0.5 * offset.norm(dim=-1, keepdim=True))
        for i in range(2):
            assert_mean(scaled[:, i], 0.0, f"{site} {i}")
            assert_variance(scaled[:, i], 1.0, f"{site} {i}")


def reward_by_hand(x, y, context, ahead):
    """The rules, for a boat at a place that is about to sail `ahead` to the east."""
    total = 0.0
    for b, berth in enumerate(BERTHS):
        if math.dist((x, y), berth) < 1:
            total += 1 if b == context % 4 else -1
    if 4 < x + ahead < 6 and abs(y - PASSAGES[context // 4][1]) > 0.8:
        total -= 0.25
    return total


@pytest.mark.parametrize("context", range(8))
def test_rewards_everywhere(context):
    model = Harbour()
    x, y = (
        axis.reshape(-1)
        for axis in torch.meshgrid(torch.arange(-1, 12, 0.37), torch.arange(-6, 6, 0.37), indexing="ij")
    )
    for action, ahead in ((EAST, 1.0), (LISTEN, 0.0)):
        reward = model.reward(torch.stack([x, y], -1), torch.tensor(action), torch.tensor(context))
        by_hand = [
            reward_by_hand(*place, context, ahead) for place in zip(x.tolist(), y.tolist(), strict=True)
        ]
        assert torch.allclose(reward, torch.tensor(by_hand))


@pytest.mark.parametrize("context", [0, 4])
def test_only_the_open_passage_lets_boats_through(context):
    """Boats that start west of the wall sail east: those at the passage get through, the others stay."""
    model = Harbour(process_variance=1e-8)
    y = torch.tensor([3.0, -3.0, 0.0, 3.7, 3.9])
    state = torch.stack([torch.full_like(y, 3.5), y], -1)
    for _ in range(4):
        state = model.transition(state, torch.tensor(EAST), torch.tensor(context))
    through = [3.0, 3.7] if context == 0 else [-3.0]
    assert (state[:, 0] > 6).tolist() == [round(float(each), 1) in through for each in y]


def test_nothing_is_earned_within_eight_moves():
    """Whatever the boat does, its distance from the origin is at most t strides and a sum of drifts.

    It is at a berth only if a sum of t drifts and the first position is as long as what is missing; either
    coordinate of the sum has variance 0.04 + 0.02 t, and its square is exponential.
    """
    nearest = min(math.hypot(*berth) for berth in BERTHS) - 1
    for t in range(8):  # and that is before the way round through a passage is counted
        assert math.exp(-((nearest - t) ** 2) / (2 * (0.04 + 0.02 * t))) < 1e-5
    played = [simulate(Harbour(horizon=9), fixed_actions(*[a] * 9), 2000, seed=0).rewards for a in range(10)]
    assert max(float(rewards[:, :8].max()) for rewards in played) <= 0.0


def test_standing_still_earns_nothing():
    for action in (LOOK, LISTEN):
        assert (
            float(simulate(Harbour(), fixed_actions(*[action] * 40), 200, seed=0).rewards.abs().max()) == 0.0
        )


@pytest.mark.slow
def test_engines_agree():
    """The mean of each engine's likelihood estimates, of an episode that looks, sails and listens."""
    model = Harbour(horizon=6)
    sequence = fixed_actions(LOOK, NORTH_EAST, EAST, LOOK, LISTEN, EAST)
    one = simulate(model, sequence, 1, contexts=0, seed=3)
    times = 400
    many = one[torch.zeros(times, dtype=torch.long)]
    native, eager = (
        ParticleFilter(128, engine=engine).run(model, many, seed=seed).log_likelihood.exp()
        for seed, engine in enumerate(("native", "eager"))
    )  # [times, C]
    error = ((native.var(0) + eager.var(0)) / times).sqrt()
    assert bool(((native.mean(0) - eager.mean(0)).abs() < 4.5 * error).all())


def test_random_play_earns_next_to_nothing():
    returns = simulate(Harbour(), RandomPolicy(10), 2000, seed=0).returns
    assert float(returns.mean()) < 0.5
