"""Algorithm 1 without sampling, against brute force over all policies and theorems that hold exactly."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import comb, log, nan

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure

from cpomdp_ppl import RandomPolicy
from cpomdp_ppl.models import ContextualTiger, LineGrid
from solvers.regret import XI, TooManyPosteriorsError, exact_regret
from solvers.regret.plots import plot_entropy, plot_ratio, plot_regret
from tests.programs import Still
from tests.solvers import truth
from tests.solvers.regret.guess import SHORT, Alone, Amortised, Guess, always

TEMPERATURES = (0.1, 1.0, 10.0)


def policies() -> list[dict[tuple[int, ...], int]]:
    """All deterministic policies for two steps of `Guess`: an action for each history of outcomes."""
    found = []
    for first in range(3):
        seen = [(0,), (1,)] if first == 0 else [()]
        for second in product(range(3), repeat=len(seen)):
            found.append({None: first, **dict(zip(seen, second, strict=True))})
    return found


def play(policy, p):
    """Returns `[2]`, information, and endings `(posterior, P(ending | c))` of a policy, path by path."""
    V, endings = np.zeros(2), {}
    for path in product((0, 1), repeat=2):  # what each coin would show
        first = policy[None]
        seen = (path[0],) if first == 0 else ()
        second = policy[seen]
        chance = np.ones(2)
        for coin in path:
            chance = chance * [h if coin else 1 - h for h in Guess.heads]
        V += chance * [Guess.pays[c][first] + Guess.pays[c][second] for c in range(2)]
        y = (*seen, path[1]) if second == 0 else seen
        endings[y] = endings.get(y, 0) + chance
    information = 0.0
    for chance in endings.values():
        evidence = p @ chance
        information += sum(p[c] * chance[c] * log(chance[c] / evidence) for c in range(2) if p[c] > 0)
    return V, information, [(p * chance / (p @ chance), chance) for chance in endings.values()]


def brute_force(tau, p, weight, K, k=0, sums=None):
    """Follow Algorithm 1 history by history, each with `weight = P(history, c)`, adding up by episode."""
    sums = {} if sums is None else sums
    if k == K:
        return sums
    plays = [play(policy, p) for policy in policies()]
    best = max(p @ V for V, _, _ in plays)
    V, information, endings = max(plays, key=lambda each: p @ each[0] + tau * each[1])
    told = [max(e @ each[0] for each in plays) for e in np.eye(2)]
    added = {
        "delta": weight.sum() * (best - p @ V),
        "information": weight.sum() * information,
        "entropy": weight.sum() * -sum(x * log(x) for x in p),
        "i1": weight @ (np.array(told) - best),
        "regret": weight @ (np.array(told) - V),
        "wrong": weight @ (1 - p),
    }
    for name, value in added.items():
        sums.setdefault(name, np.zeros(K))[k] += value
    ratios = sums.setdefault("ratio", np.full(K, np.nan))
    if information > 1e-6:
        ratios[k] = np.fmax(ratios[k], (best - p @ V) / information)
    for posterior, chance in endings:
        brute_force(tau, posterior, weight * chance, K, k + 1, sums)
    return sums


@pytest.mark.parametrize("tau", [0.0, 0.4, 1.3, 6.0])
def test_against_brute_force_over_policies_and_histories(tau):
    prior = np.array([0.58, 0.42])
    expected = brute_force(tau, prior, prior, K=3)
    run = exact_regret(Guess(), 3, temperature=tau, prior=prior)
    # Where I1 comes from: at worst everything is lost whenever the posterior's draw would be wrong.
    wrong = expected.pop("wrong")  # E[1 − P_k(c*)]
    assert (run.i1 <= 2 * Guess().horizon * run.reward_bound * wrong).all()
    assert (2 * wrong <= XI * np.sqrt(run.entropy)).all()
    for name, series in expected.items():
        np.testing.assert_allclose(getattr(run, name), series, atol=1e-9, err_msg=name)
    if tau == 6.0:
        assert run.delta[0] > 0.1  # there is something to compare: it gives up reward to learn


@cache
def followed(name: str, tau: float):
    model, K, prior = {
        "line grid": (LineGrid(), 4, None),
        "short line grid": (SHORT, 8, [0.3, 0.7]),
        "tiger": (ContextualTiger(horizon=4), 2, None),
    }[name]
    return exact_regret(model, K, temperature=tau, prior=prior)


EXACT = pytest.mark.parametrize(
    ("name", "tau"), list(product(("line grid", "short line grid", "tiger"), TEMPERATURES))
)


@pytest.mark.slow
@EXACT
def test_theorems_that_hold_exactly(name, tau):
    run = followed(name, tau)
    # Lemma 3.3: information costs at most τ on every history.
    assert run.excess.max() <= 1e-8  # actions that are tied to 1e-10 are taken to be as good
    assert run.largest_ratio <= tau + 1e-6
    assert run.delta.sum() <= tau * log(len(run.prior))
    assert (run.delta >= -1e-9).all()
    # Information adds up.
    left = np.append(run.entropy[1:], run.final_entropy)
    np.testing.assert_allclose(run.information, run.entropy - left, atol=1e-9)
    at_first = -sum(p * log(p) for p in run.prior.tolist())
    assert run.entropy[0] == pytest.approx(at_first)
    assert (np.diff(run.entropy) <= 1e-12).all()
    assert run.information.sum() == pytest.approx(at_first - run.final_entropy, abs=1e-9)
    # Regret is the sum of its parts, of which the last has mean zero.
    np.testing.assert_allclose(run.i2, 0, atol=1e-9)
    np.testing.assert_allclose(run.regret, run.delta + run.i1 + run.i2, atol=1e-9)
    assert (run.i1 >= -1e-9).all()
    assert (np.diff(run.i1) <= 1e-9).all()  # the more is known, the more can be earned
    assert run.dropped[-1] < 1e-9


class Telling(Still):
    """One guess at the context, for better or worse, and then a coin, whatever was guessed."""

    actions, states = 2, 1

    def observation(self, state, action, context):
        pyro.sample("heads", dist.Bernoulli(torch.where(context == 0, 0.35, 0.65)))

    def reward(self, state, action, context):
        return torch.where(action == context, 1.0, -1.0)


@pytest.mark.slow
def test_the_bound_is_above_where_it_says_something():
    run, K = exact_regret(Telling(), 60, temperature=1.0), np.arange(1, 61)
    # It guesses with the majority of k coins (at a draw, whatever) and loses 2 when that errs.
    for k in K - 1:
        heads = np.arange(k + 1)
        chance = np.array([comb(k, h) * 0.35**h * 0.65 ** (k - h) for h in heads])
        errs = chance[2 * heads > k].sum() + chance[2 * heads == k].sum() / 2
        assert run.regret[k] == pytest.approx(2 * errs, abs=1e-9)
    bound = run.bound()
    assert run.reward_bound == 1
    assert (bound(K) < 2 * K)[19:].all()  # no agent can lose more than 2 in an episode
    assert (run.cumulative_regret <= bound(K)).all()
    delta, i1, _ = bound.terms(K)
    assert (run.delta.cumsum() <= delta).all()
    assert (run.i1.cumsum() <= i1).all()


@pytest.mark.slow
def test_more_is_given_up_for_information_at_a_higher_temperature():
    runs = [followed("short line grid", tau) for tau in TEMPERATURES]
    information, delta = [run.information[0] for run in runs], [run.delta[0] for run in runs]
    assert (np.diff(information) >= -1e-9).all()
    assert (np.diff(delta) >= -1e-9).all()
    assert delta[-1] > 1


@pytest.mark.parametrize("model", [LineGrid(6), ContextualTiger(horizon=4)])
def test_the_first_episode_against_tables_written_by_hand(model):
    t, T = truth.tables(model), model.horizon
    run = exact_regret(model, 1, temperature=0.0)
    told = truth.known_context_value(t, T)
    assert run.delta[0] == pytest.approx(0, abs=1e-9)
    assert run.regret[0] == pytest.approx(told - truth.solve(t, T).value, abs=1e-9)
    run = exact_regret(model, 1, temperature=0.0, policy=RandomPolicy(3))
    assert run.delta[0] == pytest.approx(truth.solve(t, T).value - truth.random_value(t, T), abs=1e-6)
    assert run.regret[0] == pytest.approx(told - truth.random_value(t, T), abs=1e-6)


def test_a_policy_in_place_of_the_maximiser():
    model, tau = Guess(), 1.3
    own = exact_regret(model, 3, temperature=tau)
    given = exact_regret(model, 3, temperature=tau, policy=Amortised(model, tau))
    for name in ("delta", "i1", "regret", "information", "entropy"):
        np.testing.assert_allclose(getattr(given, name), getattr(own, name), atol=1e-6, err_msg=name)


def test_violations_are_reported():
    run = exact_regret(Guess(), 2, temperature=0.5, policy=always(1))
    assert np.isnan(run.largest_ratio)  # it never looks
    np.testing.assert_allclose(run.information, 0, atol=1e-12)
    assert (run.excess > 0.01).all()
    np.testing.assert_allclose(run.regret, run.regret[0])
    random = exact_regret(Guess(), 2, temperature=0.5, policy=RandomPolicy(3))
    assert random.largest_ratio > 0.5


@pytest.mark.slow
def test_what_is_dropped_is_reported():
    model = LineGrid(6)
    whole = exact_regret(model, 3, temperature=1.0)
    part = exact_regret(model, 3, temperature=1.0, tolerance=0.02)
    assert 0 < part.dropped[-1] < 1
    assert part.num_posteriors[-1] < whole.num_posteriors[-1]
    assert (np.diff(part.dropped) >= 0).all()
    most = 2 * model.horizon * part.reward_bound
    assert (np.abs(whole.regret - part.regret) <= most * part.dropped + 1e-9).all()


@pytest.mark.parametrize("episodes", [1, 3])
def test_a_tolerance_that_leaves_nothing_is_refused(episodes):
    message = f"tolerance: expected a smaller one: no posterior after episode 1 of {episodes} .*, got 0.9"
    with pytest.raises(ValueError, match=message):
        exact_regret(Guess(), episodes, temperature=6.0, tolerance=0.9)


def test_too_many_posteriors():
    with pytest.raises(TooManyPosteriorsError, match=r"episode 3 of 5 may begin with \d+ posteriors.* = 20"):
        exact_regret(ContextualTiger(horizon=4), 5, temperature=1.0, max_posteriors=20)


def test_with_nothing_to_find_out_there_is_no_regret():
    for run in (
        exact_regret(Alone(), 2, temperature=1.0),
        exact_regret(Guess(), 2, temperature=1.0, prior=[1.0, 0.0]),
    ):
        assert run.eta == 1
        np.testing.assert_allclose(run.regret, 0, atol=1e-12)
        assert np.isfinite(run.bound()([1, 2])).all()


def test_pictures_show_what_they_are_given():
    run = followed("short line grid", 10.0)
    runs = run.cumulative_regret + np.random.default_rng(0).normal(size=(6, len(run.regret)))
    figure = plot_regret({"exact": run.cumulative_regret, "runs": runs}, run.bound())
    assert isinstance(figure, Figure)
    axis = figure.axes[0]
    assert axis.get_yscale() == "symlog"  # the bound is far above
    np.testing.assert_allclose(axis.lines[1].get_ydata(), runs.mean(0))
    np.testing.assert_allclose(axis.lines[2].get_ydata(), run.bound()(np.arange(1, 9)))
    assert plot_regret({"exact": run.cumulative_regret}).axes[0].get_yscale() == "linear"
    entropies = plot_entropy({"exact": run.entropy}, 2).axes[0]
    assert entropies.lines[0].get_xdata()[0] == 0
    assert entropies.lines[1].get_ydata()[0] == pytest.approx(log(2))
    ratios = plot_ratio({"runs": [[0.5, nan, 1.0], [1.5, nan, nan]]}, 2.0).axes[0]
    np.testing.assert_allclose(ratios.lines[1].get_ydata(), [1.0, 1.0])
    np.testing.assert_allclose(ratios.lines[1].get_xdata(), [1, 3])
    with pytest.raises(ValueError, match="curves: expected curves by name"):
        plot_regret([1.0, 2.0])
