"""What simulated episodes tell of the errors of backends: is the model linear, are particles enough."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.actions import probes, random_actions
from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.errors import DegenerateWeightsError, DensityError, UnsupportedModelError
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.gaussian import Reparameterised
from cpomdp_ppl.inference.grid_checks import NATS_BEHIND
from cpomdp_ppl.inference.observed import log_density_of_seen
from cpomdp_ppl.inference.particle_filter import ParticleFilter
from cpomdp_ppl.inference.scan import observed_in_time
from cpomdp_ppl.inference.unscented import UnscentedKalmanFilter
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.inference.kalman import KalmanRecursion
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy

REFUSALS = (UnsupportedModelError, DensityError, DegenerateWeightsError)
"""Errors by which a backend refuses a model or its episodes."""

NUM_TRIALS = 64
"""About how many episodes are simulated for a trial."""

PERSISTENCE = 0.75
"""How often persistent trials repeat an action."""

ROUNDING_ERROR = 1e-2
"""Nats by which an extended and an unscented filter may differ, in single precision, on a linear model."""

STRAIGHTNESS = 1e-4
"""How far a function may be from a straight line, as a share of its change, to count as one."""

MOST_CHECKED = 256
"""How many of the episodes that a policy has played are checked."""

FEWEST_PARTICLES, MOST_PARTICLES = 64, 4096
"""Numbers of particles to choose from, by doubling."""

TRIES = 16
"""Next states that each particle tries out, if the end of an episode leaves none alive."""

FEWEST_EFFECTIVE = 16
"""Particles that have to count, on average over time."""

DOUBT = 1e-3
"""Share of the prior that is mixed into posteriors, so that no true context is ever held impossible."""


def trials(model: CPOMDP) -> Iterator[Episodes]:
    """Simulate a few episodes in every context: random actions, persistent ones, each action alone.

    Of continuous actions, those that stand for all; see `Box.probes`.
    """
    number = model.num_contexts * max(2, -(-NUM_TRIALS // model.num_contexts))

    def persist(history: History) -> Tensor:
        new = random_actions(model, (history.num_episodes,))
        last = history.latest.action
        if last is None:
            return new
        again = torch.rand(len(new), device=model.device) < PERSISTENCE
        return torch.where(on_the_right(again, new), last, new)

    def only(action: Tensor) -> Callable[[History], Tensor]:
        return lambda history: action.expand(history.num_episodes, *action.shape)

    policies: list[Policy | Callable[[History], Decision]] = [RandomPolicy(model.actions), persist]
    policies += map(only, probes(model))
    for policy in policies:
        yield simulate(model, policy, number, contexts="balanced", seed=0)


def evenly_spaced(episodes: Episodes, most: int) -> Episodes:
    """The episodes, or so many of them that are evenly spaced, if there are more."""
    return episodes[torch.linspace(0, len(episodes) - 1, min(len(episodes), most)).long()]


def result_or_none(backend: Backend, model: CPOMDP, episodes: Episodes) -> Filtering | None:
    """Filter episodes by a backend; None if it refuses."""
    try:
        return backend.run(model, episodes, seed=0, moments=False)
    except REFUSALS:
        return None


def is_linear_gaussian(model: CPOMDP, episodes: Episodes) -> bool:
    """Whether Kalman filters are exact, as far as simulated episodes tell."""
    # First what is quick to see, and what both filters may be wrong about in the same way: neither sees how
    # noise depends on the state.
    with inference_scope(model, 0):
        try:
            recursion = ExtendedKalmanFilter().recursion(model)
            if not recursion.in_double:  # two filters may lose the same digits
                return False
            if not (_starts_straight(recursion) and _goes_straight(recursion, episodes)):
                return False
        except REFUSALS:  # a Gaussian nuisance, say, over which densities cannot be summed
            return False
    extended = result_or_none(ExtendedKalmanFilter(), model, episodes)
    unscented = result_or_none(UnscentedKalmanFilter(), model, episodes)
    if extended is None or unscented is None:
        return False
    log_likelihood = extended.log_likelihood
    likely = log_likelihood >= log_likelihood.amax(1, keepdim=True) - NATS_BEHIND  # [B, C]
    differences = (extended.increments - unscented.increments).abs().sum(1)
    differences += (extended.initial_increment - unscented.initial_increment).abs()
    return bool((differences[likely] <= ROUNDING_ERROR).all())


def _starts_straight(recursion: KalmanRecursion) -> bool:
    """Whether the first state is a linear function of noise."""
    C, E = recursion.model.num_contexts, recursion.initial_noise
    noise = _lines(torch.randn(2, C, 1, 64, E, dtype=recursion.coordinates.dtype))
    with Reparameterised("initial", recursion.plate_axes, noise):
        state = recursion.model.initial(recursion.context)
    return _straight(recursion.coordinates.vector(state, noise.shape[:-1]))


def _goes_straight(recursion: KalmanRecursion, episodes: Episodes) -> bool:
    """Whether motion is linear in state and noise, and the log-density of what is seen quadratic."""
    model, C, B = recursion.model, recursion.model.num_contexts, len(episodes)
    shape = torch.Size((B, episodes.horizon + 1))
    x = recursion.coordinates.vector(episodes.lasting_states, shape)  # [B, T + 1, D]
    K, E = x.shape[1], recursion.transition_noise
    for seen in observed_in_time(episodes):
        if not seen.observations:
            continue
        # Lines through any two states of the simulation, and on beyond one of them.
        pairs = x[torch.randint(B, (2, B, K)), torch.randint(K, (2, B, K))]  # [2, B, K, D]
        if seen.action is not None:
            points = _lines(pairs[:, None].expand(2, C, B, K, -1))  # [C, B, 3 K, D]
            noise = _lines(torch.randn(2, C, B, K, E, dtype=x.dtype)) if E else None
            if not _straight(recursion.moved(points, noise, seen.action)):
                return False
        if seen.rows is not None and not len(seen.rows):
            continue
        some = seen if seen.rows is None else seen.select(seen.rows)
        rows = slice(None) if seen.rows is None else seen.rows
        states = recursion.coordinates.state(_parabolas(pairs[:, None].expand(2, C, B, K, -1)[:, :, rows]))
        density = log_density_of_seen(model, recursion.signature, states, recursion.context, some)
        if not _parabolic(density.expand(C, -1, 5 * K)):
            return False
    return True


def _lines(ends: Tensor) -> Tensor:
    """Three points in a row for each pair `[2, C, B, K, D]`, on the particle axis: `[C, B, 3 K, D]`."""
    a, b = ends
    return torch.cat([a, b, 2 * b - a], -2)


def _straight(values: Tensor) -> bool:
    """Whether values `[C, B, 3 K, m]` at points in a row are in a row themselves."""
    a, b, c = values.chunk(3, -2)
    rounding = 1e-6 * values.abs().amax(-2, keepdim=True)
    return bool(
        ((a + c - 2 * b).abs() <= STRAIGHTNESS * (c - a).abs().amax(-2, keepdim=True) + rounding).all()
    )


def _parabolas(ends: Tensor) -> Tensor:
    """Five points in a row for each pair `[2, C, B, K, D]`: `[C, B, 5 K, D]`."""
    a, b = ends
    return torch.cat([a + 0.5 * k * (b - a) for k in range(5)], -2)


def _parabolic(values: Tensor) -> bool:
    """Whether values `[C, B, 5 K]` at points in a row are quadratic: without third differences."""
    third = torch.stack(values.double().chunk(5, -1)).diff(n=3, dim=0).abs().amax(0)  # [C, B, K]
    size = values.double().abs().amax(-1, keepdim=True)
    return bool((third <= STRAIGHTNESS * size + 1e-6).all())


def enough_particles(
    model: CPOMDP, episodes: Iterable[Episodes], widest: float, fewest: int = FEWEST_PARTICLES
) -> ParticleFilter:
    """A filter with brackets no wider than `widest` nats, beyond chance, in each of some trials.

    See `are_enough`. Where `MOST_PARTICLES` are not enough, it has so many. Where an episode ended and no
    particle is there, each tries out several next states.
    """
    backend = ParticleFilter(num_particles=fewest)
    for trial in episodes:
        while not are_enough(backend, model, trial, widest):
            if backend.tries == 1 and model.can_end and _loses_an_episode(backend, model, trial):
                backend = replace(backend, tries=TRIES)
            elif backend.num_particles >= MOST_PARTICLES:
                return backend
            else:
                backend = replace(backend, num_particles=2 * backend.num_particles)
    return backend


def _loses_an_episode(backend: ParticleFilter, model: CPOMDP, episodes: Episodes) -> bool:
    """Whether all particles of an episode, in its own context, have died."""
    assert episodes.contexts is not None
    try:
        found = backend.attempt(model, episodes, seed=0, moments=False)
    except REFUSALS:
        return False
    own = found.log_likelihood.gather(1, episodes.contexts[:, None])
    return bool((own == -torch.inf).any())


def are_enough(backend: ParticleFilter, model: CPOMDP, episodes: Episodes, widest: float) -> bool:
    """Whether a particle filter brackets the information about the context well enough, with particles alive.

    `H(C) − mean H(P)` is biased up by noise in the posterior P, and `H(C) + mean log P(c)` of the true
    context down (see `MutualInformation`). That the true context is random makes the width of the bracket
    noisy, so it is allowed two standard errors. Averaged over contexts as likely as another run of the filter
    finds them, it is about as wide without that noise, and is allowed none; but two runs may be wrong alike.
    """
    assert episodes.contexts is not None
    c = episodes.contexts[:, None]  # [B, 1]
    prior = torch.bincount(c[:, 0], minlength=model.num_contexts).double() / len(c)
    try:
        first, second = (backend.run(model, episodes, seed=seed, moments=False) for seed in (0, 1))
        p, other = first.posterior(prior)[:, -1], second.posterior(prior)[:, -1]  # [B, C]
    except REFUSALS:
        return False
    mixed, negative_entropy = (1 - DOUBT) * p + DOUBT * prior, torch.xlogy(p, p).sum(1)
    by_truth = negative_entropy - mixed.gather(1, c)[:, 0].log()  # [B]
    by_other = negative_entropy - torch.xlogy(other, mixed).sum(1)
    assert first.ess is not None
    effective = first.ess.gather(2, c[:, None].expand(-1, first.ess.shape[1], 1))[episodes.alive].mean()
    chance = 2 * by_truth.std() / len(c) ** 0.5
    narrow = (by_truth.mean() <= widest + chance) & (by_other.mean() <= widest)
    return bool(narrow & (effective >= FEWEST_EFFECTIVE))
