from __future__ import annotations

import pytest
import torch
from torch import nn

from cpomdp_ppl import RandomPolicy, simulate
from solvers.cids.policy import Exploring, LSTMPolicy, unroll
from tests.programs import Dice, EyesOpen, Plates


def priors(model, B):
    """A different prior for each episode, `[B, C]`."""
    log_odds = torch.arange(B * model.num_contexts).reshape(B, -1).sin()
    return (3 * log_odds).softmax(-1)


def stepwise(policy, episodes, prior):
    """`log π(· | h_t)`, `[B, T, A]`, of a policy fed one percept after another."""
    wrapped = type("Steps", (), {"start": policy.start, "act": policy.act})()
    logits, features = unroll(wrapped, episodes, prior)
    assert features is None
    return logits


@pytest.mark.parametrize("amortised", [False, True])
def test_whole_sequences_agree_with_single_steps(model, amortised):
    policy = LSTMPolicy(model, hidden=16, amortised=amortised, seed=1)
    episodes = simulate(model, policy, 7, seed=2)
    prior = priors(model, 7)
    logits, hidden = policy.unroll(episodes, prior)
    assert logits.shape == (7, model.horizon, model.num_actions)
    assert hidden.shape == (7, model.horizon, 16)
    torch.testing.assert_close(
        logits.log_softmax(-1), stepwise(policy, episodes, prior), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("program", [EyesOpen, Plates, Dice])
def test_whole_sequences_agree_for_plates_indices_and_initial_observations(program):
    model = program()
    policy = LSTMPolicy(model, hidden=8, seed=1)
    episodes = simulate(model, policy, 5, seed=2)
    prior = priors(model, 5)
    at_once = policy.unroll(episodes, prior)[0].log_softmax(-1)
    torch.testing.assert_close(at_once, stepwise(policy, episodes, prior), rtol=1e-4, atol=1e-5)


def test_an_amortised_policy_reads_the_prior_and_another_does_not():
    model = Dice()
    episodes = simulate(model, RandomPolicy(model.num_actions), 5, seed=2)
    one, other = priors(model, 5), torch.full((5, model.num_contexts), 1 / model.num_contexts)
    deaf = LSTMPolicy(model, hidden=8, seed=1)
    torch.testing.assert_close(deaf.unroll(episodes, one), deaf.unroll(episodes, other), rtol=0, atol=0)
    hears = LSTMPolicy(model, hidden=8, amortised=True, seed=1)
    apart = (hears.unroll(episodes, one)[0] - hears.unroll(episodes, other)[0]).abs()
    assert bool((apart.amax((1, 2)) > 1e-3).all())


def test_a_sure_prior_is_a_finite_input():
    model = Dice()
    policy = LSTMPolicy(model, hidden=8, amortised=True, seed=1)
    episodes = simulate(model, RandomPolicy(model.num_actions), model.num_contexts, seed=2)
    assert bool(policy.unroll(episodes, torch.eye(model.num_contexts))[0].isfinite().all())


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_chance_decides_now_and_then(chance):
    """The mixture's probabilities, in single steps and whole sequences; what is ruled out stays so."""
    model = Dice()
    policy = LSTMPolicy(model, hidden=8, seed=1)
    with torch.no_grad():
        policy.logits.bias.copy_(torch.tensor([1.0, 0.0, -torch.inf]))
    episodes = simulate(model, policy, 5, seed=2)
    mixed = Exploring(policy, chance)
    prior = torch.full((5, 2), 0.5)
    p = policy.unroll(episodes, prior)[0].softmax(-1)
    expected = (1 - chance) * p + chance * torch.tensor([0.5, 0.5, 0.0])
    logits = policy.unroll(episodes, prior)[0]
    assert bool((mixed.probs(logits, None)[..., 2] == 0).all())
    log_probs = mixed.log_probs(logits, None)
    torch.testing.assert_close(log_probs.exp(), expected)
    torch.testing.assert_close(stepwise(mixed, episodes, prior).exp(), expected, rtol=1e-4, atol=1e-5)
    log_probs[..., 0].sum().backward()
    assert all(
        bool(weight.grad.isfinite().all()) for weight in policy.parameters() if weight.grad is not None
    )


def test_first_decisions_are_about_even(model):
    policy = LSTMPolicy(model, seed=0)
    episodes = simulate(model, RandomPolicy(model.num_actions), 50, seed=0)
    probabilities = policy.unroll(episodes, priors(model, 50))[0].softmax(-1).detach()
    assert float((probabilities - 1 / model.num_actions).abs().max()) < 0.1


def test_weights_come_from_the_seed_alone():
    model = Dice()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = LSTMPolicy(model, seed=3), LSTMPolicy(model, seed=3), LSTMPolicy(model, seed=4)
    assert torch.equal(before, torch.get_rng_state())
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name])
    assert not torch.equal(one.lstm.weight_hh_l0, other.lstm.weight_hh_l0)


def test_the_models_own_weights_are_not_the_policys():
    model = Dice()
    model.register_parameter("friction", nn.Parameter(torch.tensor(1.0)))
    assert not any("friction" in name for name, _ in LSTMPolicy(model).named_parameters())


def test_hidden_units_must_be_some():
    with pytest.raises(ValueError, match="hidden"):
        LSTMPolicy(Dice(), hidden=0)


def test_actions_without_probabilities_cannot_be_learned_from():
    model = Dice()
    episodes = simulate(model, RandomPolicy(3), 2, seed=0)

    class Stubborn:
        def start(self, prior):
            return None

        def act(self, history, memory):
            return torch.zeros(history.num_episodes, dtype=torch.long), None

    with pytest.raises(ValueError, match="Categorical"):
        unroll(Stubborn(), episodes, torch.full((2, 2), 0.5))
