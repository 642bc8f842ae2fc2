"""The unscented Kalman filter: programs run at sigma points, and nothing is differentiated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cpomdp_ppl.errors import require, require_count
from cpomdp_ppl.inference.engine import native_or_none, require_engine
from cpomdp_ppl.inference.gaussian_belief import GaussianBelief, Transformed, block_diagonal
from cpomdp_ppl.inference.kalman import Function, KalmanFilter, KalmanRecursion
from cpomdp_ppl.inference.native_kalman import KalmanKernel, KalmanSettings

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP


@dataclass(frozen=True)
class UnscentedKalmanFilter(KalmanFilter):
    """Run the programs at sigma points, and take means and covariances of what comes out.

    Exact where programs are linear and Gaussian. Sites must be Normal, MultivariateNormal or Delta. The
    sigma points of a transition are those of state and noise together; the noise of an observation is
    averaged over the sigma points of the state.

    Args:
        alpha: How far out the sigma points are: `alpha · √(n + kappa)` standard deviations in n dimensions.
        beta: Extra weight of the central point in covariances.
        kappa: Part of the distance of sigma points; see alpha. None takes `3 - n`, which gets fourth moments
            of a normal right, as long as that is positive, and else 0, so that no weight is negative.
        reward_points: Number of points of the belief at which the reward is averaged.
        engine: `"native"` compiles the model's programs, and refuses those that cannot be compiled; `"eager"`
            runs them as they are; `"auto"` compiles what it can. The two agree up to rounding.
    """

    name: ClassVar[str] = "ukf"
    draws: ClassVar[bool] = False
    alpha: float = 1.0
    beta: float = 0.0
    kappa: float | None = None
    reward_points: int = 64
    engine: str = "auto"

    def __post_init__(self) -> None:
        require(_is_finite(self.alpha) and self.alpha > 0, "alpha", self.alpha, "a positive number")
        require(_is_finite(self.beta), "beta", self.beta, "a finite number")
        require(
            self.kappa is None or (_is_finite(self.kappa) and self.kappa > -1),
            "kappa",
            self.kappa,
            "None or a number above -1",
        )
        require_count("reward_points", self.reward_points)
        require_engine(self.engine)

    def recursion(self, model: CPOMDP) -> UnscentedRecursion:
        """Apply the filter to a model."""
        return UnscentedRecursion(model, self)

    def kernel(self, model: CPOMDP) -> KalmanKernel | None:
        """The compiled filter of a model as it is now; None if the eager engine serves it."""
        return native_or_none(self.engine, model, "ukf", partial(KalmanKernel, extended=False))

    def settings(self) -> KalmanSettings:
        """What the compiled filter is told when it runs."""
        return KalmanSettings(self.reward_points, self.sigma_points)

    def sigma_points(self, n: int) -> tuple[float, Tensor, Tensor]:
        """How many deviations sigma points are away in n dimensions; weights in means and covariances."""
        spread = self.alpha**2 * (n + (max(3.0 - n, 0.0) if self.kappa is None else self.kappa))  # n + λ
        of_mean = torch.full((2 * n + 1,), 0.5 / spread, dtype=torch.float64)
        of_mean[0] = 1 - n / spread
        of_covariance = of_mean.clone()
        of_covariance[0] += 1 - self.alpha**2 + self.beta
        return math.sqrt(spread), of_mean, of_covariance


class UnscentedRecursion(KalmanRecursion):
    """The recursion that pushes Gaussians through functions by the unscented transform."""

    def __init__(self, model: CPOMDP, settings: UnscentedKalmanFilter) -> None:
        super().__init__(model, settings.reward_points)
        self.settings = settings

    def transform(
        self, function: Function, size: int, belief: GaussianBelief, num_noise: int = 0
    ) -> Transformed:
        """Evaluate the function at `2n + 1` sigma points of belief and noise, on the particle axis."""
        mean, root, D = belief.mean, belief.root, belief.mean.shape[-1]
        if num_noise:
            unit = torch.eye(num_noise, dtype=root.dtype, device=root.device)
            root = block_diagonal([root, unit.expand(*root.shape[:2], -1, -1)])
            mean = torch.cat([mean, mean.new_zeros(()).expand(*mean.shape[:2], num_noise)], -1)
        n = mean.shape[-1]
        distance, *weights = self.settings.sigma_points(n)
        of_mean, of_covariance = (each.to(root.device, self.coordinates.dtype) for each in weights)
        arms = root.mT * distance  # [C, B, n, n]
        deviations = torch.cat([torch.zeros_like(arms[:, :, :1]), arms, -arms], 2)  # [C, B, 2n + 1, n]
        points = mean[:, :, None] + deviations
        values, noise = function(points[..., :D], points[..., D:] if num_noise else None)
        # Relative to the central point: small alphas have large weights, which cancel.
        around = values - values[:, :, :1]
        shift = (around * of_mean[:, None]).sum(2, keepdim=True)
        if noise is not None:
            noise = (noise * of_mean[:, None, None]).sum(2)
        return Transformed(
            (values[:, :, :1] + shift)[:, :, 0], deviations[..., :D], around - shift, of_covariance, noise
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
