"""What is known, step by step, against the same filter over whole batches, and against exact filters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter, as_backend, inference_scope
from cpomdp_ppl.inference.knowledge import Knowledge
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.policy import Percept
from cpomdp_ppl.state import map_state
from tests.conftest import assert_mean
from tests.programs import EyesOpen, Needle
from tests.solvers.machines import Awake, Machine
from tests.solvers.truth import tables

CLOSE = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}


def percept_at(episodes, t, rows=None):
    """What was seen at time t, by some of the episodes; at 0, before the first action."""
    rows = slice(None) if rows is None else rows
    if t == 0:
        values, flags = episodes.initial_observations, episodes.initially_observed
        return Percept(None, {s: v[rows] for s, v in values.items()}, {s: f[rows] for s, f in flags.items()})
    seen = {site: value[rows, t - 1] for site, value in episodes.observations.items()}
    flags = {site: flag[rows, t - 1] for site, flag in episodes.observed.items()}
    return Percept(episodes.actions[rows, t - 1], seen, flags)


def first(backend, model, prior, episodes, **settings):
    """What is known before the first action."""
    known = Knowledge.first(backend, model, prior, **settings)
    return known.after(percept_at(episodes, 0)) if model.initial_observation else known


def followed(backend, model, prior, episodes, seed=0, **settings):
    """What is known at times 0 … T, all of it looked at as soon as it is known."""
    with inference_scope(model, seed):
        series = [first(backend, model, prior, episodes, **settings)]
        for t in range(1, episodes.horizon + 1):
            series.append(series[-1].after(percept_at(episodes, t)))
        for known in series:
            _ = known.moments, known.expected_rewards
    return series


def uneven(C, B):
    """A prior of its own for each episode, float64 `[B, C]`."""
    return (torch.arange(B * C).reshape(B, C).double().sin()).softmax(1)


SERVED = [
    *((LightDark, name) for name in ("ekf", "ukf", "grid")),
    *((EyesOpen, name) for name in ("ekf", "ukf", "grid")),  # sees something before it acts
    *((Beacons, name) for name in ("ekf", "ukf")),  # a dict of a vector and a number
    *((make, "exact") for make in (LineGrid, ContextualTiger)),
    *((lambda kind=kind: kind(0, C=3, A=2, N=3, horizon=4), "exact") for kind in (Machine, Awake)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), SERVED)
def test_step_by_step_it_is_what_the_batch_says(make, name):
    model, backend = make(), as_backend(name)
    B, C = 6, model.num_contexts
    episodes = simulate(model, RandomPolicy(model.num_actions), B, contexts="balanced", seed=1)
    prior = uneven(C, B)
    batch = backend.run(model, episodes)
    expected = batch.log_posterior(prior)
    for t, known in enumerate(followed(backend, model, prior, episodes)):
        torch.testing.assert_close(known.log_posterior, expected[:, t], **CLOSE)
        assert known.time.tolist() == [t] * B
        for ours, theirs in zip(known.moments, (batch.state_mean, batch.state_variance), strict=True):
            map_state(
                lambda x, y, t=t: torch.testing.assert_close(x.movedim(1, 0), y[:, t], **CLOSE), ours, theirs
            )
        assert known.expected_rewards.shape == (B, C, model.num_actions)
        if t < model.horizon:
            taken = episodes.actions[:, t, None, None].expand(-1, C, 1)
            found = known.expected_rewards.gather(2, taken).squeeze(2)
            torch.testing.assert_close(found, batch.expected_reward[:, t], **CLOSE)
    assert not bool(known.lost.any())
    assert torch.equal(known.contexts, torch.arange(C).expand(B, C))
    torch.testing.assert_close(known.track.log_likelihood.T, batch.log_likelihood, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), SERVED[:8])
def test_actions_that_were_not_taken_have_expected_rewards_too(make, name):
    """Had the agent stopped after doing something else, the batch would have said the same."""
    model, backend, t = make(), as_backend(name), 2
    episodes = simulate(model, RandomPolicy(model.num_actions), 4, contexts="balanced", seed=1)
    found = followed(backend, model, uneven(model.num_contexts, 4), episodes)[t].expected_rewards
    for a in range(model.num_actions):
        actions, flags = episodes.actions.clone(), {s: f.clone() for s, f in episodes.observed.items()}
        actions[:, t] = a
        for flag in flags.values():
            flag[:, t] = False
        other = replace(episodes, actions=actions, observed=flags, lengths=torch.full((4,), t + 1))
        expected = backend.run(model, other, moments=False).expected_reward[:, t]
        torch.testing.assert_close(found[..., a], expected, **CLOSE)


@pytest.mark.parametrize("make", [LineGrid, ContextualTiger])
def test_expected_rewards_of_finite_models_are_those_of_their_tables(make):
    model, t = make(), 3
    episodes = simulate(model, RandomPolicy(3), 8, contexts="balanced", seed=2)
    prior = uneven(model.num_contexts, 8)
    reward = torch.as_tensor(tables(model).reward)  # [C, A, S]
    known = followed(ObservableOperator(), model, prior, episodes)[t]
    assert known.probabilities.shape == (model.num_contexts, 8, model.states)
    torch.testing.assert_close(
        known.expected_rewards, torch.einsum("cbs,cas->bca", known.probabilities, reward)
    )


def test_states_that_are_not_finitely_many_have_no_probabilities():
    episodes = simulate(LightDark(2), RandomPolicy(3), 2, seed=0)
    assert followed(as_backend("ekf"), LightDark(2), uneven(2, 2), episodes)[1].probabilities is None


@pytest.mark.slow
@pytest.mark.parametrize("make", [LightDark, EyesOpen, Beacons, ContextualTiger])
def test_particles_under_one_seed_are_those_of_the_batch(make):
    """Programs run as they are draw the same numbers, whoever asks."""
    model, backend = make(), ParticleFilter(64, engine="eager", chunk=100)
    episodes = simulate(model, RandomPolicy(model.num_actions), 5, contexts="balanced", seed=1)
    prior = uneven(model.num_contexts, 5)
    batch = backend.run(model, episodes, seed=7)
    series = followed(backend, model, prior, episodes, seed=7)
    log_posterior = torch.stack([known.log_posterior for known in series], 1)
    torch.testing.assert_close(log_posterior, batch.log_posterior(prior), **CLOSE)
    assert series[0].ess.tolist() == [[64.0] * model.num_contexts] * 5 or model.initial_observation
    ess = torch.stack([known.ess for known in series[1:]], 1)
    torch.testing.assert_close(ess, batch.ess, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "exact", "policy"),
    [
        (LightDark, "grid", RandomPolicy(3)),
        (ContextualTiger, "exact", lambda history: torch.zeros(history.num_episodes, dtype=torch.long)),
        (EyesOpen, "ekf", RandomPolicy(2)),
        (lambda: Machine(1, C=3, A=2, N=3, K=3, horizon=4), "exact", RandomPolicy(2)),
    ],
)
def test_likelihoods_by_particles_are_right_on_average(make, exact, policy):
    """The mean of 600 estimates `p̂ / p`, in each context, is 1 within 4.5 standard errors.

    Each copy of an episode has particles of its own. EyesOpen is linear and Gaussian.
    """
    model, copies = make(), 600
    episodes = simulate(model, policy, 1, contexts=model.num_contexts - 1, seed=3)
    truth = as_backend(exact).run(model, episodes, moments=False).log_likelihood[0]  # [C]
    many = episodes[torch.zeros(copies, dtype=torch.long)]
    prior = model.prior().expand(copies, -1)
    known = followed(ParticleFilter(128), model, prior, many, seed=5)[-1]
    ratio = (known.track.log_likelihood.T - truth).exp()  # [copies, C]
    assert bool((ratio.std(0) < 2.0).all())  # or the error of the mean would not be known
    assert bool((ratio.std(0) > 1e-3).all())  # or there would be nothing to test
    for context in range(model.num_contexts):
        assert_mean(ratio[:, context], 1.0, f"p̂ / p in context {context}")


@pytest.mark.slow
def test_moments_and_rewards_by_particles_are_right():
    """Against a grid, within 4.5 standard errors of the mean over 400 copies, and a bias of order 1 / N."""
    model, copies, N, t = LightDark(), 400, 512, 8
    episodes = simulate(model, RandomPolicy(3), 1, contexts=0, seed=4)
    many = episodes[torch.zeros(copies, dtype=torch.long)]
    prior = model.prior().expand(copies, -1)
    truth = followed(as_backend("grid"), model, model.prior()[None], episodes)[t]
    known = followed(ParticleFilter(N), model, prior, many, seed=6)[t]
    pairs = [
        (known.moments[0][0], truth.moments[0][0], 1.0),
        (known.moments[1][0], truth.moments[1][0], float(truth.moments[1][0].mean())),
        *((known.expected_rewards[:, 0, a], truth.expected_rewards[:, 0, a], 1.0) for a in range(3)),
    ]
    for ours, theirs, unit in pairs:
        error = float(ours.std()) / copies**0.5
        assert abs(float(ours.mean() - theirs.mean())) < 4.5 * error + 4 * unit / N


def test_some_of_the_episodes_go_on_as_among_all():
    model, backend = ContextualTiger(), ObservableOperator()
    episodes = simulate(model, RandomPolicy(3), 6, contexts="balanced", seed=1)
    prior = uneven(3, 6)
    whole = followed(backend, model, prior, episodes)
    rows = torch.tensor([4, 1, 1])
    with inference_scope(model, 0):
        some = whole[3].rows(rows)
        assert some.time.tolist() == [3] * 3
        for t in range(4, 7):
            some = some.after(percept_at(episodes, t, rows))
            torch.testing.assert_close(some.log_posterior, whole[t].log_posterior[rows])
            torch.testing.assert_close(some.expected_rewards, whole[t].expected_rewards[rows])
            torch.testing.assert_close(some.probabilities, whole[t].probabilities[:, rows])


def impossible(episodes, b, t):
    """The same, but what episode b saw at time t is neither 0 nor 1."""
    side = episodes.observations["side"].clone()
    side[b, t - 1] = 0.5
    return replace(episodes, observations={"side": side})


def sensing(B):
    return simulate(LineGrid(), lambda history: torch.full((B,), 2), B, contexts="balanced", seed=0)


def test_what_no_context_can_have_produced_is_noted_and_the_posterior_kept():
    episodes = impossible(sensing(3), 1, 4)
    prior = uneven(2, 3)
    series = followed(ObservableOperator(), LineGrid(), prior, episodes)
    whole = followed(ObservableOperator(), LineGrid(), prior, sensing(3))
    assert [known.lost.tolist() for known in series[:4]] == [[False] * 3] * 4
    assert [known.lost.tolist() for known in series[4:]] == [[False, True, False]] * 7
    for t, known in enumerate(series):
        expected = whole[t].log_posterior.clone()
        expected[1] = whole[min(t, 3)].log_posterior[1]
        torch.testing.assert_close(known.log_posterior, expected)
        assert bool(known.log_posterior.isfinite().all())
        assert bool(known.expected_rewards.isfinite().all())
    with inference_scope(LineGrid(), 0):
        assert series[5].rows(torch.tensor([1, 2])).lost.tolist() == [True, False]


def test_a_prior_that_is_too_sure_loses_an_episode_too():
    """Machine's contexts cannot lead where others do: what is possible in one alone is lost on another."""
    model, backend = Machine(9, C=2, A=2, N=3, K=3, horizon=4), ObservableOperator()
    episodes = simulate(model, RandomPolicy(2), 200, contexts=1, seed=0)
    increments = backend.run(model, episodes, moments=False).increments
    where = (increments[..., 0].cumsum(1) == -torch.inf).double()  # [B, T]
    b = int(where.any(1).nonzero()[0])
    when = int(where[b].argmax()) + 1
    sure = torch.tensor([[1.0, 0.0]]).double()
    series = followed(backend, model, sure, episodes[b])
    assert [bool(known.lost) for known in series] == [t >= when for t in range(5)]
    open_ = followed(backend, model, torch.tensor([[0.5, 0.5]]).double(), episodes[b])
    assert not bool(open_[-1].lost)
    assert open_[-1].log_posterior.exp().tolist() == [[0.0, 1.0]]


