from __future__ import annotations

from itertools import product

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.interpolate import CubicSpline
from scipy.stats import norm

from cpomdp_ppl import CPOMDP, RandomPolicy, bounds, evaluate
from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from solvers import exact
from tests.programs import Plates, Walk
from tests.solvers.machines import Machine


def best_by_enumeration(model, c):
    """The best of all rules from time and state to action, each worth what all paths of states bring it."""
    T, N = model.horizon, model.states
    P0, P, R = (model.tables[name][c] for name in ("initial", "transition", "reward"))
    values = []
    for actions in product(range(model.num_actions), repeat=T * N):
        rule = np.reshape(actions, (T, N))
        value = 0.0
        for path in product(range(N), repeat=T):
            probability, total = P0[path[0]], 0.0
            for t, s in enumerate(path):
                total += R[rule[t, s], s]
                if t + 1 < T:
                    probability *= P[rule[t, s], s, path[t + 1]]
            value += probability * total
        values.append(value)
    return max(values)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_of_all_rules_and_paths(seed):
    model = Machine(seed)
    truth = [best_by_enumeration(model, c) for c in range(2)]
    found = informed_return(model)
    assert found.dtype == torch.float64
    assert found.numpy() == pytest.approx(truth)
    prior = [0.3, 0.7]
    found = evaluate(model, RandomPolicy(2), 4, prior=prior)
    assert found.informed_return == pytest.approx(prior @ np.array(truth))


@pytest.mark.parametrize(
    "model", [LineGrid(), ContextualTiger(4), Machine(3)], ids=lambda m: type(m).__name__
)
def test_who_knows_the_context_alone_earns_no_more(model):
    known = [exact.plan(model, prior=point).value for point in np.eye(model.num_contexts)]
    assert (informed_return(model).numpy() >= np.array(known) - 1e-9).all()


class Hill(CPOMDP):
    """A walk on a line to the top of a hill, whose place is the context."""

    contexts, actions, horizon = 2, 3, 5

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 0.3))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(0.9 * state + 0.7 * (action - 1), 0.4))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0))

    def reward(self, state, action, context):
        return (-((state - 1 - context) ** 2)).exp() - 0.1 * (action - 1).abs() - 0.5


def hill(c):
    """Its value by splines and quadrature."""
    x, nodes = np.linspace(-12, 12, 1601), np.linspace(-8.5, 8.5, 101)
    weights = norm.pdf(nodes) / norm.pdf(nodes).sum()
    V = np.zeros_like(x)
    for _ in range(Hill.horizon):
        later, Q = CubicSpline(x, V), []
        for a in range(3):
            moved = (0.9 * x + 0.7 * (a - 1))[:, None] + 0.4 * nodes
            reward = np.exp(-((x - 1 - c) ** 2)) - 0.1 * abs(a - 1) - 0.5
            Q.append(reward + later(moved.clip(-12, 12)) @ weights)
        V = np.max(Q, axis=0)
    return CubicSpline(x, V)(0.3 * nodes) @ weights


def test_a_grid_agrees_with_quadrature():
    truth = np.array([hill(0), hill(1)])
    found = informed_return(Hill()).numpy()
    assert found == pytest.approx(truth, abs=4e-3)
    assert (found > truth).all()  # on the safe side
    result = evaluate(Hill(), RandomPolicy(3), 10, likelihood="ekf")
    assert result.informed_return == pytest.approx(truth.mean(), abs=4e-3)
    assert result.regret_at_most.mean == pytest.approx(result.informed_return - result.returns.mean)


class Cliff(Hill):
    """One may fall off on the left; to arrive on top pays, and what comes later is worth less."""

    discount = 0.8

    def ends(self, state, action, context):
        return torch.sigmoid(-3.0 * (state + 0.5))

    def reward(self, state, action, context, next_state):
        return (-((next_state - 1 - context) ** 2)).exp() - 0.1 * (state - next_state).abs()


def cliff(c):
    """Its value by splines and quadrature."""
    x, nodes = np.linspace(-12, 12, 1601), np.linspace(-8.5, 8.5, 401)
    weights = norm.pdf(nodes) / norm.pdf(nodes).sum()
    V = np.zeros_like(x)
    for _ in range(Cliff.horizon):
        later, Q = CubicSpline(x, V), []
        for a in range(3):
            moved = (0.9 * x + 0.7 * (a - 1))[:, None] + 0.4 * nodes
            reward = np.exp(-((moved - 1 - c) ** 2)) - 0.1 * np.abs(moved - x[:, None])
            goes_on = 1 / (1 + np.exp(-3 * (moved + 0.5)))
            Q.append((reward + 0.8 * goes_on * later(moved.clip(-12, 12))) @ weights)
        V = np.max(Q, axis=0)
    return CubicSpline(x, V)(0.3 * nodes) @ weights


@pytest.mark.slow
def test_a_grid_agrees_with_quadrature_where_episodes_end():
    truth = np.array([cliff(0), cliff(1)])
    found = informed_return(Cliff()).numpy()
    assert found == pytest.approx(truth, abs=6e-3)
    assert (found > truth).all()
    endless = type("Endless", (Cliff,), {"ends": CPOMDP.ends})()
    assert (informed_return(endless).numpy() > truth + 0.01).all()


@pytest.mark.slow
def test_closed_forms_on_grids():
    assert informed_return(Walk()).numpy() == pytest.approx([0, 0 + 1 + 2], abs=1e-6)  # a step up each time
    assert informed_return(Plates()).numpy() == pytest.approx([6, 6], abs=1e-3)  # two legs: a plane
    assert informed_return(Plates(), max_dim=1) is None
    # To see the state is of no use to who knows where the light is.
    assert informed_return(LightDark()).numpy() == pytest.approx(LightDark().context_known_return(), abs=1e-3)


class Needle(Walk):
    """A reward between the points of any grid."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 1e-4 + 0.0 * action))

    def reward(self, state, action, context):
        return (-(((state - 0.123456) / 1e-3) ** 2)).exp()


class Forbidden(Machine):
    """A reward that is not a number where nobody gets to."""

    def __init__(self, seed):
        super().__init__(seed)
        self.states = 3

    def reward(self, state, action, context):
        return torch.where(state == 2, torch.nan, super().reward(state.clamp(max=1), action, context))

    def transition(self, state, action, context):
        return super().transition(state.clamp(max=1), action, context)


class Runaway(Walk):
    """By turns, its actions lead further than either alone, or both at random."""

    horizon = 24

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 0.01))

    def transition(self, state, action, context):
        doubled = torch.where(state < 0, 1 - 2 * state, 1.0)
        return pyro.sample("x", dist.Normal(torch.where(action == 0, -state, doubled), 0.01))


@pytest.mark.slow
def test_none_rather_than_a_wrong_one(monkeypatch):
    assert informed_return(Beacons()) is None  # three numbers
    assert informed_return(Needle()) is None
    assert informed_return(Runaway()) is None
    assert informed_return(Forbidden(0)) is None
    monkeypatch.setattr(bounds, "TABLE_MEMORY", 100)
    assert informed_return(ContextualTiger()) is None
    with pytest.raises(ValueError, match="max_dim: expected 1 or 2, got 3"):
        informed_return(ContextualTiger(), max_dim=3)
