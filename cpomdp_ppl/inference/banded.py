"""Transitions between the points of a grid, as tables of which only a band is not zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

NEGLIGIBLE_MASS = 1e-34
"""Probability below which points do not move on."""


@dataclass(frozen=True)
class Band:
    """Transitions from the points `start … start + P - 1` to the points `low … high - 1`.

    Attributes:
        weights: Shares of the points to arrive at, `[C, P, high - low]`; `[1, …]` if all contexts are alike.
    """

    start: int
    low: int
    high: int
    weights: Tensor

    @staticmethod
    def of(start: int, table: Tensor) -> Band:
        """The band of a table `[C, P, G]` of weights, which are normalised."""
        table = table / table.sum(-1, keepdim=True)
        columns = (table != 0).any(0).any(0).nonzero()[:, 0]
        low, high = int(columns[0]), int(columns[-1]) + 1
        return Band(start, low, high, table[..., low:high].clone())


@dataclass(frozen=True)
class BandedTransition:
    """Where one action leads from every point of a grid.

    Attributes:
        bands: The table's blocks of rows, each with the columns that are not zero.
        identity: Whether every point stays where it is.
        signed: Whether some weights are negative, as motion without noise ends between grid points.
        shape: Shape of the grid.
    """

    bands: Sequence[Band]
    identity: bool
    signed: bool
    shape: Sequence[int]

    def __call__(self, p: Tensor) -> Tensor:
        """Move beliefs `[C, R, G]`."""
        if self.identity:
            return p
        moved = torch.zeros_like(p)
        for c, (source, target) in enumerate(zip(p, moved, strict=True)):
            highest = source.amax(0).tolist()  # empty stretches of the grid are skipped
            for band in self.bands:
                stop = band.start + band.weights.shape[1]
                if max(highest[band.start : stop]) > NEGLIGIBLE_MASS:
                    weights = band.weights[c if len(band.weights) > 1 else 0]
                    target[:, band.low : band.high].addmm_(source[:, band.start : stop], weights)
        return nonnegative(moved, self.shape) if self.signed else moved

    def expect(self, values: Tensor) -> Tensor:
        """Means of functions `[C, R, G]` of the point arrived at, for every point to start from."""
        if self.identity:
            return values
        expected = torch.empty_like(values)
        for band in self.bands:
            stop = band.start + band.weights.shape[1]
            expected[..., band.start : stop] = values[..., band.low : band.high] @ band.weights.mT
        return expected

    def origins(self, later: Tensor) -> Tensor:
        """Weights `[C, R, M, G]` of all points to start from, for points arrived at, `[C, R, M]`.

        Negative weights are taken for zero, as no distribution has such. That leaves the mean right, but adds
        about half a cell's width of spread.
        """
        last = self.bands[-1]
        G = last.start + last.weights.shape[1]
        found = torch.zeros(*later.shape, G, dtype=last.weights.dtype)
        for c, (arrived, target) in enumerate(zip(later.flatten(1), found.flatten(1, 2), strict=True)):
            for band in self.bands:
                rows = ((arrived >= band.low) & (arrived < band.high)).nonzero()[:, 0]
                weights = band.weights[c if len(band.weights) > 1 else 0].T[arrived[rows] - band.low]
                target[rows, band.start : band.start + band.weights.shape[1]] = weights
        return found.clamp_(min=0) if self.signed else found


def nonnegative(p: Tensor, shape: Sequence[int]) -> Tensor:
    """Beliefs `[C, R, G]` on a grid of this shape, whose negative masses their neighbours have paid for.

    To cut them off and normalise would move probability between places that are far from each other: what
    comes to lie between two points is shared out as -1, 9, 9, -1 sixteenths, and would gain an eighth.
    """
    moved = p.unflatten(-1, tuple(shape))
    for axis in [*range(-len(shape), 0)] * 3:  # what a neighbour cannot pay, the next one may
        debt = moved.clamp(max=0)
        if not bool(debt.any()):
            break
        means = moved.clamp(min=0)
        before, after = _shifted(means, 1, axis), _shifted(means, -1, axis)
        rate = debt / (before + after).clamp(min=1e-300)
        solvent = before + after > 0
        rate, left = torch.where(solvent, rate, 0.0), torch.where(solvent, 0.0, debt)
        moved = means * (1 + _shifted(rate, 1, axis) + _shifted(rate, -1, axis)) + left
    positive: Tensor = moved.flatten(-len(shape)).clamp(min=0)
    return positive / positive.sum(-1, keepdim=True)


def _shifted(x: Tensor, by: int, axis: int) -> Tensor:
    """Values one place before (1) or after (-1) along an axis; zero at the ends."""
    n = x.shape[axis]
    shifted = x.roll(by, axis)
    at_end = torch.arange(n) == (0 if by > 0 else n - 1)
    return torch.where(at_end.reshape(-1, *[1] * (-axis - 1)), 0.0, shifted)
