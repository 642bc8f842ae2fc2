"""Which contexts make a difference, against hand-written truth and closed forms; models without others."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam
from torch.distributions import Normal

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.state import leaves
from solvers import cids, exact
from solvers.regret.invariance import Gaps, Restricted, merge_invariant_contexts, policy_gaps
from tests.programs import Dice, EyesOpen, Learnable, Plates, Walk
from tests.solvers import truth
from tests.solvers.regret.guess import always


class Repeated:
    """In front of a model with two contexts: a third, which is the first again."""

    contexts = ("this", "that", "this again")
    context_prior = (0.5, 0.3, 0.2)

    def initial(self, context):
        return super().initial(context % 2)

    def transition(self, state, action, context):
        return super().transition(state, action, context % 2)

    def observation(self, state, action, context):
        return super().observation(state, action, context % 2)

    def reward(self, state, action, context):
        return super().reward(state, action, context % 2)


class GridThrice(Repeated, LineGrid):
    def context_known_return(self):
        return super().context_known_return()[[0, 1, 0]]


class LightThrice(Repeated, LightDark):
    pass


# ---- gaps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [ContextualTiger(horizon=5), LineGrid(5, start=1, penalty=15.0)])
def test_gaps_against_tables_written_by_hand(model):
    t, C = truth.tables(model), model.num_contexts
    values = np.array([[truth.value(t, model.horizon, j, i) for j in np.eye(C)] for i in np.eye(C)])
    found = policy_gaps(model)
    np.testing.assert_allclose(found.values, values, atol=1e-9)
    np.testing.assert_allclose(found.gaps, values.diagonal()[:, None] - values, atol=1e-9)
    assert (found.gaps >= -1e-9).all()


def test_played_gaps_against_a_closed_form():
    model = LightDark()
    found = policy_gaps(model, [always(1), always(0)], num_episodes=1000)
    t = torch.arange(model.horizon, dtype=torch.float64)
    sd = (model.initial_variance + model.process_variance * t).sqrt()
    wrong = Normal(-model.step * t, sd)  # depth in the light, of walking into the dark
    lost = (1 - wrong.cdf(torch.tensor(model.goal)) - wrong.cdf(torch.tensor(0.0))).sum()
    expected = float(model.context_known_return()[0] - lost)
    assert found.source == "policy"
    for i, j in ((0, 1), (1, 0)):
        assert abs(found.gaps[i, j] - expected) < 4.5 * found.standard_errors[i, j]
    assert (found.gaps.diagonal() == 0).all()
    assert (found.standard_errors.diagonal() == 0).all()


def test_played_gaps_against_exact_ones():
    model = ContextualTiger(horizon=4)
    exactly = policy_gaps(model)
    plans = [exact.plan(model, prior=point) for point in torch.eye(3)]
    played = policy_gaps(model, plans, num_episodes=2000, batch_size=1500)
    assert (played.gaps - exactly.gaps).abs().le(4.5 * played.standard_errors + 1e-6).all()


def test_policies_meet_the_same_world():
    # By context all play alike, so that nothing but noise could tell them apart.
    same = policy_gaps(LightDark(), RandomPolicy(3), num_episodes=100)
    assert (same.gaps == 0).all()
    assert (same.standard_errors == 0).all()


def test_a_policy_is_told_its_context_by_a_point_prior():
    class Told:
        def start(self, prior):
            assert ((prior == 0) | (prior == 1)).all()
            return 1 - prior.argmax(-1)

        def act(self, history, memory):
            return memory, memory

    one = policy_gaps(LightDark(), Told(), num_episodes=50)
    two = policy_gaps(LightDark(), [always(1), always(0)], num_episodes=50)
    assert torch.equal(one.gaps, two.gaps)


def test_refusals():
    with pytest.raises(ValueError, match=r"policy: expected one that .*, as LightDark is not finite"):
        policy_gaps(LightDark())
    with pytest.raises(ValueError, match="policy: expected a policy for each of 2 contexts"):
        policy_gaps(LightDark(), [always(0)])
    with pytest.raises(ValueError, match="epsilon: expected a number, not negative"):
        merge_invariant_contexts(LineGrid(), -1.0)
    with pytest.raises(ValueError, match="gaps: expected of contexts"):
        merge_invariant_contexts(ContextualTiger(), 1.0, gaps=policy_gaps(LineGrid()))
    left = "detector left"
    for wrong in ([0, 0], [], [2], [-1], [0.0], [0.5], [True], 1, left, None, [left, left]):
        with pytest.raises(ValueError, match="kept: expected"):
            Restricted(LineGrid(), wrong, [0.5, 0.5])
    with pytest.raises(ValueError, match=r"kept: expected names out of .*'detector left'.*, got .*'left'"):
        Restricted(LineGrid(), ["left"], [1.0])
    with pytest.raises(ValueError, match="gaps: expected Gaps, from policy_gaps, got 3"):
        merge_invariant_contexts(LineGrid(), 1.0, gaps=3)
    known = policy_gaps(LineGrid())
    for useless in (dict(policy=always(0)), dict(seed=1), dict(num_episodes=50)):
        with pytest.raises(ValueError, match=f"gaps: expected either gaps, .*, got {next(iter(useless))}"):
            merge_invariant_contexts(LineGrid(), 1.0, gaps=known, **useless)


# ---- which may go ------------------------------------------------------------------------------------------


def made_up(gaps, errors=None) -> Gaps:
    g = torch.tensor(gaps, dtype=torch.float64)
    e = torch.zeros_like(g) if errors is None else torch.full_like(g, errors)
    return Gaps(ContextualTiger().context_names, g, g, e, "exact" if errors is None else "policy")


def test_both_gaps_must_be_small():
    one_way = made_up([[0, 0.1, 9], [2, 0, 9], [9, 9, 0]])
    assert merge_invariant_contexts(ContextualTiger(), 1.0, gaps=one_way).dropped == {}
    both = merge_invariant_contexts(ContextualTiger(), 2.0, gaps=one_way)
    assert both.dropped == {"left dull": "both sharp"}
    assert both.kept == (0, 2)


def test_invariance_is_not_transitive_and_the_order_decides():
    chain = made_up([[0, 1, 3], [1, 0, 1], [3, 1, 0]])  # 0 ~ 1 ~ 2, but not 0 ~ 2
    found = merge_invariant_contexts(ContextualTiger(), 1.0, gaps=chain)
    assert found.invariant.tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    assert found.kept == (0, 2)
    assert found.dropped == {"left dull": "both sharp"}
    everything = merge_invariant_contexts(ContextualTiger(), 3.0, gaps=chain)
    assert everything.kept == (0,)
    assert everything.dropped == {"left dull": "both sharp", "right dull": "both sharp"}
    np.testing.assert_allclose(everything.prior, [1.0])


def test_an_unsure_pair_is_kept_apart():
    gaps = [[0, 0.9, 9], [0.9, 0, 9], [9, 9, 0]]
    for error, dropped in ((0.04, 1), (0.06, 0)):
        found = merge_invariant_contexts(ContextualTiger(), 1.0, gaps=made_up(gaps, error))
        assert len(found.dropped) == dropped


@pytest.mark.parametrize("model", [LineGrid(), ContextualTiger(horizon=4)])
def test_contexts_that_matter_are_kept(model):
    found = merge_invariant_contexts(model, 0.01)
    assert found.dropped == {}
    assert found.kept == tuple(range(model.num_contexts))
    assert "kept" in str(found)


def test_a_context_that_is_there_twice_goes():
    model = GridThrice()
    found = merge_invariant_contexts(model, 0.0)
    assert found.kept == (0, 1)
    assert found.dropped == {"this again": "this"}
    np.testing.assert_allclose(found.prior, [0.7, 0.3])
    assert str(found).splitlines() == [
        "2 of 3 contexts kept (ε = 0, gaps: exact)",
        "  this: prior 0.7, stands for this again",
        "  that: prior 0.3",
        "  this again dropped: gaps to this 0 and 0",
    ]
    reduced = found.model
    reduced.check()
    np.testing.assert_allclose(reduced.prior(), [0.7, 0.3])
    np.testing.assert_allclose(reduced.context_known_return(), [20, 20])
    # What is best is worth as much with two contexts as with three.
    assert exact.plan(reduced).value == pytest.approx(exact.plan(model).value, abs=1e-6)
    assert exact.plan(reduced).value == pytest.approx(
        truth.solve(truth.tables(LineGrid()), 10, [0.7, 0.3]).value, abs=1e-6
    )


def test_a_context_that_is_there_twice_goes_by_playing():
    found = merge_invariant_contexts(
        LightThrice(), 1.0, policy=[always(1), always(0), always(1)], num_episodes=300
    )
    assert found.dropped == {"this again": "this"}
    assert "± 0" in str(found)


# ---- models without the others -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ekf", "ukf", "grid", "smc", "exact"])
def test_every_backend_serves_a_restricted_model(backend):
    whole = LineGrid() if backend == "exact" else LightDark(horizon=6)
    thrice = GridThrice() if backend == "exact" else LightThrice(horizon=6)
    reduced = Restricted(thrice, [1, 2], [0.6, 0.4])
    episodes = simulate(whole, RandomPolicy(3), 20, seed=0)
    found = as_backend(backend).run(reduced, episodes, seed=0)
    known = as_backend(backend).run(whole, episodes, seed=0)  # contexts 1 and 0, in this order
    np.testing.assert_allclose(found.log_likelihood, known.log_likelihood[:, [1, 0]], atol=1e-6)
    np.testing.assert_allclose(found.expected_reward, known.expected_reward[..., [1, 0]], atol=1e-5)
    assert (known.log_likelihood[:, 0] - known.log_likelihood[:, 1]).abs().max() > 0.1  # the order counts


def test_contexts_may_be_named():
    named = Restricted(ContextualTiger(), ["right dull", "left dull"], [0.5, 0.5])
    assert named.index.tolist() == [2, 1]
    assert named.context_names == ("right dull", "left dull")
    numbered = Restricted(ContextualTiger(), torch.tensor([2, 1]), [0.5, 0.5])
    assert numbered.context_names == named.context_names


@pytest.mark.parametrize("kind", [Walk, Plates, EyesOpen, Learnable, Dice, ContextualTiger])
def test_programs_of_all_kinds(kind):
    class Paid(kind):  # in some of these programs all contexts are the same
        def reward(self, state, action, context):
            return super().reward(state, action, context) + 10.0 * context

    model = Paid()
    reduced = Restricted(model, [1], [1.0])
    reduced.check()
    assert reduced.action_names == model.action_names
    policy = RandomPolicy(model.num_actions)
    here = simulate(reduced, policy, 50, contexts=0, seed=0)
    there = simulate(model, policy, 50, contexts=1, seed=0)
    assert torch.equal(here.actions, there.actions)
    assert torch.equal(here.rewards, there.rewards)
    for site, values in there.observations.items():
        assert torch.equal(here.observations[site][here.observed[site]], values[there.observed[site]]), site
    for (_, ours), (_, theirs) in zip(leaves(here.states), leaves(there.states), strict=True):
        assert torch.equal(ours, theirs)


def test_what_was_learned_is_taken_along_and_the_original_is_left_alone():
    class Body(PyroModule):
        def __init__(self):
            super().__init__()
            self.weight = PyroParam(torch.tensor(1.0))

    class Moving(Learnable):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def transition(self, state, action, context):
            return pyro.sample("x", dist.Normal(state + self.drift * self.body.weight * action, 1e-3))

    model = Moving()
    simulate(model, always(1), 2, seed=0)  # it has run
    with pyro.get_param_store().scope():
        pyro.param("drift", torch.tensor(7.0), constraint=torch.distributions.constraints.positive)
        reduced = Restricted(model, [1], [1.0])
    moved = simulate(reduced, always(1), 10, seed=0).states.diff(dim=1)
    assert moved.mean() == pytest.approx(7.0, abs=0.01)
    assert model._pyro_name == ""
    assert "drift" not in pyro.get_param_store()
    assert not list(pyro.get_param_store().keys())


def test_a_restricted_model_can_be_learned_and_saved(tmp_path):
    reduced = merge_invariant_contexts(GridThrice(), 0.0).model
    solution = cids.fit(reduced, likelihood="exact", iterations=2, batch_size=20, seed=0, progress=False)
    solution.save(tmp_path / "solution")
    again = cids.load(tmp_path / "solution", merge_invariant_contexts(GridThrice(), 0.0).model)
    assert again.evaluate(20).returns == solution.evaluate(20).returns
    other = merge_invariant_contexts(GridThrice(accuracy=0.8), 0.0).model
    with pytest.raises(ValueError, match="was made with constants"):
        cids.load(tmp_path / "solution", other)
