"""Regret against brute force over all policies, hand-written truth, and theorems that hold exactly."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import comb, exp, log, nan, sqrt

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure

from baselines.simple import PosteriorSampling, ThompsonSampling
from cpomdp_ppl import CPOMDP, RandomPolicy
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.policy import History, Percept
from solvers import exact
from solvers.regret import (
    XI,
    Bound,
    Optima,
    TooManyPosteriorsError,
    context_known_values,
    decompose,
    estimate_eta,
    exact_regret,
    merge_invariant_contexts,
    policy_gaps,
    policy_values,
    reward_bound,
)
from solvers.regret.plots import plot_entropy, plot_ratio, plot_regret
from solvers.regret.values import merged
from tests.programs import Walk
from tests.solvers import truth

TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0)

SHORT = LineGrid(4)
"""There is time to walk to an end and collect, or to sense: information has a price."""


class Guess(CPOMDP):
    """One state; a look tells a little about the context, and guesses pay differently."""

    contexts, actions, states = 2, ("look", "first", "second"), 1
    heads = (0.3, 0.85)
    pays = ((-0.11, 1.0, -1.7), (-0.11, -0.9, 1.3))  # by context and action

    def __init__(self, horizon: int = 2, heads: tuple[float, float] = (0.3, 0.85)) -> None:
        super().__init__()
        self.horizon, self.heads = horizon, heads

    def initial(self, context):
        return torch.tensor(0)

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        heads = torch.where(context == 0, *self.heads)
        pyro.sample("heads", dist.Bernoulli(heads).mask(action == 0))

    def reward(self, state, action, context):
        return torch.tensor(self.pays)[context, action]


class Alone(Guess):
    """The same with its first context alone."""

    contexts = 1


class Amortised:
    """The exact maximiser for whatever prior it is started from."""

    def __init__(self, model: CPOMDP, temperature: float) -> None:
        self.model, self.temperature = model, temperature

    def start(self, prior):
        p = prior.double() / prior.double().sum(-1, keepdim=True)
        distinct, number = np.unique(p.numpy().round(6), axis=0, return_inverse=True)
        groups = [np.flatnonzero(number.reshape(-1) == i) for i in range(len(distinct))]
        plans = [exact.plan(self.model, prior=p[g[0]], temperature=self.temperature) for g in groups]
        return [(plan, torch.as_tensor(g), plan.start(p[g])) for plan, g in zip(plans, groups, strict=True)]

    def act(self, history, memory):
        actions, after = torch.zeros(history.num_episodes, dtype=torch.long), []
        for plan, rows, memo in memory:
            actions[rows], memo = plan.act(rows_of(history, rows), memo)
            after.append((plan, rows, memo))
        return actions, after


def rows_of(history: History, rows: torch.Tensor) -> History:
    def of(percept: Percept) -> Percept:
        return Percept(
            None if percept.action is None else percept.action[rows],
            {site: value[rows] for site, value in percept.observations.items()},
            {site: flags[rows] for site, flags in percept.observed.items()},
        )

    return History(tuple(of(percept) for percept in history.percepts))


# ---- the constant ξ, and the bound -------------------------------------------------------------------------


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
    for run in (
        exact_regret(Alone(), 2, temperature=1.0),
        exact_regret(Guess(), 2, temperature=1.0, prior=[1.0, 0.0]),
    ):
        assert run.eta == 1
        np.testing.assert_allclose(run.regret, 0, atol=1e-12)
        assert np.isfinite(run.bound()([1, 2])).all()
    parts = decompose(Guess(), RandomPolicy(3), [[[1.0, 0.0], [1.0, 0.0]]], [0], num_episodes=20)
    assert parts.eta == 1
    assert decompose(Alone(), RandomPolicy(3), [[[1.0]]], [0], exact=True).eta == 1


def test_largest_rewards():
    for model in (LineGrid(), LineGrid(penalty=5.0, high_value=30.0), ContextualTiger()):
        assert reward_bound(model) == pytest.approx(abs(truth.tables(model).reward).max())
    assert reward_bound(LightDark()) == 1.0
    right = reward_bound(Walk(), [lambda history: torch.ones(history.num_episodes, dtype=torch.long)])
    assert right > reward_bound(Walk(), num_episodes=10)


# ---- Algorithm 1, exactly ----------------------------------------------------------------------------------


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
def test_information_costs_at_most_tau_on_every_history(name, tau):
    run = followed(name, tau)
    assert run.excess.max() <= 1e-8  # actions that are tied to 1e-10 are taken to be as good
    assert run.largest_ratio <= tau + 1e-6
    assert run.delta.sum() <= tau * log(len(run.prior))
    assert (run.delta >= -1e-9).all()


@EXACT
def test_information_adds_up(name, tau):
    run = followed(name, tau)
    left = np.append(run.entropy[1:], run.final_entropy)
    np.testing.assert_allclose(run.information, run.entropy - left, atol=1e-9)
    at_first = -sum(p * log(p) for p in run.prior.tolist())
    assert run.entropy[0] == pytest.approx(at_first)
    assert (np.diff(run.entropy) <= 1e-12).all()
    assert run.information.sum() == pytest.approx(at_first - run.final_entropy, abs=1e-9)


@EXACT
def test_regret_is_the_sum_of_its_parts_of_which_the_last_has_mean_zero(name, tau):
    run = followed(name, tau)
    np.testing.assert_allclose(run.i2, 0, atol=1e-9)
    np.testing.assert_allclose(run.regret, run.delta + run.i1 + run.i2, atol=1e-9)
    assert (run.i1 >= -1e-9).all()
    assert (np.diff(run.i1) <= 1e-9).all()  # the more is known, the more can be earned
    assert run.dropped[-1] < 1e-9


class Telling(CPOMDP):
    """One guess at the context, for better or worse, and then a coin, whatever was guessed."""

    contexts, actions, states, horizon = 2, 2, 1, 1

    def initial(self, context):
        return torch.tensor(0)

    def transition(self, state, action, context):
        return state

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
    run = exact_regret(Guess(), 2, temperature=0.5, policy=lambda h: torch.full((h.num_episodes,), 1))
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


@pytest.mark.slow
def test_limits_that_errors_speak_of_can_be_raised():
    model, random, prior = ContextualTiger(horizon=4), RandomPolicy(3), [[1 / 3] * 3]
    runs, settings = [prior], {"temperature": 0.0}
    for call in (
        lambda **limit: exact_regret(model, 1, **settings, **limit),
        lambda **limit: decompose(model, random, runs, [0], num_episodes=2, **limit),
        lambda **limit: context_known_values(model, **limit),
        lambda **limit: policy_gaps(model, **limit),
        lambda **limit: merge_invariant_contexts(model, 1.0, **limit),
    ):
        with pytest.raises(exact.TooManyBeliefsError, match="raise max_beliefs"):
            call(max_beliefs=1)
        call(max_beliefs=1000)
    for call in (
        lambda **limit: exact_regret(model, 1, policy=random, **settings, **limit),
        lambda **limit: decompose(model, random, runs, [0], exact=True, **limit),
        lambda **limit: decompose(model, always_listen, runs, [0], best=random, exact=True, **limit),
        lambda **limit: policy_values(model, random, prior, exact=True, **limit),
    ):
        with pytest.raises(exact.TooManyHistoriesError, match="raise max_histories"):
            call(max_histories=100)
        call(max_histories=300)


def always_listen(history):
    return torch.zeros(history.num_episodes, dtype=torch.long)


def test_equal_posteriors_are_merged_and_impossible_is_not_unlikely():
    p = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1e-13, 1 - 1e-13], [0.5, 0.5 + 1e-14]], dtype=torch.float64)
    distinct, number = merged(p, 11)
    assert number.tolist()[0] == number.tolist()[3]
    assert len(distinct) == 3  # what is possible may yet be found true
    endings = exact.Endings.of(p.numpy(), np.full((4, 2), 0.25))
    assert torch.equal(endings.posteriors, distinct)
    for i in range(4):
        torch.testing.assert_close(distinct[number[i]], p[i], rtol=0, atol=1e-12)


def test_too_many_posteriors():
    with pytest.raises(TooManyPosteriorsError, match=r"episode 3 of 5 may begin with \d+ posteriors.* = 20"):
        exact_regret(ContextualTiger(horizon=4), 5, temperature=1.0, max_posteriors=20)


def test_a_prior_that_excludes_a_context():
    run = exact_regret(LineGrid(5), 3, temperature=1.0, prior=[0.0, 1.0])
    np.testing.assert_allclose(run.regret, 0, atol=1e-9)
    assert list(run.num_posteriors) == [1, 1, 1]


# ---- values by playing -------------------------------------------------------------------------------------

PRIORS = [[0.5, 0.5], [0.9, 0.1], [0.9, 0.1 + 1e-9], [0.0, 1.0]]


def test_played_values_against_exact_ones():
    model = LineGrid(6)
    policy = Amortised(model, 1.0)
    played = policy_values(model, policy, PRIORS, num_episodes=400, batch_size=1700, seed=1)
    exactly = policy_values(model, policy, PRIORS, exact=True)
    for i, p in enumerate(PRIORS):  # by dynamic programming alone
        plan = exact.plan(model, prior=torch.tensor(p) / sum(p), temperature=1.0)
        np.testing.assert_allclose(exactly.values[i], plan.returns, atol=1e-4)
        assert float(exactly.information[i]) == pytest.approx(plan.information, abs=1e-5)
    assert (played.values - exactly.values).abs().le(4.5 * played.standard_errors + 1e-4).all()
    gap = (played.information - exactly.information).abs()
    assert gap.le(4.5 * played.information_errors + 1e-5).all()
    assert (played.standard_errors[0] > 0).all()
    assert torch.equal(played.values[1], played.values[2])  # equal priors are played once
    assert float(played.information[3]) == pytest.approx(0, abs=1e-12)


def test_a_noisy_filter_does_not_fabricate_information():
    model = Guess(horizon=3)
    look = policy_values(
        model, lambda h: torch.zeros(h.num_episodes, dtype=torch.long), [[0.5, 0.5]], exact=True
    )
    by = policy_values(
        model,
        lambda h: torch.zeros(h.num_episodes, dtype=torch.long),
        [[0.5, 0.5]],
        num_episodes=2000,
        likelihood="smc",
    )
    assert float(by.information) <= float(look.information + 4.5 * by.information_errors)
    assert float(by.information) == pytest.approx(
        float(look.information), abs=4.5 * float(by.information_errors)
    )


def test_what_the_prior_excludes_may_be_impossible_under_it():
    model = Guess(heads=(0.0, 1.0))
    look = lambda h: torch.zeros(h.num_episodes, dtype=torch.long)  # noqa: E731
    played = policy_values(model, look, [[1.0, 0.0], [0.5, 0.5]], num_episodes=10)
    np.testing.assert_allclose(played.information, [0.0, log(2)], atol=1e-12)
    np.testing.assert_allclose(played.information_errors, 0, atol=1e-9)


def test_values_are_the_same_under_a_seed():
    values = [
        policy_values(LineGrid(), RandomPolicy(3), PRIORS, num_episodes=5, seed=s).values for s in (3, 3, 4)
    ]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_what_is_earned_when_told():
    grid = context_known_values(LineGrid())
    assert grid.source == "exact"
    np.testing.assert_allclose(grid.values, LineGrid().context_known_return())
    tiger = ContextualTiger(horizon=4)
    t = truth.tables(tiger)
    np.testing.assert_allclose(
        context_known_values(tiger).values, [truth.solve(t, 4, point).value for point in np.eye(3)]
    )
    assert context_known_values(LightDark()).source == "closed form"
    by = context_known_values(LightDark(), LikelySide(), source="policy", num_episodes=500)
    assert by.source == "policy"
    off = (by.values - LightDark().context_known_return()).abs()
    assert off.le(4.5 * by.standard_errors).all()
    with pytest.raises(ValueError, match=r"policy: expected a policy, as Walk is not finite"):
        context_known_values(Walk())
    with pytest.raises(ValueError, match=r"source: expected another, as Walk has no"):
        context_known_values(Walk(), source="closed form")
    with pytest.raises(ValueError, match="source: expected None or one of"):
        context_known_values(Walk(), source="guess")


# ---- decomposition by playing ------------------------------------------------------------------------------


class LikelySide:
    """Light–Dark: walk to the side that was likelier from the start."""

    def start(self, prior):
        return (prior[:, 1] <= 0.5).long()  # left 0, right 1

    def act(self, history, memory):
        return memory, memory


POSTERIORS = torch.tensor([[[0.5, 0.5], [0.85, 0.15], [1.0, 0.0]], [[0.5, 0.5], [0.15, 0.85], [0.3, 0.7]]])
PARTS = ("regret", "delta", "i1", "i2", "information")


def exact_parts(model, policy_temperature):
    """Every part for every run and episode, by dynamic programming."""
    told = [exact.plan(model, prior=point).value for point in torch.eye(2)]
    parts = {name: np.zeros(POSTERIORS.shape[:2]) for name in PARTS}
    for r, k in product(*map(range, POSTERIORS.shape[:2])):
        p, c = POSTERIORS[r, k].double(), (0, 1)[r]
        plan = exact.plan(model, prior=p, temperature=policy_temperature)
        best = exact.plan(model, prior=p).value
        parts["regret"][r, k] = told[c] - plan.returns[c]
        parts["delta"][r, k] = best - plan.expected_return
        parts["i1"][r, k] = told[c] - best
        parts["i2"][r, k] = plan.expected_return - plan.returns[c]
        parts["information"][r, k] = plan.information
    return parts


@pytest.mark.parametrize("best", [False, True])
def test_played_parts_against_exact_ones(best):
    model, tau = SHORT, 10.0
    found = decompose(
        model,
        Amortised(model, tau),
        POSTERIORS,
        ["detector right", "detector left"],
        best=Amortised(model, 0.0) if best else None,
        num_episodes=400,
    )
    assert found.best == ("policy" if best else "exact")
    expected = exact_parts(model, tau)
    assert expected["delta"].max() > 1
    for name in PARTS:
        off = np.abs(found.data[name].values - expected[name])
        assert (off <= 4 * found.data[f"{name}_error"].values + 1e-5).all(), name
    data = found.data
    np.testing.assert_allclose(data["regret"], data["delta"] + data["i1"] + data["i2"], atol=1e-9)
    np.testing.assert_allclose(found.cumulative_regret, data["regret"].values.cumsum(1))
    assert np.isnan(data["ratio"].values[0, 2])  # it is sure, and has nothing to find out
    assert np.isnan(data["ratio_error"].values[0, 2])
    np.testing.assert_allclose(data["ratio"].values[1, 1], data["delta"][1, 1] / data["information"][1, 1])
    # Where it is sure of the true context, V̄ is the true value; where it is not, errors of both count.
    assert float(data["i2"][0, 2]) == float(data["i2_error"][0, 2]) == 0
    regrets = data["regret_error"].values[:, 0]  # of V in either context, as the optima are exact
    np.testing.assert_allclose(data["i2_error"][0, 0], np.hypot(*regrets) / 2)
    assert list(data["context"].values) == ["detector right", "detector left"]
    assert "means over 2 runs" in str(found)


def test_exact_parts():
    model, tau = SHORT, 10.0
    found = decompose(model, Amortised(model, tau), POSTERIORS, [0, 1], exact=True)
    for name, expected in exact_parts(model, tau).items():
        np.testing.assert_allclose(found.data[name], expected, atol=1e-4, err_msg=name)
        assert (found.data[f"{name}_error"] == 0).all()
    p = POSTERIORS.double().numpy()
    entropies = -(p * np.log(np.where(p > 0, p, 1))).sum(-1).mean(0)  # [K]
    assert found.eta == pytest.approx(
        (exact_parts(model, tau)["information"].mean(0) / entropies).min(), abs=1e-4
    )


def test_policies_that_draw_are_not_valued_exactly():
    told = [exact.plan(SHORT, prior=point) for point in torch.eye(2)]
    for policy in (PosteriorSampling(SHORT, told), ThompsonSampling(SHORT, told, "exact")):
        with pytest.raises(ValueError, match=r"policy: .*which draws random numbers"):
            decompose(SHORT, policy, POSTERIORS, [0, 1], exact=True)
        with pytest.raises(ValueError, match=r"policy: .*which draws random numbers"):
            exact_regret(SHORT, 1, temperature=0.0, policy=policy)
    # Played, it earns what its draws earn on average: for the prior, in context c, Σ_j P(j) V_c(π_j).
    sampling = PosteriorSampling(SHORT, told)
    played = policy_values(SHORT, sampling, [[0.3, 0.7]], num_episodes=2000)
    expected = 0.3 * told[0].returns + 0.7 * told[1].returns
    assert (played.values[0] - expected).abs().le(4 * played.standard_errors[0]).all()


@pytest.mark.parametrize("optima", [[3.0, 5.0], (3, 5), np.array([3.0, 5.0]), torch.tensor([3.0, 5.0])])
def test_optima_may_be_numbers(optima):
    plain = decompose(SHORT, RandomPolicy(3), POSTERIORS, [0, 1], optima=optima, exact=True)
    assert plain.optima.source == "given"
    assert (plain.optima.standard_errors == 0).all()
    known = Optima(torch.tensor([3.0, 5.0]).double(), torch.zeros(2).double(), "closed form")
    same = decompose(SHORT, RandomPolicy(3), POSTERIORS, [0, 1], optima=known, exact=True)
    assert plain.data.equals(same.data)
    own = decompose(SHORT, RandomPolicy(3), POSTERIORS, [0, 1], exact=True)
    shift = np.array([3.0, 5.0]) - own.optima.values.numpy()
    np.testing.assert_allclose(plain.data["regret"] - own.data["regret"], shift[:, None].repeat(3, 1))


def test_a_policy_against_itself():
    found = decompose(
        LightDark(), LikelySide(), POSTERIORS, [0, 1], best=LikelySide(), num_episodes=50, likelihood="ekf"
    )
    assert found.optima.source == "closed form"
    assert (found.data["delta"] == 0).all()  # it meets the same world
    assert (found.data["delta_error"] == 0).all()
    np.testing.assert_allclose(found.data["information"], 0, atol=1e-12)  # it never looks
    assert found.data["ratio"].isnull().all()
    np.testing.assert_allclose(found.data["regret"], found.data["i1"] + found.data["i2"], atol=1e-9)


def test_refusals_of_decompose():
    with pytest.raises(ValueError, match="best: expected a policy that stands for the best, as LightDark"):
        decompose(LightDark(), LikelySide(), POSTERIORS, [0, 1])
    with pytest.raises(ValueError, match=r"posteriors: expected shape \[R, K, 3\]"):
        decompose(ContextualTiger(), RandomPolicy(3), POSTERIORS, [0, 1])
    with pytest.raises(ValueError, match="posteriors: expected non-negative probabilities"):
        decompose(LineGrid(), RandomPolicy(3), 2 * POSTERIORS, [0, 1])
    with pytest.raises(ValueError, match=r"contexts: expected shape \[2\]"):
        decompose(LineGrid(), RandomPolicy(3), POSTERIORS, [0])
    with pytest.raises(ValueError, match="contexts: expected indices 0 to 1"):
        decompose(LineGrid(), RandomPolicy(3), POSTERIORS, [0, 2])
    for wrong in ([1.0], [1.0, nan], 3.0, [[1.0, 2.0]]):
        with pytest.raises(ValueError, match=r"optima: expected finite numbers, of shape \[2\]"):
            decompose(LineGrid(), RandomPolicy(3), POSTERIORS, [0, 1], optima=wrong)
    with pytest.raises(ValueError, match="optima: expected an array of real numbers"):
        decompose(LineGrid(), RandomPolicy(3), POSTERIORS, [0, 1], optima="exact")
    with pytest.raises(ValueError, match="num_episodes: expected at least 2"):
        decompose(LineGrid(), RandomPolicy(3), POSTERIORS, [0, 1], num_episodes=1)


# ---- pictures ----------------------------------------------------------------------------------------------


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


def test_the_constant_is_where_its_definition_says():
    """At the maximum of (1 − exp(−x)) / √x, exp(x) = 1 + 2 x; written as a bisection."""
    low, high = 0.5, 2.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if exp(middle) > 1 + 2 * middle else (middle, high)
    assert pytest.approx(2 * (1 - exp(-low)) / sqrt(low), abs=1e-12) == XI
