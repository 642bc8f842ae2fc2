from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from baselines import rdpg
from baselines.learned import LearningInterrupted
from baselines.rdpg import Exploring, Learner, Recurrent, RecurrentPolicy, Replay, Settings
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.encoding import Encoding
from cpomdp_ppl.models import ContextualTiger, LineGrid
from cpomdp_ppl.policy import History, Percept
from cpomdp_ppl.rng import isolated
from tests.programs import Dice, EyesOpen, Skewed, Still

CPU = torch.device("cpu")
SHORT = Settings(
    hidden=8,
    random_episodes=20,
    round_size=10,
    updates=2,
    batch_size=8,
    evaluate_every=20,
    evaluation_episodes=50,
)


def fitted(model=None, num_episodes=60, **settings):
    return rdpg.fit(model or LineGrid(), num_episodes, **{"settings": SHORT, "progress": False, **settings})


def same_weights(one, two):
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class ByHistory(nn.Module):
    """A network that looks its numbers up in a table, by the actions taken so far."""

    def __init__(self, table, num_actions):
        super().__init__()
        self.table, self.num_actions = table, num_actions

    def forward(self, features):  # [B, T, F]: none yet, or which action was the last
        last = features[:, :, : self.num_actions + 1].argmax(-1) - 1
        rows = [[self.table[tuple(path[1 : t + 1])] for t in range(len(path))] for path in last.tolist()]
        return torch.tensor(rows)


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_the_values_of_a_tree_are_a_fixed_point_of_the_targets(discount):
    """Brute force: rewards depend on all actions so far, and values come from the whole tree."""
    A, T = 2, 3
    generator = torch.Generator().manual_seed(0)
    paths = [path for t in range(1, T + 1) for path in itertools.product(range(A), repeat=t)]
    reward = dict(zip(paths, torch.randn(len(paths), generator=generator).tolist(), strict=True))

    def q(history):  # of all actions, acting for the best thereafter
        after = [(*history, a) for a in range(A)]
        return [reward[path] + discount * (max(q(path)) if len(path) < T else 0.0) for path in after]

    values = {history: q(history) for history in [(), *paths] if len(history) < T}
    complete = torch.tensor([path for path in paths if len(path) == T])  # [8, 3], every way to act
    before = torch.cat([torch.full((len(complete), 1), -1), complete[:, :-1]], 1)
    features = nn.functional.one_hot(before + 1, A + 1).float()
    rewards = torch.tensor([[reward[tuple(path[: t + 1])] for t in range(T)] for path in complete.tolist()])

    learner = Learner(A + 1, A, Settings(), CPU, discount)
    learner.target_critic = learner.target_actor = ByHistory(values, A)  # μ' is greedy by Q'
    expected = [[values[tuple(path[:t])][path[t]] for t in range(T)] for path in complete.tolist()]
    targets = learner.targets(features, rewards, torch.ones(rewards.shape).bool())
    assert torch.allclose(targets, torch.tensor(expected), atol=1e-6)


def test_targets_are_of_the_target_actors_action_and_not_of_the_best():
    learner = Learner(3, 2, Settings(), CPU, 0.5)
    learner.target_critic = ByHistory({(): [9.0, 9.0], (0,): [4.0, 7.0], (0, 0): [2.0, 5.0]}, 2)
    always_0 = {history: [1.0, 0.0] for history in [(), (0,), (0, 0)]}
    learner.target_actor = ByHistory(always_0, 2)
    features = nn.functional.one_hot(torch.tensor([[0, 1, 1]]), 3).float()
    rewards, alive = torch.tensor([[10.0, 20.0, 30.0]]), torch.ones(1, 3).bool()
    assert learner.targets(features, rewards, alive).tolist() == [[10 + 0.5 * 4, 20 + 0.5 * 2, 30]]


def test_nothing_is_expected_after_the_end():
    """Whatever the networks make of steps that do not belong to an episode, nobody learns it."""
    learner = Learner(3, 2, Settings(), CPU, 0.5)
    learner.target_critic = ByHistory({(): [9.0, 9.0], (0,): [4.0, 7.0], (0, 0): [torch.nan, 5.0]}, 2)
    learner.target_actor = ByHistory({history: [1.0, 0.0] for history in [(), (0,), (0, 0)]}, 2)
    features = nn.functional.one_hot(torch.tensor([[0, 1, 1]]), 3).float()
    alive = torch.tensor([[True, True, False]])
    targets = learner.targets(features, torch.tensor([[10.0, 20.0, 0.0]]), alive)
    assert targets[0, :2].tolist() == [10 + 0.5 * 4, 20]


