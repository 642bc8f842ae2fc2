"""Where a chain may start: a place at which the estimated posterior is not zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.errors import DensityError, invalid
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.learning.posterior import FOR_START
from cpomdp_ppl.rng import seed_for

if TYPE_CHECKING:
    from cpomdp_ppl.learning.metropolis import Walk
    from cpomdp_ppl.learning.posterior import Posterior, PosteriorPoint

NUM_NEARBY, NUM_FROM_PRIOR = 10, 20
"""Numbers of places around the initial values, and of draws from the prior, that are tried."""

TRIES_PER_BLOCK = 3
"""Number of times that a block gets random numbers at such a place before it counts as impossible there."""

PARTICLE_FACTORS = (4, 16, 64)
"""Factors of the number of particles with which a place is looked for where a start would be possible."""


def starting_point(walk: Walk, posterior: Posterior) -> tuple[PosteriorPoint, bool]:
    """A place around the initial values at which the posterior is not zero, or else a draw from the prior.

    Returns:
        The place, and whether it was not found around the initial values.

    Raises:
        ValueError: If the prior is zero at the initial values, or no place was found.
    """
    middle = walk.estimated(posterior, walk.centre)
    if not math.isfinite(middle.log_prior):
        raise invalid("initial", posterior.values(walk.centre), "values at which the prior is not zero")
    root = torch.linalg.cholesky(walk.covariance) * (2.0 if walk.known else 1.0)
    for _ in range(NUM_NEARBY):
        point = walk.estimated(posterior, walk.centre + root @ walk.normal(walk.P))
        if math.isfinite(point.log_density):
            return point, False
    if math.isfinite(middle.log_density):
        return middle, False
    return _far_starting_point(walk, posterior, middle), True


def _far_starting_point(walk: Walk, posterior: Posterior, middle: PosteriorPoint) -> PosteriorPoint:
    """A place at which a start is possible, if the estimate is zero around the initial values.

    A start may be anywhere, and its random numbers may be any: neither changes what the chain converges to.
    """
    best = middle
    for k in range(NUM_FROM_PRIOR + 1):
        try:
            start = middle
            if k > 0:
                drawn = posterior.from_prior(seed_for(walk.seed, FOR_START, walk.chain, k - 1))
                start = walk.estimated(posterior, drawn)
            point = _revived(walk, posterior, start)
        except (DensityError, NotImplementedError):  # a wild value, or a prior that cannot be drawn from
            continue
        if math.isfinite(point.log_density):
            return point
        best = max(best, point, key=_blocks_alive)
    error = invalid(
        "initial", posterior.values(middle.u), "values at which the estimated likelihood is not zero"
    )
    raise ValueError(f"{error}; {_way_out(posterior, middle, best)}")


def _revived(walk: Walk, posterior: Posterior, point: PosteriorPoint) -> PosteriorPoint:
    """The same place, with other random numbers for blocks whose estimate is zero there."""
    for block in range(len(point.seeds) if posterior.noisy and math.isfinite(point.log_prior) else 0):
        for _ in range(TRIES_PER_BLOCK):
            if math.isfinite(point.log_likelihoods[block]):
                break
            point = posterior.renewed(point, block, walk.next_seed())
        else:
            return point
    return point


def _blocks_alive(point: PosteriorPoint) -> int:
    """Number of blocks of episodes whose likelihood is not zero; -1 where the prior is zero."""
    return sum(map(math.isfinite, point.log_likelihoods)) if math.isfinite(point.log_prior) else -1


def _way_out(posterior: Posterior, *places: PosteriorPoint) -> str:
    """Say what is wrong with initial values around which no start was found, and what to pass instead."""
    likelihood, backend = posterior.likelihood, posterior.likelihood.backend
    tried = f"about there, and at {NUM_FROM_PRIOR} draws from the prior"
    nowhere = f"{tried}, it is zero, too ({likelihood.impossible})"
    if not isinstance(backend, ParticleFilter):
        return f"{nowhere}; pass `initial` values at which the episodes are possible"
    N = backend.num_particles
    for more in (times * N for times in PARTICLE_FACTORS):
        for k, point in enumerate(places):
            if math.isfinite(likelihood.with_particles(more)(posterior.space.values(point.u), k)):
                given = f"num_particles={more}, initial={posterior.values(point.u)}"
                return f"{nowhere} with {N} particles, but with {more} it is not: pass {given}"
    return (
        f"{nowhere} with {N} particles, and with {PARTICLE_FACTORS[-1] * N} at the most promising place: "
        "pass `initial` values at which the episodes are possible, or "
        f'likelihood=ParticleFilter({N}, guide="ekf"), which looks ahead, where that serves the model'
    )
