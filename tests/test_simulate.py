from __future__ import annotations

import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import ModelError, RandomPolicy, simulate
from cpomdp_ppl.models import LightDark
from cpomdp_ppl.state import map_state
from tests.conftest import assert_mean
from tests.programs import Walk


def test_same_seed_same_episodes(model):
    policy = RandomPolicy(model.num_actions)
    one, two, other = (simulate(model, policy, 20, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.contexts, two.contexts)
    assert torch.equal(one.rewards, two.rewards)
    map_state(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), one.states, two.states)
    assert not torch.equal(one.actions, other.actions)


def test_without_a_seed_episodes_differ(model):
    policy = RandomPolicy(model.num_actions)
    one, two = (simulate(model, policy, 50).actions for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_caller_is_left_alone(seed, validation):
    class Params(Walk):
        def transition(self, state, action, context):
            return state + pyro.param("speed", torch.tensor(1.0)) + pyro.param("new", torch.tensor(0.0))

    def shaky(history):
        random.random()
        np.random.rand()
        return torch.ones(5, dtype=torch.long)

    with pyro.get_param_store().scope(), pyro.validation_enabled(validation):
        pyro.param("speed", torch.tensor(2.0))
        torch_state, numpy_state, python_state = (
            torch.get_rng_state(),
            np.random.get_state(),
            random.getstate(),
        )
        episodes = simulate(Params(), shaky, 5, seed=seed)
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert random.getstate() == python_state
        assert all(np.array_equal(x, y) for x, y in zip(np.random.get_state(), numpy_state, strict=True))
        assert list(pyro.get_param_store().keys()) == ["speed"]
        assert pyro.settings.get("validate_distributions_pyro") is validation
        torch.testing.assert_close(episodes.states[:, 1] - episodes.states[:, 0], torch.full((5,), 2.0))


def test_the_caller_is_left_alone_when_a_policy_fails():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="lost"):
        simulate(Walk(), lambda history: (_ for _ in ()).throw(RuntimeError("lost")), 5, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_contexts_come_from_the_prior():
    episodes = simulate(Walk(), RandomPolicy(2), 20_000, prior=[0.2, 0.8], seed=0)
    assert_mean(episodes.contexts.float(), 0.8, "contexts")
    each = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert simulate(Walk(), RandomPolicy(2), 3, prior=each, seed=0).contexts.tolist() == [0, 1, 1]


def test_contexts_can_be_given_or_balanced():
    policy = RandomPolicy(2)
    assert simulate(Walk(), policy, 3, contexts=[1, 0, 1]).contexts.tolist() == [1, 0, 1]
    assert simulate(Walk(), policy, 3, contexts=1).contexts.tolist() == [1, 1, 1]
    assert simulate(Walk(), policy, 5, contexts="balanced").contexts.tolist() == [0, 1, 0, 1, 0]


def test_random_actions_are_uniform():
    episodes = simulate(LightDark(), RandomPolicy(3), 2_000, seed=0)
    for action in range(3):
        assert_mean((episodes.actions == action).float().flatten(), 1 / 3, f"action {action}")


def test_a_categorical_decision_is_drawn_by_its_probabilities():
    logits = torch.tensor([0.7, 0.2, 0.1]).log()
    episodes = simulate(
        LightDark(), lambda history: dist.Categorical(logits=logits.expand(5000, 3)), 5000, seed=0
    )
    for action, probability in enumerate((0.7, 0.2, 0.1)):
        assert_mean((episodes.actions[:, 3] == action).float(), probability, f"action {action}")


def test_the_agent_sees_nothing_that_is_masked_nor_any_truth():
    given = []

    def look(history):
        given.append(history)
        return torch.tensor([0, 1, 2, 2])

    episodes = simulate(LightDark(horizon=3), look, 4, seed=0)
    for history in given[1:]:
        z = history.latest.observations["z"]
        assert z[:2].tolist() == [0.0, 0.0]
        assert bool((z[2:] != 0).all())
        assert history.latest.observed["z"].tolist() == [False, False, True, True]
    assert torch.equal(given[2].observations["z"][:, 1:], episodes.observations["z"][:, :2])
    assert torch.equal(given[2].actions, episodes.actions[:, :2])
    assert set(vars(given[2])) == {"percepts"}


BAD_ARGUMENTS = [
    (dict(num_episodes=0), "num_episodes: expected a positive integer, got 0"),
    (dict(num_episodes=2.5), "num_episodes: expected a positive integer, got 2.5"),
    (dict(num_episodes=True), "num_episodes: expected a positive integer, got True"),
    (dict(contexts=2), "contexts: expected indices 0 to 1, got indices from 2 to 2"),
    (dict(contexts=[0, 1]), r"contexts: expected a single index or shape \[4\]"),
    (dict(contexts=[0.5] * 4), "contexts: expected integer indices"),
    (dict(contexts="even"), "contexts: expected indices.*got even"),
    (dict(prior=[0.5, 0.6]), "prior: expected non-negative probabilities that sum to 1"),
    (dict(prior=[-0.5, 1.5]), "prior: expected non-negative"),
    (dict(prior=[1.0]), r"prior: expected shape \[2\] or \[4, 2\], got \[1\]"),
    (dict(prior=[float("nan"), 1.0]), "prior: expected non-negative"),
    (dict(seed=-1), "seed: expected None or an integer from 0"),
    (dict(seed="x"), "seed: expected None or an integer from 0"),
    (dict(policy=3), "policy: expected an object with `start` and `act`, or a function"),
    (dict(policy=RandomPolicy), "policy: expected an object"),
    (
        dict(policy=lambda h: torch.tensor([0, 1, 2, 0])),
        "policy: expected actions 0 to 1, got actions from 0 to 2",
    ),
    (dict(policy=lambda h: torch.tensor([0, 1, -1, 0])), "policy: expected actions 0 to 1"),
    (
        dict(policy=lambda h: torch.zeros(4)),
        r"policy: expected int64 actions of shape \[4\], got torch.float32",
    ),
    (dict(policy=lambda h: torch.zeros(3).long()), r"policy: expected int64 actions of shape \[4\]"),
    (dict(policy=lambda h: 1), "policy: expected actions"),
    (dict(policy=lambda h: dist.Categorical(logits=torch.zeros(4, 3))), r"policy: expected shape \[4, 2\]"),
    (dict(policy=lambda h: dist.Normal(torch.zeros(4), 1.0)), "policy: expected actions"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[m[:40] for _, m in BAD_ARGUMENTS])
def test_bad_arguments_are_named(arguments, message):
    arguments = dict(policy=RandomPolicy(2), num_episodes=4) | arguments
    with pytest.raises(ValueError, match=message):
        simulate(Walk(), **arguments)


def test_a_program_that_leaves_the_reals_is_named():
    class Blowing(Walk):
        horizon = 12

        def transition(self, state, action, context):
            return torch.where(context == 1, (state.abs() + 10) ** 4, state)

    with pytest.raises(ModelError, match=r"transition: 'state' is inf at time .* in context '1'"):
        simulate(Blowing(), RandomPolicy(2), 8, contexts="balanced", seed=0)


def test_random_policy_rejects_no_actions():
    with pytest.raises(ValueError, match="num_actions: expected a positive integer, got 0"):
        RandomPolicy(0)
