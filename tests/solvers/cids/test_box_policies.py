"""C-IDS where actions are continuous: exact gradients, policies at work, and everything around a fit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from cpomdp_ppl import Agent, Box, Episodes, simulate
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.progress import bar
from solvers import cids
from solvers.cids import imitation, settings
from solvers.cids.batch import Batch
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.box_distributions import FAMILIES, ScaledBeta, SquashedGaussian
from solvers.cids.estimator import ActorCritic, Decisions, Reinforce
from solvers.cids.experts import Restarts, practise, rehearse
from solvers.cids.imitation import Pupil, imitate
from solvers.cids.learner import DRIFT, LEAST_CAUTION, TOO_FAR, Learner
from solvers.cids.lucky import search
from solvers.cids.objective import Information, Variational
from solvers.cids.playing import play_out
from solvers.cids.policy import Exploring, LSTMPolicy, previous_actions, unroll
from solvers.cids.priors import OnePrior
from solvers.cids.searching import Searching
from solvers.cids.verdict import LEARNED, FixedPlan, Trial, judge
from tests.conftest import assert_mean
from tests.inference.test_knowledge import uneven
from tests.solvers.cids.knobs import Dial, Glide, Knob
from tests.solvers.cids.test_belief_policy import opinionated

CHANCE, PERSISTENCE, TEMPERATURE = 0.2, 0.7, 0.6
NONE = torch.full((1,), torch.nan, dtype=torch.float64)


class Constant(nn.Module):
    """A policy of the user's own: the same distribution, whatever was seen."""

    def __init__(self, model, family=SquashedGaussian, outputs=(0.4, -0.5)):
        super().__init__()
        self.box, self.family = model.box, family
        self.outputs = nn.Parameter(torch.tensor(outputs))

    def start(self, prior):
        return None

    def act(self, history, memory):
        return self.family.of(self.box, self.outputs.expand(history.num_episodes, -1)), None


class Plain(Constant):
    """One that returns a distribution of torch's own."""

    def act(self, history, memory):
        mean = self.outputs[:1].expand(history.num_episodes, -1)
        return torch.distributions.Independent(torch.distributions.Uniform(mean, mean + 0.1), 1), None


# ------------------------------------------------------------------------------- mixtures and gradients


def density(leaning, action, previous, chance=CHANCE, persistence=PERSISTENCE):
    """The density of an action of a policy that explores."""
    return leaning.near(previous, persistence).wider(chance).log_prob(action).exp()


@pytest.mark.parametrize("family", FAMILIES.values())
@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_what_is_drawn_has_the_density_that_is_evaluated(family, chance):
    """E[f] over draws is the integral of f times the density, for several f; 4.5 standard errors."""
    box, n = Glide().box, 20_000
    leaning = family.of(box, torch.tensor([[0.4, -0.2]]).double())
    previous, exploring = torch.tensor([[0.9]]).double(), Exploring(None, chance, PERSISTENCE)
    torch.manual_seed(0)
    drawn = exploring.draw(family.of(box, torch.tensor([[0.4, -0.2]]).double().expand(n, 2)), previous)
    x = torch.linspace(-1 + 1e-6, 2 - 1e-6, 20_001).double()[:, None]
    log_probs, _ = exploring.evaluate(leaning, x, previous)
    for f in (torch.ones_like, torch.sin, torch.square):
        truth = torch.trapezoid(log_probs.exp() * f(x)[:, 0], x[:, 0])
        assert_mean(f(drawn)[:, 0], float(truth), "what is drawn", sd=float(f(drawn).std()) + 1e-3)


def true_gradient(family, outputs, objective):
    """Of `E[R] + τ H(Y)` or `E[R]`, by the trapezoid rule over both actions; all else is constant."""
    model = Dial()
    outputs = outputs.detach().double().requires_grad_()
    leaning = family.of(model.box, outputs[None])
    odds = torch.linspace(-13.8, 13.8, 501, dtype=torch.float64)
    share = odds.sigmoid()
    x = -1 + 4 * share[:, None]  # [n, 1]
    weights = 4 * share * (1 - share) * (odds[1] - odds[0])
    reward = -0.5 * ((x - 1).square() + (x - 2).square())[:, 0]
    first = density(leaning, x, NONE)  # [n]
    second = density(leaning, x, x[:, None])  # [n before, n]

    def means(values, entropy):
        paid = weights * first * values  # [n]
        later = weights * second * values  # [n before, n]
        if entropy:
            paid, later = -weights * first * first.log(), -weights * second * second.log()
        return paid.sum() + 0.7 * (entropy or 0.5) * (weights * first * later.sum(1)).sum()

    value = means(reward, 0)
    if objective == "variational":
        value = value + TEMPERATURE * means(reward, 1.0)
    return torch.autograd.grad(value, outputs)[0]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["information", "variational"])
