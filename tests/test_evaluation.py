from __future__ import annotations

import json
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.context import stratified
from cpomdp_ppl.evaluation import Mean, compare, evaluate, most_exact
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from tests.conftest import fixed_actions
from tests.programs import Walk
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


def test_too_far_away_is_worth_nothing():
    assert LineGrid(horizon=3).context_known_return().tolist() == [0.0, 0.0]


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


def test_noise_is_paired_whatever_the_policy_draws():
    """Two policies that do the same, of which one draws random numbers on the way."""

    class Restless(RandomPolicy):
        def act(self, history, memory):
            torch.rand(17)
            return torch.full((history.num_episodes,), 1), memory

    one = evaluate(LightDark(), fixed_actions(*[1] * 20), 200, seed=5, likelihood="ekf")
    two = evaluate(LightDark(), Restless(3), 200, seed=5, likelihood="ekf")
    assert one.returns == two.returns


def test_workers_make_no_difference():
    model = LineGrid()
    plan = solve(tables(model), model.horizon)
    one, two = (
        evaluate(model, plan, 90, batch_size=25, workers=workers, seed=1).as_dict() for workers in (1, 2)
    )
    del one["seconds_per_decision"], two["seconds_per_decision"]
    assert one == two


def test_a_table_of_policies():
    model = LineGrid()
    policies = {"random": RandomPolicy(3), "left": fixed_actions(*[0] * 10)}
    table = compare(model, policies, {"random": 40, "left": 60}, training_seconds={"random": 3.0}, seed=0)
    assert table.evaluations["left"].returns == evaluate(model, policies["left"], 60, seed=0).returns
    assert table.evaluations["left"].returns.mean == pytest.approx(-10.0)
    lines = str(table).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| random", "| left"]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert json.loads(json.dumps(table.as_dict()))["training_seconds"] == {"random": 3.0}
    with pytest.raises(ValueError, match="policies"):
        compare(model, {})
    with pytest.raises(ValueError, match="num_episodes"):
        compare(model, policies, {"random": 40})


def test_evaluating_several_is_comparing_them():
    model, policies = LineGrid(), {"random": RandomPolicy(3), "again": RandomPolicy(3)}
    settings = dict(prior=[0.2, 0.8], likelihood="smc", seed=7)
    one, other = evaluate(model, policies, 40, **settings), compare(model, policies, 40, **settings)
    for name in policies:
        assert one.evaluations[name].returns == other.evaluations[name].returns
        assert one.evaluations[name].entropy == other.evaluations[name].entropy
    fresh = compare(model, policies, 40, seed=None).evaluations
    assert fresh["random"].returns == fresh["again"].returns  # on the same episodes, whichever they are
    with pytest.raises(ValueError, match="seed"):
        evaluate(model, policies["random"], 40, seed=-1)


def test_a_model_that_the_grid_refuses_is_left_to_particles():
    class Heavy(Walk):
        def transition(self, state, action, context):
            return state + pyro.sample("jump", dist.StudentT(2.0))

    assert most_exact(Heavy()).name == "smc"


def test_contexts_are_spread_like_the_prior():
    result = evaluate(LineGrid(), RandomPolicy(3), 100, prior=[0.9, 0.1])
    assert [mean.num_episodes for mean in result.returns_by_context.values()] == [90, 10]


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999])
def test_strata_are_as_even_as_can_be(offset):
    prior = torch.tensor([0.15, 0.5, 0.0, 0.35])
    counts = torch.bincount(stratified(prior, 101, offset), minlength=4)
    assert ((counts - 101 * prior).abs() < 1).all()
    assert counts[2] == 0


def test_the_most_exact_backend():
    assert most_exact(LineGrid()).name == "exact"
    assert most_exact(LightDark()).name == "grid"
    assert most_exact(Beacons()) == ParticleFilter(num_particles=1024)


def test_it_says_everything_in_words_and_as_numbers():
    result = evaluate(LineGrid(), RandomPolicy(3), 50)
    for word in ("return", "detector left", "H(C|Y) in bits", "identified", "regret"):
        assert word in str(result)
    assert json.loads(json.dumps(result.as_dict()))["returns"]["num_episodes"] == 50


def test_one_episode_has_no_spread():
    assert math.isnan(Mean.of(torch.tensor([3.0])).standard_error)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="num_episodes"):
        evaluate(LineGrid(), RandomPolicy(3), 0)
    with pytest.raises(ValueError, match="prior"):
        evaluate(LineGrid(), RandomPolicy(3), 10, prior=[0.5, 0.6])
