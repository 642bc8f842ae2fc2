"""Not to give an episode up whose particles have all died: it is filtered again with more of them.

One surprising episode must not take the others' results with it. To start again only then makes likelihoods a
little too high on average: this is for posteriors, and not for evidence, which a fit by likelihood needs
without bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference.backend import checked, initial_step, require_possible, rows_observed, steps
from cpomdp_ppl.inference.particle_filter import SMC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.inference.smoothing import Smoothing
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

Result = TypeVar("Result")


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
        backend: Which filter.
        model: The CPOMDP.
        episodes: What was done and seen.
        prior: Over contexts, `[C]` or `[B, C]`: those that it excludes cannot save an episode. The model's if
            left out.
        seed: For backends that draw random numbers.
        moments: Whether to compute filtered means and variances of the state, too.

    Raises:
        DegenerateWeightsError: If no context can have produced an episode, however many particles.

    Example:
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
        require_possible(model, _looks(model, episodes, found))
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


def _looks(model: CPOMDP, episodes: Episodes, found: Filtering) -> list[tuple[Observed, Tensor]]:
    """What was seen in time, and what every context makes of it, `[C, B]`."""
    looks = list(zip(steps(episodes, 0), found.increments.movedim(1, 0).mT, strict=True))
    first = [(initial_step(episodes, 0), found.initial_increment.T)] if model.initial_observation else []
    return [*first, *looks]


def updated(
    backend: Backend,
    recursion: Recursion,
    belief: Any,
    total: Tensor,
    increment: Tensor,
    lived: Sequence[Observed],
    prior: Tensor,
) -> tuple[Any, Tensor]:
    """A belief and its log-likelihoods `[C, B]` after a step. To be called inside `inference_scope`.

    Episodes that have just lost all particles are filtered again from their start, with more of them, of
    which as many are drawn as there were.

    Args:
        backend: Which filter.
        recursion: It, at work.
        belief: After the step.
        total: Log-likelihoods before the step.
        increment: Of the step.
        lived: All steps so far, with this one.
        prior: Over contexts, `[B, C]`: those that it excludes cannot save an episode.

    Raises:
        DegenerateWeightsError: If no context can have produced an episode, however many particles.
    """
    model, larger = recursion.model, backend.larger()
    after = total + increment
    lost = (prior.T.log() + after).amax(0) == -torch.inf
    if larger is None or not isinstance(recursion, SMC) or not bool(lost.any()):
        return belief, checked(model, total, increment, lived[-1])
    rows, number = lost.nonzero()[:, 0], recursion.N
    path, p = [_some(seen, rows) for seen in lived], prior[rows]
    try:
        states, again = persistently(larger, lambda each: _replayed(each.recursion(model), path, p, number))
    except DegenerateWeightsError:  # of a prior that is too sure, the posterior will tell
        return belief, checked(model, total, increment, lived[-1])
    return recursion.with_rows(belief, rows, states), after.index_copy(1, rows, again)


def _replayed(
    recursion: Recursion, path: Sequence[Observed], prior: Tensor, num_draws: int
) -> tuple[State, Tensor]:
    """Draws from the belief after a path, leaves `[C, B, M, …]`, and its log-likelihoods `[C, B]`."""
    model, log_prior = recursion.model, prior.T.log()
    belief, total = recursion.start(len(prior)), torch.zeros_like(log_prior)
    for seen in path:
        act = recursion.look if seen.action is None else recursion.step
        belief, increment = act(belief, seen)
        checked(model, log_prior + total, increment, seen)
        total = total + increment
    return recursion.draw(belief, num_draws), total


def _some(seen: Observed, rows: Tensor) -> Observed:
    """A step of some episodes, in which perhaps nothing was observed."""
    some = seen.select(rows)
    (known,), (complete,) = rows_observed({site: flags[None] for site, flags in some.observed.items()})
    return replace(some, rows=known, complete=complete)
