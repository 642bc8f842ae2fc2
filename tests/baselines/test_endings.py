"""Planners where episodes end, rewards come on arrival and are discounted, and actions are continuous."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from baselines.commands import best_repeated
from baselines.commitments import plans, returns_after, returns_of
from baselines.pft import PFT
from baselines.qmdp import QMDP
from baselines.simple import Always, ApproachObserveCommit, MostLikelyContext
from cpomdp_ppl import CPOMDP, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.policy import FunctionPolicy, History, Percept
from solvers.exact import plan
from tests.baselines.mine import DIG, LEAVE, TAP, Mine, action_values, values_of
from tests.conftest import assert_mean

COMMITMENTS = ["dig", "leave", lambda t: "dig" if t < 3 else "leave"]
PLANS = [[DIG] * 5, [LEAVE] * 5, [DIG, DIG, DIG, LEAVE, LEAVE]]


class Falling:
    """A policy, and by how much its actions fall short of the best, by the exact plan, in each episode.

    In expectation that is what its return lacks, and there is less luck in it.
    """

    def __init__(self, policy):
        self.policy, self.best, self.short = policy, plan(policy.model), 0.0

    def start(self, prior):
        return self.policy.start(prior), self.best.start(prior)

    def act(self, history, memory):
        actions, ours = self.policy.act(history, memory[0])
        _, beliefs = self.best.act(history, memory[1])
        alive = beliefs >= 0
        Q = self.best.q_values[history.time][beliefs]  # [B, A]
        lost = Q.amax(1) - Q.gather(1, actions[:, None])[:, 0]
        self.short = self.short + torch.where(alive, lost, 0.0)
        return actions, (ours, beliefs)


def assert_nearly_optimal(policy, num_episodes):
    """It lacks less than a twentieth of the optimum, give or take two standard errors."""
    falling = Falling(policy)
    simulate(policy.model, falling, num_episodes, seed=0)
    error = float(falling.short.std()) / num_episodes**0.5
    assert float(falling.short.mean()) < 0.05 * falling.best.value + 2 * error


@pytest.mark.slow
def test_the_mine_is_worth_thinking_about():
    """The plan agrees with what is best by hand where the context is known, and beats all commitments."""
    best = plan(Mine())
    V = np.zeros((2, 4))
    for _ in range(5):
        V = action_values(V).max(2)
    for c in range(2):
        certain = [float(k == c) for k in range(2)]
        assert plan(Mine(), prior=certain).value == pytest.approx(V[c, 0], abs=1e-6)
    assert best.value > 0.3 + max(values_of(p, 0)[:, 0].mean() for p in PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("compute", [returns_of, returns_after])
def test_commitments_are_worth_what_is_earned_until_the_end(compute):
    """From every depth, at two times, against sums backwards through the tables."""
    model, rows = Mine(), 100
    states = torch.arange(4).repeat_interleave(rows)[None, :, None].expand(2, -1, 32)
    with inference_scope(model, 0):
        programs = ParticleFilter(2).recursion(model)
        for time in (0, 3):
            times = torch.full((4 * rows,), time)
            found = compute(plans(model, COMMITMENTS), programs, states, times).unflatten(1, (4, rows))
            for g, each in enumerate(PLANS):
                later = action_values(values_of(each, time + 1))  # [2, 4, A]
                expected = values_of(each, time) if compute is returns_of else later
                for c, s in np.ndindex(2, 4):
                    earned = found[c, s, ..., g].double().reshape(rows, -1)  # [rows, 1], or [rows, A]
                error = earned.std(0) / rows**0.5 + 1e-5  # the latter in single precision
                assert ((earned.mean(0) - torch.tensor(expected[c, s])).abs() < 4.5 * error).all()


@pytest.mark.slow
def test_qmdp_is_value_iteration_one_step_ahead():
    """`Σ_c P(c) (E[r] + γ E[V_c])`, V by the best commitment in each context, on average over the depths.

    The best of three plans on 2000 drawn depths is better than on all by less than their standard error.
    """
    policy, B = QMDP(Mine(), COMMITMENTS, states=2000), 20
    prior = np.array([0.7, 0.3])
    values = policy.values(policy.start(torch.tensor(prior).float().expand(B, -1)), 0)
    expected = []
    for a in range(3):
        of_context = []
        for c in range(2):
            went = [(1, 0.8), (0, 0.2)] if a == DIG else [(0, 1.0)]
            survives = (0.98, 0.4)[c] if a == DIG else float(a == TAP)
            reward = sum(p * s for s, p in went) if a == DIG else (0.0, -0.1, 4.0)[a]
            V = max(sum(p * values_of(g, 1)[c, s] for s, p in went) for g in PLANS)
            of_context.append(reward + 0.9 * survives * V)
        expected.append(prior @ of_context)
    np.testing.assert_allclose(values.mean(0), expected, atol=0.03)
    np.testing.assert_allclose(values[:, LEAVE], 4.0, atol=1e-5)


@pytest.mark.slow
def test_pft_is_nearly_optimal_in_the_mine():
    model = Mine()
    model.horizon = 3
    assert_nearly_optimal(PFT(model, 150, 16), 25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["POUCT", "POMCP"])
def test_the_planners_of_pomdp_py_know_ends_and_arrival(kind):
    """Of three steps: to leave is worth its price and nothing more, and no action more than it is."""
    pomcp = pytest.importorskip("baselines.pomcp")
    model, B, trees = Mine(), 15, []
    model.horizon = 3
    policy = getattr(pomcp, kind)(model, 400, exploration=3.0)
    plan_by_search = policy._plan

    def watched(agents, time):
        actions = plan_by_search(agents, time)
        if time == 0:
            trees.extend(each.tree.children for each in agents)
        return actions

    policy._plan = watched
    assert_nearly_optimal(policy, B)
    exact = plan(model).q_values[0][0]
    values = torch.tensor([[tree[choice].value for choice in policy.choices.choices] for tree in trees])
    np.testing.assert_allclose(values[:, LEAVE], 4.0, atol=1e-5)
    mean, error = values.mean(0), values.std(0) / B**0.5
    assert (mean < exact + 4.5 * error + 1e-5).all()


@pytest.mark.slow
def test_trees_end_where_episodes_do():
    """Every value is the mean return: discounted, and nothing from nodes at which the episode is over."""

    def fancy(states, posterior, time):
        return posterior[:, 0] * (1 + time)

    S, B, gamma = 150, 3, Mine.discount
    policy = PFT(Mine(), S, 16, leaf=fancy)
    tree = policy.search(policy.start(torch.full((B, 2), 0.5)), 1)
    p, ends = tree.log_posterior.exp(), 0
    for b in range(B):
        for node, a in (tree.visits[:, b] > 0).nonzero().tolist():
            n, home, depth = int(tree.visits[node, b, a]), tree.first[node, b, a], int(tree.depth[node, b])
            assert not bool(tree.over[node, b])
            children = [int(k) for k in tree.children[home, b] if k > 0]
            over = [k for k in children if tree.over[k, b]]
            assert len(over) <= 1 if a == DIG else len(over) == (a == LEAVE)
            ends += len(over)
            if 1 + depth + 1 == Mine.horizon:
                continue
            passed = {k: 1 + int(tree.visits[k, b].sum()) for k in children if k not in over}
            total = (n - sum(passed.values())) * sum(float(tree.reward[k, b]) for k in over)
            for k, m in passed.items():
                to_come = fancy(None, p[k, b][None], torch.tensor([1 + depth + 1]))[0]
                to_come = to_come + (tree.visits[k, b] * tree.values[k, b]).sum()
                total = total + m * tree.reward[k, b] + gamma * to_come
            assert float(tree.values[node, b, a]) == pytest.approx(float(total / n), rel=1e-6, abs=1e-9)
    assert ends >= B


def half_of_them_over(B):
    """Times 0, 1 and 2 of episodes of which the odd ones ended with the first step."""
    sites = {"hollow": torch.zeros(B), "ended": torch.zeros(B)}
    blind = {site: torch.zeros(B).bool() for site in sites}
    odd = torch.arange(B) % 2 == 1
    first = Percept(
        torch.where(odd, LEAVE, TAP),
        sites | {"ended": odd.float()},
        {"hollow": ~odd, "ended": torch.ones(B).bool()},
    )
    second = Percept(torch.full((B,), TAP), sites, {"hollow": ~odd, "ended": ~odd})
    return History((Percept(None, sites, blind), first, second))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PFT, QMDP])
def test_what_is_over_is_not_thought_about(kind, monkeypatch):
    """Beliefs of episodes that are over stay as they were, and only the others are planned for."""
    policy = kind(Mine(), chunk=10) if kind is QMDP else PFT(Mine(), 5, chunk=10)
    history, sizes = half_of_them_over(6), []
    name = "values" if kind is QMDP else "search"
    original = getattr(kind, name)

    def watched(self, memory, *rest):
        sizes.append(len(memory.prior))
        return original(self, memory, *rest)

    monkeypatch.setattr(kind, name, watched)
    memory, likelihoods = policy.start(torch.full((6, 2), 0.5)), []
    for t in range(3):
        actions, memory = policy.act(History(history.percepts[: t + 1]), memory)
        assert actions.shape == (6,)
        likelihoods.append(memory.log_likelihood)
    assert sizes == [6, 3, 3]
    assert torch.equal(likelihoods[1][1::2], likelihoods[2][1::2])
    np.testing.assert_allclose(likelihoods[2][::2].exp(), [[0.9**2, 0.1**2]] * 3, rtol=1e-5)


class Aim(CPOMDP):
    """Twice an action that should be near the target of the context, of which one hears after the first."""

    contexts, actions, horizon, discount = 3, Box(-2.0, 2.0), 2, 0.5
    targets, noise = (-1.5, 0.0, 1.0), 0.8

    def initial(self, context):
        return torch.zeros(())

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(torch.tensor(self.targets)[context], self.noise))

    def reward(self, state, action, context, next_state):
        return -((action[..., 0] - torch.tensor(self.targets)[context]) ** 2)


@pytest.mark.slow
def test_continuous_actions_aim_at_the_posterior_mean():
    """The optimum is the mean of the targets; of 12 actions in the box, some are within 0.3 of any point.

    Of a sequence by the golden ratio, 12 in an interval leave no gap above 0.146 of it.
    """
    model = Aim()
    episodes = simulate(model, PFT(model, 200, 4, root_particles=4), 40, seed=0)
    heard, targets = episodes.observations["z"][:, :1].double().numpy(), np.array(model.targets)
    weights = np.exp(-0.5 * ((heard - targets) / model.noise) ** 2)
    posterior_mean = (weights * targets).sum(1) / weights.sum(1)
    for t, best in enumerate((targets.mean(), posterior_mean)):
        off = episodes.actions[:, t, 0].numpy() - best
        assert np.abs(off).max() < 4 * 0.146
        assert np.abs(off).mean() < 4 * 0.146 / 2
        assert_mean(torch.tensor(off), 0.0, f"what actions are off at time {t}")


@pytest.mark.slow
def test_rules_take_continuous_actions_by_context():
    """By hand: the likeliest context is the one whose target is nearest to what was heard."""
    model = Aim()
    spread = FunctionPolicy(lambda h: model.box.uniform(torch.zeros(())).expand((h.num_episodes,)))
    each = [Always(model, -2.0), spread, Always(model, [1.5])]
    episodes = simulate(model, MostLikelyContext(model, each, ParticleFilter(2)), 60, seed=0)
    heard = episodes.observations["z"][:, 0]
    likeliest = (heard[:, None] - torch.tensor(model.targets)).abs().argmin(1)
    actions = episodes.actions[:, 1, 0]
    assert (actions[likeliest == 0] == -2.0).all()
    assert (actions[likeliest == 2] == 1.5).all()
    assert len(actions[likeliest == 1].unique()) == int((likeliest == 1).sum()) > 3

    rule = ApproachObserveCommit(model, 2.0, 1, -1.0, [0.1, 0.2, 0.3], 0.6, ParticleFilter(2))
    episodes = simulate(model, rule, 60, seed=0)
    heard = episodes.observations["z"][:, 0]
    weights = (-0.5 * ((heard[:, None] - torch.tensor(model.targets)) / model.noise) ** 2).softmax(1)
    sure, context = weights.max(1)
    expected = torch.where(sure > 0.6, torch.tensor([0.1, 0.2, 0.3])[context], -1.0)
    assert (episodes.actions[:, 0] == 2.0).all()
    assert torch.allclose(episodes.actions[:, 1, 0], expected)
    assert 0 < int((expected == -1).sum()) < 60


@pytest.mark.slow
def test_the_best_to_repeat_ends_or_is_a_probe():
    assert [int(each.action) for each in best_repeated(Mine(), 0)] == [DIG, LEAVE]
    assert [float(each.action) for each in best_repeated(Aim(), 0)] == [-2.0, 0.0, 0.0]  # of -2, 0 and 2


@pytest.mark.parametrize("action", [2.5, [1.0, 1.0], "left", [[0.5]]])
def test_what_is_no_continuous_action_is_named(action):
    with pytest.raises(ValueError, match=r"^action: expected"):
        Always(Aim(), action)


@pytest.mark.parametrize("kind", ["QMDP", "POUCT", "POMCP"])
def test_who_needs_finitely_many_actions_says_so(kind):
    module = pytest.importorskip("baselines.qmdp" if kind == "QMDP" else "baselines.pomcp")
    with pytest.raises(UnsupportedModelError, match=f"^{kind}: Aim has continuous actions"):
        getattr(module, kind)(Aim())


class Paired(Mine):
    """The same, with a plate inside."""

    max_plate_nesting = 1

    def initial(self, context):
        return torch.zeros(1, dtype=torch.long)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PFT, QMDP])
def test_ends_of_models_with_plates(kind):
    settings = (50,) if kind is PFT else ()
    models = Paired(), Mine()
    with_plates, without = (simulate(model, kind(model, *settings), 20, seed=0) for model in models)
    assert torch.equal(with_plates.lengths, without.lengths)
    assert torch.equal(with_plates.returns, without.returns)
