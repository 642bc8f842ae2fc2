"""Points that are spread out like a standard normal."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.quasirandom import SobolEngine

if TYPE_CHECKING:
    from torch import Tensor


@cache
def normal_points(num_points: int, dim: int) -> Tensor:
    """N points `[N, D]` spread out like a standard normal, for means of functions that may jump.

    Sobol's points, whose coordinates are replaced, rank for rank, by the midpoints' quantiles of the normal.
    The outermost two are moved out until the second moment is 1, since the tails that they stand for are
    what midpoints leave out; then what correlation is left is taken away. So the mean of a linear or
    quadratic function is exact (a quadratic one in D > 1 dimensions only if N > 2D).

    Examples:
        >>> points = normal_points(64, 2)
        >>> (points.mT @ points / 64).round(decimals=6).abs()
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    levels = (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points
    quantiles = torch.special.ndtri(levels)
    if num_points > 1:
        inner = quantiles[1:-1].square().sum()
        quantiles[-1] = ((num_points - inner) / 2).sqrt()
        quantiles[0] = -quantiles[-1]
    ranks = SobolEngine(dim).draw(num_points, dtype=torch.float64).argsort(0).argsort(0)
    points: Tensor = quantiles[ranks]
    if 1 < 2 * dim < num_points:
        factor = torch.linalg.cholesky(points.mT @ points / num_points)
        points = torch.linalg.solve_triangular(factor.mT, points, upper=True, left=False)
    return points
