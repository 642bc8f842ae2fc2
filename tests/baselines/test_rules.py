"""Rules for far goals earn far more than anything that does not find out the context."""

from __future__ import annotations

import pytest

from baselines.rules import HarbourRule, OfficeRule
from baselines.simple import Always
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.evaluation import evaluate
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.models import Harbour, Office

RULES = [(Harbour, HarbourRule, ParticleFilter(1024)), (Office, OfficeRule, ObservableOperator())]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "rule", "likelihood"), RULES)
def test_a_rule_beats_whatever_finds_out_nothing(make, rule, likelihood):
    model = make()
    found = evaluate(model, rule(model), 400, likelihood=likelihood, seed=0).returns
    known = evaluate(model, rule(model), 400, likelihood=likelihood, reveal_context=True, seed=0).returns
    assert found.mean > 15.0
    assert known.mean > found.mean + 10 * (known.standard_error + found.standard_error)
    for policy in (RandomPolicy(model.num_actions), *(Always(model, a) for a in range(model.num_actions))):
        returns = simulate(model, policy, 400, seed=1).returns
        error = float(returns.std()) / 400**0.5 + found.standard_error
        assert found.mean > float(returns.mean()) + 10 * error


def test_who_is_told_the_room_walks_there_without_a_stop():
    model = Office()
    known = evaluate(model, OfficeRule(model), 400, likelihood="exact", reveal_context=True, seed=0).returns
    best = float(informed_return(model).mean())
    assert abs(known.mean - best) < 4 * known.standard_error


def test_the_office_rule_asks_at_the_desk_first():
    model = Office(slip=0.0)
    actions = simulate(model, OfficeRule(model), 20, seed=0).actions
    assert actions[:, :4].unique(dim=0).tolist() == [[0, 0, 0, 4]]
