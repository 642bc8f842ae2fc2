"""The extended Kalman filter, derived from the program by automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from cpomdp_ppl.errors import require_count
from cpomdp_ppl.inference.engine import native_or_none, require_engine
from cpomdp_ppl.inference.gaussian_belief import GaussianBelief, Transformed, product
from cpomdp_ppl.inference.kalman import Function, KalmanFilter, KalmanRecursion
from cpomdp_ppl.inference.native_kalman import KalmanKernel, KalmanSettings

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP


@dataclass(frozen=True)
class ExtendedKalmanFilter(KalmanFilter):
    """Linearise the programs about the mean; exact where they are linear and Gaussian.

    Sites must be Normal, MultivariateNormal or Delta. The scale of the noise is taken at the mean.

    Args:
        reward_points: Number of points of the belief at which the reward is averaged.
        engine: `"native"` compiles the model's programs, and refuses those that cannot be compiled; `"eager"`
            runs them as they are; `"auto"` compiles what it can. The two agree up to rounding.
    """

    name: ClassVar[str] = "ekf"
    draws: ClassVar[bool] = False
    reward_points: int = 64
    engine: str = "auto"

    def __post_init__(self) -> None:
        require_count("reward_points", self.reward_points)
        require_engine(self.engine)

    def recursion(self, model: CPOMDP) -> ExtendedRecursion:
        """Apply the filter to a model."""
        return ExtendedRecursion(model, self.reward_points)

    def kernel(self, model: CPOMDP) -> KalmanKernel | None:
        """The compiled filter of a model as it is now; None if the eager engine serves it."""
        return native_or_none(self.engine, model, "ekf", partial(KalmanKernel, extended=True))

    def settings(self) -> KalmanSettings:
        """What the compiled filter is told when it runs."""
        return KalmanSettings(self.reward_points)


class ExtendedRecursion(KalmanRecursion):
    """The recursion that pushes Gaussians through the tangents of functions.

    Attributes:
        keeps_graph: Whether the tangents can be differentiated once more, with autograd on.
    """

    keeps_graph = False

    def transform(
        self, function: Function, size: int, belief: GaussianBelief, num_noise: int = 0
    ) -> Transformed:
        """Differentiate the function at the mean: one backward pass, with its values on the particle axis.

        Particle k is there for the k-th value, so the gradients of value k at particle k are the rows of the
        Jacobian. Forward mode would need no such copies, but as of torch 2.13 an operation takes 0.2 ms and
        more wherever a dual number meets a plain one (zero tangents go through Python), and the filter took
        2.5 times as long.
        """
        C, B, n = belief.mean.shape
        graph = self.keeps_graph and torch.is_grad_enabled()
        points = belief.mean[:, :, None].expand(C, B, size, n).contiguous()  # [C, B, m, n]
        if not (graph and points.requires_grad):
            # No copy for a single value; a leaf that requires a gradient is safe from programs.
            points = points.detach().requires_grad_()
        with torch.enable_grad():
            arguments = [points]
            if num_noise:
                arguments.append(points.new_zeros((C, B, size, num_noise), requires_grad=True))
            values, noise = function(points, arguments[1] if num_noise else None)
            by_points, *by_noise = _jacobians(values, arguments, graph)
        if not graph:
            values, noise = values.detach(), None if noise is None else noise.detach()
        directions = belief.root.mT  # [C, B, n, n]: direction k is column k of the root
        slopes = product(directions, by_points.mT)  # [C, B, n, m]
        if by_noise:
            slopes = torch.cat([slopes, by_noise[0].mT], 2)  # [C, B, n + E, m]: noise has unit directions
        noise = None if noise is None else noise[:, :, 0]
        return Transformed(values[:, :, 0], directions, slopes, None, noise)


def _jacobians(values: Tensor, arguments: list[Tensor], create_graph: bool) -> list[Tensor]:
    """Derivatives of values `[C, B, m, m]`, the k-th at the k-th particle, by arguments `[C, B, m, ·]`."""
    found: tuple[Tensor | None, ...] = (None,) * len(arguments)
    if values.requires_grad:
        m = values.shape[-1]
        which = torch.ones_like(values) if m == 1 else torch.eye(m, dtype=values.dtype, device=values.device)
        found = torch.autograd.grad(
            values, arguments, which.expand_as(values), allow_unused=True, create_graph=create_graph
        )
    pairs = zip(arguments, found, strict=True)
    # There is no gradient by what the values do not depend on.
    return [torch.zeros_like(argument) if one is None else one for argument, one in pairs]