@pytest.mark.parametrize("family", FAMILIES.values())
def test_gradients_are_unbiased(family, objective):
    """With chance and persistence, an end and a discount: 4.5 standard errors of 60 batches."""
    model = Dial()
    policy = Constant(model, family, (0.4, -0.5) if family is SquashedGaussian else (1.0, 2.5))
    acting, found, B = Exploring(policy, CHANCE, PERSISTENCE), [], 500
    truth = true_gradient(family, policy.outputs, objective)
    payoff = Variational() if objective == "variational" else Information(belief_rewards=False)
    for seed in range(60):
        episodes = simulate(model, acting, B, contexts="balanced", seed=seed)
        batch = Batch.of(episodes, ParticleFilter(4).run(model, episodes, seed=seed), model.prior().double())
        leaning, _ = unroll(policy, episodes, batch.prior)
        log_probs, entropies = acting.evaluate(leaning, episodes.actions, batch.previous)
        log_probs = log_probs * batch.alive
        payoffs = payoff.payoffs(batch, log_probs.detach(), TEMPERATURE) * batch.alive
        zeros = torch.zeros_like(payoffs)
        before = Decisions(batch, log_probs, entropies, zeros, None, None).detached()
        advantages = ActorCritic(gae_lambda=1.0).advantages(payoffs - payoffs.mean(), before)
        surrogate = (advantages * log_probs).sum(1).mean()
        found.append(torch.autograd.grad(surrogate, policy.outputs)[0])
    for k, each in enumerate(torch.stack(found, 1)):
        assert_mean(each, float(truth[k]), f"gradient {k}")
        assert each.std() / 60**0.5 < 0.1 * truth.norm()  # the test could tell


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 1e-5])
def test_steps_over_a_box_stay_near_what_was_decided(rate):
    """Rates that are far too large become smaller, so that no batch takes decisions far; small ones stay.

    By the mean of `r − 1 − log r` over the steps that count, of ratios r.
    """
    drifts, cautions = [], []

    class Watching(Learner):
        def _drift(self, step):
            drifts.append(super()._drift(step))
            with torch.no_grad():
                log_ratio = (self.decide(step.batch).log_probs - step.before.log_probs)[step.batch.alive]
            assert drifts[-1] == pytest.approx(
                float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-3, abs=1e-7
            )
            return drifts[-1]

        def _take_care(self, step, learning_rate):
            norms = super()._take_care(step, learning_rate)
            cautions.append((self.caution, drifts[-1]))
            return norms

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "Learner", Watching)
        cids.fit(
            Glide(),
            likelihood="ekf",
            iterations=12,
            batch_size=40,
            learning_rate=rate,
            seed=0,
            progress=False,
        )
    accepted = [drift for _, drift in cautions]
    assert len(cautions) == 12
    assert max(accepted) <= TOO_FAR * DRIFT
    assert all(LEAST_CAUTION <= caution <= 1 for caution, _ in cautions)
    if rate == 1.0:
        assert len(drifts) > 12  # some steps were taken again
        assert cautions[-1][0] < 0.1
    else:
        assert cautions[-1][0] == 1.0
        assert len(drifts) == 12


# ---------------------------------------------------------------------------------------------- policies


def parameters(leaning):
    return torch.stack([leaning.first, leaning.second])


@pytest.mark.parametrize("distribution", FAMILIES)
@pytest.mark.parametrize("make", [Knob, Glide])
def test_a_recurrent_policy_reads_ragged_episodes_at_once_as_it_does_step_by_step(make, distribution):
    model = make()
    policy = LSTMPolicy(model, 8, amortised=True, distribution=distribution, seed=1)
    episodes, prior = simulate(model, policy, 12, seed=2), uneven(2, 12)
    assert bool((episodes.lengths < model.horizon).any())
    leaning, hidden = policy.unroll(episodes, prior)
    assert type(leaning) is FAMILIES[distribution]
    assert leaning.batch_shape == hidden.shape[:2] == (12, model.horizon)
    steps = type("Steps", (), {"start": policy.start, "act": policy.act})()
    stepwise, features = unroll(steps, episodes, prior)
    assert features is None
    alive = episodes.alive
    torch.testing.assert_close(
        parameters(leaning)[:, alive], parameters(stepwise)[:, alive], rtol=1e-4, atol=1e-5
    )


