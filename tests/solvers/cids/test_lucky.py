"""The search for lucky episodes, on models of which all that can be found is known."""

from __future__ import annotations

import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid, Office
from examples.problems.regulator import Regulator
from solvers.cids.lucky import search


def planned(plans):
    """A policy that follows plans `[B, T]`."""
    return lambda history: plans[:, history.time]


@pytest.fixture(scope="module")
def grid():
    return search(LineGrid())


def test_what_is_worth_knowing_on_the_line_grid(grid):
    """To stay is worth 0, and to know the way 20; whoever walks ends at a target, or at a detector."""
    assert grid.constant == pytest.approx(0.0)
    assert grid.worth == pytest.approx(20.0)
    assert grid.unit in (20.0, 40.0)
    plans = simulate(LineGrid(), planned(grid.plans), 2, contexts=[0, 1], seed=0)
    assert plans.returns.tolist() == [20.0, 20.0]


def test_leads_go_almost_everywhere_and_make_no_detours(grid):
    """Moves are not random here. Neighbouring cells may count as one place."""
    actions, steps = grid.leads
    K = len(steps)
    assert actions.shape == (K, 10)
    states = simulate(LineGrid(), planned(actions), K, contexts=0, seed=0).states
    ends = states[torch.arange(K), steps]
    assert len(ends.unique()) >= 6
    assert torch.equal(steps[ends < 7], (ends - 3).abs()[ends < 7])
    assert bool((steps[ends == 7] == 4).all())  # done, a step after a target


@pytest.mark.slow
def test_lucky_episodes_pay_more_than_doing_one_thing_all_the_time():
    """In every context of the office, whose rooms are eight steps away and more."""
    model = Office()
    found = search(model)
    assert found.constant <= 0.0
    assert found.episodes.contexts.unique().tolist() == list(range(model.num_contexts))
    assert bool((found.episodes.returns > found.constant).all())
    expected = torch.zeros(len(found.episodes), dtype=torch.double)
    for t in range(model.horizon):
        state, action = found.episodes.states[:, t], found.episodes.actions[:, t]
        expected += model.reward(state, action, found.episodes.contexts)
    torch.testing.assert_close(found.episodes.returns.double(), expected, check_dtype=False)


def test_where_nothing_is_better_nothing_is_lucky():
    class Flat(LineGrid):
        def reward(self, state, action, context):
            return torch.ones(())

    found = search(Flat(horizon=4))
    assert found.episodes is None
    assert (found.constant, found.worth, found.unit) == (4.0, 0.0, 1.0)


def test_the_seed_alone_decides():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (search(ContextualTiger(horizon=3), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.episodes.states, same.episodes.states)
    assert torch.equal(one.plans, same.plans)
    assert torch.equal(one.leads[0], same.leads[0])
    assert one.worth == same.worth
    assert not torch.equal(one.episodes.states, other.episodes.states)


@pytest.mark.slow
def test_many_contexts_are_searched_as_few_are():
    """There are more contexts than a round's episodes would leave a full set of lucky ones for."""

    class Shores(LightDark):
        contexts = 40

    assert search(Shores(horizon=4)).plans.shape == (40, 4)


def test_averages_are_over_the_prior():
    """Who is nearly sure of the context earns as much by doing the same thing as who is told."""
    sure, open_ = (
        search(LightDark(), torch.tensor(p, dtype=torch.float64)) for p in ([1.0, 0.0], [0.5, 0.5])
    )
    assert sure.constant == sure.constant_told > 15.0
    assert open_.constant < 0.5 < 15.0 < open_.constant_told


@pytest.mark.slow
def test_goals_are_far_where_neither_chance_nor_one_action_gets_near_them():
    """A regulator earns on the way: to do nothing is far better than chance, and not far from the best."""
    far = {kind.__name__: search(kind()).is_far for kind in (LightDark, LineGrid, Office, Regulator)}
    assert far == {"LightDark": False, "LineGrid": False, "Office": True, "Regulator": False}
