from __future__ import annotations

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from baselines.commitments import plans
from baselines.pft import PFT
from cpomdp_ppl import CPOMDP, simulate
from cpomdp_ppl.inference import ObservableOperator
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.models import Beacons, LightDark, LineGrid
from tests.baselines.test_commitments import return_by_tables
from tests.baselines.upfront import Orchard, Regretful, Workshop, first_decision
from tests.conftest import assert_mean
from tests.solvers import truth

LEFT, RIGHT, SENSE = 0, 1, 2


@pytest.mark.slow
def test_it_is_nearly_optimal():
    model = LineGrid(horizon=6)
    policy = Regretful(PFT(model, 300, 4), model)
    simulate(model, policy, 120, contexts="balanced", seed=0)
    lost = policy.shortfall
    error = float(lost.std()) / len(lost) ** 0.5
    assert float(lost.mean()) - error <= 0.05 * policy.plan.value


@pytest.mark.slow
def test_what_costs_now_and_pays_later_is_tried():
    """To mend one part after the other, and then to run, earns 2 T − 15 for sure; to sell at once, −1."""
    model = Workshop()
    model.horizon = 8
    returns = simulate(
        model, PFT(model, 40, 4, root_particles=4), 18, contexts="balanced", seed=0
    ).returns.double()
    error = float(returns.std()) / len(returns) ** 0.5
    assert float(returns.mean()) > -1 + 3 * error
    assert float(returns.mean()) >= 2 * model.horizon - 15 - 2 * error


@pytest.mark.slow
def test_what_pays_only_after_several_steps_is_begun():
    """To plant k times and then to harvest earns (T − k) (0.7 k − 1) − 2 k, at best 7.5; to leave, −1."""
    model = Orchard()
    policy = PFT(model, 100)
    tree = policy.search(policy.start(model.prior().expand(20, -1)), 0)
    assert int((tree.most_visited() == 0).sum()) >= 15


class Ladder(CPOMDP):
    """No noise, one context: what an action earns depends on where it is taken."""

    contexts = 1
    actions = 2
    horizon = 5

    def initial(self, context):
        return torch.tensor(1)

    def transition(self, state, action, context):
        return (3 * state + 5 * action + 1) % 7

    def observation(self, state, action, context):
        pyro.sample("blink", dist.Delta(torch.tensor(0.0)))

    def reward(self, state, action, context):
        return self.table()[state, action]

    def table(self):
        return torch.tensor(
            [[3.0, 0.0], [2.0, 1.0], [0.0, 4.0], [1.0, 1.5], [5.0, 0.0], [0.0, 0.5], [2.5, 2.0]]
        )


def ladder_return(actions, state=1):
    total, table = 0.0, Ladder().table()
    for a in actions:
        total += float(table[state, a])
        state = (3 * state + 5 * a + 1) % 7
    return total


def greedy_on_the_ladder(state=1):
    actions = []
    for _ in range(5):
        actions.append(int(Ladder().table()[state].argmax()))
        state = (3 * state + 5 * actions[-1] + 1) % 7
    return actions


@pytest.mark.slow
def test_it_finds_the_best_sequence_of_actions_where_nothing_is_uncertain():
    model = Ladder()
    best = max(ladder_return(actions) for actions in itertools.product(range(2), repeat=5))
    assert best > ladder_return(greedy_on_the_ladder())
    episodes = simulate(model, PFT(model, 150, 2, exploration=4.0, leaf_particles=1), 3, seed=0)
    assert episodes.returns.tolist() == [best] * 3


def plain_uct(num_simulations, exploration, leaf):
    """UCT on the ladder as in a textbook: visits and mean returns of every sequence of actions."""
    visits, values = {(): [0, 0]}, {(): [0.0, 0.0]}
    for _ in range(num_simulations):
        path = ()
        while len(path) < 5 and path in visits:
            n = visits[path]
            if 0 in n:
                a = n.index(0)
            else:
                bound = [
                    q + exploration * math.sqrt(math.log(sum(n)) / m)
                    for q, m in zip(values[path], n, strict=True)
                ]
                a = bound.index(max(bound))
            path = (*path, a)
        if len(path) < 5:
            visits[path], values[path] = [0, 0], [0.0, 0.0]
        total = ladder_return(path) + (leaf(len(path)) if len(path) < 5 else 0.0)
        for d, a in enumerate(path):
            to_come = total - ladder_return(path[:d])
            visits[path[:d]][a] += 1
            values[path[:d]][a] += (to_come - values[path[:d]][a]) / visits[path[:d]][a]
    return visits, values


