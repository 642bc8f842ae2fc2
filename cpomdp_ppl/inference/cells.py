"""Cells of a grid, and transitions between their centres."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCAN_POINTS = 2**14
"""Points at which functions are evaluated together in the search for jumps."""

HALVINGS = 2
"""How often cells around a jump are halved."""

HALVED_CELLS = 16
"""Distance from a jump, in cells, within which they are halved."""

SHARERS = 6
"""Number of points along each axis among which a point is shared out; it is even."""

MOST_JUMPS = 32
"""Number of jumps beyond which a function is taken to be rough everywhere."""

NEGLIGIBLE_MASS = 1e-34
"""Probability below which points do not move on."""


class CellGrid:
    """Cells in one or two dimensions, and their centres: the points.

    Args:
        edges: Edges of the cells along each axis, ascending.
    """

    def __init__(self, edges: Sequence[Tensor]) -> None:
        self.edges = list(edges)
        self.lines = [(x[1:] + x[:-1]) / 2 for x in edges]
        self.shape = tuple(len(line) for line in self.lines)
        self.size = math.prod(self.shape)
        self.dim = len(self.shape)
        self.points = torch.cartesian_prod(*self.lines).reshape(-1, self.dim)  # [G, d]
        self.widths = torch.cartesian_prod(*[x.diff() for x in edges]).reshape(-1, self.dim)  # [G, d]
        self.finest = self.widths.amin(0)  # [d]
        at_end = [torch.arange(n) % (n - 1) == 0 for n in self.shape]
        self.boundary = torch.cartesian_prod(*at_end).reshape(-1, self.dim).any(1).nonzero()[:, 0]

    @staticmethod
    def between(bounds: Sequence[Sequence[float]], widths: Sequence[float]) -> CellGrid:
        """The grid of equal cells, about as wide as asked for, that fills given bounds."""
        pairs = zip(bounds, widths, strict=True)
        return CellGrid(
            [torch.linspace(low, high, max(SHARERS, round((high - low) / h)) + 1) for (low, high), h in pairs]
        )

    @staticmethod
    def around(bounds: Sequence[Sequence[float]], widths: Sequence[float]) -> CellGrid:
        """A grid of equal cells, about as wide as asked for, that covers bounds and has round edges."""
        edges = []
        for (low, high), width in zip(bounds, widths, strict=True):
            h = _round_spacing(width)
            first, last = math.floor(low / h), math.ceil(high / h)
            edges.append(torch.arange(first, max(last, first + SHARERS) + 1) * h)
        return CellGrid(edges)

    def refined(self, jumps: Sequence[float]) -> CellGrid:
        """A one-dimensional grid of equal cells, with finer ones around the places of jumps.

        A belief conditioned on a density that jumps has a steep edge there, which coarse cells would blur.
        All but the outermost edges move a little, such that the first jump is on one.
        """
        edges, h = self.edges[0].clone(), float(self.finest[0])
        if jumps:
            away = math.remainder(jumps[0] - float(edges[0]), h)
            edges[1:-1] += away if abs(away) > 1e-9 * h else 0.0
        for level in range(HALVINGS):
            middle = (edges[1:] + edges[:-1]) / 2
            near = torch.zeros_like(middle, dtype=torch.bool)
            for jump in jumps:
                near |= (middle - jump).abs() < HALVED_CELLS * h / 2**level
            edges = torch.cat([edges, middle[near]]).sort().values
        return CellGrid([edges])

    def __str__(self) -> str:
        return " × ".join(f"[{x[0]:.4g}, {x[-1]:.4g}]" for x in self.edges)

    def containing(self, jumps: Sequence[float]) -> Tensor:
        """Numbers of the cells of a one-dimensional grid that have jumps inside, not at their edges."""
        x = torch.tensor(jumps)
        cell = torch.searchsorted(self.edges[0], x) - 1
        x, cell = (kept[(cell >= 0) & (cell < self.size)] for kept in (x, cell))
        place = (x - self.edges[0][cell]) / self.widths[cell, 0]
        inside: Tensor = cell[(place > 1e-3) & (place < 1 - 1e-3)].unique()
        return inside

    def subpoints(self, cells: Tensor, parts: int) -> Tensor:
        """Points that divide cells evenly, `[cells, parts**d, d]`."""
        offset = (torch.arange(parts) + 0.5) / parts - 0.5
        offsets = torch.cartesian_prod(*[offset] * self.dim).reshape(-1, self.dim)
        return self.points[cells, None] + offsets * self.widths[cells, None]

    def shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the grid points around `x [..., d]`, and their shares (Lagrange weights), `[..., m**d]`.

        What falls outside goes to the boundary; m is `SHARERS`.
        """
        index = share = None
        for axis, line in enumerate(self.lines):
            n, tiny = len(line), 1e-9 * self.finest[axis]
            along = x[..., axis].clamp(line[0], line[-1]).contiguous()
            after = torch.searchsorted(line, along - tiny).clamp(max=n - 1)
            along = torch.where((line[after] - along).abs() <= tiny, line[after], along)  # exactly on a point
            first = (after - SHARERS // 2).clamp(0, n - SHARERS)
            weights = _lagrange(line, along, first)
            some = first[..., None] + torch.arange(SHARERS)
            if index is None or share is None:
                index, share = some, weights
            else:
                index = (index[..., :, None] * n + some[..., None, :]).flatten(-2)
                share = (share[..., :, None] * weights[..., None, :]).flatten(-2)
        assert index is not None
        assert share is not None
        return index, share


def jumps_of(function: Callable[[Tensor], Tensor], grid: CellGrid) -> list[float]:
    """Where a function from points `[P, 1]` to values `[..., P]` jumps, within a grid of one dimension."""
    x = grid.subpoints(torch.arange(grid.size), 16).flatten(0, 1)  # [P, 1], ascending
    jump = torch.zeros(len(x) - 1, dtype=torch.bool)
    for some in torch.arange(len(x)).split(SCAN_POINTS):
        some = torch.arange(max(0, int(some[0]) - 3), int(some[-1]) + 1)  # chunks overlap
        values = function(x[some])
        changes = values.diff().abs()
        around = torch.maximum(changes[..., 2:], changes[..., :-2])
        found = (changes[..., 1:-1] > 4 * around) & (
            changes[..., 1:-1] > 1e-5 * (1 + values[..., 1:-2].abs())
        )
        jump[some[1:-2]] |= found.flatten(0, -2).any(0)
    where = jump.nonzero()[:, 0]
    if not len(where) or len(where) > MOST_JUMPS:  # programs need not take zero points
        return []
    low, high = x[where], x[where + 1]
    for _ in range(50):  # bisection: the jump is in the half that changes more
        middle = (low + high) / 2
        a, b, c = function(low), function(middle), function(high)
        left = ((b - a).abs().flatten(0, -2).amax(0) > (c - b).abs().flatten(0, -2).amax(0))[:, None]
        low, high = torch.where(left, low, middle), torch.where(left, middle, high)
    return [float(place) for place in (low + high)[:, 0] / 2]


def jump_along(values: Tensor, axis: int) -> Tensor:
    """Which cells a function jumps in, from its values `[..., cells, parts, parts]`: bool `[cells]`.

    A smooth function changes bit by bit; one that jumps, between two neighbours only.
    """
    changes = values.diff(dim=axis).abs()
    largest, total = changes.amax(axis), changes.sum(axis)  # [..., cells, parts]
    found = (largest > 0.7 * total) & (largest > 1e-5 * (1 + values.abs().amax(axis)))
    return found.movedim(-2, 0).flatten(1).any(1)


def _lagrange(line: Tensor, x: Tensor, first: Tensor) -> Tensor:
    """Lagrange weights at `x [...]` of `SHARERS` nodes of a line from `first [...]` on, `[..., m]`."""
    nodes = line.unfold(0, SHARERS, 1)  # [n - m + 1, m]
    away = [x - nodes[:, j][first] for j in range(SHARERS)]
    weights = []
    for i in range(SHARERS):
        above, below = torch.ones_like(x), torch.ones_like(nodes[:, i])
        for j in range(SHARERS):
            if j != i:
                above, below = above * away[j], below * (nodes[:, i] - nodes[:, j])
        weights.append(above / below[first])  # exactly 1 on node i
    return torch.stack(weights, -1)


def _round_spacing(spacing: float) -> float:
    """A nearby spacing that divides a power of ten into a round number of parts."""
    unit = 10.0 ** math.ceil(math.log10(10 * spacing))
    parts = unit / spacing  # 10 to 100
    step = 10 if parts >= 30 else 5
    return unit / (round(parts / step) * step)


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
