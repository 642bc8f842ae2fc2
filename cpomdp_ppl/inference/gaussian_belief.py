"""Gaussian beliefs, and what becomes of them when they are pushed through a function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpomdp_ppl.inference.covariance import product


@dataclass(frozen=True)
class GaussianBelief:
    """`N(μ, L Lᵀ)` over the state vector.

    Attributes:
        mean: μ, `[C, B, D]`.
        root: L, `[C, B, D, D]`: any square root of the covariance, which may be singular.
    """

    mean: Tensor
    root: Tensor

    @property
    def covariance(self) -> Tensor:
        """The covariance `L Lᵀ`, `[C, B, D, D]`."""
        return product(self.root, self.root.mT)

    def draw(self, num_draws: int) -> Tensor:
        """Draw M states independently, `[C, B, M, D]`."""
        C, B, D = self.mean.shape
        noise = torch.randn(C, B, num_draws, D, dtype=self.mean.dtype, device=self.mean.device)
        return self.mean[:, :, None] + product(noise, self.root.mT)


@dataclass(frozen=True)
class Transformed:
    """The first two moments of a Gaussian that was pushed through a function.

    Attributes:
        mean: Mean of the values, `[C, B, m]`.
        inputs: Deviations of the Gaussian's points from its mean, `[C, B, K', n]`; those from K' to K, where
            only the noise deviates, are zero.
        outputs: Deviations of the values from their mean, `[C, B, K, m]`.
        weights: Weights of the K deviations in a covariance, `[K]`; None if all are 1.
        noise: Mean covariance of the noise on top of the values, `[C, B, m, m]`, if there is any.
    """

    mean: Tensor
    inputs: Tensor
    outputs: Tensor
    weights: Tensor | None
    noise: Tensor | None

    def covariance(self, left: Tensor, right: Tensor) -> Tensor:
        """The covariance of two families of deviations `[C, B, K, ·]`."""
        return product((left if self.weights is None else left * self.weights[:, None]).mT, right)

    @property
    def cross(self) -> Tensor:
        """The covariance of points and values, `[C, B, n, m]`."""
        return self.covariance(self.outputs[:, :, : self.inputs.shape[2]], self.inputs).mT

    def unexplained(self, J: Tensor) -> Tensor:
        """The covariance of what J times the values' deviations leave of the points', `[C, B, n, n]`."""
        nothing = self.outputs.shape[2] - self.inputs.shape[2]
        inputs = torch.nn.functional.pad(self.inputs, (0, 0, 0, nothing)) if nothing else self.inputs
        inputs = inputs.to(J.dtype)
        left = inputs - product(self.outputs.to(J.dtype), J.mT)  # a sum of squares, whatever the rounding
        return self.covariance(left, left)


@dataclass(frozen=True)
class Expected:
    """What the observation program expects at points of the state, and what was observed.

    Attributes:
        mean: Mean of the observation, `[C, B, K, m]`.
        noise: Covariance of its noise, `[C, B, K, m, m]`.
        values: What was observed, `[B, m]`.
        observed: Which of the values were observed, bool `[B, m]`; None for all.
    """

    mean: Tensor
    noise: Tensor
    values: Tensor
    observed: Tensor | None
