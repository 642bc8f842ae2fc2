"""Metropolis–Hastings on a density that is estimated, block by block, with random numbers that are kept."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError, invalid
from cpomdp_ppl.experiments.execute import in_parallel
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.learning.posterior import FOR_ESTIMATE, FOR_START, FOR_WALK
from cpomdp_ppl.rng import seed_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.learning.posterior import Posterior, PosteriorPoint

ACCEPTANCE = 0.25
"""Acceptance rate of steps nearby that warm-up steers to."""

JUMP_FREEDOM = 5
"""Degrees of freedom of jumps: tails heavier than those of a posterior that is nearly normal."""

NUM_NEARBY, NUM_FROM_PRIOR = 10, 20
"""Numbers of places around the initial values, and of draws from the prior, that are tried."""

TRIES_PER_BLOCK = 3
"""Number of times that a block gets random numbers at such a place before it counts as impossible there."""

PARTICLE_FACTORS = (4, 16, 64)
"""Factors of the number of particles with which a place is looked for where a start would be possible."""

ROUND_SECONDS = 5.0
"""Seconds that processes work before they report, roughly: what Ctrl-C can cost."""


@dataclass(frozen=True)
class MetropolisStep:
    """One step of a chain.

    Attributes:
        point: Where the step ended.
        accepted: Whether the proposed parameters were accepted.
        probability: The probability of that.
        renewed: Whether the random numbers that were proposed for a block were accepted.
    """

    point: PosteriorPoint
    accepted: bool
    probability: float
    renewed: bool


class Walk:
    """One chain, which can be continued where it was left: it holds all that its next step depends on.

    A chain of parameters and of the random numbers that their likelihood is estimated with. Parameters are
    proposed with the same random numbers, so that most of the noise is in both estimates and cancels; then
    new ones are proposed for one block of episodes.

    It begins around `start [P]`, adapts for `warm_up` steps, and knows the covariance of the posterior, or
    does not (None). A share `jumps` of proposals do not depend on where it is.
    """

    def __init__(
        self, start: Tensor, covariance: Tensor | None, jumps: float, warm_up: int, seed: int, chain: int
    ) -> None:
        self.centre, self.jumps, self.warm_up = start, jumps, warm_up
        self.seed, self.chain = seed, chain
        self.P, self.seeds, self.taken = len(start), 0, 0
        self.point: PosteriorPoint | None = None
        self.known = covariance is not None
        self.covariance = covariance.double() if covariance is not None else 0.04 * torch.eye(self.P).double()
        self.log_scale = math.log(2.38 / math.sqrt(self.P))
        self.given = self.centre, self.covariance
        self.mean, self.scatter = torch.zeros_like(start), torch.zeros_like(self.covariance)
        # On the way in from afar all is accepted, which says nothing about the right scale.
        self.most = self.log_scale + (0.5 if self.known else 2.0)
        self.trust = (100 if self.known else 10) * self.P  # how many steps what was given counts for
        self._generator = torch.Generator().manual_seed(seed_for(seed, FOR_WALK, chain))

    def advance(self, posterior: Posterior, count: int) -> list[MetropolisStep]:
        """Take some steps, those of warm-up first."""
        steps = []
        for _ in range(count):
            point = self._start(posterior) if self.point is None else self.point
            if self.taken == self.warm_up:
                point = self._reestimated(posterior, point)
            step = self._step(posterior, point)
            self.point = step.point
            self.taken += 1
            steps.append(step)
        return steps

    def _start(self, posterior: Posterior) -> PosteriorPoint:
        """Find a place at which the posterior is not zero, which becomes the centre if it is far away."""
        point, far = starting_point(self, posterior)
        if far:
            self.centre = point.u
            self.given = self.centre, self.covariance
        return point

    def normal(self, count: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(count, generator=self._generator, dtype=torch.float64)

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def next_seed(self) -> int:
        """A seed for the random numbers of one more estimate."""
        self.seeds += 1
        return seed_for(self.seed, FOR_ESTIMATE, self.chain, self.seeds)

    def estimated(self, posterior: Posterior, u: Tensor) -> PosteriorPoint:
        """The posterior at u, estimated with new random numbers."""
        return posterior.at(u, tuple(self.next_seed() for _ in posterior.likelihood.bounds))

    def _reestimated(self, posterior: Posterior, point: PosteriorPoint) -> PosteriorPoint:
        """The same place with a new estimate: a lucky one must not outlast warm-up."""
        again = self.estimated(posterior, point.u)
        return again if math.isfinite(again.log_density) else point

    def _step(self, posterior: Posterior, point: PosteriorPoint) -> MetropolisStep:
        """Propose, and accept or not."""
        adapting = self.taken < self.warm_up
        # Without anything given, it is not known yet where to jump to.
        jumping = self._uniform() < self.jumps and (self.known or not adapting)
        root = torch.linalg.cholesky(self.covariance)
        if jumping:
            heavy = math.sqrt(JUMP_FREEDOM / float(self.normal(JUMP_FREEDOM).square().sum()))
            u = self.centre + heavy * root @ self.normal(self.P)
            log_ratio = self._log_jump(point.u, root) - self._log_jump(u, root)
        else:
            u = point.u + math.exp(self.log_scale) * root @ self.normal(self.P)
            log_ratio = 0.0
        proposed = posterior.at(u, point.seeds)
        probability = math.exp(min(0.0, proposed.log_density - point.log_density + log_ratio))
        accepted = self._uniform() < probability
        after = proposed if accepted else point
        if adapting:
            after = self._adapt(posterior, after, None if jumping else probability)
        after, renewed = self._renew(posterior, after) if posterior.noisy else (after, False)
        return MetropolisStep(after, accepted, probability, renewed)

    def _renew(self, posterior: Posterior, point: PosteriorPoint) -> tuple[PosteriorPoint, bool]:
        """Propose new random numbers for a block, and accept them or not."""
        block = int(self._uniform() * len(point.seeds))
        proposed = posterior.renewed(point, block, self.next_seed())
        ratio = proposed.log_likelihoods[block] - point.log_likelihoods[block]
        accepted = self._uniform() < math.exp(min(0.0, ratio))
        return (proposed if accepted else point), accepted

    def _log_jump(self, u: Tensor, root: Tensor) -> float:
        """Density of a jump to u, a multivariate Student t, but for a constant."""
        away = torch.linalg.solve_triangular(root, (u - self.centre)[:, None], upper=False)
        return -0.5 * (JUMP_FREEDOM + self.P) * math.log1p(float(away.square().sum()) / JUMP_FREEDOM)

    def _adapt(
        self, posterior: Posterior, point: PosteriorPoint, probability: float | None
    ) -> PosteriorPoint:
        """Adapt the scale to the acceptance rate, and centre and shape to places, the later the more."""
        n = self.taken + 1
        if probability is not None:
            change = 2 * (probability - ACCEPTANCE) / (n + 10) ** 0.6
            self.log_scale = min(self.log_scale + change, self.most)
        rate = 1 / n**0.8  # forgets the way in from the start
        away = point.u - self.mean
        self.mean = self.mean + rate * away
        self.scatter = (1 - rate) * (self.scatter + rate * torch.outer(away, away))
        if n % 10:
            return point
        share = n / (n + self.trust)
        self.centre = (1 - share) * self.given[0] + share * self.mean
        self.covariance = (1 - share) * self.given[1] + share * self.scatter
        return self._reestimated(
            posterior, point
        )  # or a lucky estimate holds the walk up, and it learns nothing


def starting_point(walk: Walk, posterior: Posterior) -> tuple[PosteriorPoint, bool]:
    """A place around the initial values at which the posterior is not zero, or else a draw from the prior.

    The flag says whether it is such a draw. Raises if no place was found.
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


