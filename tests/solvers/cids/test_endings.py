"""C-IDS where episodes end, rewards are for arrival and discounted: against everything that can happen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpomdp_ppl import Episodes, simulate
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter, inference_scope
from cpomdp_ppl.inference.knowledge import Knowledge
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.signature import ENDED
from solvers import cids, exact
from solvers.cids.batch import Batch
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.estimator import ActorCritic, Decisions, Reinforce, standardised
from solvers.cids.experience import Beginnings
from solvers.cids.experts import ARRIVALS, Restarts, Sight, rehearse
from solvers.cids.group import SINGLE_PROCESS
from solvers.cids.lucky import search
from solvers.cids.objective import Information, Variational
from solvers.cids.playing import play_out
from solvers.cids.policy import Exploring, LSTMPolicy, previous_actions, unroll
from solvers.cids.quality import LikelihoodQuality
from solvers.cids.searching import Searching, _Simulator
from solvers.cids.settings import FitSettings
from solvers.cids.verdict import Trial
from tests.conftest import assert_mean
from tests.inference.test_knowledge import followed
from tests.solvers.cids.test_searching import indifferent
from tests.solvers.machines import Mortal

TEMPERATURE = 1.7
MODELS = [Mortal(0, horizon=3), Mortal(1, certain=True, awake=True), Mortal(4, A=3, horizon=2)]


def name(model):
    kind = "sure" if model.tensors["end"].dtype == torch.bool else "probable"
    return f"{kind}-{model.num_actions}-{model.horizon}"


def steps_from(model, c, s, a):
    """Every step from a state: where to, what is seen (-1 for nothing), whether it ends, how likely."""
    seen = model.chances(a)[c]
    for s2, moves in enumerate(model.tables["transition"][c, a, s]):
        for o, shows in enumerate(seen[s2]):
            end = model.tables["end"][c, a, s2]
            for over, chance in ((True, end), (False, 1 - end)):
                if moves * shows * chance > 0:
                    yield s2, o if len(seen[s2]) > 1 else -1, over, moves * shows * chance


def ways_from(model, c, s, t=0):
    """Every way to go on from a state, `((a, s', o, over), …)`, with its probability but for the actions."""
    if t == model.horizon:
        yield (), 1.0
        return
    for a in range(model.num_actions):
        for s2, o, over, p in steps_from(model, c, s, a):
            for rest, q in [((), 1.0)] if over else ways_from(model, c, s2, t + 1):
                yield ((a, s2, o, over), *rest), p * q


@cache
def everything(model):
    """All that can happen, as episodes with their probabilities `[B]` but for the actions."""
    prior, T, rows = model.prior().tolist(), model.horizon, []
    for c, p_context in enumerate(prior):
        for s, p_state in enumerate(model.tables["initial"][c]):
            for first, p_first in enumerate(model.chances(None)[c, s]):
                p = p_context * p_state * p_first
                rows += [(c, s, first, way, p * q) for way, q in ways_from(model, c, s) if p * q > 0]
    B = len(rows)
    actions, symbols = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.long)
    seen, over = torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T)
    states, rewards = torch.zeros(B, T + 1, dtype=torch.long), torch.zeros(B, T, dtype=torch.float64)
    for b, (c, s, _, way, _) in enumerate(rows):
        states[b, 0] = s
        for t, (a, s2, o, ends) in enumerate(way):
            actions[b, t], states[b, t + 1], over[b, t] = a, s2, ends
            symbols[b, t], seen[b, t] = max(o, 0), o >= 0
            rewards[b, t] = model.tables["reward"][c, a, states[b, t], s2]
    awake, flags = model.initial_observation, torch.ones(B, T, dtype=torch.bool)
    first = {"o": torch.tensor([row[2] for row in rows]), ENDED: torch.zeros(B)}
    episodes = Episodes(
        actions,
        {"o": symbols, ENDED: over},
        {"o": seen, ENDED: flags},
        torch.tensor([len(row[3]) for row in rows]),
        contexts=torch.tensor([row[0] for row in rows]),
        states=states,
        rewards=rewards,
        initial_observations=first if awake else None,
        initially_observed={"o": flags[:, 0], ENDED: ~flags[:, 0]} if awake else None,
        discount=model.discount,
    )
    assert bool((episodes.lengths < T).any())
    return episodes, torch.tensor([row[4] for row in rows], dtype=torch.float64)


def what_the_agent_knows(episodes):
    """A number for each different history, `[B]`."""
    parts = [episodes.actions, *episodes.observations.values(), *episodes.observed.values()]
    if episodes.initial_observations is not None:
        parts += [values[:, None] for values in episodes.initial_observations.values()]
    lengths = episodes.lengths[:, None]
    _, number = torch.cat([part.double() for part in (*parts, lengths)], 1).unique(dim=0, return_inverse=True)
    return number


def a_policy(model, kind):
    """One with preferences, in double precision."""
    policy = (
        LSTMPolicy(model, hidden=4, seed=0)
        if kind == "lstm"
        else BeliefPolicy(model, hidden=4, likelihood="exact", seed=0)
    )
    with torch.no_grad():
        policy.logits.weight.mul_(15)
    return policy.double()


def probabilities(model, acting):
    """`P(c, s_{0:T}, y)` of all that can happen, `[B]`, and `log π(a_t | h_t)` `[B, T]`, with gradients."""
    episodes, p = everything(model)
    prior = model.prior().double().expand(len(episodes), -1)
    logits, _ = unroll(acting.policy, episodes, prior)
    log_probs, _ = acting.evaluate(logits, episodes.actions, previous_actions(episodes.actions))
    log_probs = torch.where(episodes.alive, log_probs, 0.0)
    joint = p * log_probs.sum(1).exp()
    assert float(joint.detach().sum()) == pytest.approx(1.0, abs=1e-6)
    return joint, log_probs


def exact_value(model, joint, objective):
    """`E[R] + τ I(C; Y)`, or `E[R] + τ H(Y)`, by summing over everything that can happen."""
    episodes, _ = everything(model)
    number, c = what_the_agent_knows(episodes), episodes.contexts
    p_y = torch.zeros(int(number.max()) + 1, dtype=torch.float64).index_add(0, number, joint)
    p_cy = torch.zeros(len(p_y) * model.num_contexts, dtype=torch.float64)
    p_cy = p_cy.index_add(0, number * model.num_contexts + c, joint).view(len(p_y), -1)
    gamma = model.discount ** torch.arange(model.horizon).double()
    earned = (joint * (episodes.rewards * gamma).sum(1)).sum()
    if objective == "variational":
        return earned + TEMPERATURE * torch.special.entr(p_y).sum()
    lone = p_y[:, None] * model.prior().double()
    return earned + TEMPERATURE * (torch.xlogy(p_cy, p_cy.clamp(min=1e-300) / lone)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "belief"])
@pytest.mark.parametrize("model", MODELS, ids=name)
def test_expected_gradients_are_exact(model, kind):
    """Estimates, averaged over all that can happen by their probabilities, against autograd."""
    policy = a_policy(model, kind)
    acting = Exploring(policy, 0.1, 0.4)
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    episodes, _ = everything(model)
    joint, log_probs = probabilities(model, acting)
    batch = Batch.of(episodes, ObservableOperator().run(model, episodes), model.prior().double())
    # Any function of the history will do for a critic: that of the number of steps, and what is believed.
    values = batch.log_posterior[:, :-1, 0].exp() - torch.arange(model.horizon)
    blank = torch.zeros(len(episodes), model.horizon, 3)
    before = Decisions(batch, log_probs, blank[..., 0], values, blank, blank).detached()
    for objective in (Information(True, 1e-12), Information(False, 1e-12), Variational(), Variational(True)):
        kind_of = "variational" if isinstance(objective, Variational) else "information"
        value = exact_value(model, joint, kind_of)
        truth = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
        payoffs = objective.payoffs(batch, log_probs.detach(), TEMPERATURE) * batch.alive
        if kind_of == "information":
            torch.testing.assert_close((joint * payoffs.sum(1)).sum(), value, rtol=0, atol=1e-6)
        for estimator in (Reinforce(baseline=False), ActorCritic(gae_lambda=1.0)):
            advantages = estimator.advantages(payoffs, before)
            surrogate = (joint.detach() * (advantages * log_probs).sum(1)).sum()
            found = torch.autograd.grad(surrogate, weights, retain_graph=True, allow_unused=True)
            for one, other in zip(found, truth, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert max(float(each.abs().max()) for each in truth if each is not None) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "belief"])
@pytest.mark.parametrize("model", MODELS, ids=name)
def test_episodes_are_played_as_often_as_they_are_probable(model, kind):
    """Each of all ways, by both engines: within 4.5 standard deviations. Filters then agree, too."""
    n, policy = 12_000, a_policy(model, kind)
    acting = Exploring(policy, 0.1, 0.4)
    with torch.no_grad():
        joint, _ = probabilities(model, acting)
    prior = model.prior().double()
    counts = (prior * n).round().long()
    contexts = torch.arange(model.num_contexts).repeat_interleave(counts)
    prior = prior.expand(len(contexts), -1)
    if kind == "belief":
        played = play_out(model, acting, contexts, prior, None, seed=1)
        episodes = played.episodes
        again = ObservableOperator().run(model, episodes, moments=False)
        torch.testing.assert_close(played.filtering.log_posterior(prior), again.log_posterior(prior))
        torch.testing.assert_close(played.filtering.expected_reward, again.expected_reward)
    else:
        episodes = simulate(model, acting, len(contexts), contexts=contexts, seed=1)
    all_of_them, _ = everything(model)

    def keys(some):
        first = some.initial_observations
        initial = torch.zeros_like(some.contexts) if first is None else first["o"]
        seen = torch.where(some.observed["o"], some.observations["o"], -1)
        over = some.observations[ENDED].long()
        parts = (some.contexts[:, None], initial[:, None], some.states, some.actions, seen, over)
        return torch.cat(parts, 1), some.rewards.double(), some.lengths

    (known, rewards, lengths), (found, paid, took) = keys(all_of_them), keys(episodes)
    unique, number = torch.cat([known, found]).unique(dim=0, return_inverse=True)
    assert len(unique) == len(known)  # nothing else may happen
    counts = number[len(known) :].bincount(minlength=len(unique))[number[: len(known)]]
    where = torch.empty_like(number[: len(known)])
    where[number[: len(known)]] = torch.arange(len(known))
    rows = where[number[len(known) :]]
    torch.testing.assert_close(paid, rewards[rows])
    assert torch.equal(took, lengths[rows])
    gamma = model.discount ** torch.arange(model.horizon).double()
    torch.testing.assert_close(episodes.returns.double(), (rewards[rows] * gamma).sum(1))
    expected = joint * len(contexts)
    deviation = (counts - expected).abs() / (expected * (1 - joint)).sqrt().clamp(min=1.0)
    assert float(deviation.max()) < 4.5 + 1.0  # one more, where hardly any are expected


# -------------------------------------------------------------------------------- what is after the end


def learner(model, policy, likelihood="exact", **settings):
    """A learner at its start."""
    given = {"estimator": ActorCritic(), "temperature": TEMPERATURE, **settings}
    choices = ("information", given["estimator"], None, given["temperature"], 1e-2, 3, 30)
    return FitSettings.of(model, likelihood, policy, *choices).learner(policy, 0, SINGLE_PROCESS)


def a_batch(model, its, seed=0):
    """A batch of 30 episodes that a learner plays."""
    prior = model.prior().double().expand(30, -1)
    contexts = torch.arange(30) % model.num_contexts
    if isinstance(its.policy, BeliefPolicy):
        begun = Beginnings(contexts, prior, torch.zeros(30).bool(), None)
        return its.experience.live(its.acting, begun, seed)
    return its.experience.filter(its.experience.play(its.acting, contexts, prior, seed), prior, seed)


def spoilt(batch):
    """The same batch, with other numbers wherever an episode is over."""
    g = torch.Generator().manual_seed(5)
    episodes, steps = batch.episodes, torch.arange(batch.episodes.horizon + 1)
    dead = steps[:-1] >= episodes.lengths[:, None]  # [B, T]
    later = steps > episodes.lengths[:, None]  # [B, T + 1]

    def other(values, where):
        noise = 100 * torch.rand(values.shape, generator=g, dtype=torch.float64) - 50
        mask = where.reshape(where.shape + (1,) * (values.dim() - 2))
        return torch.where(mask, noise.to(values.dtype), values)

    changed = replace(episodes)
    last = torch.randint(2, episodes.actions.shape, generator=g)
    actions = torch.where(dead, last, episodes.actions)
    for what, values in {
        "actions": actions,
        "rewards": other(episodes.rewards, dead),
        "states": other(episodes.states, later),
        "observations": {site: other(seen, dead) for site, seen in episodes.observations.items()},
    }.items():
        object.__setattr__(changed, what, values)
    filtering = replace(
        batch.filtering,
        increments=other(batch.filtering.increments, dead),
        expected_reward=other(batch.filtering.expected_reward, dead),
    )
    inputs = batch.inputs
    if inputs is not None:
        parts = {part: getattr(inputs, part) for part in ("odds", "posterior", "by_context", "overall")}
        inputs = replace(inputs, **{part: other(values, dead) for part, values in parts.items()})
    return replace(
        batch,
        episodes=changed,
        filtering=filtering,
        log_posterior=other(batch.log_posterior, later),
        previous=previous_actions(actions),
        inputs=inputs,
    )


@pytest.mark.parametrize("estimator", [ActorCritic(), Reinforce()], ids=["critic", "as printed"])
@pytest.mark.parametrize("kind", ["lstm", "belief"])
def test_what_is_written_after_the_end_teaches_nothing(kind, estimator):
    """All weights are the very same after a few steps, and so is what was measured."""
    model, found = Mortal(0, horizon=5), []
    for change in (lambda batch: batch, spoilt):
        policy = LSTMPolicy(model, hidden=4) if kind == "lstm" else BeliefPolicy(model, 4, likelihood="exact")
        its = learner(model, policy, estimator=estimator)
        batch = change(a_batch(model, its))
        assert bool((batch.episodes.lengths < 5).any())
        with isolated(0):
            measured = its._improve(batch, TEMPERATURE, 1e-2)
        found.append((measured, [weight.detach().clone() for weight in its.parameters]))
    (one, weights), (other, same) = found
    assert one == other
    assert all(map(torch.equal, weights, same))


def test_after_the_end_nothing_is_paid_or_found_out():
    """Rewards are worth `γ^t`; nats are not, and sum to `log P(c | y) − log P(c)`."""
    model = Mortal(0, horizon=5)
    policy = BeliefPolicy(model, 4, likelihood="exact")
    batch = a_batch(model, learner(model, policy))
    episodes, T = batch.episodes, 5
    dead = torch.arange(T) >= episodes.lengths[:, None]
    assert torch.equal(batch.alive, ~dead)
    information, objective = Information(mixed=1e-12).information(batch), Information(mixed=1e-12)
    for belief in (False, True):
        rewards = batch.rewards(belief)
        assert bool((rewards[dead] == 0).all())
        payoffs = replace(objective, belief_rewards=belief).payoffs(batch, torch.zeros(30, T), 2.0)
        torch.testing.assert_close(payoffs, rewards + 2.0 * information)
    gamma = 0.8 ** torch.arange(T).double()
    torch.testing.assert_close(batch.rewards(False), episodes.rewards.double() * gamma)
    assert bool((information[dead] == 0).all())
    final = ObservableOperator().run(model, episodes).log_posterior(model.prior().double())[:, -1]
    told = final.gather(1, batch.contexts[:, None])[:, 0] - batch.prior_true().log()
    torch.testing.assert_close(information.sum(1), told)
    log_probs = torch.where(dead, 0.0, -1.0)
    assert bool((Variational().payoffs(batch, log_probs, 2.0)[dead].abs() < 1e-9).all())


def test_particles_are_counted_as_long_as_episodes_go_on():
    model = Mortal(0, horizon=5)
    policy = BeliefPolicy(model, 4, likelihood=ParticleFilter(32))
    batch = a_batch(model, learner(model, policy, policy.backend))
    own = batch.filtering.ess[torch.arange(30), :, batch.contexts].tolist()
    going_on = [
        n for row, length in zip(own, batch.episodes.lengths.tolist(), strict=True) for n in row[:length]
    ]
    found = LikelihoodQuality(30).measure(batch)["ess"]
    assert found == pytest.approx(sum(going_on) / len(going_on))


def test_units_are_those_of_steps_that_were_taken():
    g = torch.Generator().manual_seed(0)
    values = torch.randn(20, 4, 3, generator=g, dtype=torch.float64)
    taken = torch.arange(4) < (torch.arange(20) % 4 + 1)[:, None]
    junk = torch.where(taken[..., None], values, 1e6)
    units = standardised(junk, SINGLE_PROCESS, taken)
    expected = (values - values[taken].mean(0)) / values[taken].std(0, correction=0)
    torch.testing.assert_close(units[taken], expected[taken])


def test_what_a_policy_rules_out_may_stand_where_it_decides_nothing():
    """After the end, actions are written as 0, whose log-probability may be -inf: losses stay finite."""

    class Never(LSTMPolicy):
        def unroll(self, episodes, prior):
            logits, features = super().unroll(episodes, prior)
            return logits + torch.tensor([-torch.inf, 0.0, 0.0]), features

        def act(self, history, memory):
            decision, memory = super().act(history, memory)
            return type(decision)(logits=decision.logits + torch.tensor([-torch.inf, 0.0, 0.0])), memory

    model = Mortal(4, A=3, horizon=4)
    for estimator in (ActorCritic(), Reinforce()):
        for objective in ("information", "variational"):
            settings = dict(likelihood="exact", iterations=3, batch_size=20, seed=0, progress=False)
            solution = cids.fit(
                model, policy=Never(model, 4), estimator=estimator, **settings, objective=objective
            )
            assert bool(np.isfinite(solution.history["objective"]).all())
            actions = simulate(model, solution.policy, 20, seed=0).actions
            assert set(actions[:, 0].tolist()) <= {1, 2}


# ----------------------------------------------------------------------------- fits, and what they report


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "belief"])
def test_a_fit_reports_the_return_and_the_information_of_its_policy(kind):
    """Of a policy that hardly changes, by the averages of 25 batches: 4.5 standard errors.

    What the mixture with the prior costs is less than a tenth of one.
    """
    model = Mortal(2, C=3, N=3, awake=True, horizon=4)
    policy = a_policy(model, kind).float()
    settings = dict(likelihood="exact", iterations=25, batch_size=200, learning_rate=1e-9, temperature=1.0)
    estimator = ActorCritic(random_actions=0.0)
    solution = cids.fit(
        model, policy=policy, estimator=estimator, **settings, seed=1, progress=False, verdict=False
    )
    truth = exact.evaluate(model, solution.policy)
    expected = float(truth.returns @ model.prior().double().numpy())
    measured = {column: torch.as_tensor(series.values) for column, series in solution.history.items()}
    assert_mean(measured["return"], expected, "return")
    assert_mean(measured["information_upper"], truth.information, "information")
    assert_mean(measured["information_lower"], truth.information, "information")
    assert_mean(measured["objective"], expected + truth.information, "objective")

    prior = model.prior().double()
    trial = Trial(model, ObservableOperator(), prior, 1.0, 7, num_episodes=2000)
    found = trial.mean(trial.play(solution.policy).worth)
    assert abs(found.mean - expected - truth.information) < 4.5 * found.standard_error + 1e-3


@pytest.mark.slow
def test_a_fit_of_what_ends_gets_near_the_exact_plan():
    """Of what the best plan has above one action all the time, nine tenths."""
    model = Mortal(3, A=3, certain=True, awake=True, horizon=3)
    settings = dict(likelihood="exact", iterations=40, batch_size=100, seed=0, progress=False)
    solution = cids.fit(model, temperature=0.1, **settings, verdict=False)
    best = exact.plan(model, temperature=0.1)
    always = exact.evaluate(model, lambda history: torch.zeros(history.num_episodes, dtype=torch.long))
    found, p = exact.evaluate(model, solution.policy), model.prior().double().numpy()
    worth, least = (float(each.returns @ p) + 0.1 * each.information for each in (found, always))
    assert worth <= best.value + 1e-6
    assert worth > best.value - 0.1 * (best.value - least)


# -------------------------------------------------------------------------- search, practice, look-ahead


class Hill(Mortal):
    """A walk from 0 to 5 that ends there; what is paid on arrival is worth the less the later it comes."""

    contexts, actions, horizon, states, discount = 2, 2, 8, 6, 0.9

    def __init__(self):
        super(Mortal, self).__init__(0)
        del self.context_prior
        self.contexts, self.actions, self.states, self.horizon = 2, 2, 6, 8

    def initial(self, context):
        return torch.zeros_like(context)

    def transition(self, state, action, context):
        return (state + 2 * action - 1).clamp(0, 5)

    def observation(self, state, action, context):
        super(Mortal, self).observation(state * 0, action * 0 + 1, context)

    def ends(self, state, action, context):
        return state == 5

    def reward(self, state, action, context, next_state):
        return torch.where(next_state == 5, 10.0 * (1.0 + context), 0.0) - 0.1


def test_a_search_knows_that_it_is_over():
    """Five steps to the top, 10 or 20 there, and 0.1 for each step: at most that, and no more."""
    model = Hill()
    found = search(model)
    gamma = 0.9 ** np.arange(8)
    up = 15.0 * gamma[4] - 0.1 * gamma[:5].sum()
    assert found.constant == pytest.approx(up)
    assert found.worth == pytest.approx(0.0, abs=1e-9)
    assert found.episodes is None  # nothing is better than to go up
    actions, until = found.leads
    K = len(until)
    states = simulate(model, lambda history: actions[:, history.time], K, contexts=0, seed=0)
    assert bool((until < states.lengths).all())  # nobody is led to where it is over
    assert set(states.states[torch.arange(K), until].tolist()) == set(range(5))


@pytest.mark.parametrize("seed", [0, 1])
def test_practice_goes_on_until_the_end(seed):
    """Steps taken over are not over; later ones end as often as the tables say, 4.5 standard errors."""
    model, B = Mortal(seed, N=3, horizon=6), 3000
    contexts = torch.arange(B) % 2
    given = simulate(
        model, lambda history: torch.randint(2, (history.num_episodes,)), B, contexts=contexts, seed=0
    )
    steps = torch.minimum(torch.arange(B) // 2 % 4, given.lengths - 1)
    policy = BeliefPolicy(model, 4, likelihood="exact", seed=0)
    batch = rehearse(model, Exploring(policy, 0.5), contexts, Restarts(given, steps), seed=1)
    episodes = batch.episodes
    assert bool((episodes.lengths > steps).all())
    assert torch.equal(batch.alive, episodes.alive & (torch.arange(6) >= steps[:, None]))
    assert bool((episodes.rewards[~episodes.alive] == 0).all())
    s, a, after = episodes.states[:, :-1], episodes.actions, episodes.states[:, 1:]
    c = contexts[:, None].expand_as(a)
    pays = model.tensors["reward"][c, a, s, after]
    torch.testing.assert_close(episodes.rewards[episodes.alive].double(), pays[episodes.alive])
    chance = model.tensors["end"][c, a, after]
    last = torch.arange(6) == episodes.lengths[:, None] - 1
    mine = batch.alive & (torch.arange(6) < 5)  # the last step may be the horizon's
    assert_mean((last.double() - chance)[mine], 0.0, "ends")
    gamma = 0.8 ** torch.arange(6).double()
    torch.testing.assert_close(batch.rewards(False), episodes.rewards.double() * gamma)


def test_who_sees_everything_expects_what_is_paid_on_arrival():
    """The mean over 4,000 of them, and that each is itself a mean: 4.5 standard errors."""
    model, B = Mortal(0, N=3), 4000
    moves, pays = model.tables["transition"], model.tables["reward"]
    means = (moves * pays).sum(-1)  # [C, A, N]
    variances = (moves * pays**2).sum(-1) - means**2
    for c, s in itertools.product(range(2), range(3)):
        with inference_scope(model, 0):
            state, context = torch.full((B,), s), torch.full((B,), c)
            found = Sight(Generative(model), state, context, context * 0).expected_rewards[:, 0].double()
        for a in range(2):
            assert_mean(found[:, a], float(means[c, a, s]), "what is expected")
            squares = (found[:, a] - means[c, a, s]).square()
            assert_mean(squares, float(variances[c, a, s]) / ARRIVALS, "its variance")


def values_by_hand(model, belief, time):
    """The worth at the start of each action `[A]` in a joint belief, if all are equally often taken later."""
    moves, pays = model.tables["transition"], model.tables["reward"]
    on = 1 - model.tables["end"]  # [C, A, S']
    later = np.zeros(moves.shape[::2][:2])  # [C, N]
    for t in range(model.horizon - 1, time - 1, -1):
        pay = model.discount**t * np.einsum("cast,cast->cas", moves, pays)
        Q = pay + np.einsum("cast,cat,ct->cas", moves, on, later)
        later = Q.mean(1)
    return np.einsum("cs,cas->a", belief, Q)


@pytest.mark.slow
def test_looking_ahead_stops_at_the_end():
    """Means of 2,000 simulations of each action, against a recursion: 4.5 standard errors."""
    model = Mortal(2, C=3, N=3, A=3, horizon=4)
    solution = indifferent(model)
    searching = Searching(solution, 64)
    episodes, B = simulate(model, solution.policy, 12, seed=0), 12
    prior = model.prior().double().expand(B, -1)
    series = followed(ObservableOperator(), model, prior, episodes)
    compared = 0
    for t in (0, 1, 3):
        going = (episodes.lengths > t).nonzero()[:, 0]
        known = series[t].rows(going)
        with inference_scope(model, 3):
            actions = torch.arange(3).expand(len(going), 3)
            values = _Simulator(searching, t).values(known, actions, 2000)  # [B, 3, M]
        for i in range(len(going)):
            joint = known.log_posterior[i].exp()[:, None] * known.probabilities[:, i]
            truth = values_by_hand(model, joint.numpy(), t)
            for a in range(3):
                assert_mean(values[i, a], float(truth[a]), f"action {a} at {t}")
                compared += 1
    assert compared > 50


@pytest.mark.slow
def test_who_looks_ahead_asks_the_critic_only_where_it_goes_on():
    """A critic that always says 5, after one step: 4.5 standard errors."""
    model = Mortal(2, C=3, N=3, A=3, horizon=4)
    settings = {"objective": {"": "Information"}}
    solution = SimpleNamespace(**{**vars(indifferent(model)), "settings": settings})
    with torch.no_grad():
        solution.policy.critic.value.weight.zero_()
        solution.policy.critic.value.bias.fill_(5.0)
    joint, on = model.prior().double().numpy()[:, None] * model.tables["initial"], 1 - model.tables["end"]
    moves, pays = model.tables["transition"], model.tables["reward"]
    truth = np.einsum("cs,cast,cast->a", joint, moves, pays + 5.0 * on[:, :, None])
    with inference_scope(model, 3):
        known = Knowledge.first(ObservableOperator(), model, model.prior()[None])
        looking = _Simulator(Searching(solution, 64, depth=1, temperature=0.0), 0)
        values = looking.values(known, torch.arange(3)[None], 20_000)[0]
    for a in range(3):
        # Rewards are those that the filter expects, so that only the end is left to chance.
        assert_mean(values[a], float(truth[a]), f"action {a}")
