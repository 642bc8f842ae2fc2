"""Episodes with the filter inside the policy, against the same filter over what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter, as_backend, inference_scope
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.state import map_state
from solvers.cids.belief_policy import Inputs
from solvers.cids.experience import Beginnings, Experience
from solvers.cids.objective import Information
from solvers.cids.playing import Lead, Played, play_out
from solvers.cids.policy import Exploring
from tests.inference.test_knowledge import CLOSE, followed, uneven
from tests.programs import Dice, EyesOpen, Needle, Plates
from tests.solvers.cids.test_belief_policy import opinionated
from tests.solvers.machines import Awake, Machine

SERVED = [
    *((LineGrid, "exact"), (ContextualTiger, "exact"), (LightDark, "ekf"), (Beacons, "ekf")),
    (EyesOpen, "ekf"),  # sees something before it acts
    (lambda: Awake(1, C=3, A=2, N=3, K=3, horizon=4), "exact"),
]


def explorer(model, likelihood):
    """A policy that is not indifferent, repeats itself, and leaves some to chance."""
    return Exploring(opinionated(model, likelihood), 0.1, 0.5)


def led(model, B):
    """Every third episode is led by the last action, for as many steps as its number has thirds."""
    numbers = torch.arange(B)
    steps = torch.where(numbers % 3 == 0, (numbers // 3) % model.horizon, 0)
    return Lead(torch.full((B, model.horizon), model.num_actions - 1), steps)


def playing(model, acting, B, lead=None, seed=3):
    """Episodes of all contexts, each with a prior of its own."""
    contexts = torch.arange(B) % model.num_contexts
    return play_out(model, acting, contexts, uneven(model.num_contexts, B), lead, seed)


@pytest.mark.slow
@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize(("make", "name"), SERVED)
def test_it_is_what_a_filter_makes_of_the_episodes(make, name, leads):
    model, B = make(), 12
    acting = explorer(model, name)
    played = playing(model, acting, B, led(model, B) if leads else None)
    T, prior = model.horizon, uneven(model.num_contexts, B)
    again = as_backend(name).run(model, played.episodes, moments=False)
    torch.testing.assert_close(played.filtering.initial_increment, again.initial_increment, **CLOSE)
    # What follows on what is impossible already is of no account.
    so_far = again.log_posterior(prior)[:, :-1].isfinite()
    ours, theirs = (torch.where(so_far, each.increments, 0.0) for each in (played.filtering, again))
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(played.filtering.log_likelihood, again.log_likelihood, **CLOSE)
    torch.testing.assert_close(played.filtering.expected_reward, again.expected_reward, **CLOSE)
    torch.testing.assert_close(played.filtering.log_posterior(prior), again.log_posterior(prior), **CLOSE)
    assert played.episodes.lengths.tolist() == [T] * B
    assert played.episodes.contexts.tolist() == [b % model.num_contexts for b in range(B)]
    assert len(played.episodes.actions.unique()) > 1
    assert not bool(played.lost.any())

    # What the policy read is what is known along these episodes.
    series = followed(as_backend(name), model, prior, played.episodes)[:T]
    with inference_scope(model, 0):
        expected = Inputs.stack([acting.policy.encoding(known) for known in series])
    for part in Inputs.__annotations__:
        torch.testing.assert_close(
            getattr(played.inputs, part), getattr(expected, part), rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), SERVED)
def test_rewards_are_those_of_the_model(make, name):
    """Told the true states, the model pays what was recorded."""
    model = make()
    episodes = playing(model, explorer(model, name), 6).episodes
    for t in range(model.horizon):
        state = map_state(lambda leaf, t=t: leaf[:, t], episodes.states)
        expected = model.reward(state, episodes.actions[:, t], episodes.contexts)
        torch.testing.assert_close(episodes.rewards[:, t], expected.expand(6).to(episodes.rewards))
    torch.testing.assert_close(episodes.returns, episodes.rewards.sum(1))


def test_who_is_led_does_as_told_and_then_as_it_likes():
    model, B = LineGrid(), 30
    lead = led(model, B)
    actions = playing(model, explorer(model, "exact"), B, lead).episodes.actions
    given = torch.arange(model.horizon) < lead.steps[:, None]
    assert bool((actions[given] == 2).all())
    assert len(actions[~given].unique()) == 3
    some = lead.rows(slice(3, 6))
    assert some.steps.tolist() == lead.steps[3:6].tolist()


@dataclass(frozen=True)
class ByBelief:
    """A policy of the joint belief over contexts and states, written so that numpy can say the same."""

    backend: ObservableOperator
    weights: torch.Tensor  # [C N, A]

    def encoding(self, known):
        p = known.log_posterior.exp()
        return Inputs(p, p, known.contexts, known.probabilities.movedim(1, 0), known.time[:, None].double())

    def decide(self, inputs):
        joint = (inputs.posterior[..., None] * inputs.by_context).flatten(-2)
        return joint @ self.weights + inputs.overall * torch.tensor([0.3, -0.3])


CHANCE, PERSISTENCE = 0.2, 0.7


def chances_of_actions(weights, belief, time, previous):
    """What `Exploring` makes of the logits above, of a joint belief `[C, N]`."""
    logits = belief.flatten() @ weights + time * np.array([0.3, -0.3])
    if previous is not None:
        logits[previous] += PERSISTENCE
    p = np.exp(logits) / np.exp(logits).sum()
    return (1 - CHANCE) * p + CHANCE / 2


def all_that_can_happen(model, weights, lead, c, s, belief, time=0, previous=None):
    """Every way to go on from a state, with its probability: `((a, s', o), …)`, o = -1 for nothing."""
    if time == model.horizon:
        yield (), 1.0
        return
    p_action = chances_of_actions(weights, belief, time, previous)
    if time < len(lead):
        p_action = np.eye(2)[lead[time]]
    for a in range(2):
        moved = np.einsum("cs,cst->ct", belief, model.tables["transition"][:, a])
        seen = model.chances(a)  # [C, N, K], or [C, N, 1] for nothing
        for o in range(seen.shape[2]):
            joint = moved * seen[:, :, o]
            if joint.sum() == 0 or p_action[a] == 0:
                continue
            for s2 in range(model.states):
                p = p_action[a] * model.tables["transition"][c, a, s, s2] * seen[c, s2, o]
                if p > 0:
                    name = o if seen.shape[2] > 1 else -1
                    after = all_that_can_happen(model, weights, lead, c, s2, joint / joint.sum(), time + 1, a)
                    for rest, q in after:
                        yield ((a, s2, name), *rest), p * q


@pytest.mark.slow
def test_episodes_have_the_right_joint_law_led_or_not():
    """Actions, states and observations: every way to go within 4.5 standard deviations.

    Some are led for no step, one, or two; contexts and priors differ, too.
    """
    model, n = Machine(1, C=2, A=2, N=2, K=2, horizon=3), 24_000
    weights = np.random.default_rng(0).normal(size=(4, 2))
    acting = Exploring(ByBelief(ObservableOperator(), torch.as_tensor(weights)), CHANCE, PERSISTENCE)
    kinds = [((), 0, 0.5), ((1,), 0, 0.9), ((0, 1), 1, 0.3)]  # lead, context, prior of context 0
    which = torch.arange(n) % 3
    actions = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0]])[which]
    contexts = torch.tensor([0, 0, 1])[which]
    prior = torch.tensor([[p, 1 - p] for _, _, p in kinds], dtype=torch.float64)[which]
    episodes = play_out(model, acting, contexts, prior, Lead(actions, which), seed=9).episodes
    seen = torch.where(episodes.observed["o"], episodes.observations["o"], -1)
    found = torch.stack([episodes.actions, episodes.states[:, 1:], seen], -1)  # [n, T, 3]
    for k, (lead, c, p) in enumerate(kinds):
        belief = np.array([p, 1 - p])[:, None] * model.tables["initial"]
        ways = {}
        for s, start in enumerate(model.tables["initial"][c]):
            for way, q in all_that_can_happen(model, weights, lead, c, s, belief) if start else ():
                ways[s, way] = start * q
        assert sum(ways.values()) == pytest.approx(1.0)
        assert len(ways) > 8
        mine = which == k
        counts = dict.fromkeys(ways, 0)
        for s, way in zip(episodes.states[mine, 0].tolist(), found[mine].tolist(), strict=True):
            counts[s, tuple(tuple(step) for step in way)] += 1  # nothing else may happen
        N = int(mine.sum())
        common = [way for way, q in ways.items() if q * N >= 10]
        rare = [way for way in ways if way not in common]
        for group in ([way] for way in common), [rare]:
            for some in group:
                q = sum(ways[way] for way in some)
                deviation = abs(sum(counts[way] for way in some) - N * q)
                assert deviation <= 4.5 * (N * q * (1 - q)) ** 0.5 + 1


@pytest.mark.slow
def test_beliefs_by_particles_are_close_to_exact_ones():
    """On average over 60 episodes, their last posteriors are 0.05 apart or less, with 1,000 particles."""
    model, B = LightDark(), 60
    played = playing(model, explorer(model, ParticleFilter(1000)), B)
    exact = as_backend("grid").run(model, played.episodes, moments=False)
    ours = played.filtering.posterior(uneven(2, B))
    theirs = exact.posterior(uneven(2, B))
    assert float((ours - theirs)[:, -1].abs().mean()) < 0.05
    assert float((played.filtering.expected_reward - exact.expected_reward).abs().mean()) < 0.05
    assert played.filtering.ess.shape == (B, model.horizon, 2)
    assert bool((played.filtering.ess >= 1 - 1e-5).all())
    assert bool((played.filtering.ess <= 1000 + 1e-2).all())


@pytest.mark.slow
@pytest.mark.parametrize("make", [Plates, Dice])
def test_plates_indices_and_tables_are_played_too(make):
    model = make()
    found = playing(model, explorer(model, "smc"), 5).episodes
    expected = simulate(model, RandomPolicy(model.num_actions), 5, seed=0)
    for name in ("observations", "observed", "initial_observations", "initially_observed"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        for site in ours or ():
            assert (ours[site].shape, ours[site].dtype) == (theirs[site].shape, theirs[site].dtype)
    assert found.states.shape == expected.states.shape


def test_the_seed_alone_decides():
    model = LineGrid()
    acting = explorer(model, "exact")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (playing(model, acting, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.episodes.actions, same.episodes.actions)
    assert torch.equal(one.filtering.increments, same.filtering.increments)
    assert not torch.equal(one.episodes.actions, other.episodes.actions)


def test_no_gradient_is_kept():
    played = playing(LineGrid(), explorer(LineGrid(), "exact"), 4)
    assert not played.inputs.by_context.requires_grad
    assert not played.filtering.increments.requires_grad


def test_what_was_played_is_put_together_in_order():
    acting = explorer(ContextualTiger(), "exact")
    parts = [playing(ContextualTiger(), acting, B, seed=B) for B in (2, 3)]
    whole = Played.joined(parts)
    assert len(whole.episodes) == 5
    for part in ("odds", "posterior", "by_context", "overall"):
        each = torch.cat([getattr(played.inputs, part) for played in parts])
        assert torch.equal(getattr(whole.inputs, part), each)
    increments = torch.cat([played.filtering.increments for played in parts])
    assert torch.equal(whole.filtering.increments, increments)
    assert whole.lost.tolist() == [False] * 5


# ------------------------------------------------------------------------------- batches of such episodes


def beginnings(model, B, lead=None, told=()):
    """All contexts in turn; some of the episodes are told theirs."""
    contexts = torch.arange(B) % model.num_contexts
    prior, tells = uneven(model.num_contexts, B), torch.zeros(B, dtype=torch.bool)
    tells[list(told)] = True
    sure = torch.nn.functional.one_hot(contexts, model.num_contexts).double()
    return Beginnings(contexts, torch.where(tells[:, None], sure, prior), tells, lead)


def lived(model, likelihood, *arguments, acting=None, seed=4):
    """A batch of such episodes."""
    acting = acting or explorer(model, likelihood)
    return Experience(model, acting.policy.backend).live(acting, beginnings(model, *arguments), seed)


def test_steps_that_were_led_do_not_count():
    model, B = LineGrid(), 12
    lead = led(model, B)
    batch = lived(model, "exact", B, lead, [1, 2])
    assert torch.equal(batch.since, lead.steps)
    assert torch.equal(batch.alive, torch.arange(model.horizon) >= lead.steps[:, None])
    assert batch.told.nonzero()[:, 0].tolist() == [1, 2]
    assert batch.own.tolist() == [(int(lead.steps[b]) == 0) and b not in (1, 2) for b in range(B)]
    assert batch.previous[:, 0].tolist() == [-1] * B
    assert torch.equal(batch.previous[:, 1:], batch.episodes.actions[:, :-1])
    assert bool((batch.log_posterior[[1, 2]].exp().amax(2) == 1).all())


@pytest.mark.parametrize("leads", [False, True])
def test_information_telescopes(leads):
    """What the policy's steps tell is what is known at the end, less what was known when it took over."""
    model, B = LineGrid(), 24
    batch = lived(model, "exact", B, led(model, B) if leads else None)
    told = (Information(mixed=1e-12).information(batch) * batch.alive).sum(1)
    prior = uneven(2, B)
    posterior = ObservableOperator().run(model, batch.episodes).log_posterior(prior)  # [B, T + 1, C]
    true = posterior[torch.arange(B), :, batch.contexts]  # [B, T + 1]
    torch.testing.assert_close(told, true[:, -1] - true[torch.arange(B), batch.since])
    assert float(told.abs().max()) > 0.1