def advance(
    posterior: Posterior, walks: Sequence[Walk], warm_up: int, draws: int, workers: int | None, bar: Any
) -> tuple[list[list[MetropolisStep]], bool]:
    """Warm up and draw: the draws of each chain, as many of one as of another, and whether these are all.

    Chains go forward in rounds, and each has its own random numbers: how they are cut into rounds, and which
    process takes them, changes nothing. Ctrl-C ends the run, if every chain has a draw.
    """
    rounds: list[list[list[MetropolisStep]]] = []  # steps by round and chain
    taken, total = 0, warm_up + draws
    count = 1  # the first step is in this process, where errors are plainest
    try:
        while taken < total:
            began = time.perf_counter()
            round_of = partial(_advanced, posterior, count)
            advanced = dict(in_parallel(round_of, walks, workers=1 if taken == 0 else workers))
            walks = [advanced[k][0] for k in range(len(walks))]
            rounds.append([advanced[k][1] for k in range(len(walks))])
            taken += count
            bar.update(count * len(walks))
            if workers != 1:
                seconds = (time.perf_counter() - began) / count
                count = max(1, min(int(ROUND_SECONDS / seconds), 2 * count, total - taken))
    except KeyboardInterrupt:
        if taken <= warm_up:
            raise
        return _drawn(rounds, len(walks), warm_up), False
    return _drawn(rounds, len(walks), warm_up), True


def _advanced(posterior: Posterior, count: int, walk: Walk) -> tuple[Walk, list[MetropolisStep]]:
    return walk, walk.advance(posterior, count)


def _drawn(rounds: list[list[list[MetropolisStep]]], chains: int, warm_up: int) -> list[list[MetropolisStep]]:
    return [[step for one in rounds for step in one[k]][warm_up:] for k in range(chains)]
