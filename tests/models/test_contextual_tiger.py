from __future__ import annotations

import itertools

import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.models import ContextualTiger
from tests.conftest import assert_mean, fixed_actions

LISTEN, OPEN_LEFT, OPEN_RIGHT = 0, 1, 2
ACCURACY = {0: (0.85, 0.85), 1: (0.55, 0.85), 2: (0.85, 0.55)}  # context: left ear, right ear


@pytest.mark.parametrize("context", [0, 1, 2])
def test_ears_report_by_their_table(context):
    model = ContextualTiger(horizon=1)
    episodes = simulate(model, fixed_actions(LISTEN), 40_000, contexts=context, seed=0)
    doors = episodes.states[:, 1]
    for door, left, right in itertools.product((0, 1), repeat=3):
        here = doors == door
        both = (episodes.observations["left_ear"][here, 0] == left) & (
            episodes.observations["right_ear"][here, 0] == right
        )
        probability = 1.0
        for accuracy, says in zip(ACCURACY[context], (left, right), strict=True):
            probability *= accuracy if says == door else 1 - accuracy
        assert_mean(both.float(), probability, f"door {door}, ears {left}{right}")


def test_the_tiger_stays_while_listening_and_moves_when_a_door_opens():
    episodes = simulate(ContextualTiger(horizon=3), fixed_actions(LISTEN, OPEN_LEFT, LISTEN), 20_000, seed=0)
    doors = episodes.states
    assert torch.equal(doors[:, 0], doors[:, 1])
    assert torch.equal(doors[:, 2], doors[:, 3])
    for door in (0, 1):
        assert_mean(doors[doors[:, 1] == door, 2].float(), 0.5, f"new tiger after {door}")


def test_rewards():
    model = ContextualTiger()
    door = torch.tensor([0, 0, 0, 1, 1, 1])
    action = torch.tensor([LISTEN, OPEN_LEFT, OPEN_RIGHT] * 2)
    reward = model.reward(door, action, torch.tensor(0))
    assert reward.tolist() == [-1.0, -100.0, 10.0, -1.0, 10.0, -100.0]
