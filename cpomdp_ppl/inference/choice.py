"""The backend to take: by its name, by a description in a file, or for a model if none is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from cpomdp_ppl.errors import DensityError, ModelError, invalid, require, require_model
from cpomdp_ppl.experiments.fingerprint import describe
from cpomdp_ppl.inference.backend import Backend
from cpomdp_ppl.inference.discrete import MEMORY
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.finite import ObservableOperator
from cpomdp_ppl.inference.grid import GridFilter
from cpomdp_ppl.inference.particle_filter import ParticleFilter
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.inference.trials import (
    MOST_CHECKED,
    MOST_PARTICLES,
    NUM_TRIALS,
    enough_particles,
    evenly_spaced,
    is_linear_gaussian,
    result_or_none,
    trials,
)
from cpomdp_ppl.inference.unscented import UnscentedKalmanFilter
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.model import CPOMDP


AUTO = "auto"
"""The name of the rule that chooses a backend; see `default_backend`."""

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (
        ParticleFilter,
        ExtendedKalmanFilter,
        UnscentedKalmanFilter,
        ObservableOperator,
        GridFilter,
    )
}
"""The backends by the names that are accepted wherever a backend is."""

MOST_STATES = 256
"""Up to so many states, exact operators are as quick as particles."""

BRACKET, NARROW_BRACKET = 0.05, 0.01
"""Nats by which information about the context may be uncertain for want of particles; if most exact."""

FEWEST_IF_EXACT = 1024
"""Particles of the most exact filter."""

GRID_SIZES = (1200, 2400)
"""Points of the grids that are tried: one that needs more would take too long."""


def as_backend(likelihood: str | Backend) -> Backend:
    """A backend by its name, with default settings, or as it is.

    Examples:
        >>> as_backend("smc")
        ParticleFilter(num_particles=256, resampling='systematic', ess_threshold=0.5, guide=None, \
common_random_numbers=True, chunk=None, engine='auto', tries=1)
    """
    return _named(likelihood, list(BACKENDS))


def _named(likelihood: str | Backend, names: list[str]) -> Backend:
    if isinstance(likelihood, Backend):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in BACKENDS:
        raise invalid("likelihood", likelihood, f"one of {names}, or a backend")
    return BACKENDS[likelihood]()


def backend_as_data(backend: Backend) -> dict[str, Any] | None:
    """A backend as plain data, from which `backend_from_data` makes it again.

    None if it, or a part of it, is somebody's own: no file can hold code.

    Examples:
        >>> backend_as_data(ExtendedKalmanFilter())
        {'': 'ExtendedKalmanFilter', 'reward_points': 64, 'engine': 'auto'}
    """
    parts = [getattr(backend, field.name) for field in fields(backend)] if _is_ours(backend) else [backend]
    return describe(backend) if all(_is_plain(part) for part in parts) else None


def backend_from_data(data: Any) -> Backend:
    """The backend that plain data describe, as `backend_as_data` gives them; nothing in them is ever run.

    Raises:
        ValueError: If they describe none.

    Examples:
        >>> backend_from_data({"": "ParticleFilter", "num_particles": 64}).label
        'smc, 64 particles'
    """
    kinds = {kind.__name__: kind for kind in BACKENDS.values()}
    name = data.get("") if isinstance(data, Mapping) else None
    if not isinstance(name, str) or name not in kinds:
        raise invalid("likelihood", data, f"one of {', '.join(kinds)}, with its settings")
    settings = {key: value for key, value in data.items() if key}
    taken = {field.name: field.default for field in fields(kinds[name])}
    for key, value in settings.items():
        require(key in taken, "likelihood", key, f"settings of {name} out of {', '.join(taken)}")
        require(_is_plain(value), key, value, "a plain value")
        require(type(value) is bool or type(taken[key]) is not bool, key, value, "True or False")
    try:
        return kinds[name](**settings)
    except (TypeError, OverflowError) as error:  # of comparisons with what is no number
        raise invalid("likelihood", data, f"settings that {name} takes") from error


def _is_ours(backend: Backend) -> bool:
    return type(backend) in BACKENDS.values()


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a setting."""
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str | Tensor | np.ndarray | np.generic)


def default_backend(model: CPOMDP, *, most_exact: bool = False) -> Backend:
    """The backend that serves a model well, as far as simulated episodes tell: what `"auto"` means.

    Exact operators serve finite models of up to 256 states, if their tables fit in memory. A Kalman filter is
    exact where initial state, motion and sensors are linear with Gaussian noise of constant scale. All other
    models get a particle filter, with the smallest power of two of particles, from 64 to 4,096, by which the
    information about the context is known to some 0.05 nats and 16 particles count; see `are_enough`. 4,096
    may be too few: then posteriors are noisy, and `Filtering.standard_error` says so.

    The simulated episodes have random actions, persistent ones, and every action on its own. The choice is
    wrong for a policy that gets to places where none of these do, if the program is not linear there or its
    sensors are sharper. `evaluate` looks at the policy's own episodes, too; a fit does not.

    Args:
        model: The CPOMDP.
        most_exact: Whether exactness is worth time, as where results are judged. Exact operators then serve
            models of any size that fits in memory, a grid, which estimates its error, states of one number,
            and others have at least 1,024 particles, and as many as 0.01 nats take.

    Raises:
        ModelError: If nothing is ever seen.

    Examples:
        >>> from cpomdp_ppl.models import LightDark, LineGrid
        >>> default_backend(LineGrid()).label, default_backend(LightDark()).name
        ('exact', 'smc')
    """
    require_model(model)
    if not signature(model).observations:
        raise ModelError(type(model).__name__, ["observation: has no sample site: nothing is seen"])
    if _has_tables(model, most_exact) and _serves(ObservableOperator(), model):
        return ObservableOperator()
    if all(is_linear_gaussian(model, episodes) for episodes in trials(model)):
        return ExtendedKalmanFilter()
    return _without_kalman(model, most_exact)


