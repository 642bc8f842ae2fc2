from __future__ import annotations

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.actions import random_actions
from cpomdp_ppl.generative import Generative, Tally
from cpomdp_ppl.inference import Observed, ParticleFilter, PerceptDensity, inference_scope
from cpomdp_ppl.models import LightDark
from cpomdp_ppl.policy import Percept
from cpomdp_ppl.state import leaves, map_state
from tests.conftest import assert_mean, fixed_actions
from tests.programs import EyesOpen, Plates, Reef, Sail
from tests.solvers.machines import Mortal


def by_hand(model, actions, contexts, seed):
    """Episodes by single steps: rewards `[B, T]`, last states, flags and values at the last step."""
    with inference_scope(model, seed):
        programs = Generative(model)
        state, rewards = programs.initial(contexts), []
        for a in actions:
            step = programs.step(state, torch.full_like(contexts, a), contexts)
            state = step.state
            rewards.append(step.reward)
    return torch.stack(rewards, 1), state, step.percept


def test_steps_are_distributed_like_episodes(model):
    """Means of returns, of every number in the last state, and of what is seen; 4.5 standard errors."""
    B, T = 3000, 4
    actions = [i % model.num_actions for i in range(T - 1)] + [model.num_actions - 1]
    model.horizon = T
    contexts = torch.arange(B) % model.num_contexts
    episodes = simulate(model, fixed_actions(*actions), B, contexts="balanced", seed=0)
    rewards, state, percept = by_hand(model, actions, contexts, seed=1)

    def same_mean(ours, theirs, what):
        spread = float((ours.double().var() + theirs.double().var()).sqrt())
        assert_mean(ours, float(theirs.double().mean()), what, sd=max(spread, 1e-9))

    same_mean(rewards.sum(1), episodes.returns, "return")
    for (name, ours), (_, theirs) in zip(leaves(state), leaves(episodes.states), strict=True):
        for k in range(ours[0].numel()):
            same_mean(ours.reshape(B, -1)[:, k], theirs[:, -1].reshape(B, -1)[:, k], name)
    for site, flags in percept.observed.items():
        assert torch.equal(flags, episodes.observed[site][:, -1])
        same_mean(percept.observations[site].float(), episodes.observations[site][:, -1].float(), site)


@pytest.mark.parametrize("program", [Plates, EyesOpen])
def test_shapes_with_plates_and_initial_observations(program):
    model = program()
    episodes = simulate(model, fixed_actions(*[0] * model.horizon), 6, seed=0)
    contexts = torch.zeros(6, dtype=torch.long)
    rewards, state, percept = by_hand(model, [0], contexts, seed=0)
    assert rewards.shape == (6, 1)
    for (_, ours), (_, theirs) in zip(leaves(state), leaves(episodes.states), strict=True):
        assert ours.shape == theirs[:, 0].shape
    for site, values in percept.observations.items():
        assert values.shape == episodes.observations[site][:, 0].shape
        assert percept.observed[site].shape == episodes.observed[site][:, 0].shape
    if model.initial_observation:
        with inference_scope(model, 0):
            programs = Generative(model)
            first = programs.observe(programs.initial(contexts), contexts)
        assert first.action is None
        assert first.observed.keys() == episodes.initially_observed.keys()


def test_each_step_has_its_own_action_and_context():
    from cpomdp_ppl.models import LineGrid

    model = LineGrid()
    with inference_scope(model, 0):
        programs = Generative(model)
        state = torch.tensor([3, 3, 3, 0, 0])
        step = programs.step(state, torch.tensor([0, 1, 2, 0, 0]), torch.tensor([0, 0, 0, 0, 1]))
    assert step.state.tolist() == [2, 4, 3, 7, 7]
    assert step.reward.tolist() == [0.0, 0.0, 0.0, 20.0, -40.0]
    assert step.percept.observed["side"].tolist() == [False, False, True, False, False]


