from __future__ import annotations

import json
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, evaluation, simulate
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.evaluation import Evaluation, Mean, PerEpisode, compare, evaluate
from cpomdp_ppl.inference import ParticleFilter, reference_backend
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.prior import stratified, weighted_strata
from tests.conftest import fixed_actions
from tests.programs import Needle, Skewed, Walk
from tests.solvers.truth import known_context_value, solve, tables


def test_the_optimum_is_found_to_be_worth_what_it_is():
    model = LineGrid()
    truth = tables(model)
    plan = solve(truth, model.horizon)
    result = evaluate(model, plan, 6000, seed=1)
    assert abs(result.returns.mean - plan.value) < 3 * result.returns.standard_error
    assert result.likelihood == "exact"
    assert result.regret is not None
    assert result.regret.mean == pytest.approx(20.0 - result.returns.mean)
    # six reports, of which the plan follows the majority: it errs when two or fewer are right
    assert abs(result.identified - 0.97) < 0.02


def test_regret_is_against_what_the_exact_solution_says():
    model = LineGrid(horizon=8, start=2)
    best = model.context_known_return()
    assert float(best.mean()) == pytest.approx(known_context_value(tables(model), 8))
    assert LineGrid(horizon=3).context_known_return().tolist() == [0.0, 0.0]  # too far away


def test_light_dark_known_context():
    model = LightDark()
    assert float(model.context_known_return()[0]) == pytest.approx(17.96, abs=0.01)
    episodes = simulate(model, fixed_actions(*[1] * 20), 20_000, contexts="light right", seed=0)
    error = float(episodes.returns.std()) / 20_000**0.5
    assert abs(float(episodes.returns.mean()) - float(model.context_known_return()[0])) < 3 * error


class Openers:
    """Opens the left door at the time that is the context's number, known by the order of episodes."""

    def start(self, prior):
        return torch.arange(len(prior)) // (len(prior) // 3)

    def act(self, history, memory):
        return torch.where(memory == history.time, 1, 0), memory


def test_numbers_by_hand():
    """A policy that draws nothing: in context c it opens the left door at time c, and else listens."""
    model = ContextualTiger(horizon=3)
    result = evaluate(model, Openers(), 900, seed=3)
    for mean in result.returns_by_context.values():
        assert mean.num_episodes == 300
        # two listens at −1, and ten or minus a hundred at even odds: the number of wins can be read off
        wins = (300 * (mean.mean + 2) + 300 * 100) / 110
        assert wins == pytest.approx(round(wins), abs=1e-6)
        assert 110 < wins < 190  # 150 expected, with a standard deviation of 8.7
        p = wins / 300
        assert mean.deviation == pytest.approx(110 * math.sqrt(p * (1 - p) * 300 / 299))
    parts = list(result.returns_by_context.values())
    assert result.returns.mean == pytest.approx(sum(part.mean for part in parts) / 3)
    error = math.sqrt(sum(part.standard_error**2 for part in parts)) / 3
    assert result.returns.standard_error == pytest.approx(error)
    assert result.regret is None
    # Told the door and the context, there is a treasure every time: an upper bound on regret.
    assert result.informed_return == pytest.approx(30.0)
    assert result.regret_at_most is not None
    assert result.regret_at_most.mean == pytest.approx(30.0 - result.returns.mean)
    assert result.regret_at_most.standard_error == result.returns.standard_error
    assert "30.000 can be earned (state and context known)" in str(result)
    assert f"regret, at most   {result.regret_at_most.with_error()}" in str(result)


def test_noise_is_paired_whatever_the_policy_draws():
    """Two policies that do the same, of which one draws random numbers on the way."""

    class Restless(RandomPolicy):
        def act(self, history, memory):
            torch.rand(17)
            return torch.full((history.num_episodes,), 1), memory

    one = evaluate(LightDark(), fixed_actions(*[1] * 20), 200, seed=5, likelihood="ekf")
    two = evaluate(LightDark(), Restless(3), 200, seed=5, likelihood="ekf")
    assert one.returns == two.returns


