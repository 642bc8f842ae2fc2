"""The posterior density of a model's constants, with a likelihood that is estimated block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.learning.block_likelihood import BlockLikelihood
    from cpomdp_ppl.learning.parameters import Unconstrained

FOR_WALK, FOR_ESTIMATE, FOR_REPLICATE, FOR_START = range(4)
"""What random numbers are for, as the first purpose of `seed_for`."""


@dataclass(frozen=True)
class PosteriorPoint:
    """A place in parameter space, with the posterior density as estimated there.

    Attributes:
        u: The place on the unconstrained scale, `[P]`.
        log_prior: Log-density of the prior there, on the parameters' own scale.
        log_jacobian: What turns that into a log-density on the unconstrained scale.
        log_likelihoods: The estimate for each block of episodes.
        seeds: Seed of each estimate's random numbers.
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
        """Log-density of the posterior on the unconstrained scale, but for a constant."""
        return self.log_prior + self.log_jacobian + self.log_likelihood


class Posterior:
    """The posterior density, estimated.

    Args:
        space: The parameters.
        prior: A distribution for every parameter.
        likelihood: Estimates of the likelihood.
        noisy: Whether these depend on random numbers.
    """

    def __init__(
        self, space: Unconstrained, prior: Mapping[str, Any], likelihood: BlockLikelihood, noisy: bool
    ) -> None:
        self.space, self.prior, self.likelihood, self.noisy = space, prior, likelihood, noisy

    def at(self, u: Tensor, seeds: tuple[int, ...]) -> PosteriorPoint:
        """Estimate the density at u; where the prior is zero, the likelihood is not needed."""
        with torch.no_grad(), isolated(0):
            values = self.space.values(u)
            log_prior = sum(_log_prior(self.prior[name], value) for name, value in values.items())
            log_jacobian = float(self.space.log_jacobian(u))
        finite = all(bool(torch.isfinite(value).all()) for value in values.values())
        if not finite or not math.isfinite(log_prior) or not math.isfinite(log_jacobian):
            return PosteriorPoint(u, -math.inf, 0.0, (0.0,) * len(seeds), seeds)
        estimates = self.likelihood.per_block(values, dict(enumerate(seeds)))
        return PosteriorPoint(u, log_prior, log_jacobian, tuple(estimates.values()), seeds)

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

    def renewed(self, point: PosteriorPoint, block: int, seed: int) -> PosteriorPoint:
        """The same place with other random numbers for one block."""
        with torch.no_grad(), isolated(0):
            values = self.space.values(point.u)
        estimates, seeds = list(point.log_likelihoods), list(point.seeds)
        estimates[block], seeds[block] = self.likelihood.per_block(values, {block: seed})[block], seed
        return replace(point, log_likelihoods=tuple(estimates), seeds=tuple(seeds))


def _rounded(value: Tensor) -> Any:
    digits = [float(f"{x:.4g}") for x in value.flatten().tolist()]
    return torch.tensor(digits, dtype=torch.float64).reshape(value.shape).tolist()


def _log_prior(prior: Any, value: Tensor) -> float:
    inside = bool(prior.support.check(value).all())
    return float(prior.log_prob(value).sum()) if inside else -math.inf