def test_a_persistent_one_does_not_note_but_raises():
    with pytest.raises(DegenerateWeightsError, match="time 4 of episode 1"):
        followed(
            ObservableOperator(), LineGrid(), uneven(2, 3), impossible(sensing(3), 1, 4), persistent=True
        )


def test_persistent_particles_begin_again():
    """Four particles lose some of forty episodes; with more of them, none is lost."""
    model, backend = Needle(), ParticleFilter(4)
    episodes = simulate(model, RandomPolicy(2), 40, seed=0)
    prior = model.prior().expand(40, -1)
    noted = followed(backend, model, prior, episodes)[-1]
    assert 0 < int(noted.lost.sum()) < 40
    assert bool(noted.log_posterior.isfinite().any(1).all())
    going_on = followed(backend, model, prior, episodes, persistent=True)[-1]
    assert not bool(going_on.lost.any())
    assert going_on.track.belief.weights.shape == (2, 40, 4)
    assert bool(going_on.log_posterior.exp().sum(1).isclose(torch.ones(40, dtype=torch.float64)).all())


def test_nothing_that_was_known_changes():
    model, backend = LineGrid(), ObservableOperator()
    episodes = sensing(2)
    with inference_scope(model, 0):
        known = Knowledge.first(backend, model, uneven(2, 2))
        before = known.track.belief.probabilities.clone(), known.track.log_likelihood.clone()
        for t in (1, 2):
            known.after(percept_at(episodes, t)).rows(torch.tensor([1, 0]))
        assert torch.equal(known.track.belief.probabilities, before[0])
        assert torch.equal(known.track.log_likelihood, before[1])
        assert known.time.tolist() == [0, 0]