def reference_backend(model: CPOMDP) -> Backend:
    """The most exact backend, as far as simulated episodes tell, in reasonable time; see `default_backend`.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> reference_backend(LineGrid()).name
        'exact'
    """
    return default_backend(model, most_exact=True)


def backend_for(model: CPOMDP, likelihood: str | Backend | None, *, most_exact: bool = False) -> Backend:
    """The backend that is given, by itself or by its name; left out or `"auto"`, the `default_backend`."""
    if likelihood is None or likelihood == AUTO:
        return default_backend(model, most_exact=most_exact)
    return _named(likelihood, [AUTO, *BACKENDS])


def more_particles(backend: Backend) -> Backend | None:
    """The same filter with twice the particles, up to 4,096; None if it has so many, or none at all."""
    if not isinstance(backend, ParticleFilter) or backend.num_particles >= MOST_PARTICLES:
        return None
    return replace(backend, num_particles=2 * backend.num_particles)


def _has_tables(model: CPOMDP, most_exact: bool) -> bool:
    """Whether a model is finite, and small enough for exact operators."""
    N = model.states
    if N is None or model.box is not None:
        return False
    small = N <= MOST_STATES and 8 * model.num_contexts * model.num_actions * N**2 <= MEMORY
    return most_exact or small


def _without_kalman(model: CPOMDP, most_exact: bool) -> Backend:
    """A grid, if it may take its time and can, or particles."""
    if not most_exact:
        return enough_particles(model, trials(model), BRACKET)
    if sum(leaf.shape.numel() for _, leaf in leaves(signature(model).state)) == 1:
        episodes = next(trials(model))
        for num_points in GRID_SIZES:
            if result_or_none(GridFilter(num_points), model, episodes) is not None:
                return GridFilter()  # which may take more points, should other episodes need them
    return enough_particles(model, trials(model), NARROW_BRACKET, FEWEST_IF_EXACT)


class Follow(Protocol):
    """Filters episodes of a model, without moments of the state, and says by which backend."""

    def __call__(  # noqa: D102
        self, model: CPOMDP, episodes: Episodes, *, prior: Tensor | None, seed: int | None
    ) -> tuple[Filtering, Backend]: ...


def follow_by(model: CPOMDP, likelihood: str | Backend | None) -> Follow:
    """How to filter simulated episodes of a model: by the given backend, or else by the most exact one.

    That is chosen by simulated episodes, too, but a policy may lead elsewhere. If it does, and the backend is
    not exact there or refuses, the next best takes its place.
    """
    chosen = likelihood is None or likelihood == AUTO
    return partial(_follow_suited if chosen else _follow, backend_for(model, likelihood, most_exact=True))


def _follow(
    backend: Backend, model: CPOMDP, episodes: Episodes, *, prior: Tensor | None, seed: int | None
) -> tuple[Filtering, Backend]:
    return filtered(backend, model, episodes, prior=prior, seed=seed, moments=False), backend


def _follow_suited(
    backend: Backend, model: CPOMDP, episodes: Episodes, *, prior: Tensor | None, seed: int | None
) -> tuple[Filtering, Backend]:
    some = evenly_spaced(episodes, MOST_CHECKED)
    if isinstance(backend, ExtendedKalmanFilter) and not is_linear_gaussian(model, some):
        backend = _without_kalman(model, most_exact=True)
    try:
        return _follow(backend, model, episodes, prior=prior, seed=seed)
    except DensityError:
        if isinstance(backend, ParticleFilter):
            raise
    enough = enough_particles(model, [evenly_spaced(some, NUM_TRIALS)], NARROW_BRACKET, FEWEST_IF_EXACT)
    return _follow(enough, model, episodes, prior=prior, seed=seed)


def _serves(backend: Backend, model: CPOMDP) -> bool:
    """Whether a backend can follow episodes of a model, also where one of their sites was not observed.

    A policy may come upon combinations that random actions do not, so each site is hidden in turn.
    """
    episodes = simulate(model, RandomPolicy(model.actions), 2, seed=0)
    sites = list(episodes.observed)
    if not sites:  # whatever needs an observation will say so
        return False
    for hidden in (None, *(sites if len(sites) > 1 else [])):
        observed = {name: flags & (name != hidden) for name, flags in episodes.observed.items()}
        first = episodes.initially_observed
        if first is not None:
            first = {name: flags & (name != hidden) for name, flags in first.items()}
        some = replace(episodes, observed=observed, initially_observed=first)
        if result_or_none(backend, model, some) is None:
            return False
    return True
