"""Metropolis–Hastings on a density that is estimated, block by block, with random numbers that are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError, invalid
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.rng import isolated, seed_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.learning.likelihood import Estimator
    from cpomdp_ppl.learning.parameters import Unconstrained

WALK, ESTIMATE, REPLICATE, START = range(4)
"""What random numbers are for."""

TARGET = 0.25
"""Acceptance rate of steps nearby that warm-up steers to."""

FREEDOM = 5
"""Degrees of freedom of jumps: tails heavier than those of a posterior that is nearly normal."""

NEARBY, AFAR = 10, 20
"""Places about the initial values, and draws from the prior, at which a start is looked for."""

TRIES = 3
"""Random numbers that a block gets at such a place before it counts as impossible there."""

MORE = (4, 16, 64)
"""Times as many particles, with which a place is looked for where a start would be possible."""


@dataclass(frozen=True)
class Point:
    """A place of the walk.

    Attributes:
        u: On the unconstrained scale, `[P]`.
        log_prior: Density there, on the parameters' own scale.
        log_jacobian: What makes it one on the unconstrained scale.
        log_likelihoods: The estimate for each block of episodes.
        seeds: Which random numbers it was made with, for each.
    """

    u: Tensor
    log_prior: float
    log_jacobian: float
    log_likelihoods: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def log_likelihood(self) -> float:
        """The estimate for all episodes."""
        return sum(self.log_likelihoods)

    @property
    def log_density(self) -> float:
        """On the unconstrained scale, but for a constant."""
        return self.log_prior + self.log_jacobian + self.log_likelihood


@dataclass(frozen=True)
class Step:
    """Where a step ended, and how.

    Attributes:
        point: Where.
        accepted: Whether the parameters that were proposed were.
        probability: How likely that was.
        renewed: Whether the random numbers that were proposed for a block were.
    """

    point: Point
    accepted: bool
    probability: float
    renewed: bool


class Target:
    """The posterior density, estimated.

    Args:
        space: Of the parameters.
        prior: By parameter.
        estimator: Of the likelihood.
        noisy: Whether its estimates depend on random numbers.
    """

    def __init__(
        self, space: Unconstrained, prior: Mapping[str, Any], estimator: Estimator, noisy: bool
    ) -> None:
        self.space, self.prior, self.estimator, self.noisy = space, prior, estimator, noisy

    def at(self, u: Tensor, seeds: tuple[int, ...]) -> Point:
        """Estimate it; where the prior is zero there is no need to."""
        with torch.no_grad(), isolated(0):
            values = self.space.values(u)
            log_prior = sum(_log_prior(self.prior[name], value) for name, value in values.items())
            log_jacobian = float(self.space.log_jacobian(u))
        finite = all(bool(torch.isfinite(value).all()) for value in values.values())
        if not finite or not math.isfinite(log_prior) or not math.isfinite(log_jacobian):
            return Point(u, -math.inf, 0.0, (0.0,) * len(seeds), seeds)
        estimates = self.estimator.per_block(values, dict(enumerate(seeds)))
        return Point(u, log_prior, log_jacobian, tuple(estimates.values()), seeds)

    def from_prior(self, seed: int) -> Tensor:
        """A draw from the prior, on the unconstrained scale, `[P]`; NaN where that has no such value."""
        parts = []
        with torch.no_grad(), isolated(seed):
            for one, transform in zip(self.space.parameters, self.space.transforms, strict=True):
                prior = self.prior[one.name]
                shape = one.value.shape[: one.value.dim() - len(prior.event_shape)]
                parts.append(transform.inv(prior.expand(shape).sample().double()).reshape(-1))
        return torch.cat(parts)

    def values(self, u: Tensor) -> dict[str, Any]:
        """The parameters at u as plain numbers, for messages."""
        with torch.no_grad():
            found = self.space.values(u)
        return {name: _rounded(value) for name, value in found.items()}

    def renewed(self, point: Point, block: int, seed: int) -> Point:
        """The same place with other random numbers for one block."""
        with torch.no_grad(), isolated(0):
            values = self.space.values(point.u)
        estimates, seeds = list(point.log_likelihoods), list(point.seeds)
        estimates[block], seeds[block] = self.estimator.per_block(values, {block: seed})[block], seed
        return replace(point, log_likelihoods=tuple(estimates), seeds=tuple(seeds))


def _rounded(value: Tensor) -> Any:
    digits = [float(f"{x:.4g}") for x in value.flatten().tolist()]
    return torch.tensor(digits, dtype=torch.float64).reshape(value.shape).tolist()


def _log_prior(prior: Any, value: Tensor) -> float:
    inside = bool(prior.support.check(value).all())
    return float(prior.log_prob(value).sum()) if inside else -math.inf


class Walk:
    """One chain, which can be taken up where it was left: it holds all that its next step depends on.

    A chain of parameters and of the random numbers that their likelihood is estimated with. Parameters are
    proposed with the same random numbers, so that most of the noise is in both estimates and cancels; then
    new ones are proposed for one block of episodes.

    Args:
        start: Where it begins, roughly, `[P]`.
        covariance: Of the posterior, `[P, P]`, as far as it is known; None if it is not.
        jumps: Share of proposals that do not depend on where the walk is.
        warm_up: Steps during which it adapts.
        seed: Of all chains.
        chain: Number of this one.
    """

    def __init__(
        self, start: Tensor, covariance: Tensor | None, jumps: float, warm_up: int, seed: int, chain: int
    ) -> None:
        self.centre, self.jumps, self.warm_up = start, jumps, warm_up
        self.seed, self.chain = seed, chain
        self.P, self.seeds, self.taken = len(start), 0, 0
        self.point: Point | None = None
        self.known = covariance is not None
        self.covariance = covariance.double() if covariance is not None else 0.04 * torch.eye(self.P).double()
        self.log_scale = math.log(2.38 / math.sqrt(self.P))
        self.given = self.centre, self.covariance
        self.mean, self.scatter = torch.zeros_like(start), torch.zeros_like(self.covariance)
        # On the way in from afar all is accepted, which says nothing about the right scale.
        self.most = self.log_scale + (0.5 if self.known else 2.0)
        self.trust = (100 if self.known else 10) * self.P  # how many steps what was given counts for
        self._generator = torch.Generator().manual_seed(seed_for(seed, WALK, chain))

    def advance(self, target: Target, count: int) -> list[Step]:
        """Take some steps, those of warm-up first."""
        steps = []
        for _ in range(count):
            point = self._begin(target) if self.point is None else self.point
            if self.taken == self.warm_up:
                point = self._again(target, point)
            step = self._step(target, point)
            self.point = step.point
            self.taken += 1
            steps.append(step)
        return steps

    def _normal(self, count: int) -> Tensor:
        return torch.randn(count, generator=self._generator, dtype=torch.float64)

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def _seed(self) -> int:
        self.seeds += 1
        return seed_for(self.seed, ESTIMATE, self.chain, self.seeds)

    def _anew(self, target: Target, u: Tensor) -> Point:
        """A place, with new random numbers."""
        return target.at(u, tuple(self._seed() for _ in target.estimator.bounds))

    def _begin(self, target: Target) -> Point:
        """A place that is possible: about the initial values, or else a draw from the prior."""
        middle = self._anew(target, self.centre)
        if not math.isfinite(middle.log_prior):
            raise invalid("initial", target.values(self.centre), "values at which the prior is not zero")
        root = torch.linalg.cholesky(self.covariance) * (2.0 if self.known else 1.0)
        for _ in range(NEARBY):
            point = self._anew(target, self.centre + root @ self._normal(self.P))
            if math.isfinite(point.log_density):
                return point
        return middle if math.isfinite(middle.log_density) else self._begin_afar(target, middle)

    def _begin_afar(self, target: Target, middle: Point) -> Point:
        """Where a start is possible, if the estimate is zero about the initial values.

        A start may be anywhere, and its random numbers may be any: neither changes what the chain tends to.
        """
        best = middle
        for k in range(AFAR + 1):
            try:
                start = middle
                if k > 0:
                    drawn = target.from_prior(seed_for(self.seed, START, self.chain, k - 1))
                    start = self._anew(target, drawn)
                point = self._revived(target, start)
            except (DensityError, NotImplementedError):  # a wild value, or a prior that cannot be drawn from
                continue
            if math.isfinite(point.log_density):
                self.centre = point.u
                self.given = self.centre, self.covariance
                return point
            best = max(best, point, key=_blocks_alive)
        error = invalid(
            "initial", target.values(middle.u), "values at which the estimated likelihood is not zero"
        )
        raise ValueError(f"{error}; {_way_out(target, middle, best)}")

    def _revived(self, target: Target, point: Point) -> Point:
        """The same place, with other random numbers for blocks whose estimate is zero there."""
        for block in range(len(point.seeds) if target.noisy and math.isfinite(point.log_prior) else 0):
            for _ in range(TRIES):
                if math.isfinite(point.log_likelihoods[block]):
                    break
                point = target.renewed(point, block, self._seed())
            else:
                return point
        return point

    def _again(self, target: Target, point: Point) -> Point:
        """The same place with a new estimate: a lucky one of warm-up is not to last."""
        again = self._anew(target, point.u)
        return again if math.isfinite(again.log_density) else point

    def _step(self, target: Target, point: Point) -> Step:
        """Propose, and accept or not."""
        adapting = self.taken < self.warm_up
        # Without anything given, nobody knows yet where to jump to.
        jumping = self._uniform() < self.jumps and (self.known or not adapting)
        root = torch.linalg.cholesky(self.covariance)
        if jumping:
            heavy = math.sqrt(FREEDOM / float(self._normal(FREEDOM).square().sum()))
            u = self.centre + heavy * root @ self._normal(self.P)
            log_ratio = self._log_jump(point.u, root) - self._log_jump(u, root)
        else:
            u = point.u + math.exp(self.log_scale) * root @ self._normal(self.P)
            log_ratio = 0.0
        proposed = target.at(u, point.seeds)
        probability = math.exp(min(0.0, proposed.log_density - point.log_density + log_ratio))
        accepted = self._uniform() < probability
        after = proposed if accepted else point
        if adapting:
            after = self._adapt(target, after, None if jumping else probability)
        after, renewed = self._renew(target, after) if target.noisy else (after, False)
        return Step(after, accepted, probability, renewed)

    def _renew(self, target: Target, point: Point) -> tuple[Point, bool]:
        """Propose new random numbers for a block, and accept them or not."""
        block = int(self._uniform() * len(point.seeds))
        proposed = target.renewed(point, block, self._seed())
        ratio = proposed.log_likelihoods[block] - point.log_likelihoods[block]
        accepted = self._uniform() < math.exp(min(0.0, ratio))
        return (proposed if accepted else point), accepted

    def _log_jump(self, u: Tensor, root: Tensor) -> float:
        """Density of a jump to u, a multivariate Student t, but for a constant."""
        away = torch.linalg.solve_triangular(root, (u - self.centre)[:, None], upper=False)
        return -0.5 * (FREEDOM + self.P) * math.log1p(float(away.square().sum()) / FREEDOM)

    def _adapt(self, target: Target, point: Point, probability: float | None) -> Point:
        """The scale by the acceptance rate, centre and shape by the places so far, the later the more."""
        n = self.taken + 1
        if probability is not None:
            change = 2 * (probability - TARGET) / (n + 10) ** 0.6
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
        return self._again(target, point)  # or a lucky estimate holds the walk, and it learns nothing


def _blocks_alive(point: Point) -> int:
    """In how many blocks of episodes the likelihood is not zero; none where the prior is."""
    return sum(map(math.isfinite, point.log_likelihoods)) if math.isfinite(point.log_prior) else -1


def _way_out(target: Target, *places: Point) -> str:
    """What is wrong with initial values about which no start was found, and what to pass instead."""
    estimator, backend = target.estimator, target.estimator.backend
    nowhere = f"about there, and at {AFAR} draws from the prior, it is zero, too ({estimator.impossible})"
    if not isinstance(backend, ParticleFilter):
        return f"{nowhere}; pass `initial` values at which the episodes are possible"
    N = backend.num_particles
    for more in (times * N for times in MORE):
        for k, point in enumerate(places):
            if math.isfinite(estimator.with_particles(more)(target.space.values(point.u), k)):
                given = f"num_particles={more}, initial={target.values(point.u)}"
                return f"{nowhere} with {N} particles, but with {more} it is not: pass {given}"
    return (
        f"{nowhere} with {N} particles, and with {MORE[-1] * N} at the most promising place: pass `initial` "
        f'values at which the episodes are possible, or likelihood=ParticleFilter({N}, guide="ekf"), which '
        "looks ahead, where that serves the model"
    )
