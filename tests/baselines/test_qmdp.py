from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from baselines.commitments import plans
from baselines.qmdp import QMDP
from cpomdp_ppl import simulate
from cpomdp_ppl.evaluation import evaluate
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.policy import Percept
from tests.baselines.upfront import first_decision
from tests.conftest import assert_mean
from tests.solvers import truth

LEFT, RIGHT, LOOK = range(3)


class Beliefs:
    """The exact joint P(c, s | h) of finite models, followed along a history by Bayes' rule."""

    def __init__(self, model):
        self.model, self.tables = model, truth.tables(model)
        self.joint = self.tables.prior[:, None] * self.tables.initial  # [C, S]

    def after(self, action, outcome):
        later = Beliefs(self.model)
        predicted = np.einsum("cs,cst->ct", self.joint, self.tables.transition[:, action])
        seen = predicted * self.tables.observation[:, action, :, outcome]
        later.joint = seen / seen.sum()
        return later

    def qmdp(self, time, commitments=None):
        """QMDP's Q of every action, `[A]`, by pushing distributions through the tables."""
        T, tables = self.model.horizon, self.tables
        Q = np.zeros(tables.reward.shape[1])
        for a in range(len(Q)):
            Q[a] = (self.joint * tables.reward[:, a]).sum()
            returns = []
            for plan in plans(self.model, commitments).tolist():
                p, total = np.einsum("cs,cst->ct", self.joint, tables.transition[:, a]), 0.0
                for t in range(time + 1, T):
                    total = total + (p * tables.reward[:, plan[t]]).sum(1)  # [C], times P(c | h)
                    p = np.einsum("cs,cst->ct", p, tables.transition[:, plan[t]])
                returns.append(total + np.zeros(len(p)))
            Q[a] += np.max(returns, 0).sum()
        return Q

    def information(self, action):
        """I(C; O | h, a) in nats, from the joint distribution of both."""
        predicted = np.einsum("cs,cst->ct", self.joint, self.tables.transition[:, action])
        joint = np.einsum("ct,cto->co", predicted, self.tables.observation[:, action])  # P(c, o)
        product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
        positive = joint > 0
        return float((joint[positive] * np.log(joint[positive] / product[positive])).sum())


def percept(model, action, num_episodes, **seen):
    """The same step in every episode."""
    sites = truth.tables(model).sites if model.states else ("z",)
    values = {site: torch.full((num_episodes,), float(seen.get(site, 0.0))) for site in sites}
    flags = {site: torch.full((num_episodes,), site in seen) for site in sites}
    return Percept(torch.full((num_episodes,), action), values, flags)


def started(policy, num_episodes, prior=None):
    prior = policy.model.prior() if prior is None else torch.tensor(prior)
    return policy.start(prior.expand(num_episodes, -1))


def test_values_are_those_of_the_tables():
    """At every time of random play on the line grid, where a particle filter is exact."""
    model, B = LineGrid(horizon=6), 12
    commitments = ["left", "right", lambda t: (RIGHT, LEFT)[t % 2]]
    policy = QMDP(model, commitments, num_particles=3, states=2)
    episodes = simulate(model, lambda h: torch.randint(3, (B,)), B, seed=0)
    memory, beliefs = started(policy, B), [Beliefs(model)] * B
    for t in range(6):
        expected = np.stack([belief.qmdp(t, commitments) for belief in beliefs])
        np.testing.assert_allclose(policy.values(memory, t), expected, rtol=0, atol=1e-4)
        step = Percept(
            episodes.actions[:, t],
            {"side": episodes.observations["side"][:, t]},
            {"side": episodes.observed["side"][:, t]},
        )
        memory = memory.after(model, step, t + 1, seed=t)
        outcome = truth.outcomes(step, ("side",))
        beliefs = [
            belief.after(int(a), o)
            for belief, a, o in zip(beliefs, episodes.actions[:, t], outcome, strict=True)
        ]


def test_values_are_means_where_there_is_luck():
    """After two growls from the left; the state is now uncertain, and differently so in each context."""
    model, B = ContextualTiger(horizon=5), 60
    commitments = ["listen", lambda t: "open right" if t == 3 else "listen"]
    policy = QMDP(model, commitments, num_particles=2000, states=1000)
    memory, belief = started(policy, B), Beliefs(model)
    for t in range(2):
        memory = memory.after(model, percept(model, 0, B, left_ear=0, right_ear=0), t + 1, seed=t)
        belief = belief.after(0, 1)
    values, expected = policy.values(memory, 2), belief.qmdp(2, commitments)
    for a in range(3):
        assert_mean(values[:, a], expected[a], f"Q of action {a}")