def test_a_table_of_policies():
    model = LineGrid()
    policies = {"random": RandomPolicy(3), "left": fixed_actions(*[0] * 10)}
    table = compare(model, policies, {"random": 40, "left": 60}, training_seconds={"random": 3.0}, seed=0)
    assert table.evaluations["left"].returns == evaluate(model, policies["left"], 60, seed=0).returns
    assert table.evaluations["left"].returns.mean == pytest.approx(-10.0)
    *lines, empty, note = str(table).splitlines()
    assert (empty, note) == ("", "regret: against an agent that is told the context, in closed form.")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| random", "| left"]
    assert f"| {table.evaluations['random'].regret.with_error(2)} |" in lines[2]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    for word in ("return", "detector left", "H(C|Y) in bits", "identified", "regret"):
        assert word in str(table.evaluations["left"])
    assert json.loads(json.dumps(table.as_dict()))["training_seconds"] == {"random": 3.0}
    assert "≤" not in str(table)
    tiger = compare(ContextualTiger(), {"random": RandomPolicy(3), "left": fixed_actions(*[1] * 10)}, 6)
    for name, row in zip(tiger.evaluations, str(tiger).splitlines()[2:4], strict=True):
        assert f"| ≤ {100 - tiger.evaluations[name].returns.mean:.2f} |" in row
    assert str(tiger).endswith("as nobody earns more than 100.000, told context and state.")


def test_several_are_evaluated_on_the_same_episodes():
    model, policies = LineGrid(), {"random": RandomPolicy(3), "again": RandomPolicy(3)}
    fresh = compare(model, policies, 40, seed=None).evaluations
    assert fresh["random"].returns == fresh["again"].returns  # on the same episodes, whichever they are


@pytest.mark.parametrize(
    ("policies", "settings", "named"),
    [
        (RandomPolicy(3), {"num_episodes": 0}, "num_episodes"),
        (RandomPolicy(3), {"prior": [0.5, 0.6]}, "prior"),
        (RandomPolicy(3), {"seed": -1}, "seed"),
        ({}, {}, "policies"),
        (
            {"random": RandomPolicy(3), "other": RandomPolicy(3)},
            {"num_episodes": {"random": 40}},
            "num_episodes",
        ),
    ],
)
def test_nonsense_is_refused(policies, settings, named):
    with pytest.raises(ValueError, match=named):
        evaluate(LineGrid(), policies, **settings)


@pytest.mark.slow
def test_a_model_that_the_grid_refuses_is_left_to_particles():
    class Heavy(Walk):
        def transition(self, state, action, context):
            return state + pyro.sample("jump", dist.StudentT(2.0))

    assert reference_backend(Heavy()).name == "smc"


RANDOM = RandomPolicy(2)


@pytest.mark.parametrize("num_episodes", [2, 3, 4, 16, 17, 100])
def test_a_rare_context_is_played_and_counts_as_the_prior_says(num_episodes):
    """Before, 16 episodes gave 1.00 ± 0.00."""
    result = evaluate(Skewed(), RANDOM, num_episodes)
    assert result.returns.mean == pytest.approx(0.97 * 1 - 0.03 * 100, abs=1e-5)
    # A single episode in the rare context is as uncertain as it is far from the plain mean of all.
    m = num_episodes - 1
    away = (-100 - (m - 100) / num_episodes) ** 2 * num_episodes / m
    error = 0.03 * away**0.5 if num_episodes == 3 else (0.03**2 + 0.97**2) ** 0.5 * away**0.5
    assert result.returns.standard_error == pytest.approx(0.0 if num_episodes >= 4 else error, rel=1e-4)
    assert result.identified == pytest.approx(0.97, abs=1e-6)  # what is seen tells too little to doubt
    assert result.identified_error == pytest.approx(0.0 if num_episodes >= 4 else error / 101, rel=1e-4)
    assert result.unplayed == 0.0
    assert sum(mean.num_episodes for mean in result.returns_by_context.values()) == num_episodes


