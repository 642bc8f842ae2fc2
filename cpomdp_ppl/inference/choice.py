"""The backend to take for a model if none is given."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cpomdp_ppl.errors import DensityError
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.inference.discrete import MEMORY
from cpomdp_ppl.inference.finite import ObservableOperator
from cpomdp_ppl.inference.particle_filter import ParticleFilter
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.inference.reference import enough_particles, reference_backend, result_or_none, suited
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.model import CPOMDP


def default_backend(model: CPOMDP) -> Backend:
    """The backend that serves a model well where many likelihoods are wanted, as in a fit.

    That is `exact` for a finite model with no more states than the particle filter would have particles, if
    its tables fit in memory: it is then as quick, and has no noise. For all others it is the particle filter
    with its default settings, whose likelihoods are unbiased whatever the program. A Kalman filter is never
    taken unasked: that a program is linear and Gaussian cannot be seen by running it, and where it is not,
    the filter is biased.

    Examples:
        >>> from cpomdp_ppl.models import LightDark, LineGrid
        >>> default_backend(LineGrid()).name, default_backend(LightDark()).name
        ('exact', 'smc')
    """
    exact, particles = ObservableOperator(), ParticleFilter()
    N = model.states
    if N is None or particles.num_particles < N:
        return particles
    if 8 * model.num_contexts * model.num_actions * N**2 > MEMORY:
        return particles
    return exact if _serves(exact, model) else particles


def backend_for(model: CPOMDP, likelihood: str | Backend | None) -> Backend:
    """The backend that is given, by itself or by its name, or else the model's `default_backend`."""
    return default_backend(model) if likelihood is None else as_backend(likelihood)


class Follow(Protocol):
    """Filters episodes of a model, without moments of the state, and says by which backend."""

    def __call__(  # noqa: D102
        self, model: CPOMDP, episodes: Episodes, *, prior: Tensor | None, seed: int | None
    ) -> tuple[Filtering, Backend]: ...


def follow_by(model: CPOMDP, likelihood: str | Backend | None) -> Follow:
    """How to filter simulated episodes of a model: by the given backend, or else by the reference backend.

    The reference backend is chosen by simulated episodes, too, but a policy may lead elsewhere. If it does,
    and the backend is not exact there or refuses, the next best takes its place.
    """
    if likelihood is None:
        return partial(_follow_by_reference, reference_backend(model))
    return partial(_follow, as_backend(likelihood))


def _follow(
    backend: Backend, model: CPOMDP, episodes: Episodes, *, prior: Tensor | None, seed: int | None
) -> tuple[Filtering, Backend]:
    return filtered(backend, model, episodes, prior=prior, seed=seed, moments=False), backend


def _follow_by_reference(
    backend: Backend, model: CPOMDP, episodes: Episodes, *, prior: Tensor | None, seed: int | None
) -> tuple[Filtering, Backend]:
    backend = suited(backend, model, episodes)
    try:
        return _follow(backend, model, episodes, prior=prior, seed=seed)
    except DensityError:
        if isinstance(backend, ParticleFilter):
            raise
    return _follow(enough_particles(model, episodes), model, episodes, prior=prior, seed=seed)


def _serves(backend: Backend, model: CPOMDP) -> bool:
    """Whether a backend can follow episodes of a model, also where one of their sites was not observed.

    A policy may come upon combinations that random actions do not, so each site is hidden in turn.
    """
    episodes = simulate(model, RandomPolicy(model.num_actions), 2, seed=0)
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