@pytest.mark.parametrize("box", [None, Box([-1.0, 0.0], [1.0, 4.0])])
def test_gradient_steps_are_those_of_shorter_episodes(box):
    """Steps after the end count for nothing: as if the episodes had been cut to their lengths."""

    def after_a_step(*batches):
        torch.manual_seed(0)
        learner = Learner(2, 3 if box is None else 2, Settings(hidden=4), CPU, 0.9, box)
        torch.manual_seed(1)
        learner.update(*batches)
        return torch.cat([w.flatten() for net in (learner.actor, learner.critic) for w in net.parameters()])

    torch.manual_seed(2)
    actions = torch.randint(3, (6, 4)) if box is None else 4 * torch.rand(6, 4, 2) - torch.tensor([1.0, 0.0])
    features, rewards = torch.randn(6, 4, 2), torch.randn(6, 4)
    alive = (torch.arange(4) < 3).expand(6, 4)
    whole = after_a_step(features, actions, rewards, alive)
    assert torch.equal(whole, after_a_step(features, actions, rewards.where(alive, 100.0), alive))
    assert not torch.allclose(whole, after_a_step(features, actions, rewards, torch.ones(6, 4).bool()))
    cut = after_a_step(*(x[:, :3] for x in (features, actions, rewards, alive)))
    if box is not None:  # nothing is drawn: noise would come in another order
        assert torch.allclose(whole, cut, atol=1e-6)


@pytest.mark.slow
def test_the_continuous_actor_climbs_to_the_top():
    """One step that earns less the farther the action is from a point: there is the optimum."""
    torch.manual_seed(0)
    box, best, width = Box([-2.0, 0.0], [2.0, 10.0]), torch.tensor([1.0, 2.5]), torch.tensor([4.0, 10.0])
    learner = Learner(1, 2, Settings(actor_rate=0.003, critic_rate=0.003), CPU, box=box)
    features, alive = torch.ones(64, 1, 1), torch.ones(64, 1).bool()
    for _ in range(400):
        actions = box.uniform(torch.zeros(())).sample((64, 1))
        learner.update(features, actions, -3 * ((actions - best) / width).square().sum(-1), alive)
    found = box.from_units(learner.actor(features)[0, 0].tanh())
    assert ((found - best).abs() < 0.05 * width).all()


def test_straight_through_is_one_hot_forwards_and_soft_backwards():
    logits = torch.tensor([[0.3, -1.0, 2.0]]).repeat(20_000, 1).requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.5])
    torch.manual_seed(0)
    noise = -torch.empty_like(logits).exponential_().log()
    torch.manual_seed(0)
    drawn = rdpg.straight_through(logits, 0.7)
    (drawn * weights).sum().backward()
    chosen = (logits + noise).argmax(-1)
    assert torch.allclose(drawn, nn.functional.one_hot(chosen, 3).float(), atol=1e-6)

    y = ((logits + noise) / 0.7).softmax(-1).detach()
    slope = (y * weights - y * (y * weights).sum(-1, keepdim=True)) / 0.7  # Jacobian of the softmax, by hand
    assert torch.allclose(logits.grad, slope, atol=1e-5)
    p = logits[0].softmax(-1).detach()
    assert ((drawn.mean(0) - p).abs() < 4.5 * (p * (1 - p) / 20_000).sqrt()).all()


@pytest.mark.slow
def test_the_actor_climbs_and_the_critic_leaves_it_alone():
    """One history, one step: the actor must come to prefer the action whose reward is the largest."""
    torch.manual_seed(0)
    learner = Learner(1, 3, Settings(hidden=8, actor_rate=0.01, critic_rate=0.01), CPU)
    features, payoff = torch.ones(48, 1, 1), torch.tensor([0.0, 1.0, 0.5])
    for _ in range(300):
        actions = torch.randint(3, (48, 1))
        learner.update(features, actions, payoff[actions], torch.ones(48, 1).bool())
    assert torch.allclose(learner.critic(features)[0, 0], payoff, atol=0.05)
    assert learner.actor(features)[0, 0].softmax(-1)[1] > 0.9
    assert torch.allclose(learner.target_critic(features)[0, 0], payoff, atol=0.1)


def test_targets_follow_slowly():
    torch.manual_seed(0)
    learner = Learner(2, 3, Settings(hidden=4, target_rate=0.25), CPU)
    before = [w.clone() for w in learner.target_actor.parameters()]
    alive = torch.ones(5, 4).bool()
    learner.update(torch.randn(5, 4, 2), torch.randint(3, (5, 4)), torch.randn(5, 4), alive)
    for old, new, online in zip(
        before, learner.target_actor.parameters(), learner.actor.parameters(), strict=True
    ):
        assert torch.allclose(new, 0.75 * old + 0.25 * online, atol=1e-7)
        assert not torch.equal(old, online)


