from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from baselines.commitments import plans, play, returns_after, returns_of
from cpomdp_ppl import CPOMDP
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from tests.conftest import assert_mean
from tests.solvers import truth

LEFT, RIGHT, STAY = range(3)


def test_plans_say_what_to_do_when():
    model = LineGrid(horizon=4)
    assert plans(model, None).tolist() == [[a] * 4 for a in range(3)]
    given = ["right", 2, lambda t: "sense" if t < 2 else LEFT]
    assert plans(model, given).tolist() == [[1] * 4, [2] * 4, [2, 2, 0, 0]]


@pytest.mark.parametrize("commitments", [[], "left", 3, [3], [-1], ["up"], [[0, 1]], [lambda t: t]])
def test_plans_that_are_none(commitments):
    with pytest.raises(ValueError, match=r"^commitments: expected"):
        plans(LineGrid(), commitments)


def return_by_tables(model, plan, start, time):
    """Of a plan from a state at a time, in every context, by pushing distributions through the tables."""
    tables, total = truth.tables(model), 0.0
    p = np.zeros(tables.initial.shape)
    p[:, start] = 1
    for t in range(time, model.horizon):
        total = total + (p * tables.reward[:, plan[t]]).sum(1)
        p = np.einsum("cs,cst->ct", p, tables.transition[:, plan[t]])
    return total + np.zeros(len(p))


@pytest.mark.parametrize("compute", [returns_of, returns_after])
def test_returns_are_those_of_the_tables(compute):
    """From every state at every time at once, of plans alone or each after every action.

    At the horizon, where no action is left to take, plans earn nothing.
    """
    model, T = LineGrid(horizon=5), 6 if compute is returns_of else 5
    G = plans(model, ["left", "right", lambda t: (RIGHT, STAY, LEFT)[t % 3]])
    state, time = (grid.flatten() for grid in torch.meshgrid(torch.arange(8), torch.arange(T), indexing="ij"))
    with inference_scope(model, 0):
        programs = ParticleFilter(2).recursion(model)
        returns = compute(G, programs, state[None, :, None].expand(2, -1, 2), time)
    for r, (s, t) in enumerate(zip(state.tolist(), time.tolist(), strict=True)):
        for g, plan in enumerate(G.tolist()):
            if compute is returns_of:
                np.testing.assert_array_equal(returns[:, r, g], return_by_tables(model, plan, s, t))
            else:
                for a in range(3):
                    taken = [*plan[:t], a, *plan[t + 1 :]]
                    np.testing.assert_array_equal(returns[:, r, a, g], return_by_tables(model, taken, s, t))
    assert returns.abs().max() > 0


@pytest.mark.slow
def test_returns_are_means_where_there_is_luck():
    model = ContextualTiger(horizon=4)
    plan = [0, 1, 2, 0]
    with inference_scope(model, 0):
        programs = ParticleFilter(50).recursion(model)
        states = torch.ones(3, 400, 50, dtype=torch.long)
        returns = returns_of(torch.tensor([plan]), programs, states, torch.zeros(400, dtype=torch.long))
    expected = return_by_tables(model, plan, 1, 0)
    for c in range(3):
        assert_mean(returns[c, :, 0], expected[c], f"return in context {c}")


def test_returns_on_light_dark_have_a_closed_form():
    """After n moves one way the position is `N(n, σ_u² + n σ_p²)`; depth beyond 1 pays, below 0 costs."""
    model = LightDark(horizon=8)
    expected = {}
    for direction, move in ((LEFT, -1), (RIGHT, 1)):
        for context, side in ((0, 1), (1, -1)):
            depths = [NormalDist(side * move * t, (0.09 + 0.1 * t) ** 0.5) for t in range(8)]
            expected[context, direction] = sum(1 - depth.cdf(1) - depth.cdf(0) for depth in depths)
    with inference_scope(model, 0):
        programs = ParticleFilter(64).recursion(model)
        states = 0.3 * torch.randn(2, 300, 64)
        returns = returns_of(plans(model, ["left", "right"]), programs, states, torch.zeros(300).long())
    for (context, direction), value in expected.items():
        assert_mean(returns[context, :, direction], value, f"direction {direction} in context {context}")


def test_play_asks_for_actions_until_the_last_step_is_over():
    model, asked = LineGrid(horizon=6), []

    def left(times):
        asked.append(times.tolist())
        return torch.zeros_like(times)

    with inference_scope(model, 0):
        programs = ParticleFilter(1).recursion(model)
        total = play(programs, torch.full((2, 2, 1), 2), torch.tensor([2, 4]), left)
    assert asked == [[2, 4], [3, 5], [4, 5], [5, 5]]
    assert total.tolist() == [[20.0, 0.0], [-40.0, 0.0]]  # there in time, and too late


def test_what_is_over_stays_as_it_was_however_the_rest_goes_on():
    """A state that grows without bound: an episode that has ended must not come to harm."""

    class Growing(CPOMDP):
        contexts, actions, horizon = 1, 1, 60

        def initial(self, context):
            return torch.tensor(10.0)

        def transition(self, state, action, context):
            return state * 10

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, 1.0))

        def reward(self, state, action, context):
            return torch.where(state < 1e30, 1.0, -state)

    model = Growing()
    with inference_scope(model, 0):
        recursion = ParticleFilter(1).recursion(model)
        returns = play(recursion, torch.full((1, 2, 1), 10.0), torch.tensor([30, 58]), torch.zeros_like)
    assert returns[0, 1] == 2
