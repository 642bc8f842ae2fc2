"""The exact solutions against brute force, closed forms and the simulator."""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.models import ContextualTiger, LineGrid
from tests.conftest import assert_mean
from tests.solvers.truth import (
    DEAF,
    LOPSIDED,
    Reals,
    Tables,
    evaluate,
    fixed_context_values,
    known_context_value,
    random_value,
    solve,
    tables,
)

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP

SMALL_GRID: dict[str, Any] = dict(num_cells=3, start=1)


def expectimax(t: Tables, p: Reals, steps: int) -> float:
    """The most that can still be earned, given P(c, s, h) `[C, S]`, on every history apart."""
    best = -np.inf
    for a in range(t.reward.shape[1]):
        total = float((p * t.reward[:, a]).sum())
        moved = np.einsum("cs,cst->ct", p, t.transition[:, a])
        for o in range(t.observation.shape[-1]) if steps > 1 else ():
            seen = moved * t.observation[:, a, :, o]
            total += expectimax(t, seen, steps - 1) if seen.any() else 0.0
        best = max(best, total)
    return best


@pytest.mark.parametrize(
    ("model", "horizon"),
    [
        (LineGrid(**LOPSIDED), 6),
        (LineGrid(num_cells=5, start=2), 5),
        (LineGrid(**SMALL_GRID, accuracy=0.7, penalty=15.0), 3),
        (ContextualTiger(), 4),
        (ContextualTiger(**DEAF), 4),
    ],
)
def test_no_policy_of_histories_is_better_and_beliefs_may_be_merged(model: CPOMDP, horizon: int) -> None:
    t = tables(model)
    C = len(t.prior)
    for prior in (t.prior, np.arange(1.0, C + 1) / np.arange(1.0, C + 1).sum()):
        by_history = expectimax(t, prior[:, None] * t.initial, horizon)
        assert solve(t, horizon, prior).value == pytest.approx(by_history, abs=1e-9)


@pytest.mark.parametrize("horizon", [4, 7, 10])
def test_line_grid_senses_until_it_must_go(horizon: int) -> None:
    """Moving and collecting leave T - 4 reports; the majority decides, and a tie is not worth the risk."""
    n = horizon - 4
    binomial = [comb(n, k) * 0.85**k * 0.15 ** (n - k) for k in range(n + 1)]
    right = sum(p for k, p in enumerate(binomial) if 2 * k > n)
    wrong = sum(p for k, p in enumerate(binomial) if 2 * k < n)
    assert solve(tables(LineGrid()), horizon).value == pytest.approx(20 * right - 40 * wrong)


def test_line_grid_for_those_who_are_certain() -> None:
    t = tables(LineGrid())
    np.testing.assert_allclose(fixed_context_values(t, 10), (20 - 40) / 2)
    assert known_context_value(t, 10) == pytest.approx(20)


def test_random_policies() -> None:
    assert random_value(tables(ContextualTiger()), 10) == pytest.approx(10 * (-1 + 10 - 100) / 3)
    # Out of three cells, a random walker gets to an end by its first t steps with probability 1 - 3^-t.
    assert random_value(tables(LineGrid(**SMALL_GRID)), 4) == pytest.approx((1 - 3.0**-3) * (20 - 40) / 2)


@pytest.mark.parametrize(
    "model", [LineGrid(), LineGrid(8, **LOPSIDED), ContextualTiger(), ContextualTiger(6, **DEAF)]
)
def test_simulated_returns(model: CPOMDP) -> None:
    t, T = tables(model), model.horizon
    contexts = np.eye(len(t.prior))
    rational, certain = solve(t, T), solve(t, T, contexts[-1])
    for policy, expected in (
        (rational, rational.value),
        (certain, evaluate(t, certain)),
        (RandomPolicy(model.num_actions), random_value(t, T)),
    ):
        episodes = simulate(model, policy, 6000, contexts="balanced", seed=0)
        assert episodes.returns is not None
        assert_mean(episodes.returns, expected, type(policy).__name__, limit=3)
    # By context: the mean over all of them does not know which is which.
    for c, context in enumerate(contexts):
        returns = simulate(model, certain, 4000, contexts=c, seed=1).returns
        assert returns is not None
        assert_mean(returns, evaluate(t, certain, context), f"certain, in context {c}", limit=3)
