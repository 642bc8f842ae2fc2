"""Climbing a smooth function by BFGS."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError

ValueAndGradient: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]
"""A function of u `[P]`, and its gradient `[P]`."""


def climb(
    function: ValueAndGradient,
    u: Tensor,
    iterations: int,
    longest: float,
    tolerance: float,
    bar: Any,
) -> tuple[Tensor, list[float], bool]:
    """Climb a function by BFGS with steps of bounded length.

    Args:
        function: From u `[P]` to a value and its gradient `[P]`.
        u: Where to begin.
        iterations: Number of steps, at the most.
        longest: Length of the longest step.
        tolerance: Gain below which a further step is not worth while.
        bar: A progress bar.

    Returns:
        The highest point, values by iteration, and whether the climb has converged.
    """
    value, g = function(u)
    series, eye = [value], torch.eye(len(u), dtype=u.dtype)
    H = eye / max(1.0, float(g.norm()))  # estimate of the inverse of the negative Hessian
    fresh = True
    for done in range(iterations):
        direction = H @ g
        promised = 0.5 * float(g @ direction)  # what a quadratic function has left to gain
        if promised < tolerance and not fresh:
            return _ended(u, series, True, bar, iterations - done)
        if float(g.norm()) == 0.0:
            return _ended(u, series, True, bar, iterations - done)
        direction = direction * min(1.0, longest / float(direction.norm()))
        found = _line_search(function, u, value, g, direction)
        if found is None:
            if fresh:  # along the gradient itself nothing is to be gained
                return _ended(u, series, promised < tolerance, bar, iterations - done)
            H, fresh = eye / max(1.0, float(g.norm())), True
            bar.update()
            series.append(value)
            continue
        after, value, g_after = found
        s, y = after - u, g - g_after  # the function is climbed, so y is along s
        curvature = float(s @ y)
        if curvature > 1e-10 * float(s.norm() * y.norm()):
            if fresh:
                H = eye * curvature / float(y @ y)
            left = eye - torch.outer(s, y) / curvature
            H = left @ H @ left.mT + torch.outer(s, s) / curvature
            fresh = False
        u, g = after, g_after
        series.append(value)
        bar.update()
        bar.set_postfix(log_likelihood=f"{value:.3f}")
    return u, series, False


def _ended(
    u: Tensor, series: list[float], converged: bool, bar: Any, left: int
) -> tuple[Tensor, list[float], bool]:
    bar.update(left)
    return u, series, converged


def _line_search(
    function: ValueAndGradient, u: Tensor, value: float, g: Tensor, direction: Tensor
) -> tuple[Tensor, float, Tensor] | None:
    """Halve a step until it gains enough; None if none does."""
    promised = float(g @ direction)
    for _ in range(12):
        try:
            after, gradient = function(u + direction)
        except (DegenerateWeightsError, DensityError):
            after = -math.inf
        if after >= value + 1e-4 * promised:
            return u + direction, after, gradient
        direction, promised = direction / 2, promised / 2
    return None
