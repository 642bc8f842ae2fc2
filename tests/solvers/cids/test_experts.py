"""Practice, told context and state: what is seen, what is recorded, and that it is learned what pays."""

from __future__ import annotations

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import as_backend, inference_scope
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.state import leaves, map_state
from solvers.cids import experts
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.estimator import ActorCritic
from solvers.cids.experts import Practice, Restarts, Sight, practise, rehearse
from solvers.cids.lucky import search
from solvers.cids.pace import Pace
from solvers.cids.policy import Exploring
from tests.inference.test_knowledge import followed
from tests.solvers.cids.test_belief_policy import opinionated
from tests.solvers.machines import Machine


def seen(model, episodes, t):
    """What is seen of episodes at time t by somebody who sees everything."""
    time = torch.full((len(episodes),), t)
    state = map_state(lambda leaf: leaf[:, t], episodes.states)
    return Sight(Generative(model), state, episodes.contexts, time)


def test_to_see_everything_is_to_be_sure():
    """Where nothing is random, who is told the context knows the state: both are read alike."""
    model = LineGrid()
    policy = opinionated(model, "exact")
    episodes = simulate(model, RandomPolicy(3), 8, contexts="balanced", seed=0)
    sure = torch.nn.functional.one_hot(episodes.contexts, 2).double()
    series = followed(as_backend("exact"), model, sure, episodes)
    for t in (0, 3, 7):
        with inference_scope(model, 0):
            ours, theirs = (policy.encoding(known) for known in (seen(model, episodes, t), series[t]))
        torch.testing.assert_close(policy.decide(ours), policy.decide(theirs))
        torch.testing.assert_close(policy.values(ours), policy.values(theirs))
        torch.testing.assert_close(ours.overall, theirs.overall)


@pytest.mark.parametrize("make", [LightDark, Beacons, ContextualTiger])
def test_what_is_seen_is_the_state_itself(make):
    model = make()
    episodes = simulate(model, RandomPolicy(model.num_actions), 6, contexts="balanced", seed=1)
    with inference_scope(model, 0):
        sight = seen(model, episodes, 2)
        mean, variance = sight.moments
        rewards = sight.expected_rewards
        assert torch.equal(sight.log_posterior.exp().argmax(1), episodes.contexts)
    for (_, ours), (_, spread), (_, leaf) in zip(
        leaves(mean), leaves(variance), leaves(episodes.states), strict=True
    ):
        assert torch.equal(ours[0], leaf[:, 2].double())
        assert bool((spread == 0).all())
    assert rewards.shape == (6, 1, model.num_actions)
    for a in range(model.num_actions):
        state = map_state(lambda leaf: leaf[:, 2], episodes.states)
        expected = model.reward(state, torch.full((6,), a), episodes.contexts)
        torch.testing.assert_close(rewards[:, 0, a], expected.expand(6).to(rewards))


def test_steps_that_are_taken_over_are_those_of_the_lucky_episode():
    model, B = Machine(1, C=2, A=2, N=3, K=2, horizon=6), 90
    contexts = torch.arange(B) % 2
    given = simulate(model, RandomPolicy(2), B, contexts=contexts, seed=0)
    steps = torch.arange(B) // 2 % 6
    acting = Exploring(opinionated(model, "exact"), 0.1, 0.5)
    batch = rehearse(model, acting, contexts, Restarts(given, steps), seed=1)
    episodes = batch.episodes
    for b in range(B):
        n = int(steps[b])
        assert torch.equal(episodes.actions[b, :n], given.actions[b, :n])
        if n:
            assert torch.equal(episodes.states[b, : n + 1], given.states[b, : n + 1])
    assert not torch.equal(episodes.actions, given.actions)
    for t in range(6):
        expected = model.reward(episodes.states[:, t], episodes.actions[:, t], contexts)
        torch.testing.assert_close(episodes.rewards[:, t], expected)
    assert torch.equal(batch.since, steps)
    assert torch.equal(batch.alive, torch.arange(6) >= steps[:, None])
    assert bool(batch.told.all())
    assert bool((batch.log_posterior.exp().gather(2, contexts[:, None, None].expand(-1, 7, 1)) == 1).all())
    torch.testing.assert_close(batch.rewards(belief=True), batch.episodes.rewards)


@pytest.mark.slow
def test_it_moves_as_the_model_does():
    """Where each state leads, by context and action: within 4.5 standard deviations."""
    model, B = Machine(1, C=2, A=2, N=3, K=2, horizon=3), 6000
    contexts = torch.arange(B) % 2
    given = simulate(model, RandomPolicy(2), B, contexts=contexts, seed=0)
    acting = Exploring(opinionated(model, "exact"), 0.3, 0.0)
    restarts = Restarts(given, torch.arange(B) % 3)
    episodes = rehearse(model, acting, contexts, restarts, seed=1).episodes
    before, after = episodes.states[:, :-1].flatten(), episodes.states[:, 1:].flatten()
    actions, c = episodes.actions.flatten(), contexts.repeat_interleave(3)
    compared = 0
    for context in range(2):
        for a in range(2):
            for s in range(3):
                here = (c == context) & (actions == a) & (before == s)
                n = int(here.sum())
                for s2, p in enumerate(model.tables["transition"][context, a, s]):
                    count = int((after[here] == s2).sum())
                    assert abs(count - n * p) <= 4.5 * (n * p * (1 - p)) ** 0.5
                    compared += n > 100
    assert compared > 15


ESTIMATOR = ActorCritic(random_actions=0.05, exploration=0.01)


def practised(model, seed=0, rounds=experts.ROUNDS):
    """A policy after some batches of practice."""
    policy, found = BeliefPolicy(model, likelihood="exact", seed=0), search(model)
    practice = Practice(policy, ESTIMATOR, found.episodes, Pace(rounds, found.constant))
    for number in range(rounds):
        practice.iterate(seed_for(seed, number))
    return policy


@pytest.mark.slow
def test_the_tiger_is_never_let_out_by_who_sees_it():
    """In each context, at least 95 % of what nobody can exceed."""
    model, B = ContextualTiger(horizon=3), 300
    contexts = torch.arange(B) % 3
    given = simulate(model, RandomPolicy(3), B, contexts=contexts, seed=0)
    nothing = Restarts(given, torch.zeros(B, dtype=torch.long))
    batch = rehearse(model, Exploring(practised(model)), contexts, nothing, seed=2)
    returns = torch.stack([batch.episodes.returns[contexts == c].mean() for c in range(3)])
    best = informed_return(model)
    assert bool((returns >= 0.95 * best).all())
    assert bool((returns <= best + 1e-5).all())


@pytest.mark.slow
def test_what_serves_only_those_who_see_the_state_is_forgotten():
    """Who hears the tiger only must not open doors as somebody who sees it."""
    model = ContextualTiger(horizon=3)
    policy = BeliefPolicy(model, likelihood="exact", seed=0)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    assert not practise(policy, ESTIMATOR, search(model), 30, 0, bar(False, 1, "", ""))
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())


@pytest.mark.slow
def test_the_seed_alone_decides():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    policies = [practised(ContextualTiger(horizon=3), seed, rounds=3) for seed in (1, 1, 2)]
    assert torch.equal(before, torch.get_rng_state())
    one, same, other = (torch.cat([w.flatten() for w in policy.parameters()]) for policy in policies)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
