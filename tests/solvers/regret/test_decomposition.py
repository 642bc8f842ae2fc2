"""What policies are worth and regret is made of, when played, against exact values."""

from __future__ import annotations

from itertools import product
from math import log, nan

import numpy as np
import pytest
import torch

from baselines.simple import PosteriorSampling, ThompsonSampling
from cpomdp_ppl import RandomPolicy
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from solvers import exact
from solvers.regret import (
    Optima,
    context_known_values,
    decompose,
    exact_regret,
    merge_invariant_contexts,
    policy_gaps,
    policy_values,
)
from solvers.regret.values import merged
from tests.programs import Walk
from tests.solvers import truth
from tests.solvers.regret.guess import SHORT, Alone, Amortised, Guess, always

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
    model, prior = Guess(horizon=3), [[0.5, 0.5]]
    look = policy_values(model, always(0), prior, exact=True)
    by = policy_values(model, always(0), prior, num_episodes=2000, likelihood="smc")
    assert abs(float(by.information - look.information)) <= 4.5 * float(by.information_errors)


def test_what_the_prior_excludes_may_be_impossible_under_it():
    model = Guess(heads=(0.0, 1.0))
    played = policy_values(model, always(0), [[1.0, 0.0], [0.5, 0.5]], num_episodes=10)
    np.testing.assert_allclose(played.information, [0.0, log(2)], atol=1e-12)
    np.testing.assert_allclose(played.information_errors, 0, atol=1e-9)


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


@pytest.mark.slow
def test_optima_may_be_numbers():
    known = Optima(torch.tensor([3.0, 5.0]).double(), torch.zeros(2).double(), "closed form")
    own, same, *plain = (
        decompose(SHORT, RandomPolicy(3), POSTERIORS, [0, 1], optima=optima, exact=True)
        for optima in (None, known, [3.0, 5.0], (3, 5), np.array([3.0, 5.0]), torch.tensor([3.0, 5.0]))
    )
    for found in plain:
        assert found.optima.source == "given"
        assert (found.optima.standard_errors == 0).all()
        assert found.data.equals(same.data)
    shift = np.array([3.0, 5.0]) - own.optima.values.numpy()
    np.testing.assert_allclose(same.data["regret"] - own.data["regret"], shift[:, None].repeat(3, 1))


def test_with_nothing_to_find_out_any_eta_will_do():
    parts = decompose(Guess(), RandomPolicy(3), [[[1.0, 0.0], [1.0, 0.0]]], [0], num_episodes=20)
    assert parts.eta == 1
    assert decompose(Alone(), RandomPolicy(3), [[[1.0]]], [0], exact=True).eta == 1


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


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (LightDark(), {}, "best: expected a policy that stands for the best, as LightDark"),
        (ContextualTiger(), {}, r"posteriors: expected shape \[R, K, 3\]"),
        (LineGrid(), {"posteriors": 2 * POSTERIORS}, "posteriors: expected non-negative probabilities"),
        (LineGrid(), {"contexts": [0]}, r"contexts: expected shape \[2\]"),
        (LineGrid(), {"contexts": [0, 2]}, "contexts: expected indices 0 to 1"),
        (LineGrid(), {"optima": [1.0]}, r"optima: expected finite numbers, of shape \[2\]"),
        (LineGrid(), {"optima": [1.0, nan]}, "optima: expected finite numbers"),
        (LineGrid(), {"optima": 3.0}, "optima: expected finite numbers"),
        (LineGrid(), {"optima": [[1.0, 2.0]]}, "optima: expected finite numbers"),
        (LineGrid(), {"optima": "exact"}, "optima: expected an array of real numbers"),
        (LineGrid(), {"num_episodes": 1}, "num_episodes: expected at least 2"),
    ],
)
def test_refusals_of_decompose(model, changes, words):
    arguments = {"posteriors": POSTERIORS, "contexts": [0, 1], **changes}
    with pytest.raises(ValueError, match=words):
        decompose(model, RandomPolicy(3), **arguments)


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
        lambda **limit: decompose(model, always(0), runs, [0], best=random, exact=True, **limit),
        lambda **limit: policy_values(model, random, prior, exact=True, **limit),
    ):
        with pytest.raises(exact.TooManyHistoriesError, match="raise max_histories"):
            call(max_histories=100)
        call(max_histories=300)


def test_equal_posteriors_are_merged_and_impossible_is_not_unlikely():
    p = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1e-13, 1 - 1e-13], [0.5, 0.5 + 1e-14]], dtype=torch.float64)
    distinct, number = merged(p, 11)
    assert number.tolist()[0] == number.tolist()[3]
    assert len(distinct) == 3  # what is possible may yet be found true
    endings = exact.Endings.of(p.numpy(), np.full((4, 2), 0.25))
    assert torch.equal(endings.posteriors, distinct)
    for i in range(4):
        torch.testing.assert_close(distinct[number[i]], p[i], rtol=0, atol=1e-12)