@pytest.mark.parametrize("settings", [{"batch_size": 3}, {"batch_size": 1}, {"reveal_context": True}])
def test_weights_go_with_their_episodes(settings):
    model = Skewed((0.9, 0.07, 0.03), (1.0, -100.0, 500.0), (0.0, 0.0, 0.0))
    given = [0.5, 0.48, 0.02]
    result = evaluate(model, RANDOM, 11, prior=given, **settings)
    assert result.returns.mean == pytest.approx(0.5 * 1 - 0.48 * 100 + 0.02 * 500)
    assert result.returns.standard_error == 0.0
    each = result.per_episode
    assert each.weights.sum() == pytest.approx(1.0)
    for c, p in enumerate(given):
        assert each.weights[each.contexts == c].sum() == pytest.approx(p)
        assert (each.returns[each.contexts == c] == model.means[c]).all()


def test_what_is_left_to_find_out_is_weighted_too():
    """H(C|Y) and how often the likeliest context is right, against the table of `P(c, z)`."""
    prior = np.array([0.5, 0.45, 0.05])
    model = Skewed(prior.tolist(), (0.0,) * 3, (0.0,) * 3)
    joint = prior[:, None] * np.array([[0.7, 0.3], [0.4, 0.6], [0.4, 0.6]])  # [C, Z]
    bits = -(joint * np.log2(joint / joint.sum(0))).sum()
    result = evaluate(model, RANDOM, 3000, seed=1)
    assert abs(result.entropy.mean - bits) < 3 * result.entropy.standard_error
    assert abs(result.identified - joint.max(0).sum()) < 3 * result.identified_error
    # Of six episodes every context gets two: it is weights that make up for it.
    few = evaluate(model, RANDOM, 6, seed=2)
    each = few.per_episode
    for found, error, values in (
        (few.entropy.mean, few.entropy.standard_error, each.entropies.numpy()),
        (few.identified, few.identified_error, each.identified.double().numpy()),
    ):
        assert (found, error) == pytest.approx(stratified_by_hand(values, each.contexts.numpy(), prior))


def stratified_by_hand(values, strata, prior):
    """`Σ P(c) ȳ_c` and the root of `Σ P(c)² s_c² / n_c`; a stratum of one varies as much as it is far off."""
    mean, variance, n = 0.0, 0.0, len(values)
    for c, p in enumerate(prior):
        own = values[strata == c]
        mean += p * own.mean()
        s2 = own.var(ddof=1) if len(own) > 1 else (own[0] - values.mean()) ** 2 * n / (n - 1)
        variance += p**2 * s2 / len(own)
    return mean, variance**0.5


@pytest.mark.parametrize("num_episodes", [5, 7, 9, 10, 11, 60])
def test_a_mean_of_strata(num_episodes):
    rng = np.random.default_rng(num_episodes)
    for _ in range(20):
        prior = rng.dirichlet([0.5] * 5)
        contexts, weights = weighted_strata(torch.from_numpy(prior), num_episodes)
        values = rng.normal(size=num_episodes) * (1 + contexts.numpy())
        found = Mean.of(torch.from_numpy(values), contexts, weights)
        expected = stratified_by_hand(values, contexts.numpy(), prior)
        assert (found.mean, found.standard_error) == pytest.approx(expected)
    alone = Mean.of(torch.from_numpy(values), torch.arange(num_episodes))  # all strata of one
    assert alone.standard_error == pytest.approx(values.std(ddof=1) / num_episodes**0.5)
    assert alone.deviation == pytest.approx(values.std(ddof=1))


def test_errors_cover_the_truth_as_often_as_they_should():
    """A skewed prior, in the rarest context of which ten of 500 episodes are played; 1,000 evaluations."""
    prior, R = torch.tensor([0.7, 0.25, 0.03, 0.02], dtype=torch.float64), 1000
    means, spreads = torch.tensor([1.0, -3.0, 40.0, -300.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    contexts, weights = weighted_strata(prior, 500)
    noise = torch.randn(R, 500, generator=torch.Generator().manual_seed(0))
    found = [Mean.of(y, contexts, weights) for y in means[contexts] + spreads[contexts] * noise]
    z = np.array([(each.mean - float(prior @ means.double())) / each.standard_error for each in found])
    # Binomial standard errors of the shares: 0.015 and 0.007.
    assert abs(np.mean(np.abs(z) < 1) - 0.683) < 0.045
    assert abs(np.mean(np.abs(z) < 1.96) - 0.95) < 0.021


def test_a_stratum_of_one_is_held_too_uncertain_rather_than_too_sure():
    """Five contexts and seven episodes, of which four are alone in their context."""
    prior = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
    contexts, weights = weighted_strata(prior, 7)
    assert torch.bincount(contexts).tolist() == [3, 1, 1, 1, 1]
    for means in ([0.0] * 5, [0.0, 1.0, -1.0, 2.0, -5.0]):
        spreads = torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0])[contexts]
        noise = spreads * torch.randn(500, 7, generator=torch.Generator().manual_seed(1))
        found = [Mean.of(y, contexts, weights) for y in torch.tensor(means)[contexts] + noise]
        true_variance = np.var([each.mean for each in found])
        told = np.mean([each.standard_error**2 for each in found])
        assert told > 0.9 * true_variance  # up to 1/n too little, if the others have no spread at all