def test_a_policy_of_beliefs_decides_alike_in_play_in_hindsight_and_as_an_agent():
    """The same history, the same distribution; nothing is asked of it after the end."""
    model, B = Glide(), 8
    policy, prior = opinionated(model, "ekf"), uneven(2, 8)
    played = play_out(model, Exploring(policy), torch.arange(B) % 2, prior, None, seed=1)
    episodes, alive = played.episodes, played.episodes.alive
    assert bool((episodes.lengths < 5).any())
    assert bool(model.box.contains(episodes.actions).all())
    expected = policy.decide(played.inputs)
    hindsight, _ = unroll(policy, episodes, prior)
    torch.testing.assert_close(
        parameters(hindsight)[:, alive], parameters(expected)[:, alive], rtol=1e-4, atol=1e-4
    )
    assert bool((expected.mode[alive].diff(dim=0).abs() > 0.01).any())
    again = ExtendedKalmanFilter().run(model, episodes)
    torch.testing.assert_close(played.filtering.log_posterior(prior), again.log_posterior(prior))
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(played.filtering.expected_reward, again.expected_reward, **close)
    for b in (0, 3):
        agent = Agent(model, policy, likelihood="ekf", prior=prior[b], greedy=True, seed=0)
        for t in range(int(episodes.lengths[b])):
            torch.testing.assert_close(
                torch.as_tensor(agent.act()), expected.mode[b, t].detach(), rtol=1e-3, atol=1e-3
            )
            seen = {site: values[b, t] for site, values in episodes.observations.items()}
            agent.observe(seen, action=episodes.actions[b, t].numpy())
        assert agent.over == (int(episodes.lengths[b]) == 5 or bool(episodes.observations["ended"][b].any()))


SHORT = dict(iterations=4, batch_size=20, seed=0, progress=False)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_a_policy_of_the_users_own(family):
    policy = Constant(Dial(), family)
    before = policy.outputs.detach().clone()
    solution = cids.fit(Dial(), policy=policy, **SHORT, learning_rate=0.1)
    assert solution.policy is policy
    assert bool(np.isfinite(solution.history["objective"]).all())
    assert not torch.equal(before, policy.outputs.detach())


@pytest.mark.parametrize("estimator", [ActorCritic(), Reinforce()])
def test_distributions_that_nothing_is_known_of_are_refused_by_name(estimator):
    expected = "policy: expected a Categorical over actions, or a SquashedGaussian or ScaledBeta over a box"
    with pytest.raises(ValueError, match=f"{expected}, to learn from, got Independent"):
        cids.fit(Dial(), policy=Plain(Dial()), **SHORT, estimator=estimator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BeliefPolicy, LSTMPolicy])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_saved_decides_as_before(kind, family, tmp_path):
    model = Glide()
    settings = {"likelihood": "ekf"} if kind is BeliefPolicy else {}
    policy = kind(model, 8, distribution=family, **settings)
    solution = cids.fit(model, likelihood="ekf", policy=policy, **SHORT)
    solution.save(tmp_path)
    loaded = cids.load(tmp_path, Glide())
    assert type(loaded.policy) is kind
    assert loaded.policy.logits.family is FAMILIES[family]
    one, two = (simulate(model, each.policy, 20, seed=0).actions for each in (solution, loaded))
    assert torch.equal(one, two)
    assert solution.evaluate(50, likelihood="ekf").returns.num_episodes == 50


def test_searching_is_for_finitely_many_actions():
    solution = SimpleNamespace(model=Knob(), policy=BeliefPolicy(Knob(), 4, likelihood=ParticleFilter(4)))
    with pytest.raises(UnsupportedModelError, match="Searching: Knob has continuous actions"):
        Searching(solution)


# -------------------------------------------------------------------------- before a fit, and after it


