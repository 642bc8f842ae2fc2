"""Filters that do not give an episode up when all its particles have died: they begin again with more.

One surprising episode must not take the others' results with it. To start again only then makes likelihoods a
little too high on average: this is for posteriors, and not for evidence, which a fit by likelihood needs
without bias.
"""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference.belief import where_alive
from cpomdp_ppl.inference.native_recursion import NativeSMC
from cpomdp_ppl.inference.observed import Observed, rows_observed
from cpomdp_ppl.inference.particle_filter import SMC
from cpomdp_ppl.inference.scan import added, observed_in_time, require_possible, steps_through

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.inference.filtering import Filtering, Smoothing
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

Result = TypeVar("Result")

FEW = 64
"""Of so many numbers, Python finds the sum sooner than torch."""


def persistently(backend: Backend, attempt: Callable[[Backend], Result]) -> Result:
    """What an attempt with a backend comes to; with ever larger ones, while it loses an episode.

    Raises:
        DegenerateWeightsError: If even the largest does.
    """
    try:
        return attempt(backend)
    except DegenerateWeightsError:
        larger = backend.larger()
        if larger is None:
            raise
    return persistently(larger, attempt)


def filtered(
    backend: Backend,
    model: CPOMDP,
    episodes: Episodes,
    *,
    prior: Tensor | None = None,
    seed: int | None = None,
    moments: bool = True,
) -> Filtering:
    """As `Backend.run`, but episodes that have lost all particles are filtered again, with more of them.

    Args:
        backend: The filter.
        model: The CPOMDP.
        episodes: What was done and seen.
        prior: Prior over contexts, `[C]` or `[B, C]`: those it excludes cannot save an episode. The model's
            if left out.
        seed: Seed of the random numbers, for backends that draw any.
        moments: Whether to compute filtered means and variances of the state, too.

    Raises:
        DegenerateWeightsError: If no context can have produced an episode, however many particles.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.inference import ParticleFilter
        >>> from cpomdp_ppl.models import LightDark
        >>> episodes = simulate(LightDark(), RandomPolicy(3), 10, seed=0)
        >>> filtered(ParticleFilter(8), LightDark(), episodes, seed=0).posterior().shape
        torch.Size([10, 21, 2])
    """
    larger = backend.larger()
    try:
        found = backend.run(model, episodes, seed=seed, moments=moments)
    except DegenerateWeightsError:
        if larger is None:
            raise
        found = backend.attempt(model, episodes, seed=seed, moments=moments)
    while larger is not None and len(rows := found.lost(prior).nonzero()[:, 0]):
        again = larger.attempt(model, episodes[rows], seed=seed, moments=moments)
        found, larger = found.with_rows(rows, again), larger.larger()
    if bool(found.lost(prior).any()):
        increments = torch.cat([found.initial_increment[:, None], found.increments], 1)  # [B, T + 1, C]
        require_possible(model, list(observed_in_time(episodes)), increments.permute(1, 2, 0))
    return found


def smoothed(
    backend: Backend,
    model: CPOMDP,
    episodes: Episodes,
    num_trajectories: int = 100,
    *,
    seed: int | None = None,
) -> Smoothing:
    """As `Backend.smooth`, but with more particles for all if an episode has lost all of its own."""
    return persistently(backend, lambda each: each.smooth(model, episodes, num_trajectories, seed=seed))


@dataclass(frozen=True)
class Track:
    """What a filter that does not give up has come to.

    Attributes:
        belief: The backend's belief about the state, with first axes `[C, B]`.
        log_likelihood: Log-likelihood of everything observed so far, float64 `[C, B]`.
        path: All steps so far, should it be necessary to go through them again; else the last one alone.
    """

    belief: Any
    log_likelihood: Tensor
    path: tuple[Observed, ...] = ()


