from __future__ import annotations

import json
import math

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.context import stratified
from cpomdp_ppl.evaluation import Mean, evaluate, most_exact
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from tests.conftest import fixed_actions
from tests.solvers.exact import known_context_value, solve, tables


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


def test_numbers_by_hand():
    model = ContextualTiger(horizon=4)
    result = evaluate(model, RandomPolicy(3), 900, seed=3)
    contexts = stratified(model.prior(), 900)
    episodes = simulate(model, RandomPolicy(3), 900, contexts=contexts, prior=model.prior().double(), seed=3)
    returns = episodes.returns.double()
    assert result.returns.mean == pytest.approx(float(returns.mean()))
    assert result.returns.deviation == pytest.approx(float(returns.std()))
    parts = [returns[contexts == c] for c in range(3)]
    for (name, mean), part in zip(result.returns_by_context.items(), parts, strict=True):
        assert name in model.context_names
        assert mean.mean == pytest.approx(float(part.mean()))
        assert mean.num_episodes == 300
    error = math.sqrt(sum(float(part.var()) / 300 for part in parts)) / 3
    assert result.returns.standard_error == pytest.approx(error)
    assert result.regret is None


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