def test_no_possible_context_is_left_out():
    rng = np.random.default_rng(0)
    for _ in range(200):
        C = int(rng.integers(1, 9))
        prior = rng.dirichlet([0.3] * C) * (rng.random(C) > 0.2)
        if not prior.sum():
            continue
        prior = torch.from_numpy(prior / prior.sum())
        possible = int((prior > 0).sum())
        B = int(rng.integers(possible, 60))
        contexts, weights = weighted_strata(prior, B)
        counts = torch.bincount(contexts, minlength=C)
        assert len(contexts) == len(weights) == B
        assert ((counts > 0) == (prior > 0)).all()
        assert counts[prior > 0].min() >= min(2, B // possible)
        assert torch.bincount(contexts, weights, minlength=C).numpy() == pytest.approx(prior.numpy())
    for C in (1, 2, 3, 7):  # nothing new where there was nothing wrong
        uniform = torch.full((C,), 1 / C)
        contexts, weights = weighted_strata(uniform, 4 * C)
        assert torch.equal(contexts, stratified(uniform, 4 * C))
        assert weights.numpy() == pytest.approx(1 / (4 * C))


def test_fewer_episodes_than_contexts_are_right_on_average():
    prior, means = np.array([0.4, 0.3, 0.2, 0.1]), np.array([1.0, -2.0, 30.0, -4.0])
    drawn = [weighted_strata(torch.from_numpy(prior), 3, seed) for seed in range(2000)]
    estimates = np.array([(weights.numpy() * means[contexts]).sum() for contexts, weights in drawn])
    assert abs(estimates.mean() - prior @ means) < 3 * estimates.std() / 2000**0.5
    model = Skewed(prior.tolist(), means.tolist(), (0.0,) * 4)
    for seed in range(6):
        found = evaluate(model, RANDOM, 3, seed=seed)
        played = found.per_episode.contexts.unique().numpy()
        assert found.returns.mean == pytest.approx(float(means[found.per_episode.contexts].mean()))
        assert found.unplayed == pytest.approx(1 - prior[played].sum())
        assert "not played" in str(found)
        assert len(played) > 1
        spread = means[found.per_episode.contexts].std(ddof=1)
        assert found.returns.standard_error == pytest.approx(spread / 3**0.5)
    assert evaluate(model, RANDOM, 3, seed=seed).returns == found.returns
    # Of a single context that was drawn twice, nobody knows how far others are.
    alike = evaluate(Skewed((0.98, 0.01, 0.01), (1.0, -100.0, 7.0), (0.0,) * 3), RANDOM, 2)
    assert alike.per_episode.contexts.tolist() == [0, 0]
    assert alike.returns.with_error() == "1.000 ± –"
    assert "not played      contexts of probability 0.02, for want of episodes" in str(alike)


def test_paired_differences():
    """The same worlds in the same places: the difference to oneself is nothing."""
    model = LineGrid()
    one = evaluate(model, RandomPolicy(3), 30, batch_size=7, seed=2).per_episode
    left = evaluate(model, fixed_actions(*[0] * 10), 30, batch_size=7, seed=2).per_episode
    assert torch.equal(one.contexts, left.contexts)
    difference = one.mean(one.returns - left.returns)
    assert difference.mean == pytest.approx(float((one.returns - left.returns).mean()))
    assert one.mean(one.returns) == evaluate(model, RandomPolicy(3), 30, batch_size=7, seed=2).returns


def test_evaluations_of_earlier_versions_can_be_read():
    mean = {"mean": 1.5, "standard_error": 0.1, "deviation": 1.0, "num_episodes": 100}
    old = {
        "returns": mean,
        "returns_by_context": {"left": mean, "right": {**mean, "standard_error": None}},
        "entropy": mean,
        "identified": 0.9,
        "regret": None,
        "seconds_per_decision": 1e-4,
        "likelihood": "exact",
    }
    read = Evaluation.from_dict(json.loads(json.dumps(old)))
    assert read.regret_against is None
    in_closed_form = Evaluation.from_dict({**old, "regret": mean})
    assert f"against         {evaluation.CLOSED_FORM}" in str(in_closed_form)
    assert not in_closed_form.beats_reference
    assert read.returns == Mean(1.5, 0.1, 1.0, 100)
    assert math.isnan(read.returns_by_context["right"].standard_error)
    assert read.regret_at_most is None
    assert "90.0 ± – %" in str(read)
    new = evaluate(ContextualTiger(), RandomPolicy(3), 9)
    assert Evaluation.from_dict(json.loads(json.dumps(new.as_dict()))) == new


class Untold(LightDark):
    """Light–Dark, as if nobody knew what knowing the context earns; short, for the sake of time."""

    def __init__(self):
        super().__init__(horizon=6)

    def context_known_return(self):
        return None


class LikelierSide:
    """Light–Dark: walks to the side that was likelier from the start, or to the right."""

    amortised = True

    def start(self, prior):
        return (prior[:, 0] >= 0.5).long()

    def act(self, history, memory):
        return memory, memory


class Contrary(LikelierSide):
    """Walks to the dark side as soon as it is told which that is."""

    def start(self, prior):
        return torch.where(prior.amax(1) > 0.99, 1 - super().start(prior), 1)


@pytest.mark.slow
def test_regret_against_the_same_policy_told_the_context():
    """Told, this policy does the best there is: the closed form is the truth."""
    rule, settings = LikelierSide(), {"likelihood": "ekf", "seed": 1}
    truth = evaluate(LightDark(horizon=6), rule, 2000, **settings)
    found = evaluate(Untold(), rule, 2000, **settings)
    told = evaluate(Untold(), rule, 2000, reveal_context=True, **settings)
    best = float(LightDark(horizon=6).context_known_return()[0])
    assert (found.returns, truth.regret_against) == (truth.returns, evaluation.CLOSED_FORM)
    assert abs(found.regret.mean + found.returns.mean - best) < 3 * told.returns.standard_error
    assert found.regret.mean == pytest.approx(told.returns.mean - found.returns.mean)
    # Every other episode is the same, told or not: the rest is all that differs.
    unpaired = math.hypot(found.returns.standard_error, told.returns.standard_error)
    assert found.regret.standard_error < 0.9 * unpaired
    each = found.per_episode
    assert torch.equal(each.reference_returns, told.per_episode.returns)
    assert found.regret == each.mean(each.reference_returns - each.returns)
    right = each.contexts == 0
    assert torch.equal(each.returns[right], each.reference_returns[right])
    assert "against the same policy, told the context" in " ".join(str(found).split())
    assert told.regret.mean == told.regret.standard_error == 0.0
    assert truth.per_episode.reference_returns is None
    # A policy of which nobody says that it reads the prior is no reference, unless it is named.
    assert evaluate(Untold(), fixed_actions(*[1] * 20), 20, **settings).regret is None


@pytest.mark.slow
def test_regret_of_several_is_against_the_one_that_earns_most_when_told():
    policies = {"random": RandomPolicy(3), "contrary": Contrary(), "side": LikelierSide()}
    number = {"random": 40, "contrary": 60, "side": 60}
    table = evaluate(Untold(), policies, number, likelihood="ekf", batch_size=25)
    told = {
        B: evaluate(Untold(), LikelierSide(), B, likelihood="ekf", batch_size=25, reveal_context=True)
        for B in (40, 60)
    }
    for name, found in table.evaluations.items():
        assert found.regret_against == "side, told the context"
        each, other = found.per_episode, told[number[name]].per_episode
        assert torch.equal(each.contexts, other.contexts)
        assert found.regret == each.mean(other.returns - each.returns)
    random = table.evaluations["random"]
    assert random.regret.mean > 4 * random.regret.standard_error
    assert "\n\nregret: against side, told the context.\n\n≤" in str(table)
    assert f"| {random.regret.with_error(2)} (≤ {random.regret_at_most.mean:.2f}) |" in str(table)


@pytest.mark.slow
def test_regret_below_zero_is_explained():
    """The reference need not be the best."""
    found = evaluate(Untold(), Contrary(), 60, likelihood="ekf")
    assert found.beats_reference
    assert f"below zero {evaluation.BELOW_ZERO}" in " ".join(str(found).split())
    table = evaluate(Untold(), {"one": Contrary(), "random": RandomPolicy(3)}, 60, likelihood="ekf")
    assert f"Regret of one, random is below zero: {evaluation.BELOW_ZERO}." in str(table)
    assert not evaluate(Untold(), LikelierSide(), 60, likelihood="ekf").beats_reference


@pytest.mark.slow
def test_who_is_told_can_be_named():
    settings = {"likelihood": "ekf", "seed": 2}
    right = fixed_actions(*[1] * 20)
    found = evaluate(Untold(), right, 40, reference=LikelierSide(), **settings)
    assert found.regret_against == "LikelierSide, told the context"
    assert found.regret == evaluate(Untold(), LikelierSide(), 40, **settings).regret
    named = evaluate(Untold(), right, 40, reference=right, **settings)
    assert (named.regret.mean, named.regret_against) == (0.0, evaluation.SAME_POLICY)
    both = {"right": right, "random": RandomPolicy(3)}
    table = evaluate(LightDark(horizon=6), both, 40, reference=right, **settings)
    assert table.evaluations["random"].regret_against == "right, told the context"
    with pytest.raises(ValueError, match="reference: expected an object"):
        evaluate(Untold(), right, 40, reference=3)


def test_the_bound_stays_beside_regret_against_a_policy():
    """The treasure every time is for who sees the door; who is told the context has to listen."""
    found = evaluate(ContextualTiger(horizon=3), Openers(), 90, reference=RandomPolicy(3))
    assert found.informed_return == pytest.approx(30.0)
    table = compare(ContextualTiger(horizon=3), {"one": Openers()}, 90, reference=RandomPolicy(3))
    assert f"| {found.regret.with_error(2)} (≤ {30 - found.returns.mean:.2f}) |" in str(table)


def test_single_episodes_as_json():
    found = evaluate(Untold(), LikelierSide(), 9, likelihood="ekf").per_episode
    read = PerEpisode.from_dict(json.loads(json.dumps(found.as_dict())))
    for name, value in vars(found).items():
        again = getattr(read, name)
        assert torch.equal(value, again) if isinstance(value, torch.Tensor) else value is again


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999])
def test_strata_are_as_even_as_can_be(offset):
    prior = torch.tensor([0.15, 0.5, 0.0, 0.35])
    counts = torch.bincount(stratified(prior, 101, offset), minlength=4)
    assert ((counts - 101 * prior).abs() < 1).all()
    assert counts[2] == 0


@pytest.mark.slow
def test_the_reference_backend():
    assert reference_backend(LineGrid()).name == "exact"
    assert reference_backend(LightDark()).name == "grid"
    assert reference_backend(Beacons()) == ParticleFilter(num_particles=1024)


@pytest.mark.slow
def test_an_episode_that_loses_its_particles_does_not_take_the_others_along():
    few = ParticleFilter(num_particles=4)
    episodes = simulate(Needle(), RandomPolicy(2), 20, seed=0)
    with pytest.raises(DegenerateWeightsError, match="num_particles"):
        few.run(Needle(), episodes, seed=0)
    with pytest.warns(UserWarning, match="rest on noise") as warned:
        result = evaluate(Needle(), RandomPolicy(2), 20, likelihood=few)
    with pytest.warns(UserWarning, match="rest on noise") as also:
        compare(Needle(), {"one": RandomPolicy(2)}, 20, likelihood=few)
    assert [warning.filename for warning in (*warned, *also)] == [__file__] * 2  # they point at their callers
    assert result.returns.num_episodes == 20
    assert 0 <= result.entropy.mean <= 1