def test_values_on_light_dark_have_a_closed_form():
    """Positions are Gaussian however one moves, so that each step's expected reward is."""
    model, B = LightDark(), 400

    def best_return(side, action):
        """Of an action and then the best commitment, in the context of the light on a side."""
        best = -math.inf
        for commitment in range(3):
            mean, variance, total = 0.0, 0.09, 0.0
            for t in range(20):
                depth = NormalDist(side * mean, variance**0.5)
                total += 1 - depth.cdf(1) - depth.cdf(0)
                move = (-1, 1, 0)[action if t == 0 else commitment]
                mean, variance = mean + move, variance + 0.1 * abs(move)
            best = max(best, total)
        return best

    policy = QMDP(model)
    values = policy.values(started(policy, B, [0.7, 0.3]), 0)
    for a in range(3):
        expected = 0.7 * best_return(1, a) + 0.3 * best_return(-1, a)
        # All particles of an episode's filter count for the first reward, and 64 of them for the rest.
        assert_mean(values[:, a], expected, f"Q of action {a}")


@pytest.mark.parametrize("prior", [[0.5, 0.5], [0.8, 0.2]])
def test_a_look_at_the_line_grid_tells_what_the_tables_say(prior):
    model, B = LineGrid(), 300
    policy = QMDP(model, num_particles=4, states=2, outcomes=16)
    information = policy.information(started(policy, B, prior), 0)
    belief = Beliefs(model)
    belief.joint = np.array(prior)[:, None] * belief.tables.initial
    expected = belief.information(LOOK)
    assert expected > 0.1
    if prior == [0.5, 0.5]:  # whatever is seen tells as much
        np.testing.assert_allclose(information[:, LOOK], expected, rtol=1e-5)
    else:
        assert_mean(information[:, LOOK], expected, "information")
    assert bool((information[:, :LOOK] == 0).all())


@pytest.mark.slow
def test_a_growl_tells_what_the_tables_say():
    """After one that the ears disagreed on, which tells that one of them is dull. Within 5 %."""
    model, B = ContextualTiger(), 100
    policy = QMDP(model, num_particles=2000, states=1000, outcomes=32)
    memory = started(policy, B).after(model, percept(model, 0, B, left_ear=0, right_ear=1), 1, seed=0)
    belief = Beliefs(model).after(0, 2)
    information = policy.information(memory, 1)
    expected = belief.information(0)
    assert float(information[:, 0].mean()) == pytest.approx(expected, abs=0.05 * expected)
    assert_mean(information[:, 0], expected, "information")
    assert bool((information[:, 1:] == 0).all())


