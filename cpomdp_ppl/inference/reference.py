"""The backend to trust with a model, by what simulated episodes tell of the errors of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.errors import require_model
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.finite import ObservableOperator
from cpomdp_ppl.inference.grid import GridFilter
from cpomdp_ppl.inference.linearity import is_linear_gaussian
from cpomdp_ppl.inference.particle_filter import ParticleFilter
from cpomdp_ppl.inference.trials import (
    NUM_TRIALS,
    constant_trials,
    evenly_spaced,
    random_trials,
    result_or_none,
)
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP

MOST_CHECKED = 256
"""How many of the episodes that a policy has played are checked."""

GRID_SIZES = (1200, 2400)
"""Points of the grids that are tried: one that needs more would take too long."""

FEWEST_PARTICLES, MOST_PARTICLES = 1024, 4096
"""Numbers of particles to choose from."""

SMALL_POSTERIOR_ERROR = 0.02
"""Mean standard error of a context's probability that is small enough."""


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
    """The reference backend of a model, or the next best if episodes get to where it is not exact.

    Args:
        backend: The `reference_backend`.
        model: The CPOMDP.
        episodes: Simulated episodes, whose states are known.
    """
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
