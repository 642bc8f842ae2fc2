"""An average over episodes, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """An average over episodes.

    Attributes:
        mean: The average.
        standard_error: Standard error of the average.
        deviation: Standard deviation of a single episode.
        num_episodes: How many episodes there were.
    """

    mean: float
    standard_error: float
    deviation: float
    num_episodes: int

    @staticmethod
    def of(values: Tensor, strata: Tensor | None = None, weights: Tensor | None = None) -> Mean:
        """Average numbers `[B]`.

        The error of the mean is made up of the errors of the groups' means, each estimated from the spread
        within its group. A group of a single number has no spread: that number is taken to be as uncertain as
        it is far from the plain mean of all. On average this is too much rather than too little, because it
        includes what differs between groups; if every group has one number, it gives the error of ungrouped
        numbers.

        Args:
            values: One number for each episode.
            strata: Which of several groups each belongs to, `[B]`, if the groups' sizes were fixed
                beforehand: what differs between groups is then no error of the mean.
            weights: Weights of the episodes, `[B]`, the same within a group; equal if left out.
        """
        n, y = len(values), values.double()
        if n == 1:
            return Mean(float(y), math.nan, math.nan, 1)
        w = torch.ones_like(y) if weights is None else weights.to(y)
        mean = float((w * y).sum() / w.sum())
        w = w / w.sum()
        deviation = float((w * (y - mean) ** 2).sum() * n / (n - 1)) ** 0.5
        if strata is None:
            return Mean(mean, deviation * float((w**2).sum()) ** 0.5, deviation, n)
        squares = 0.0
        for stratum in strata.unique():
            some = strata == stratum
            m = int(some.sum())
            # From the plain mean: one heavy episode is its own weighted mean, and would look certain.
            variance = y[some].var() if m > 1 else (y[some] - y.mean()).square().sum() * n / (n - 1)
            squares += float(w[some].sum() ** 2 * variance / m)
        return Mean(mean, squares**0.5, deviation, n)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Mean:
        """Read a mean from JSON, in which NaN is null."""
        numbers: dict[str, Any] = {
            name: math.nan if value is None else value for name, value in content.items()
        }
        return Mean(**numbers)

    def __str__(self) -> str:
        return f"{self.with_error()} (s.d. {decimal(self.deviation, 2)})"

    def with_error(self, digits: int = 3) -> str:
        """The average and its standard error, or a dash if a single episode cannot tell.

        Examples:
            >>> Mean.of(torch.tensor([1.0, 3.0])).with_error(), Mean.of(torch.tensor([1.0])).with_error(1)
            ('2.000 ± 1.000', '1.0 ± –')
        """
        return f"{self.mean:.{digits}f} ± {decimal(self.standard_error, digits)}"


def decimal(value: float, digits: int) -> str:
    """A number with so many decimals, or a dash if it is NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"
