"""The unscented Kalman filter: programs run at sigma points, and nothing is differentiated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cpomdp_ppl.errors import require, require_count
from cpomdp_ppl.inference.gaussian_belief import GaussianBelief, Transformed, block_diagonal
from cpomdp_ppl.inference.kalman import Function, KalmanFilter, KalmanRecursion

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
    """

    name: ClassVar[str] = "ukf"
    draws: ClassVar[bool] = False
    alpha: float = 1.0
    beta: float = 0.0
    kappa: float | None = None
    reward_points: int = 64

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

    def recursion(self, model: CPOMDP) -> UnscentedRecursion:
        """Apply the filter to a model."""
        return UnscentedRecursion(model, self)


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
        distance, of_mean, of_covariance = self._weights(n)
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

    def _weights(self, n: int) -> tuple[float, Tensor, Tensor]:
        """Standard deviations that sigma points are away, and their weights in means and covariances."""
        alpha, beta, kappa = self.settings.alpha, self.settings.beta, self.settings.kappa
        spread = alpha**2 * (n + (max(3.0 - n, 0.0) if kappa is None else kappa))  # n + λ
        of_mean = torch.full(
            (2 * n + 1,), 0.5 / spread, dtype=self.coordinates.dtype, device=self.model.device
        )
        of_mean[0] = 1 - n / spread
        of_covariance = of_mean.clone()
        of_covariance[0] += 1 - alpha**2 + beta
        return math.sqrt(spread), of_mean, of_covariance


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
