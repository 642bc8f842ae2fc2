"""Objectives and estimators against every history of a small model, written out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from cpomdp_ppl import Episodes, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ObservableOperator
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark
from solvers.cids.batch import OWN, Batch
from solvers.cids.critic import Critic, HistoryCritic
from solvers.cids.estimator import ActorCritic, Decisions, GradientStep, Reinforce, standardised
from solvers.cids.objective import Information, Variational, as_objective
from solvers.cids.policy import LSTMPolicy
from tests.solvers.truth import tables

TEMPERATURE = 7.0


def everything_that_can_happen(model):
    """All histories of a finite model as episodes, with `P(o | a, c)` `[B, C]` and `E[R | y, c]` `[B, C]`.

    A listen gives two bits, and everything else nothing.
    """
    t = tables(model)
    reports = list(itertools.product((0, 1), repeat=2))
    steps = [(0, 1 + k) for k in range(4)] + [(1, 0), (2, 0)]  # action and outcome
    actions, bits, likelihood, rewards = [], [], [], []
    for path in itertools.product(steps, repeat=model.horizon):
        joint = t.initial.copy()  # [C, S]: p(s_t, o_{1:t} | a, c)
        expected = np.zeros(t.initial.shape)  # E[R 1{s_t, o_{1:t}} | a, c]
        for a, o in path:
            expected = expected + joint * t.reward[:, a]
            step = t.transition[:, a] * t.observation[:, a, :, o][:, None]  # [C, S, S']
            joint, expected = (np.einsum("cs,cst->ct", x, step) for x in (joint, expected))
        actions.append([a for a, _ in path])
        bits.append([reports[o - 1] if o else (math.nan, math.nan) for _, o in path])
        likelihood.append(joint.sum(1))
        rewards.append(expected.sum(1) / joint.sum(1))
    values = np.array(bits)
    episodes = Episodes.from_arrays(
        model, np.array(actions), {"left_ear": values[..., 0], "right_ear": values[..., 1]}
    )
    return episodes, torch.tensor(np.array(likelihood)), torch.tensor(np.array(rewards))


@pytest.fixture(scope="module")
def tiger():
    model = ContextualTiger(horizon=3, mauling=20.0)
    policy = LSTMPolicy(model, hidden=8, seed=0).double()
    policy.encoding.float()
    with torch.no_grad():
        policy.logits.weight.mul_(10)  # some preferences, so that gradients are not all alike
    return model, policy


def log_probs_of(policy, episodes):
    log_policy = policy.logits(policy.lstm(policy.encoding.sequence(episodes).double())[0]).log_softmax(-1)
    return log_policy.gather(2, episodes.actions[..., None]).squeeze(2)


def exact_value(model, policy, objective):
    """`E[R] + τ I(C; Y)`, or `E[R] + τ H(Y)`, by summing over everything that can happen."""
    episodes, likelihood, rewards = everything_that_can_happen(model)
    joint = log_probs_of(policy, episodes).sum(1).exp()[:, None] * likelihood / model.num_contexts  # P(y, c)
    p_y = joint.sum(1)
    assert float(p_y.sum().detach()) == pytest.approx(1.0, abs=1e-9)
    earned = (joint * rewards).sum()
    if objective == "variational":
        return earned + TEMPERATURE * torch.special.entr(p_y).sum()
    return earned + TEMPERATURE * (joint * (joint * model.num_contexts / p_y[:, None]).log()).sum()


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def drawn(model, policy, num_episodes, seed):
    class Double(nn.Module):  # the engine plays in single precision
        def start(self, prior):
            return policy.logits.weight.new_zeros(2, len(prior), policy.hidden).unbind()

        def act(self, history, memory):
            percept = policy.encoding.step(history.latest, history.time).double()
            memory = torch.lstm_cell(percept, memory, *policy.lstm.all_weights[0])
            return dist.Categorical(logits=policy.logits(memory[0])), memory

    episodes = simulate(model, Double(), num_episodes, contexts="balanced", seed=seed)
    filtering = ObservableOperator().run(model, episodes)
    return Batch.of(episodes, filtering, model.prior().double())


@pytest.mark.slow
@pytest.mark.parametrize("belief", [False, True])
@pytest.mark.parametrize("baseline", ["none", "mean", "critic"])
@pytest.mark.parametrize("name", ["information", "variational"])
def test_gradients_are_unbiased(tiger, name, baseline, belief):
    """Against autograd through the exact objective; 4 standard errors along 6 directions."""
    model, policy = tiger
    weights = [*policy.lstm.parameters(), *policy.logits.parameters()]
    exact = flat(torch.autograd.grad(exact_value(model, policy, name), weights))
    # a mixture of 1e-9 with the prior: the bias of the bound is not what is tested here
    objective = Information(belief, mixed=1e-9) if name == "information" else Variational(belief)
    estimator = {
        "none": Reinforce(baseline=False),
        "mean": Reinforce(),
        "critic": ActorCritic(gae_lambda=1.0),
    }[baseline]
    estimates = []
    size = 250
    for seed in range(40):
        batch = drawn(model, policy, size, seed)
        log_probs = log_probs_of(policy, batch.episodes)
        payoffs = objective.payoffs(batch, log_probs.detach(), TEMPERATURE)
        # any function of the history will do for a critic: the number of listens so far
        values = 2.0 * (batch.episodes.actions == 0).double().cumsum(1).roll(1, 1)
        values[:, 0] = 0.0
        blank = torch.zeros(size, 3, 3)
        before = Decisions(batch, log_probs, blank[..., 0], values, blank, blank).detached()
        advantages = estimator.advantages(payoffs, before)
        loss = -(advantages * log_probs).sum(1).mean()
        factor = size / (size - 1) if baseline == "mean" else 1.0
        estimates.append(-factor * flat(torch.autograd.grad(loss, weights)))
    estimates = torch.stack(estimates)
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(5, len(exact), generator=generator, dtype=torch.float64)
    for direction in (exact, *others):
        along = estimates @ direction
        error = along.std() / len(along) ** 0.5
        assert abs(along.mean() - exact @ direction) < 4 * error
    assert (estimates.mean(0) - exact).norm() < 0.5 * exact.norm()  # the test could tell


def test_information_sums_to_what_the_episode_told(tiger):
    model, policy = tiger
    batch = drawn(model, policy, 50, seed=0)
    total = Information(mixed=1e-12).information(batch).sum(1)
    last = batch.log_posterior[:, -1].gather(1, batch.contexts[:, None]).squeeze(1)
    torch.testing.assert_close(total, last - math.log(1 / 3))


def test_an_impossible_context_costs_something_finite(tiger):
    model, policy = tiger
    batch = drawn(model, policy, 4, seed=0)
    log_posterior = batch.log_posterior.clone()
    log_posterior[0, 2:, batch.contexts[0]] = -math.inf
    worst = replace(batch, log_posterior=log_posterior)
    information = Information(mixed=1e-3).information(worst)
    assert bool(information.isfinite().all())
    before = (1 - 1e-3) * batch.log_posterior[0, 1, batch.contexts[0]].exp() + 1e-3 / 3
    assert float(information[0, 1]) == pytest.approx(math.log(1e-3 / 3) - math.log(before))
    assert (information[0, 2:] == 0).all()


def test_belief_rewards_have_the_same_mean_and_less_variance(tiger):
    model, policy = tiger
    batch = drawn(model, policy, 20_000, seed=1)
    sampled, belief = batch.rewards(False).sum(1), batch.rewards(True).sum(1)
    difference = sampled - belief
    assert abs(difference.mean()) < 4 * difference.std() / len(difference) ** 0.5
    assert belief.var() < 0.7 * sampled.var()


def test_the_variational_payoffs_sum_to_the_printed_loss(tiger):
    model, policy = tiger
    batch = drawn(model, policy, 30, seed=2)
    log_probs = log_probs_of(policy, batch.episodes).detach()
    total = Variational().payoffs(batch, log_probs, TEMPERATURE).sum(1)
    log_p = log_probs.sum(1) + (batch.filtering.log_likelihood.exp().mean(1)).log()
    printed = log_p - batch.episodes.returns.double() / TEMPERATURE  # J(y, c) of Algorithm 2
    torch.testing.assert_close(total, -TEMPERATURE * printed)


def test_the_critic_is_told_where_the_agent_was():
    """Dicts of vectors and numbers become one axis, in their order."""
    model = Beacons(horizon=3)
    episodes = simulate(model, LSTMPolicy(model), 5, contexts=0, seed=0)
    batch = Batch.of(episodes, ExtendedKalmanFilter().run(model, episodes), model.prior())
    assert batch.states.shape == (5, 4, 3)
    torch.testing.assert_close(batch.states[..., :2].float(), episodes.states["position"])
    torch.testing.assert_close(batch.states[..., 2].float(), episodes.states["heading"])


def test_states_are_measured_in_units_of_their_spread():
    values = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = values * torch.tensor([100.0, 1e-3, 0.0]) + 7.0
    units = standardised(values, OWN)
    torch.testing.assert_close(
        units.std((0, 1), correction=0), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    )
    assert float(units.mean((0, 1)).abs().max()) < 1e-9


def by_the_book(payoffs, values, gae_lambda, lengths):
    """Generalised advantages, a loop at a time."""
    B, T = payoffs.shape
    result = torch.zeros(B, T, dtype=torch.float64)
    for b, length in enumerate(lengths):
        for t in range(length):
            for k in range(t, length):
                after = values[b, k + 1] if k + 1 < length else 0.0
                result[b, t] += gae_lambda ** (k - t) * (payoffs[b, k] + after - values[b, k])
    return result


@pytest.mark.parametrize("lengths", [(6, 6, 6), (6, 1, 4)])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_generalised_advantages(gae_lambda, lengths):
    generator = torch.Generator().manual_seed(0)
    alive = torch.arange(6) < torch.tensor(lengths)[:, None]
    payoffs = torch.randn(3, 6, generator=generator, dtype=torch.float64) * alive
    values = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    blank = torch.zeros(3, 6)
    before = Decisions(SimpleNamespace(alive=alive), blank, blank, values, blank[..., None], blank[..., None])
    advantages = ActorCritic(gae_lambda=gae_lambda).advantages(payoffs, before)
    torch.testing.assert_close(advantages, by_the_book(payoffs, values, gae_lambda, lengths))


def test_steps_past_the_end_of_an_episode_do_not_count(tiger):
    """Every term is the mean over the steps that were played; so is the size of the advantages."""
    model, policy = tiger
    whole = drawn(model, policy, 40, seed=6)
    lengths = torch.arange(40) % 3 + 1
    batch = replace(whole, episodes=replace(whole.episodes, lengths=lengths))
    played = torch.arange(3) < lengths[:, None]
    assert torch.equal(batch.alive, played)
    assert float(batch.share_alive) == pytest.approx(float(lengths.double().mean()) / 3)
    g = torch.Generator().manual_seed(1)
    advantages, values, log_probs, entropies = (
        torch.randn(40, 3, generator=g, dtype=torch.float64) for _ in range(4)
    )
    advantages = advantages * played
    log_contexts = torch.randn(40, 3, 3, generator=g, dtype=torch.float64).log_softmax(-1)
    now = Decisions(batch, log_probs, entropies, values, log_contexts, None)
    step = GradientStep.first(advantages, now, Critic(1), 0.0)
    size = advantages[played].square().mean().sqrt()
    torch.testing.assert_close(step.size, size)
    terms = ActorCritic(exploration=0.1).terms(step)
    cross = (batch.log_posterior[:, :-1].exp() * log_contexts).sum(-1)
    expected = {
        "policy": -(advantages[played] / size).mean(),
        "value": 0.5 * advantages[played].square().mean(),  # as the targets are these above the values
        "exploration": -0.1 * entropies[played].mean(),
        "context": -cross[played].mean(),
    }
    assert terms.keys() == expected.keys()
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term)


def test_new_units_do_not_change_what_the_critic_says():
    critic = HistoryCritic(5, 2, 1)
    features = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    before = critic(features)[0]
    targets = 300.0 + 40.0 * torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    critic.rescale(targets)
    assert bool(critic.has_units)
    assert float(critic.scale) == pytest.approx(float(targets.std(correction=0)), rel=1e-4)
    torch.testing.assert_close(critic(features)[0], before, rtol=1e-4, atol=1e-3)
    critic.rescale(-targets)
    assert 0 < float(targets.mean() - critic.mean) < 0.1 * float(targets.mean())
    torch.testing.assert_close(critic(features)[0], before, rtol=1e-4, atol=1e-3)


def test_payoffs_without_spread_leave_the_units_alone():
    critic = Critic(5)
    critic.rescale(torch.full((10, 3), 7.0))
    assert not bool(critic.has_units)
    assert (float(critic.mean), float(critic.scale)) == (7.0, 1.0)


def test_the_first_step_on_a_batch_is_the_plain_gradient(tiger):
    """Before anything is clipped, `terms` has the gradient of the estimates above, but for its units."""
    model, policy = tiger
    batch = drawn(model, policy, 100, seed=5)
    log_probs = log_probs_of(policy, batch.episodes)
    payoffs = Information().payoffs(batch, log_probs.detach(), TEMPERATURE)
    blank = torch.zeros(100, 3, 1, dtype=torch.float64)
    now = Decisions(batch, log_probs, blank[..., 0], blank[..., 0], blank, blank)
    estimator = ActorCritic()
    advantages = estimator.advantages(payoffs, now.detached())
    terms = estimator.terms(GradientStep.first(advantages, now, HistoryCritic(1, 3, 1), 0.0))
    weights = [*policy.lstm.parameters(), *policy.logits.parameters()]
    ours = flat(torch.autograd.grad(terms["policy"], weights, retain_graph=True))
    plain = flat(torch.autograd.grad(-(advantages * log_probs).mean(), weights))
    torch.testing.assert_close(ours * advantages.square().mean().sqrt(), plain)


def test_clipping_stops_the_gradient_where_the_policy_has_gone_far_enough():
    """Episodes 0 and 1 have moved far towards their action, 2 and 3 have not; 0 and 2 did well."""
    logits = torch.tensor([2.0, 2.0, 0.1, 0.1]).reshape(4, 1, 1) * torch.tensor([1.0, 0.0])  # [4, 1, 2]
    logits.requires_grad_()
    model = LightDark(1)
    episodes = simulate(model, LSTMPolicy(model), 4, contexts="balanced", seed=0)
    batch = Batch.of(episodes, ExtendedKalmanFilter().run(model, episodes), model.prior())
    even = torch.full((4, 1, 2), 0.5)
    none = torch.zeros(4, 1)
    before = Decisions(batch, even.log()[..., 0], none, none, even.log(), even)
    now = Decisions(batch, logits.log_softmax(-1)[..., 0], none, none, even.log(), even)
    advantages = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
    first = GradientStep.first(advantages, before, HistoryCritic(1, 2, 1), 0.0)
    terms = ActorCritic(clip=0.2).terms(replace(first, now=now))
    (gradient,) = torch.autograd.grad(terms["policy"], logits)
    assert (gradient.abs().sum((1, 2)) > 0).tolist() == [False, True, True, True]
    assert (
        gradient[1:, 0, 0] * torch.tensor([1, -1, 1]) > 0
    ).all()  # less of what did badly, more of the rest


@pytest.mark.parametrize("objective", ["reward", 3, Information])
def test_what_is_no_objective_is_refused(objective):
    with pytest.raises(ValueError, match="objective"):
        as_objective(objective)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("gae_lambda", 1.5),
        ("clip", 0.0),
        ("exploration", -1.0),
        ("random_actions", 1.0),
        ("persistence", -1.0),
        ("told", 1.0),
        ("led", -0.1),
        ("value_weight", -1.0),
        ("max_gradient_norm", -1.0),
    ],
)
def test_estimators_refuse_nonsense_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        ActorCritic(**{name: value})