def test_a_density_for_every_context_is_that_of_the_sensor():
    """Light–Dark: normal about the position; its variance is 1 on the lit side, 8 on the dark one."""
    model = LightDark()
    x, z = torch.tensor([2.0, -1.5, 0.5, 3.0]), torch.tensor([1.0, -4.0, 0.0, 0.0])
    seen = torch.tensor([True, True, True, False])
    percept = Percept(torch.tensor([2, 2, 2, 0]), {"z": z}, {"z": seen})
    with inference_scope(model, 0):
        found = PerceptDensity(Generative(model))(x, percept)
    lit = torch.stack([x > 0, x < 0], 1)
    noise = torch.distributions.Normal(x[:, None], torch.where(lit, 1.0, 8.0).sqrt())
    torch.testing.assert_close(found, torch.where(seen[:, None], noise.log_prob(z[:, None]), 0.0))


@pytest.mark.parametrize("program", [Plates, EyesOpen])
def test_densities_agree_with_a_filter_of_one_particle(program):
    """Conditioned on the same states, a particle filter weighs by the same densities."""

    model, B = program(), 5
    contexts = torch.arange(B) % model.num_contexts
    with inference_scope(model, 0):
        programs, recursion = Generative(model), ParticleFilter(1).recursion(model)
        step = programs.step(programs.initial(contexts), torch.zeros(B, dtype=torch.long), contexts)
        found = PerceptDensity(programs)(step.state, step.percept)
        C = model.num_contexts
        states = map_state(lambda leaf: leaf[None, :, None].repeat(C, *[1] * (leaf.dim() + 1)), step.state)
        cloud = recursion.of_states(states)
        percept = step.percept
        seen = Observed.at(1, percept.action, percept.observations, percept.observed)
        _, increment = recursion.condition(cloud, seen)
    assert found.shape == (B, C)
    torch.testing.assert_close(found.double(), increment.T)


class Stumbles(Plates):
    """Ends, pays on arrival, and has plates."""

    discount = 0.7

    def ends(self, state, action, context):
        return torch.sigmoid(state[..., :1] - 1)

    def reward(self, state, action, context, next_state):
        return next_state.sum(-1, keepdim=True) - state[..., :1]


MODELS = [Reef(), Sail(), Stumbles(), Mortal(2, awake=True)]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("seeing", [False, True])
def test_moves_and_steps_end_pay_and_count_like_episodes(model, seeing):
    """Returns, ends and rewards at each time of those still going, as `simulate` has them."""
    B = 4000
    episodes = simulate(model, RandomPolicy(model.actions), B, contexts="balanced", seed=0)
    contexts = torch.arange(B) % 2
    with inference_scope(model, 1):
        programs = Generative(model)
        state = programs.initial(contexts)
        tally, lengths = Tally(model, contexts), torch.zeros(B)
        for t in range(model.horizon):
            alive = tally.alive.clone()
            action = random_actions(model, (B,))
            move = (programs.step if seeing else programs.move)(state, action, contexts)
            if seeing:
                assert torch.equal(move.percept.ended, move.ended)
            again = programs.reward(state, action, contexts, move.state)
            assert torch.equal(move.reward, again)
            theirs = episodes.alive[:, t]
            for ours, other, what in (
                (move.reward[alive], episodes.rewards[theirs, t], "reward"),
                (move.ended[alive], episodes.observations["ended"].reshape(B, -1)[theirs, t], "ended"),
            ):
                ours, other = ours.double(), other.double()
                error = (ours.var() / len(ours) + other.var() / len(other)).sqrt()
                assert abs(ours.mean() - other.mean()) <= 4.5 * error + 1e-9, (what, t)
            lengths += alive
            tally.add(move)
            state = move.state
    for ours, other in ((tally.returns, episodes.returns), (lengths, episodes.lengths)):
        spread = float((ours.double().var() + other.double().var()).sqrt())
        assert_mean(ours, float(other.double().mean()), "return or length", sd=spread)
    over = (lengths < model.horizon).float()
    assert_mean(over, float((episodes.lengths < model.horizon).float().mean()), "ended early", sd=0.71)


def test_a_reward_on_arrival_that_is_asked_for_alone_is_drawn():
    model, B = Reef(), 20_000
    with inference_scope(model, 0):
        rewards = Generative(model).reward(torch.full((B,), 2), torch.zeros(B).long(), torch.zeros(B).long())
    assert set(rewards.tolist()) == {0.0, -4.0}  # it slips, or runs onto the reef
    assert_mean(rewards, 0.8 * -4.0, "reward", sd=1.6)
