from __future__ import annotations

import itertools

import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.models import LineGrid
from solvers.exact import plan
from tests.conftest import assert_mean, fixed_actions

LEFT, RIGHT, SENSE = 0, 1, 2
DONE = 7


def play_by_hand(sequence, context):
    """The rules, written out for one episode."""
    cell, total, cells = 3, 0.0, [3]
    for action in sequence:
        high, watched = (0, 6) if context == 0 else (6, 0)
        if cell == high:
            total += 20
        if cell == watched:
            total += 10 - 50
        if cell in (0, 6, DONE):
            cell = DONE
        elif action != SENSE:
            cell += -1 if action == LEFT else 1
        cells.append(cell)
    return cells, total


@pytest.mark.parametrize("context", [0, 1])
def test_every_short_sequence_plays_by_the_rules(context):
    sequences = torch.tensor(list(itertools.product(range(3), repeat=6)))  # [729, 6]
    model = LineGrid(horizon=6)
    episodes = simulate(
        model, lambda history: sequences[:, history.time], len(sequences), contexts=context, seed=0
    )
    for b, sequence in enumerate(sequences.tolist()):
        cells, total = play_by_hand(sequence, context)
        assert episodes.states[b].tolist() == cells
        assert float(episodes.returns[b]) == total


@pytest.mark.parametrize(("context", "says_right"), [(0, 0.85), (1, 0.15)])
def test_sense_reports_the_side_of_the_detector(context, says_right):
    episodes = simulate(LineGrid(), fixed_actions(*[SENSE] * 10), 4000, contexts=context, seed=0)
    assert bool(episodes.observed["side"].all())
    for t in range(10):
        assert_mean(episodes.observations["side"][:, t], says_right, f"side at {t}")


def test_moving_observes_nothing():
    episodes = simulate(LineGrid(), fixed_actions(*[LEFT, RIGHT] * 5), 20, seed=0)
    assert not bool(episodes.observed["side"].any())


def test_who_knows_the_context_earns_what_an_exact_plan_does():
    model = LineGrid()
    model.discount = 0.9
    for context, best in enumerate(model.context_known_return()):
        sure = torch.zeros(2).index_fill(0, torch.tensor(context), 1.0)
        assert plan(model, prior=sure).value == pytest.approx(float(best), abs=1e-5)  # single precision
