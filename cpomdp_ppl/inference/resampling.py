"""Resampling: which particles survive, row by row.

A scheme turns normalised weights and uniform random numbers into ancestors. Uniforms are handed in rather
than drawn, so that several rows (the contexts of an episode) can share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.rng import first_above


class Resampling(Protocol):
    """A resampling scheme: unbiased, so particle i has `N W_i` offspring in expectation."""

    def num_uniforms(self, num_particles: int) -> int:
        """How many uniform random numbers it needs for a row of N particles."""
        ...

    def __call__(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Ancestors `[R, N]` by normalised weights `[R, N]` and uniforms `[R, num_uniforms(N)]`."""
        ...


@dataclass(frozen=True)
class Systematic:
    """One uniform for all: points `(i + u) / N` on the distribution function of the weights."""

    def num_uniforms(self, num_particles: int) -> int:
        """One."""
        return 1

    def __call__(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Count the points below each step of the distribution function; no search is needed."""
        N = weights.shape[1]
        below = distribution_function(weights).mul_(N).sub_(uniforms).ceil_()  # points below, [R, N]
        return ancestors(below)


@dataclass(frozen=True)
class Stratified:
    """A uniform in every stratum: points `(i + u_i) / N`."""

    def num_uniforms(self, num_particles: int) -> int:
        """One for every particle."""
        return num_particles

    def __call__(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Look the points up in the distribution function."""
        N = weights.shape[1]
        points = (torch.arange(N, device=weights.device) + uniforms.double()) / N
        return first_above(distribution_function(weights), points)


@dataclass(frozen=True)
class Multinomial:
    """Independent choices; the plainest scheme, and the noisiest."""

    def num_uniforms(self, num_particles: int) -> int:
        """One for every particle."""
        return num_particles

    def __call__(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Look the points up in the distribution function, sorted, so that neighbours are near in memory."""
        points = uniforms.double().sort(-1).values
        return first_above(distribution_function(weights), points)


@dataclass(frozen=True)
class Residual:
    """`⌊N W_i⌋` offspring for certain, and the rest chosen independently by the remainders."""

    def num_uniforms(self, num_particles: int) -> int:
        """At most one for every particle."""
        return num_particles

    def __call__(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Fill up with draws from the remainders until there are N."""
        N = weights.shape[1]
        expected = N * weights.double()
        certain = expected.floor()
        left = N - certain.sum(-1, keepdim=True)  # [R, 1]
        remainders = expected - certain
        total = remainders.sum(-1, keepdim=True)
        # Nothing is left over exactly when all weights are multiples of 1/N; any distribution will do.
        remainders = torch.where(total > 0, remainders / total.clamp(min=1e-300), 1.0 / N)
        drawn = first_above(distribution_function(remainders), uniforms.double().contiguous())
        kept = (torch.arange(N, device=weights.device) < left).double()  # [R, N]
        counts = certain.scatter_add(-1, drawn, kept)
        return ancestors(counts.cumsum(-1))


SCHEMES: dict[str, Resampling] = {
    "systematic": Systematic(),
    "stratified": Stratified(),
    "multinomial": Multinomial(),
    "residual": Residual(),
}


def as_scheme(resampling: str | Resampling) -> Resampling:
    """A scheme by its name, or as it is."""
    if isinstance(resampling, str):
        if resampling not in SCHEMES:
            raise invalid("resampling", resampling, f"one of {list(SCHEMES)}, or a scheme")
        return SCHEMES[resampling]
    require(callable(resampling), "resampling", resampling, f"one of {list(SCHEMES)}, or a scheme")
    return resampling


def distribution_function(weights: Tensor) -> Tensor:
    """Cumulative sums in float64: in float32 they miss 1 by enough to lose the last particle."""
    return weights.double().cumsum(-1)


def ancestors(cumulative_counts: Tensor) -> Tensor:
    """Ancestors from cumulative offspring counts, `[R, N]`; a row that does not add up to N is made to.

    The ancestor of particle i is the number of particles whose offspring have all come before it.
    """
    R, N = cumulative_counts.shape
    ends = cumulative_counts.clamp_(0, N).long()[:, :-1]  # whatever is left is the last one's
    ended = torch.zeros(R, N + 1, dtype=torch.long, device=ends.device)
    ended.scatter_add_(1, ends, ended.new_ones(()).expand_as(ends))
    return ended[:, :N].cumsum(1)