def test_the_middle_is_best_and_to_know_the_context_is_worth_the_rest():
    """What is earned by always doing the same is known but for whether there is a second step."""
    found = search(Dial(), seed=0)
    middle = -0.5 * (1 + 0.5 * 0.7)  # in the other context nothing is lost
    assert found.constant == pytest.approx(middle, abs=0.5 * 0.5 * 4.5 * (0.21 / 32) ** 0.5)
    assert found.plans.shape == (2, 2, 1)
    assert bool(Dial().box.contains(found.plans).all())
    torch.testing.assert_close(found.plans[1], torch.full((2, 1), 2.0), rtol=0, atol=0.2)
    assert found.worth == pytest.approx(-found.constant, abs=0.05)
    actions, until = found.leads
    assert actions.shape == (len(until), 2, 1)


def by_the_state(history):
    """To the middle of what was last seen, with all force, so that it often reaches the faces of the box."""
    seen = history.latest.observations["z"]
    return (-2.0 * seen)[:, None].clamp(-1.0, 2.0)


def test_only_what_is_done_before_the_end_is_learned_from():
    model = Glide()
    pupil = Pupil(as_policy(by_the_state), BeliefPolicy(model, 4, likelihood="ekf"), 1.0)
    episodes = simulate(model, pupil, 60, contexts="balanced", seed=0)
    wanted = torch.cat([wanted for _, wanted in pupil.seen])
    going = [int((episodes.lengths > t).sum()) for t in range(5)]
    assert [len(each) for _, each in pupil.seen] == going
    assert [len(each.overall) for each, _ in pupil.seen] == going
    assert min(going) < 60
    torch.testing.assert_close(wanted, episodes.actions.transpose(0, 1)[episodes.alive.T])


@pytest.mark.slow
def test_a_continuous_rule_is_learned(monkeypatch):
    """Nine of ten decisions within a twentieth of the box, and about what the rule earns."""
    monkeypatch.setattr(imitation, "ROUNDS", 10)
    model = Dial()
    policy = BeliefPolicy(model, 32, likelihood=ParticleFilter(4), seed=0)
    rule = lambda history: torch.full((history.num_episodes, 1), 2.0 if history.time else -0.5)  # noqa: E731
    assert imitate(policy, rule, OnePrior((0.5, 0.5)), 100, 0, bar(False, 10, "", "")) > 0.9
    returns = [simulate(model, each, 2000, contexts="balanced", seed=1).returns for each in (policy, rule)]
    assert float(returns[0].mean()) == pytest.approx(float(returns[1].mean()), rel=0.2)


@pytest.mark.slow
def test_a_poor_rule_is_left_behind(monkeypatch):
    """One that goes to the face of the box, where nothing is to be had: a fit finds back from there."""
    monkeypatch.setattr(imitation, "ROUNDS", 12)
    rule = lambda history: torch.full((history.num_episodes, 1), 3.0)  # noqa: E731
    settings = dict(batch_size=60, seed=0, progress=False, likelihood=ParticleFilter(4), verdict=False)
    solution = cids.fit(Dial(), start=rule, iterations=40, **settings, learning_rate=0.01)
    earned = solution.history["return"].values
    assert earned[0] < -2.0
    assert earned[-1] > -1.0


def test_practice_over_a_box():
    """Told everything, actions stay in the box, and what is paid is what the model pays."""
    model, B = Knob(), 40
    policy = BeliefPolicy(model, 8, likelihood=ParticleFilter(4), seed=0)
    contexts = torch.arange(B) % 2
    given = simulate(model, policy, B, contexts=contexts, seed=0)
    steps = torch.minimum(torch.arange(B) % 3, given.lengths - 1)
    batch = rehearse(model, Exploring(policy, 0.2, 0.5), contexts, Restarts(given, steps), seed=1)
    episodes = batch.episodes
    for b in range(B):
        assert torch.equal(episodes.actions[b, : steps[b]], given.actions[b, : steps[b]])
    assert bool(model.box.contains(episodes.actions[episodes.alive]).all())
    states, c = episodes.states, contexts[:, None]
    pays = model.reward(states[:, :-1], episodes.actions, c, states[:, 1:])
    torch.testing.assert_close(episodes.rewards, torch.where(episodes.alive, pays, 0.0))
    assert torch.equal(batch.previous[:, 1:], previous_actions(episodes.actions)[:, 1:])