def test_the_ring_overwrites_the_oldest():
    replay = Replay(5, 2, 3, CPU)
    number = iter(range(100))

    def add(n):
        ids = torch.tensor([float(next(number)) for _ in range(n)])
        rows = ids[:, None].expand(n, 2)
        replay.add(ids[:, None, None].expand(n, 2, 3), rows.long(), -rows, rows % 2 == 0)

    held = []
    for n in (2, 2, 3, 12, 1):
        add(n)
        held.append(sorted(replay.features[: len(replay), 0, 0].tolist()))
    assert held == [[0, 1], [0, 1, 2, 3], [2, 3, 4, 5, 6], [14, 15, 16, 17, 18], [15, 16, 17, 18, 19]]
    torch.manual_seed(0)
    features, actions, rewards, alive = replay.sample(200)
    assert set(features[:, 0, 0].tolist()) == {15, 16, 17, 18, 19}
    assert torch.equal(features[:, :, 0].long(), actions)  # of one and the same episode
    assert torch.equal(features[:, :, 0], -rewards)
    assert torch.equal(features[:, :, 0] % 2 == 0, alive)


def test_what_has_not_been_filled_is_not_drawn():
    replay = Replay(50, 1, 1, CPU)
    replay.add(torch.ones(3, 1, 1), torch.ones(3, 1).long(), torch.ones(3, 1), torch.ones(3, 1).bool())
    assert replay.sample(100)[0].min() == 1


@pytest.mark.parametrize("program", [LineGrid, ContextualTiger, Dice, EyesOpen])
def test_step_by_step_is_as_unrolled(program):
    model = program()
    torch.manual_seed(1)
    encoding = Encoding(model)
    policy = RecurrentPolicy(encoding, Recurrent(encoding.size, 16, model.num_actions))
    episodes = simulate(model, RandomPolicy(model.num_actions), 40, seed=0)
    unrolled = policy.actor(encoding.sequence(episodes))  # [B, T, A]
    first = episodes.initial_observations, episodes.initially_observed
    if first[0] is None:
        first = tuple(
            {site: torch.zeros_like(x[:, 0]) for site, x in xs.items()}
            for xs in (episodes.observations, episodes.observed)
        )
    history = History((Percept(None, *first),))
    memory = policy.start(torch.ones(40, model.num_contexts))
    for t in range(model.horizon):
        logits, after = policy.logits(history, memory)
        action, memory = policy.act(history, memory)
        assert torch.equal(action, logits.argmax(-1))
        assert torch.equal(memory[0], after[0])
        assert torch.allclose(logits, unrolled[:, t], atol=1e-5)
        seen = [
            {site: x[:, t] for site, x in xs.items()} for xs in (episodes.observations, episodes.observed)
        ]
        history = history.extended(Percept(episodes.actions[:, t], *seen))


def test_exploring_mixes_softmax_and_chance():
    model = LineGrid()
    encoding = Encoding(model)
    torch.manual_seed(0)
    policy = RecurrentPolicy(encoding, Recurrent(encoding.size, 8, 3))
    policy.actor.head[-1].bias.data = torch.tensor([3.0, -2.0, 0.0])
    histories = []
    simulate(model, lambda history: histories.append(history) or torch.zeros(4, dtype=torch.long), 4, seed=0)
    memory = policy.start(torch.ones(4, 2))
    logits, _ = policy.logits(histories[0], memory)
    decision, _ = Exploring(policy, 0.3).act(histories[0], memory)
    assert torch.allclose(decision.probs, 0.7 * logits.softmax(-1) + 0.1, atol=1e-6)


@pytest.mark.slow
def test_the_seed_decides_also_where_the_caller_takes_no_gradients():
    one, other = (fitted(seed=seed) for seed in (3, 4))
    with torch.no_grad():
        again = fitted(seed=3)
    assert same_weights(one.policy, again.policy)
    assert one.history.equals(again.history)
    assert not same_weights(one.policy, other.policy)


def test_history_and_the_best_policy():
    learned = fitted(num_episodes=75)
    assert learned.finished
    assert learned.seconds > 0
    assert learned.history.episodes.values.tolist() == [20, 40, 60, 75]
    assert not any(weight.requires_grad for weight in learned.policy.parameters())


class Payoff(Still):
    """Earns a known amount for each action, and sees nothing."""

    contexts, actions, horizon = 1, 3, 2
    worth = (0.0, 1000.0, 500.0)

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask(action < 0))

    def reward(self, state, action, context):
        return torch.tensor(self.worth)[action]


def test_the_policy_is_the_best_of_those_evaluated(monkeypatch):
    """By a learner that goes through all actions, the best of them in the middle."""
    favourites = iter([2] * 2 + [1] * 4 + [0] * 4)  # gradient steps before the three evaluations

    def update(self, *batch):
        last = self.actor.head[-1]
        nn.init.zeros_(last.weight)
        last.bias.data = nn.functional.one_hot(torch.tensor(next(favourites)), 3).float()

    monkeypatch.setattr(Learner, "update", update)
    learned = fitted(Payoff())
    assert learned.history.greedy_return.values.tolist() == [1000, 2000, 0]
    assert simulate(Payoff(), learned.policy, 2, seed=5).returns.tolist() == [2000, 2000]