def information_on_light_dark(mean, variance):
    """I(C; Z) of looking from a position `N(mean, variance)`, contexts equally likely, by quadrature."""
    x, z = np.linspace(mean - 4, mean + 4, 2001), np.linspace(-25, 25, 2001)
    p = np.exp(-((x - mean) ** 2) / (2 * variance))
    p /= p.sum()
    densities = []
    for side in (1, -1):
        R = np.where(side * x > 0, 1.0, 8.0)[:, None]
        densities.append(p @ (np.exp(-((z - x[:, None]) ** 2) / (2 * R)) / np.sqrt(2 * np.pi * R)))
    mixture = sum(densities) / 2
    terms = [d * np.log(d / mixture, where=d > 0, out=np.zeros_like(d)) for d in densities]
    return float(sum(terms).sum() / 2 * (z[1] - z[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("moves", "tolerance"), [(0, 0.0006), (1, 0.005)])
def test_a_look_in_light_dark_tells_what_quadrature_says(moves, tolerance):
    """From the origin next to nothing, and after a step to the side a lot; to within 10 % and 4 %.

    For a single seed, the standard error of the second is itself some 0.004.
    """
    model, B = LightDark(), 200
    found = []
    for seed in range(6):
        policy = QMDP(model, states=512, outcomes=32, seed=seed)
        memory = started(policy, B)
        for t in range(moves):
            memory = memory.after(model, percept(model, RIGHT, B), t + 1, seed=t)
        found.append(policy.information(memory, moves))
    information = torch.cat(found)
    expected = information_on_light_dark(1.0 * moves, 0.09 + 0.1 * moves)
    assert expected > 8 * tolerance
    assert float(information[:, LOOK].mean()) == pytest.approx(expected, abs=tolerance)
    assert bool((information[:, [LEFT, RIGHT]] == 0).all())


def test_information_is_what_the_temperature_pays_for():
    """The decision is the best by values and information, which are tested on their own."""
    model = LightDark()
    prior = torch.linspace(0.05, 0.95, 40)[:, None]
    prior = torch.cat([prior, 1 - prior], 1)
    for temperature in (0.0, 3.0, 50.0):
        policy = QMDP(model, temperature=temperature)
        actions, memory = first_decision(policy, prior)
        Q = policy.values(memory, 0) + temperature * policy.information(memory, 0)
        assert torch.equal(actions, Q.argmax(1))


class Waiting(LightDark):
    """Light–Dark in which one can also wait blindly, and to look costs something."""

    actions = ("left", "right", "observe", "wait")

    def reward(self, state, action, context):
        return super().reward(state, action, context) - 0.5 * (action == LOOK)


@pytest.mark.slow
def test_without_a_temperature_it_never_looks_on_purpose():
    model = Waiting(horizon=10)
    blind, paid = (
        simulate(model, QMDP(model, temperature=temperature), 100, contexts="balanced", seed=0)
        for temperature in (0.0, 30.0)
    )
    assert not bool((blind.actions == LOOK).any())
    assert bool((blind.actions == 3).any())  # it waits for a revelation
    assert bool((paid.actions == LOOK).any(1).all())


def test_values_do_not_depend_on_what_can_be_seen():
    sharp, blurred = LightDark(light_variance=0.01), LightDark(light_variance=8.0)
    policies = [QMDP(model) for model in (sharp, blurred)]
    once, again = (policy.values(started(policy, 20), 0) for policy in policies)
    assert torch.equal(once, again)


def test_in_light_dark_it_looks_because_there_is_no_other_way_to_wait():
    """To go and to be wrong costs two steps back, to stay one: by the closed form, 16.18 to 16.46."""
    model = LightDark()
    actions, _ = first_decision(QMDP(model), torch.full((100, 2), 0.5))
    assert bool((actions == LOOK).all())


@pytest.mark.slow
def test_on_the_line_grid_information_is_worth_its_price():
    """Without it, QMDP walks to and fro until it is too late for either end; the optimum is exact."""
    model = LineGrid()
    blind = evaluate(model, QMDP(model), 50)
    paid = evaluate(model, QMDP(model, temperature=10.0), 300)
    assert (blind.returns.mean, blind.entropy.mean) == (0.0, 1.0)
    assert paid.returns.mean > 10
    best = truth.solve(truth.tables(model), model.horizon).value
    assert paid.returns.mean < best + 4 * paid.returns.standard_error


def test_of_equal_actions_the_first_is_taken():
    model = LineGrid()
    policy = QMDP(model, num_particles=2, states=1)
    assert policy.values(started(policy, 1), 0).tolist() == [[20.0, 20.0, 20.0]]
    episodes = simulate(model, policy, 5, seed=0)
    assert bool((episodes.actions[:, 0] == LEFT).all())


def decide(policy, num_episodes=8):
    return simulate(policy.model, policy, num_episodes, contexts="balanced", seed=5).actions


def test_chunks_change_nothing_where_there_is_no_luck():
    model = LineGrid()
    whole, parts = (decide(QMDP(model, chunk=chunk), 5) for chunk in (None, 2))
    assert torch.equal(whole, parts)


def test_chunks_are_unlike_each_other_where_there_is():
    policy = QMDP(LightDark(), chunk=2)
    values = policy.values(started(policy, 4), 0)
    assert values.shape == (4, 3)
    assert not torch.equal(values[:2], values[2:])


def test_a_certain_context_has_nothing_to_tell():
    policy = QMDP(LightDark(), temperature=100.0)
    memory = started(policy, 50, [1.0, 0.0])
    assert bool((policy.information(memory, 0) == 0).all())
    actions, _ = first_decision(policy, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert actions.tolist() == [RIGHT, LEFT]


@pytest.mark.parametrize(("argument", "value"), [("outcomes", 1.5), ("states", True)])
def test_bad_arguments_are_named(argument, value):
    with pytest.raises(ValueError, match=f"^{argument}: expected .*, got "):
        QMDP(LineGrid(), **{argument: value})


@pytest.mark.parametrize("time", [-1, 10])
def test_a_time_that_is_none_is_named(time):
    policy = QMDP(LineGrid())
    with pytest.raises(ValueError, match=r"^time: expected 0 to 9, got"):
        policy.values(started(policy, 1), time)
