"""The backend to trust with a model, by what simulated episodes tell of the errors of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError, UnsupportedModelError, require_model
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.finite import ObservableOperator
from cpomdp_ppl.inference.gaussian import Reparameterised
from cpomdp_ppl.inference.grid import GridFilter
from cpomdp_ppl.inference.grid_checks import NATS_BEHIND
from cpomdp_ppl.inference.observed import log_density_of_seen
from cpomdp_ppl.inference.particle_filter import ParticleFilter
from cpomdp_ppl.inference.scan import observed_in_time
from cpomdp_ppl.inference.unscented import UnscentedKalmanFilter
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.inference.kalman import KalmanRecursion
    from cpomdp_ppl.model import CPOMDP

REFUSALS = (UnsupportedModelError, DensityError, DegenerateWeightsError)
"""Errors by which a backend refuses a model or its episodes."""

NUM_TRIALS = 16
"""About how many episodes are simulated for a trial."""

ROUNDING_ERROR = 1e-2
"""Nats by which an extended and an unscented filter may differ, in single precision, on a linear model."""

STRAIGHTNESS = 1e-4
"""How far a function may be from a straight line, as a share of its change, to count as one."""

MOST_CHECKED = 256
"""How many of the episodes that a policy has played are checked."""

GRID_SIZES = (1200, 2400)
"""Points of the grids that are tried: one that needs more would take too long."""

FEWEST_PARTICLES, MOST_PARTICLES = 1024, 4096
"""Numbers of particles to choose from."""

SMALL_POSTERIOR_ERROR = 0.02
"""Mean standard error of a context's probability that is small enough."""


def random_trials(model: CPOMDP) -> Episodes:
    """Simulate a few episodes in every context under random actions."""
    return _simulated(model, RandomPolicy(model.num_actions))


def constant_trials(model: CPOMDP, action: int) -> Episodes:
    """Simulate a few episodes in every context under a single action."""
    return _simulated(model, lambda history: torch.full((history.num_episodes,), action, device=model.device))


def _simulated(model: CPOMDP, policy: Any) -> Episodes:
    number = model.num_contexts * max(2, -(-NUM_TRIALS // model.num_contexts))
    return simulate(model, policy, number, contexts="balanced", seed=0)


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
    extended = result_or_none(ExtendedKalmanFilter(), model, episodes)
    unscented = result_or_none(UnscentedKalmanFilter(), model, episodes)
    if extended is None or unscented is None:
        return False
    log_likelihood = extended.log_likelihood
    likely = log_likelihood >= log_likelihood.amax(1, keepdim=True) - NATS_BEHIND  # [B, C]
    differences = (extended.increments - unscented.increments).abs().sum(1)
    differences += (extended.initial_increment - unscented.initial_increment).abs()
    if not bool((differences[likely] <= ROUNDING_ERROR).all()):
        return False
    # Both may be wrong in the same way: neither sees how noise depends on the state.
    with inference_scope(model, 0):
        recursion = ExtendedKalmanFilter().recursion(model)
        if not recursion.in_double:  # two filters may lose the same digits
            return False
        try:
            return _starts_straight(recursion) and _goes_straight(recursion, episodes)
        except REFUSALS:  # a Gaussian nuisance, say, over which densities cannot be summed
            return False


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
    x = recursion.coordinates.vector(episodes.states, shape)  # [B, T + 1, D]
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


def reference_backend(model: CPOMDP) -> Backend:
    """The most exact backend, as far as simulated episodes tell, in reasonable time.

    Exact operators serve finite models. A Kalman filter is exact where initial state, motion and sensors are
    linear with Gaussian noise of constant scale; that is checked at simulated states, where the extended and
    the unscented filter have to agree. A grid estimates its error, and is taken for states of one number.
    All other models are left to 1,024 particles, or up to 4,096 if those are unsure of the context's
    probability. The simulated episodes have random actions, and every action on its own. A policy may still
    get to other places: `evaluate` looks at those, too, and goes on to the next best backend if it has to.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> reference_backend(LineGrid()).name
        'exact'
    """
    require_model(model)
    episodes = random_trials(model)
    if model.states is not None and result_or_none(ObservableOperator(), model, episodes) is not None:
        return ObservableOperator()
    if is_linear_gaussian(model, episodes) and all(
        is_linear_gaussian(model, constant_trials(model, action)) for action in range(model.num_actions)
    ):
        return ExtendedKalmanFilter()
    return _without_kalman(model, episodes)


def suited(backend: Backend, model: CPOMDP, episodes: Episodes) -> Backend:
    """The reference backend, or the next best if simulated episodes get to where it is not exact."""
    if isinstance(backend, ExtendedKalmanFilter) and not is_linear_gaussian(
        model, evenly_spaced(episodes, MOST_CHECKED)
    ):
        return _without_kalman(model, random_trials(model))
    return backend


def enough_particles(model: CPOMDP, episodes: Episodes) -> ParticleFilter:
    """A filter with so many particles that probabilities of contexts have small errors, within reason."""
    found = result_or_none(
        ParticleFilter(num_particles=FEWEST_PARTICLES), model, evenly_spaced(episodes, NUM_TRIALS)
    )
    if found is None or found.standard_error is None:
        return ParticleFilter(num_particles=MOST_PARTICLES)
    unsure = float(found.posterior_error().mean()) / SMALL_POSTERIOR_ERROR
    number = FEWEST_PARTICLES
    while number < MOST_PARTICLES and unsure > (number / FEWEST_PARTICLES) ** 0.5:
        number *= 2
    return ParticleFilter(num_particles=number)


def _without_kalman(model: CPOMDP, episodes: Episodes) -> Backend:
    """A grid, if it is quick enough, or particles."""
    if sum(leaf.shape.numel() for _, leaf in leaves(signature(model).state)) == 1:
        for num_points in GRID_SIZES:
            if result_or_none(GridFilter(num_points), model, episodes) is not None:
                return GridFilter()  # which may take more points, should other episodes need them
    return enough_particles(model, episodes)
