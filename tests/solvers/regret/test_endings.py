"""Regret, bounds and invariance with ends, discounts and rewards on arrival: against brute force."""

from __future__ import annotations

from itertools import product
from math import log
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.bounds import informed_return
from solvers import exact
from solvers.regret import Bound, decompose, exact_regret, reward_bound
from solvers.regret.invariance import Restricted, merge_invariant_contexts, policy_gaps
from solvers.regret.values import context_known_values, policy_values
from tests.programs import Reef, Sail
from tests.solvers.machines import Mortal

if TYPE_CHECKING:
    from tests.solvers.truth import Reals

SMALL = Mortal(1, horizon=2)


def policies() -> list[dict[tuple[int, ...], int]]:
    """All deterministic policies for two steps: an action for each history; action 1 shows nothing."""
    found = []
    for first in range(2):
        seen = [(0,), (1,)] if first == 0 else [()]
        for second in product(range(2), repeat=len(seen)):
            found.append({(-1,): first, **dict(zip(seen, second, strict=True))})
    return found


def step(c: int, p: Reals, a: int) -> list[tuple[tuple[int, ...], bool, Reals]]:
    """What is seen, whether that is the end, and the measure over states with it, `[N]`, in context c."""
    tables, found = SMALL.tables, []
    moved = p @ tables["transition"][c, a]
    for o in range(2) if a == 0 else [None]:
        shown = moved if o is None else moved * tables["emission"][c, a, :, o]
        end = tables["end"][c, a]
        found += [
            (() if o is None else (o,), True, shown * end),
            (() if o is None else (o,), False, shown * (1 - end)),
        ]
    return found


def earned(c: int, p: Reals, a: int) -> float:
    return float(np.sum(p[:, None] * SMALL.tables["transition"][c, a] * SMALL.tables["reward"][c, a]))


def play(policy: dict[tuple[int, ...], int], prior: Reals) -> tuple[Reals, float, list[tuple[Reals, Reals]]]:
    """Returns `[2]`, information, and endings `(posterior, P(ending | c))`, history by history."""
    V = np.zeros(2)
    endings: dict[tuple[object, ...], Reals] = {}
    for c in range(2):
        p, first = SMALL.tables["initial"][c], policy[(-1,)]
        V[c] += earned(c, p, first)
        for seen, over, q in step(c, p, first):
            if over:
                endings.setdefault((seen, "end"), np.zeros(2))[c] += q.sum()
                continue
            second = policy[seen]
            V[c] += SMALL.discount * earned(c, q, second)
            for later, ended, last in step(c, q, second):
                endings.setdefault((seen, later, ended), np.zeros(2))[c] += last.sum()
    information, found = 0.0, []
    for chance in endings.values():
        evidence = prior @ chance
        if evidence > 0:
            posterior = prior * chance / evidence
            information += sum(
                prior[c] * chance[c] * log(chance[c] / evidence) for c in range(2) if prior[c] * chance[c] > 0
            )
            found.append((posterior, chance))
    return V, information, found


def brute_force(
    tau: float, p: Reals, weight: Reals, K: int, k: int, sums: dict[str, Reals]
) -> dict[str, Reals]:
    """Follow Algorithm 1 history by history, each with `weight = P(history, c)`, adding up by episode."""
    if k == K:
        return sums
    plays = [play(policy, p) for policy in policies()]
    best = max(p @ V for V, _, _ in plays)
    V, information, endings = max(plays, key=lambda each: p @ each[0] + tau * each[1])
    told = np.array([max(e @ each[0] for each in plays) for e in np.eye(2)])
    added = {
        "delta": weight.sum() * (best - p @ V),
        "information": weight.sum() * information,
        "entropy": weight.sum() * -sum(x * log(x) for x in p if x > 0),
        "i1": weight @ (told - best),
        "regret": weight @ (told - V),
    }
    for name, value in added.items():
        sums.setdefault(name, np.zeros(K))[k] += value
    for posterior, chance in endings:
        brute_force(tau, posterior, weight * chance, K, k + 1, sums)
    return sums


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.0, 1.0, 20.0])
def test_algorithm_1_against_brute_force_over_policies_and_histories(tau: float) -> None:
    prior = np.array([0.58, 0.42])
    expected = brute_force(tau, prior, prior, 3, 0, {})
    run = exact_regret(SMALL, 3, temperature=tau, prior=prior)
    for name, series in expected.items():
        np.testing.assert_allclose(getattr(run, name), series, atol=1e-9, err_msg=name)
    assert run.discount == 0.8
    assert (run.cumulative_regret <= run.bound()([1, 2, 3])).all()
    if tau == 20.0:
        assert run.delta[0] > 1e-3  # it gives up reward to learn


def test_the_bound_counts_steps_by_what_they_are_worth() -> None:
    plain = dict(temperature=0.5, num_contexts=3, reward_bound=2.0, eta=0.3)
    K = [1, 10, 100]
    worth = 1 + 0.8 + 0.64 + 0.512
    found = Bound(horizon=4, discount=0.8, **plain).terms(K)
    xi = Bound(horizon=1, **plain).xi
    np.testing.assert_allclose(found[0], 0.5 * log(3))
    np.testing.assert_allclose(found[1], xi * worth * 2.0 * np.sqrt(np.array(K) * log(3) / 0.3))
    np.testing.assert_allclose(found[2], 2 * worth * 2.0 * np.sqrt(2 * np.array(K)))