def test_without_uncertainty_it_is_plain_uct():
    model = Ladder()
    policy = PFT(model, 60, 2, exploration=3.0, leaf=lambda states, posterior, time: 2.0 / time)
    tree = policy.search(policy.start(torch.ones(2, 1)), 0)
    visits, values = plain_uct(60, 3.0, lambda time: 2.0 / time)

    def compare(path, node):
        assert tree.visits[node, 0].tolist() == visits[path]
        torch.testing.assert_close(
            tree.values[node, 0], torch.tensor(values[path]).double(), rtol=0, atol=1e-5
        )
        for a in range(2):
            child = int(tree.first[node, 0, a])
            if child and (*path, a) in visits:
                compare((*path, a), child)

    compare((), 0)
    assert torch.equal(tree.visits[:, 0], tree.visits[:, 1])


def fancy(states, posterior, time):
    """A value that anyone can compute again from what the tree keeps."""
    return posterior[:, 0] * (1 + time)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "time"), [(LightDark(), 3), (LineGrid(), 6), (Beacons(), 0)])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_counts_add_up_and_values_are_mean_returns(model, time, temperature):
    S, B, k, alpha = 120, 3, 1.5, 0.4
    policy = PFT(model, S, 16, widening=(k, alpha), leaf=fancy, temperature=temperature)
    tree = policy.search(policy.start(model.prior().expand(B, -1)), time)
    posterior = tree.log_posterior.exp()
    for b in range(B):
        assert int(tree.visits[0, b].sum()) == S
        for node, a in (tree.visits[:, b] > 0).nonzero().tolist():
            n, home = int(tree.visits[node, b, a]), int(tree.first[node, b, a])
            children = [int(x) for x in tree.children[home, b] if x > 0]
            assert len(set(children)) == len(children) <= k * (n - 1) ** alpha + 1
            depth = int(tree.depth[node, b])
            assert all(int(tree.depth[child, b]) == depth + 1 for child in children)
            if time + depth + 1 == model.horizon:  # nothing is counted below
                if temperature == 0:
                    assert float(tree.values[node, b, a]) == pytest.approx(
                        float(tree.reward[home, b]), abs=1e-4
                    )
                continue
            passed = {child: 1 + int(tree.visits[child, b].sum()) for child in children}
            assert n == sum(passed.values())
            total = sum(
                m * tree.reward[child, b]
                + fancy(None, posterior[child, b][None], torch.tensor([time + depth + 1]))[0]
                + (tree.visits[child, b] * tree.values[child, b]).sum()
                for child, m in passed.items()
            )
            assert float(tree.values[node, b, a]) == pytest.approx(float(total / n), rel=1e-6, abs=1e-9)


@pytest.mark.slow
def test_equal_outcomes_share_a_child():
    model = LineGrid()
    policy = PFT(model, 200, 4, leaf="qmdp")
    tree = policy.search(policy.start(model.prior().expand(5, -1)), 0)
    for b in range(5):
        for a, most in ((LEFT, 1), (RIGHT, 1), (SENSE, 2)):
            children = tree.children[tree.first[0, b, a], b]
            assert int((children > 0).sum()) == most
        home = int(tree.first[0, b, SENSE])
        sides = tree.observations["side"][home, b][tree.children[home, b] > 0]
        assert sorted(sides.tolist()) == [0.0, 1.0]
        for child in tree.children[home, b][tree.children[home, b] > 0]:  # Bayes' rule
            assert float(tree.log_posterior[child, b].exp().max()) == pytest.approx(0.85)


def value_of_going_left(model, **settings):
    """The value of the one new node of a single simulation, `[B]`; its action is the first."""
    policy = PFT(model, 1, 16, **settings)
    return policy.search(policy.start(model.prior().expand(400, -1)), 0).values[0, :, LEFT]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(leaf="qmdp"), 20.0),
        (dict(leaf="qmdp", commitments=["sense"]), 0.0),
        (dict(leaf="qmdp", commitments=[lambda t: "sense" if t < 3 else "left"]), -10.0),  # still in time
        (dict(leaf="qmdp", commitments=[lambda t: "sense" if t < 8 else "left"]), 0.0),  # not in time
    ],
)
def test_leaves_are_worth_what_they_should(settings, expected):
    model = LineGrid(horizon=8)
    assert value_of_going_left(model, **settings).tolist() == [expected] * 400