def test_rare_contexts_count_in_the_choice_of_the_best():
    """Before, 16 episodes left out the context of probability 0.03, and the best had a return of 1."""
    learned = fitted(Skewed(), settings=replace(SHORT, evaluation_episodes=16))
    assert learned.history.greedy_return.values == pytest.approx(0.97 - 3.0, abs=1e-5)


def test_where_nothing_is_earned_the_unit_of_reward_is_one():
    class Nothing(Payoff):
        worth = (0.0, 0.0, 0.0)

    assert fitted(Nothing()).history.greedy_return.values.tolist() == [0, 0, 0]


def test_interrupted_it_raises_with_what_it_has(monkeypatch):
    whole = fitted(num_episodes=40)  # the same up to there, but for how chance falls
    rounds = iter(range(100))
    iterate = rdpg.Fitting.iterate

    def interrupted(self):
        if next(rounds) == 2:
            raise KeyboardInterrupt
        return iterate(self)

    monkeypatch.setattr(rdpg.Fitting, "iterate", interrupted)
    with pytest.raises(LearningInterrupted) as stop:
        fitted(num_episodes=40)
    assert re.fullmatch(r"stopped after [\d,]+ episodes", str(stop.value))
    part = stop.value.learned
    assert not part.finished
    assert part.history.episodes.values.tolist() == [20, 30]  # evaluated once more, where it was stopped
    assert part.history.greedy_return[0] == whole.history.greedy_return[0]
    assert simulate(LineGrid(), part.policy, 3, seed=0).returns.shape == (3,)


def test_interrupted_before_it_began(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(rdpg.Fitting, "iterate", interrupted)
    with pytest.raises(LearningInterrupted) as stop:
        fitted()
    assert stop.value.learned.history.sizes["episodes"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", 0),
        ("capacity", 1.5),
        ("updates", True),
        ("discount", 1.1),
        ("discount", "none"),
        ("target_rate", -0.1),
        ("temperature", 0.0),
        ("actor_rate", float("nan")),
        ("critic_rate", float("inf")),
        ("exploration", True),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value}"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_episodes": 0}, "num_episodes: expected a positive integer, got 0"),
        ({"settings": {"hidden": 3}}, "settings: expected .*hidden"),
        ({"seed": -1}, "seed: expected .*-1"),
        ({"model": LineGrid}, "model: expected an instance"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        rdpg.fit(**{"model": LineGrid(), "num_episodes": 10, "progress": False, **arguments})


def test_any_model_can_be_learned(model):
    learned = fitted(model, 30)
    assert simulate(model, learned.policy, 5, seed=0).actions.shape == (5, model.horizon)


@pytest.mark.slow
def test_it_learns_to_sense_before_it_goes():
    """Going one way is worth -10 and staying 0, so that anything beyond needs what was sensed."""
    model = LineGrid(horizon=8)
    learned = rdpg.fit(model, 1500, settings=Settings(hidden=32), seed=0, progress=False)
    n = 2000
    greedy = simulate(model, learned.policy, n, contexts="balanced", seed=1).returns.double()
    chance = simulate(model, RandomPolicy(3), n, contexts="balanced", seed=1).returns.double()
    error = ((greedy.var() + chance.var()) / n) ** 0.5
    assert greedy.mean() - chance.mean() > 5 * error
    assert greedy.mean() > 5 * error  # better than to stay


def test_chance_falls_in_a_straight_line_to_half_of_the_episodes(monkeypatch):
    fitting = rdpg.Fitting(LineGrid(), Settings(exploration=0.5, last_exploration=0.1), 1000)
    chances = []
    monkeypatch.setattr(fitting, "_play", lambda policy, n: chances.append(policy.chance))
    for played in (0, 250, 500, 900):
        fitting.played = played
        fitting._explore()
    assert chances == pytest.approx([0.5, 0.3, 0.1, 0.1])


def test_rewards_are_kept_in_units_of_the_first_returns():
    settings = Settings(random_episodes=200, updates=1, batch_size=4, evaluation_episodes=10)
    with isolated(0):
        fitting = rdpg.Fitting(LineGrid(), settings, 200)
        fitting.iterate()
    returns = fitting.replay.rewards[:200].sum(1)
    assert float(returns.std(correction=0)) == pytest.approx(1.0, abs=1e-4)
    assert float(fitting.returns[0].std(correction=0)) == pytest.approx(fitting.unit, rel=1e-4)