def test_largest_rewards_on_arrival_are_read_off() -> None:
    for model in (Mortal(1), Mortal(2, C=3, N=3)):
        possible = model.tables["transition"] > 0
        assert reward_bound(model) == pytest.approx(abs(model.tables["reward"])[possible].max(), abs=1e-6)
    assert reward_bound(Reef()) == 5.0  # to slip where one is aground


def best_of_rules(model: Mortal, c: int) -> float:
    """The best of all rules from time and state to action, each worth what it brings step by step."""
    T, N = model.horizon, model.states
    values = []
    for actions in product(range(model.num_actions), repeat=T * N):
        rule, p, value = np.reshape(actions, (T, N)), model.tables["initial"][c], 0.0
        for t in range(T):
            after = np.zeros(N)
            for s in range(N):
                a = rule[t, s]
                moved = p[s] * model.tables["transition"][c, a, s]
                value += model.discount**t * moved @ model.tables["reward"][c, a, s]
                after += moved * (1 - model.tables["end"][c, a])
            p = after
        values.append(value)
    return max(values)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_who_sees_every_state_earns_the_best_of_all_rules(seed: int) -> None:
    model = Mortal(seed, certain=seed == 2)
    truth = [best_of_rules(model, c) for c in range(2)]
    found = informed_return(model)
    assert found is not None
    np.testing.assert_allclose(found, truth, atol=1e-9)
    known = [exact.plan(model, prior=point).value for point in np.eye(2)]
    assert (found.numpy() >= np.array(known) - 1e-9).all()
    assert informed_return(Sail()) is None  # continuous actions


@pytest.mark.slow
def test_played_values_and_gaps_agree_with_exact_ones() -> None:
    model = Mortal(2, C=3, N=3)
    gaps = policy_gaps(model)
    plans = [exact.plan(model, prior=point) for point in np.eye(3)]
    played = policy_gaps(model, plans, num_episodes=2000)
    assert (gaps.gaps.abs().sum() > 0.1) & (gaps.gaps >= -1e-9).all()
    assert (played.gaps - gaps.gaps).abs().le(4.5 * played.standard_errors + 1e-6).all()
    np.testing.assert_allclose(gaps.values.diagonal(), context_known_values(model).values, atol=1e-12)

    priors = [[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]]
    settings = dict(num_episodes=3000, likelihood="exact", seed=1)
    sampled = policy_values(model, RandomPolicy(2), priors, **settings)
    exactly = policy_values(model, RandomPolicy(2), priors, exact=True)
    for name, error in (("values", "standard_errors"), ("information", "information_errors")):
        off = (getattr(sampled, name) - getattr(exactly, name)).abs()
        assert (off <= 4.5 * getattr(sampled, error) + 1e-6).all(), name

    posteriors, contexts = [[priors[0]], [priors[0]]], [0, 2]
    parts, truth = (
        decompose(model, RandomPolicy(2), posteriors, contexts, **each).data
        for each in (settings, {"exact": True})
    )
    for name in ("regret", "delta", "i1", "i2"):
        assert (abs(parts[name] - truth[name]) <= 4.5 * parts[f"{name}_error"] + 1e-6).all(), name


@pytest.mark.parametrize("model", [Mortal(2, C=3, N=3, awake=True), Reef()], ids=["Mortal", "Reef"])
def test_a_model_over_some_contexts_ends_pays_and_discounts_as_the_whole(model: Mortal | Reef) -> None:
    kept, prior = [1, 0], [0.3, 0.7]
    some = Restricted(model, kept, prior)
    some.check()
    assert (some.can_end, some.pays_on_arrival, some.discount) == (True, True, model.discount)
    whole = [0.7, 0.3, 0.0][: model.num_contexts]
    assert exact.plan(some).value == pytest.approx(exact.plan(model, prior=whole).value, abs=1e-12)
    policy = RandomPolicy(model.actions)
    ours = simulate(some, policy, 30, contexts=0, seed=0)
    theirs = simulate(model, policy, 30, contexts=1, seed=0)
    assert torch.equal(ours.lengths, theirs.lengths)
    assert torch.equal(ours.returns, theirs.returns)
    sailing = Restricted(Sail(), [1], [1.0])
    sailing.check()
    assert sailing.box == Sail.actions
    assert simulate(sailing, RandomPolicy(sailing.actions), 50, seed=0).lengths.min() < 4


def test_contexts_that_end_alike_are_merged_and_others_are_not() -> None:
    class Thrice(Reef):
        """The third context is the first again."""

        contexts = ("left", "right", "left again")

        def observation(self, state, action, context):
            super().observation(state, action, context % 2)

        def ends(self, state, action, context):
            return super().ends(state, action, context % 2)

    merged = merge_invariant_contexts(Thrice(), 0.05)
    assert merged.dropped == {"left again": "left"}
    assert merged.model.can_end
    np.testing.assert_allclose(merged.prior, [2 / 3, 1 / 3], atol=1e-7)