@pytest.mark.slow
def test_who_is_told_everything_finds_the_best_action():
    """A thousandth of the range of rewards is lost, at most a tenth of what the middle loses."""
    model = Dial()
    policy = BeliefPolicy(model, 16, likelihood=ParticleFilter(4), seed=0)
    found = search(model, seed=0)
    estimator = ActorCritic(random_actions=0.05, exploration=0.01)
    assert practise(policy, estimator, found, 20, 0, bar(False, 1, "", ""))
    sure = torch.eye(2).double()[torch.arange(600) % 2]
    told = play_out(model, Exploring(policy), torch.arange(600) % 2, sure, None, 0).episodes.returns
    assert float(told.mean()) > 0.2 * found.constant


def test_the_verdict_compares_with_a_few_actions_that_stand_for_all():
    """What doing the same all the time is worth, without information: the average of episodes of it."""
    model, prior = Knob(), Knob().prior().double()
    policy = LSTMPolicy(model, 8, seed=0)
    trial = Trial(model, ParticleFilter(16), prior, 0.0, 5, num_episodes=400)
    plans = torch.tensor([[0.0, 0.1], [1.0, 0.5]])[:, None].expand(2, 4, 2).clone()
    plans[:, 0] = torch.tensor([2.0, 0.0])
    found = judge(trial, policy, policy.state_dict(), plans)
    names = ["middle", "turn lowest", "turn highest", "look lowest", "look highest"]
    every = {f"doing '{name}' all the time" for name in names}
    assert set(found.worth) == {LEARNED, "the policy before training", "a fixed plan for '1'"} | every
    low, high, middle = (-1.0, 0.0), (3.0, 0.5), (1.0, 0.25)
    for name, action in {
        "middle": middle,
        "turn lowest": (low[0], middle[1]),
        "look highest": (middle[0], high[1]),
    }.items():
        returns = trial.play(FixedPlan.always(model, torch.tensor(action))).returns
        more = simulate(model, FixedPlan.always(model, torch.tensor(action)), 4000, seed=9).returns
        mine = found.worth[f"doing '{name}' all the time"]
        assert mine.mean == pytest.approx(float(trial.mean(returns).mean))
        error = (mine.standard_error**2 + float(more.var()) / 4000) ** 0.5
        assert abs(mine.mean - float(more.mean())) < 4.5 * error


def test_how_it_decides_is_chosen_by_name():
    one, other = (LSTMPolicy(Dial(), 4, distribution=name) for name in FAMILIES)
    assert type(one.logits.read(torch.zeros(1, 2))) is SquashedGaussian
    assert type(other.logits.read(torch.zeros(1, 2))) is ScaledBeta
    with pytest.raises(ValueError, match="distribution: expected None, or a name"):
        LSTMPolicy(Dial(), distribution="normal")


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    settings = dict(iterations=2, batch_size=20, seed=0, progress=False, checkpoint=tmp_path)
    make = {name: BeliefPolicy(Glide(), 8, likelihood="ekf", distribution=name, seed=0) for name in FAMILIES}
    cids.fit(Glide(), policy=make["squashed"], **settings)
    with pytest.raises(ValueError, match="distribution"):
        cids.fit(Glide(), policy=make["beta"], **settings)


class Away(Glide):
    """Actions are never nought, and programs make nothing proper of that."""

    actions = Box(0.5, 1.0)

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, (action[..., 0] - 0.3).sqrt()))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["ekf", "ukf", "smc"])
def test_actions_stay_in_the_box_past_the_end(likelihood):
    solution = cids.fit(Away(), likelihood=likelihood, iterations=2, batch_size=20, seed=0, progress=False)
    assert solution.evaluate(50).ended.mean > 0
    episodes = simulate(Away(), solution.policy, 50, seed=0)
    assert (episodes.lengths < 5).any()
    given = {"z": episodes.observations["z"].numpy(), "ended": episodes.observations["ended"].long().numpy()}
    again = Episodes.from_arrays(Away(), episodes.actions, given, lengths=episodes.lengths)
    assert torch.equal(again.lengths, episodes.lengths)


def test_the_support_is_the_box():
    box = Box([-1.0, 2.0], [1.0, 5.0])
    action = SquashedGaussian(box, torch.zeros(3, 2), torch.ones(3, 2))
    assert action.support.check(torch.tensor([[0.0, 3.0], [0.0, 1.9], [1.1, 4.0]])).tolist() == [
        True,
        False,
        False,
    ]
