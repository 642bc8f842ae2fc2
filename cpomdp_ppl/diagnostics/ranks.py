"""Where the truth ranks among draws from what was believed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LEVEL = 0.01
"""How likely it may be that a filter without fault is called not calibrated, over all tests together."""

ROUNDING = 64.0
"""Where all draws are the same, those this many units of rounding from the truth are tied with it."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """Where the truth came among draws from what was believed: uniform on [0, 1) if the belief is right.

    Attributes:
        values: `(rank + u) / (draws + 1)` with u uniform, one for each episode, float64 `[n]`.
        bins: Number of bins of the histogram.
    """

    values: Tensor
    bins: int

    @property
    def num_episodes(self) -> int:
        """Number of episodes n with a rank."""
        return len(self.values)

    @cached_property
    def counts(self) -> Tensor:
        """The rank histogram, int64 `[bins]`."""
        return histogram(self.values, self.bins)

    @cached_property
    def p_value(self) -> float:
        """The p-value of Pearson's χ² test against the uniform distribution; NaN without any episode.

        The test takes fewer bins than the histogram where those would have less than five episodes each, as
        the approximation by χ² is poor there.
        """
        n = self.num_episodes
        if not n:
            return math.nan
        bins = max(2, min(self.bins, n // 5))
        counts = self.counts if bins == self.bins else histogram(self.values, bins)
        chi2 = (counts - n / bins).double().square().sum() / (n / bins)
        # The upper tail of χ² with k degrees of freedom is Q(k/2, χ²/2); SciPy is not needed for that.
        return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), chi2 / 2))

    @property
    def hint(self) -> str:
        """What is wrong, in words, if anything is."""
        if not self.num_episodes:
            return "never seen"
        if self.p_value >= LEVEL:
            return "uniform"
        deviation = self.values - 0.5
        n = self.num_episodes
        shift = float(deviation.mean()) * (12 * n) ** 0.5  # standard normal, if ranks are uniform
        spread = (float(deviation.square().mean()) - 1 / 12) * (180 * n) ** 0.5  # likewise
        if max(abs(shift), abs(spread)) < 3:
            return "uneven: neither a shift nor a spread"
        if abs(spread) >= abs(shift):
            if spread > 0:
                return "over-confident: ranks pile up at both ends"
            return "under-confident: ranks crowd in the middle"
        return (
            f"too {'low' if shift > 0 else 'high'}: the truth ranks {'above' if shift > 0 else 'below'} draws"
        )


def histogram(values: Tensor, bins: int) -> Tensor:
    """How many of the values in [0, 1) are in each of so many bins of equal width, int64 `[bins]`."""
    return torch.bincount((values * bins).long().clamp(max=bins - 1), minlength=bins)


def normalised_ranks(truth: Tensor, draws: Tensor, possible: Tensor | None = None) -> Tensor:
    """Where the truth `[B, K]` comes among draws `[B, M, K]`, as a number in [0, 1), `[B, K]`.

    It is `(rank + u) / (M + 1)` with u uniform: exactly uniform, if the truth is one more such draw. Draws
    that equal the truth are tied with it; where all draws are the same up to rounding, up to rounding. Only
    `possible` draws count; the rank is NaN where there are none.

    Example:
        >>> from cpomdp_ppl.rng import isolated
        >>> with isolated(0):
        ...     rank = normalised_ranks(torch.tensor([[2.5]]), torch.arange(4.0).reshape(1, 4, 1))
        >>> 3 / 5 <= rank.item() < 4 / 5
        True
    """
    exact = not (truth.is_floating_point() or draws.is_floating_point())
    unit = 0.0 if exact else max(torch.finfo(x.dtype).eps for x in (truth, draws) if x.is_floating_point())
    y, x = truth.double()[:, None], draws.double()
    # Only where all is known for sure may rounding tell draws from the truth; elsewhere it would hide errors.
    known = x.amax(1, keepdim=True) - x.amin(1, keepdim=True) <= 4 * unit * y.abs()  # [B, 1, K]
    tied = torch.where(known, torch.isclose(x, y, rtol=ROUNDING * unit, atol=0.0), x == y)
    below = (x < y) & ~tied
    if possible is not None:
        tied, below = tied & possible, below & possible
    M = draws.shape[1] if possible is None else possible.sum(1)
    u = torch.rand(truth.shape, dtype=torch.float64, device=truth.device)
    ranks = (below.sum(1) + u * (tied.sum(1) + 1)) / (M + 1)
    return ranks if possible is None else torch.where(possible.any(1), ranks, torch.nan)