@pytest.mark.parametrize("horizon", [4, 5, 8])
@pytest.mark.parametrize(
    "commitments", [None, ["left"], ["sense", 1], [lambda t: "sense" if t < 2 else "left", "right"]]
)
def test_the_best_commitments_after_them_are_the_first_values_of_actions(commitments, horizon):
    model = LineGrid(horizon=horizon)
    policy = PFT(model, 1, 16, commitments=commitments)
    tree = policy.search(policy.start(model.prior().expand(3, -1)), 0)
    after = [[a, *plan[1:]] for a in range(3) for plan in plans(model, commitments).tolist()]
    worth = np.array([return_by_tables(model, plan, model.start, 0).mean() for plan in after])
    first = worth.reshape(3, -1).max(1)
    for b in range(3):
        taken = int(first.argmax())  # by the only simulation: the first of the best
        assert tree.visits[0, b].tolist() == [1.0 + (a == taken) for a in range(3)]
        others = [a for a in range(3) if a != taken]
        assert tree.values[0, b, others].tolist() == pytest.approx(first[others].tolist(), abs=1e-5)


def test_a_first_value_counts_as_one_visit():
    """Blindly, either target earns -10; after a look, the likelier one 0.85 · 20 - 0.15 · 40 = 11."""
    model = LineGrid(horizon=8)
    policy = PFT(model, 3, 16, commitments=["left", "right"])
    tree = policy.search(policy.start(model.prior().expand(3, -1)), 0)
    for b in range(3):
        assert tree.visits[0, b].tolist() == [2.0, 2.0, 2.0]
        assert tree.values[0, b].tolist() == pytest.approx([-10.0, -10.0, (-10.0 + 11.0) / 2], abs=1e-5)


def test_rollouts_are_random():
    model, later = LineGrid(horizon=8), LineGrid(horizon=7, start=2)
    expected = truth.random_value(truth.tables(later), 7)
    assert_mean(value_of_going_left(model, leaf="rollout"), expected, "random play")


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "action"), [(0.0, None), (1000.0, SENSE)])
def test_for_information_it_senses_first(temperature, action):
    """There is only just the time to walk to an end, so that to sense is to earn nothing."""
    model = LineGrid(horizon=4, penalty=0.0)
    policy = PFT(model, 300, 4, temperature=temperature)
    episodes = simulate(model, policy, 20, contexts="balanced", seed=0)
    if action is None:
        assert not bool((episodes.actions[:, 0] == SENSE).any())
    else:
        assert bool((episodes.actions[:, 0] == SENSE).all())


def decide(policy, num_episodes=8):
    model = policy.model
    return simulate(model, policy, num_episodes, contexts="balanced", seed=5).actions


@pytest.mark.slow
def test_chunks_are_searched_like_batches():
    prior = torch.rand(10, 2).clamp(min=0.1)
    prior = prior / prior.sum(1, keepdim=True)
    policy = PFT(LightDark(), 40, 8, chunk=4)
    actions, memory = first_decision(policy, prior)
    alone = [
        policy.search(
            type(memory)(
                map_belief(lambda leaf, i=i: leaf[:, i : i + 4], memory.belief),
                memory.prior[i : i + 4],
                memory.log_likelihood[i : i + 4],
            ),
            0,
            chunk=number,
        ).most_visited()
        for number, i in enumerate(range(0, 10, 4))
    ]
    assert torch.equal(actions, torch.cat(alone))
    model = Ladder()  # no luck in it: chunks change nothing
    whole, parts = (decide(PFT(model, 50, 2, chunk=chunk), 5) for chunk in (None, 2))
    assert torch.equal(whole, parts)


@pytest.mark.slow
def test_its_memory_is_the_exact_posterior():
    model = LineGrid(horizon=6)
    remembered = []

    class Watched(PFT):
        def act(self, history, memory):
            actions, memory = super().act(history, memory)
            remembered.append(memory.log_posterior.exp())
            return actions, memory

    episodes = simulate(model, Watched(model, 20, 4, root_particles=4), 20, contexts="balanced", seed=0)
    posterior = ObservableOperator().run(model, episodes).posterior()[:, :-1]
    torch.testing.assert_close(torch.stack(remembered, 1), posterior)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_simulations", 0),
        ("leaf_particles", -1),
        ("root_particles", True),
        ("exploration", -1.0),
        ("exploration", math.nan),
        ("widening", 3.0),
        ("widening", (0.0, 0.5)),
        ("widening", (1.0, 1.5)),
        ("leaf", "random"),
    ],
)
def test_bad_arguments_are_named(argument, value):
    settings = {"model": LineGrid(), argument: value}
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        PFT(**settings)


def test_a_leaf_of_the_wrong_shape_is_named():
    model = LineGrid()
    policy = PFT(model, 5, 4, leaf=lambda states, posterior, time: posterior)
    with pytest.raises(ValueError, match=r"^leaf: expected values of shape"):
        policy.search(policy.start(model.prior().expand(3, -1)), 0)
