"""The constants and terms of the theorem, against grids, closed forms and arithmetic by hand."""

from __future__ import annotations

from math import log, nan, sqrt

import numpy as np
import pytest

from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from solvers.regret import XI, Bound, estimate_eta, reward_bound
from tests.programs import Walk
from tests.solvers import truth
from tests.solvers.regret.guess import always


def test_xi_serves_every_posterior_and_cannot_be_much_smaller():
    rng = np.random.default_rng(0)
    posteriors = [rng.dirichlet(np.full(C, a), 2000) for C in (2, 3, 4, 7, 30) for a in (0.03, 0.3, 1, 10)]
    needed = []
    for p in [*posteriors, *[np.full((1, n), 1 / n) for n in range(2, 20)]]:
        H = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
        wrong = 2 * (1 - (p**2).sum(1))
        assert (wrong <= XI * np.sqrt(H) + 1e-12).all()
        needed.append((wrong[H > 0] / np.sqrt(H[H > 0])).max())
    assert max(needed) > 0.997 * XI  # of four equally likely contexts


def test_xi_is_the_maximum():
    x = np.linspace(1e-3, 5, 1_000_001)
    assert pytest.approx((2 * (1 - np.exp(-x)) / np.sqrt(x)).max(), abs=1e-9) == XI


def test_terms_of_the_bound_by_hand():
    bound = Bound(temperature=0.5, num_contexts=3, horizon=4, reward_bound=2.0, eta=0.25, xi=1.5)
    tau, most = 0.5 * log(3), 8.0
    for K in (1, 9):
        expected = [tau, 1.5 * most * sqrt(K * log(3) / 0.25), 2 * most * sqrt(2 * K)]
        assert bound.terms(K) == pytest.approx(expected)
        assert float(bound(K)) == pytest.approx(sum(expected))
    assert bound.terms(np.arange(6).reshape(2, 3)).shape == (3, 2, 3)
    assert bound([1, 9])[1] == pytest.approx(float(bound(9)))


def test_without_eta_there_is_no_bound():
    assert np.isinf(Bound(1.0, 2, 3, 1.0, eta=0.0)(4))
    assert Bound(1.0, 1, 3, 1.0, eta=0.0).terms(4)[1] == 0  # with one context there is nothing to find out


@pytest.mark.parametrize("K", ["a", [1, None], -1, [nan], 1j])
def test_numbers_of_episodes_that_are_none(K):
    with pytest.raises(ValueError, match="K: expected"):
        Bound(1.0, 2, 3, 1.0, eta=0.5)(K)


@pytest.mark.parametrize("wrong", [dict(eta=1.1), dict(temperature=-1), dict(horizon=0), dict(xi=0.0)])
def test_bounds_that_make_no_sense(wrong):
    proper = dict(temperature=1.0, num_contexts=2, horizon=3, reward_bound=1.0, eta=0.5)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        Bound(**{**proper, **wrong})


def test_eta_is_the_smallest_fraction_that_can_be_told():
    assert estimate_eta([0.6, 0.4, 0.2], [0.2, 0.3, 0.02]) == pytest.approx(0.1)
    # the last entropy is within the noise of its information, or negligible beside the first
    assert estimate_eta([0.6, 0.4, 0.2], [0.2, 0.3, 0.02], information_errors=[0.01, 0.01, 0.06]) == (
        pytest.approx(1 / 3)
    )
    assert estimate_eta([0.6, 1e-8], [0.3, 0.0]) == pytest.approx(0.5)
    assert estimate_eta([0.6, 1e-8], [0.3, 0.0], negligible=0.0) == 0
    assert estimate_eta([0.6], [-0.01]) == 0
    assert estimate_eta([0.6], [0.7]) == 1
    with pytest.raises(ValueError, match=r"entropies: expected .* larger than the noise"):
        estimate_eta([0.1, 0.0], [0.05, 0.0], information_errors=[0.03, 0.0])
    with pytest.raises(ValueError, match=r"information: expected shape \[2\]"):
        estimate_eta([0.1, 0.0], [0.0])
    with pytest.raises(ValueError, match=r"^information_errors: expected finite numbers"):
        estimate_eta([0.1], [0.0], information_errors=[nan])
    with pytest.raises(ValueError, match=r"^information: expected an array of real numbers"):
        estimate_eta([0.1], ["a"])


def test_with_nothing_to_find_out_any_eta_will_do():
    assert estimate_eta([0.0, 0.0], [0.0, 0.0]) == 1
    assert estimate_eta([0.0, 1e-16], [0.0, -1e-17], information_errors=[0.1, 0.0]) == 1


def test_largest_rewards():
    for model in (LineGrid(), LineGrid(penalty=5.0, high_value=30.0), ContextualTiger()):
        assert reward_bound(model) == pytest.approx(abs(truth.tables(model).reward).max())
    assert reward_bound(LightDark()) == 1.0
    right = reward_bound(Walk(), [always(1)])
    assert right > reward_bound(Walk(), num_episodes=10)