def test_what_is_expected_is_paid_to_each_step():
    """Belief rewards, from the posterior and the tables of the model, by the batch filter."""
    model, B = ContextualTiger(), 9
    batch = lived(model, "exact", B)
    again = ObservableOperator().run(model, batch.episodes, moments=False)
    expected = (again.posterior(uneven(3, B))[:, :-1] * again.expected_reward).sum(2)
    torch.testing.assert_close(batch.rewards(belief=True), expected)
    assert torch.equal(batch.rewards(belief=False), batch.episodes.rewards.double())


@pytest.mark.parametrize(("told", "share"), [(0.0, 0.0), (0.3, 0.0), (0.2, 0.3), (0.0, 0.5)])
def test_shares_are_told_and_led_and_spread_over_contexts(told, share):
    """To within two episodes of all, and four of each context; nobody is both."""
    B, C = 200, 4
    contexts = torch.arange(B) * C // B  # in order, as they are drawn
    prior = torch.full((B, C), 0.25, dtype=torch.float64)
    leads = torch.arange(7)[:, None].expand(7, 10) % 3, torch.arange(1, 8)
    with isolated(0):
        begun = Beginnings.of(contexts, prior, told, share, leads)
    guided = torch.zeros(B, dtype=torch.bool) if begun.lead is None else begun.lead.steps > 0
    for found, expected in ((begun.told, told), (guided, share)):
        assert abs(int(found.sum()) - expected * B) <= 2
        by_context = torch.stack([found[contexts == c].sum() for c in range(C)])
        assert bool(((by_context - expected * B / C).abs() <= 4).all())
    assert not bool((begun.told & guided).any())
    assert torch.equal(begun.prior[begun.told].argmax(1), contexts[begun.told])
    assert bool((begun.prior[begun.told].amax(1) == 1).all())
    assert torch.equal(begun.prior[~begun.told], prior[~begun.told])
    if begun.lead is not None:
        mine = begun.lead.steps[guided]
        assert torch.equal(begun.lead.actions[guided], leads[0][mine - 1])
        assert len(mine.unique()) == 7
    some = begun.rows(slice(10, 20))
    assert torch.equal(some.prior, begun.prior[10:20])
    assert torch.equal(some.told, begun.told[10:20])


@pytest.mark.slow
def test_episodes_that_the_filter_lost_teach_nothing_and_spoil_nothing():
    """A few particles are often nowhere near what is seen without noise."""
    model = Needle()
    batch = lived(model, ParticleFilter(12), 60)
    lost = ~batch.alive.any(1)
    assert 5 < int(lost.sum()) < 55
    assert bool(batch.alive[~lost].all())
    assert batch.lost.tolist() == lost.tolist()
    assert bool(batch.own.all())  # they are measured
    assert bool(batch.log_posterior.exp().sum(2).isclose(torch.ones((), dtype=torch.float64)).all())
    assert bool(batch.rewards(belief=True).isfinite().all())
    assert bool(Information().information(batch).isfinite().all())


@pytest.mark.slow
def test_a_batch_of_nothing_but_lost_episodes_is_an_error():
    """One episode is such a batch, now and then."""
    model = Needle()
    acting = explorer(model, ParticleFilter(12))
    errors = []
    for seed in range(20):
        try:
            assert bool(lived(model, None, 1, acting=acting, seed=seed).alive.all())
        except DegenerateWeightsError as error:
            errors.append(str(error))
    assert 0 < len(errors) < 20
    assert set(errors) == {"all particles died"}