class Persistent:
    """A filter that begins again, with more particles, in episodes whose particles have all died.

    Of those more, as many are drawn as there were. Its beliefs are `Track`s. To be made and used inside
    `inference_scope`, unless the recursion needs none.

    Args:
        backend: The filter.
        recursion: The filter at work.
        prior: Prior over contexts, `[B, C]`: those that it excludes cannot save an episode.
    """

    def __init__(self, backend: Backend, recursion: Recursion, prior: Tensor) -> None:
        self.model = recursion.model
        self.recursion = recursion
        self._larger = backend.larger() if isinstance(recursion, SMC) else None
        self._prior = prior

    def start(self, num_episodes: int) -> Track:
        """Before anything was observed."""
        belief = self.recursion.start(num_episodes)
        C, device = self.model.num_contexts, self.model.device
        return Track(belief, torch.zeros(C, num_episodes, dtype=torch.float64, device=device))

    def condition(self, track: Track, observed: Observed) -> tuple[Track, Tensor]:
        """Condition on what was observed, without moving.

        Raises:
            DegenerateWeightsError: If no context can have produced an episode, however many particles.
        """
        return self._extended(track, observed, *self.recursion.condition(track.belief, observed))

    def step(self, track: Track, observed: Observed) -> tuple[Track, Tensor]:
        """Move by the action, then condition on what was observed; errors are those of `condition`."""
        return self._extended(track, observed, *self.recursion.step(track.belief, observed))

    def _extended(
        self, track: Track, observed: Observed, belief: Any, increment: Tensor
    ) -> tuple[Track, Tensor]:
        before = track.log_likelihood
        if observed.alive is not None:
            belief = where_alive(observed.alive, belief, track.belief)
        path = (observed,) if self._larger is None else (*track.path, observed)
        after = before + increment  # [C, B]
        if _are_finite(after):  # all is possible: no need to look closer
            return Track(belief, after, path), increment
        lost = (self._prior.T.log() + after).amax(0) == -torch.inf
        if self._larger is not None and bool(lost.any()):
            rows = lost.nonzero()[:, 0]
            with suppress(DegenerateWeightsError):  # of a prior that is too sure, the posterior will tell
                belief, again = self._begun_again(belief, path, rows)
                after = after.index_copy(1, rows, again)
                gained = torch.where(before == -torch.inf, -torch.inf, after - before)
                return Track(belief, after, path), gained
        return Track(belief, added(self.model, before, increment, observed), path), increment

    def _begun_again(self, belief: Any, path: tuple[Observed, ...], rows: Tensor) -> tuple[Any, Tensor]:
        """The belief, with the episodes `rows` filtered anew, and log-likelihoods of those, `[C, R]`."""
        assert self._larger is not None
        assert isinstance(self.recursion, SMC)
        N, prior, part = self.recursion.N, self._prior[rows], [_some(observed, rows) for observed in path]
        with self.recursion.scope() if isinstance(self.recursion, NativeSMC) else nullcontext():
            states, total = persistently(
                self._larger, lambda each: _replayed(each.recursion(self.model), part, prior, N)
            )
        return self.recursion.with_episodes(belief, rows, states), total


def _replayed(
    recursion: Recursion, path: Sequence[Observed], prior: Tensor, num_draws: int
) -> tuple[State, Tensor]:
    """Draws from the belief after a path, leaves `[C, B, M, …]`, and its log-likelihoods `[C, B]`."""
    log_prior = prior.T.log()
    total = torch.zeros_like(log_prior)
    for step in steps_through(recursion, path, len(prior)):
        added(recursion.model, log_prior + total, step.increment, step.observed)
        total = total + step.increment
    return recursion.draw(step.after, num_draws), total


def _are_finite(numbers: Tensor) -> bool:
    """Whether all of `[C, B]` are; False for some that are so large that it hardly matters."""
    few = numbers.numel() <= FEW
    return math.isfinite(sum(map(sum, numbers.tolist())) if few else numbers.sum().item())


def _some(observed: Observed, rows: Tensor) -> Observed:
    """A step of some episodes, in which perhaps nothing was observed."""
    some = observed.select(rows)
    (known,), (complete,) = rows_observed({site: flags[None] for site, flags in some.observed.items()})
    return replace(some, rows=known, complete=complete)
