"""Climbing to the maximum of a likelihood: by quasi-Newton steps, or by noisy scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError
from cpomdp_ppl.inference.gaussian_belief import pseudo_inverse
from cpomdp_ppl.rng import seed_for

ValueAndGradient: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]
"""A function of u `[P]`, and its gradient `[P]`."""

SMALL_NOISE = 0.02
"""Variance of the estimate by random numbers that is small enough, as a share of that by episodes."""

MOST_FILTERS = 128
"""Number of filters for one step, at the most."""

Scores: TypeAlias = "Callable[[Tensor, int], tuple[Tensor, Tensor]]"
"""A function from u and a seed to the log-likelihood of every episode, `[B]`, and its score, `[B, P]`."""


def climb(
    function: ValueAndGradient,
    u: Tensor,
    iterations: int,
    longest: float,
    tolerance: float,
    bar: Any,
) -> tuple[Tensor, list[float], bool]:
    """Climb a function by BFGS with steps of bounded length.

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
        if (promised < tolerance and not fresh) or float(g.norm()) == 0.0:
            bar.update(iterations - done)
            return u, series, True
        direction = direction * min(1.0, longest / float(direction.norm()))
        found = _line_search(function, u, value, g, direction)
        if found is None:
            if fresh:  # along the gradient itself nothing is to be gained
                bar.update(iterations - done)
                return u, series, promised < tolerance
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


@dataclass(frozen=True)
class ScoreEstimate:
    """The score at a point, as estimated by R filters with different random numbers.

    Attributes:
        value: Logarithm of the mean likelihood of the filters.
        gradient: Gradient of that, `[P]`.
        noise: Covariance of the gradient by random numbers, `[P, P]`.
        squares: `Σ_b s_b s_bᵀ` of the mean scores of episodes, `[P, P]`; less the noise, the information.
    """

    value: float
    gradient: Tensor
    noise: Tensor
    squares: Tensor

    def covariance(self) -> Tensor:
        """Covariance of an estimate one step from here, `[P, P]`; NaN if a direction has nothing but noise.

        It is the inverse of the information, without what noise adds to the squares, and what noise adds to
        the step.
        """
        inverse = inverse_of(self.squares - self.noise)
        if bool(inverse_of(self.squares - 2 * self.noise).isnan().any()):
            return torch.full_like(inverse, torch.nan)
        return inverse + inverse @ self.noise @ inverse


def estimate_score(scores: Scores, u: Tensor, seeds: list[int]) -> ScoreEstimate:
    """Estimate the score at u by one filter for each seed.

    Each counts by the likelihood that it found, as if all were one filter with all their particles. The score
    of a single filter is biased, because it is independent of its likelihood; this one is less so.
    """
    found = [scores(u, seed) for seed in seeds]
    R = len(found)
    log_z = torch.stack([value for value, _ in found])  # [R, B]
    each = torch.stack([score for _, score in found])  # [R, B, P]
    weights = log_z.softmax(0)[..., None]
    mean = (weights * each).sum(0)
    off = (weights * (each - mean)).flatten(0, 1)
    value = (log_z.logsumexp(0) - math.log(R)).sum()
    return ScoreEstimate(float(value), mean.sum(0), off.mT @ off * (R / (R - 1)), mean.mT @ mean)


def climb_by_scores(
    scores: Scores,
    u: Tensor,
    iterations: int,
    longest: float,
    tolerance: float,
    seed: int,
    bar: Any,
) -> tuple[Tensor, ScoreEstimate, list[float], bool]:
    """Climb by Fisher scoring, with fresh random numbers for every step.

    Where a step promises no more than its noise does, the filters are doubled, until noise is a small part of
    the standard errors.

    Returns:
        Where it ended, the score there, values by iteration, and whether noise is all that was left.
    """
    R, series = 2, []
    for k in range(iterations):
        at = estimate_score(scores, u, [seed_for(seed, k, r) for r in range(R)])
        inverse = pseudo_inverse(at.squares, 1e-7)
        step = inverse @ at.gradient
        promised, by_noise = 0.5 * float(at.gradient @ step), 0.5 * float((inverse * at.noise).sum())
        series.append(at.value)
        bar.update()
        bar.set_postfix(log_likelihood=f"{at.value:.3f}")
        u = u + step * min(1.0, longest / max(float(step.norm()), 1e-300))
        if promised <= tolerance + 3 * by_noise:
            settled = 2 * by_noise <= SMALL_NOISE * len(u)
            if settled or R == MOST_FILTERS:
                bar.update(iterations - k - 1)
                return u, at, series, settled
            R *= 2
    return u, at, series, False


def inverse_of(information: Tensor) -> Tensor:
    """The inverse of the information about u, if it is positive in all directions; NaN otherwise."""
    scale = information.diagonal().abs().sqrt().clamp(min=1e-300)
    correlation = information / torch.outer(scale, scale)
    if not float(torch.linalg.eigvalsh(correlation).min()) > 1e-7 or float(scale.min()) < 1e-4:
        return torch.full_like(information, torch.nan)
    covariance: Tensor = torch.linalg.inv(correlation) / torch.outer(scale, scale)
    return covariance
