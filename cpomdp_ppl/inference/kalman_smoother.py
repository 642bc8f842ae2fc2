"""Smoothing by Rauch, Tung and Striebel: back through a Kalman filter, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpomdp_ppl.inference.belief import map_belief, where_alive
from cpomdp_ppl.inference.gaussian_belief import (
    GaussianBelief,
    Transformed,
    product,
    pseudo_inverse,
    square_root,
)
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.inference.smoothing import Smoothing, moments_in_time, trajectories_in_time

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.kalman import KalmanRecursion
    from cpomdp_ppl.inference.observed import Observed


def rauch_tung_striebel(
    recursion: KalmanRecursion, episodes: Episodes, num_trajectories: int, offset: int
) -> Smoothing:
    """Moments by the pass of Rauch, Tung and Striebel, trajectories by backward simulation."""
    way_back = _WayBack(recursion)
    for step in scan(way_back, episodes, offset):
        last = step.after
    last = map_belief(torch.Tensor.double, last)
    mean, P, drawn = last.mean, last.covariance, last.draw(num_trajectories)
    moments, draws = [(mean, P)], [drawn]
    for backward in reversed(way_back.backwards):
        mean, P = backward.moments(mean, P)
        drawn = backward.draw(drawn)
        moments.append((mean, P))
        draws.append(drawn)
    as_state = recursion.as_state
    means, variances = moments_in_time(
        [
            (as_state(mean), as_state(P.diagonal(dim1=-2, dim2=-1).clamp(min=0)))
            for mean, P in reversed(moments)
        ]
    )
    trajectories = trajectories_in_time([as_state(x) for x in reversed(draws)])
    return Smoothing("RTS", means, variances, trajectories)


@dataclass(frozen=True)
class Backward:
    """How a state follows from the next: `s_t = μ + J (s_{t+1} - ν) + ε` with `ε ~ N(0, Λ)`, in float64.

    Attributes:
        mean: μ, the filtered mean of `s_t`, `[C, B, D]`.
        ahead: ν, the mean of `s_{t+1}` that this predicts, `[C, B, D]`.
        gain: J, `[C, B, D, D]`.
        unexplained: Λ, `[C, B, D, D]`.
    """

    mean: Tensor
    ahead: Tensor
    gain: Tensor
    unexplained: Tensor

    @staticmethod
    def through(moved: Transformed, before: GaussianBelief, after: GaussianBelief) -> Backward:
        """The way back through a move from one belief to another."""
        rounding = 8 * after.root.shape[-1] * torch.finfo(after.root.dtype).eps
        J = moved.cross.double() @ pseudo_inverse(after.covariance.double(), rounding)
        return Backward(before.mean.double(), after.mean.double(), J, moved.unexplained(J))

    def stood_still(self) -> Backward:
        """The same for a state that did not move at all."""
        nowhere, nothing = torch.zeros_like(self.mean), torch.zeros_like(self.gain)
        unit = torch.eye(nothing.shape[-1], dtype=nothing.dtype, device=nothing.device)
        return Backward(nowhere, nowhere, nothing + unit, nothing)

    def moments(self, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `[C, B, D]` and covariance `[C, B, D, D]` of `s_t` out of those of `s_{t+1}`."""
        J = self.gain
        return self.mean + (J @ (mean - self.ahead)[..., None])[..., 0], J @ P @ J.mT + self.unexplained

    def draw(self, later: Tensor) -> Tensor:
        """Draw a state `s_t` for each of the states `s_{t+1}`, `[C, B, M, D]`."""
        noisy = GaussianBelief(self.mean, square_root(self.unexplained)).draw(later.shape[2])
        return noisy + product(later - self.ahead[:, :, None], self.gain.mT)


class _WayBack:
    """A recursion that notes the way back through every step of a pass.

    Attributes:
        backwards: The ways back through the steps so far, in time.
    """

    def __init__(self, recursion: KalmanRecursion) -> None:
        self.model = recursion.model
        self.recursion = recursion
        self.backwards: list[Backward] = []

    def start(self, num_episodes: int) -> GaussianBelief:
        return self.recursion.start(num_episodes)

    def condition(self, belief: GaussianBelief, observed: Observed) -> tuple[GaussianBelief, Tensor]:
        return self.recursion.condition(belief, observed)

    def step(self, belief: GaussianBelief, observed: Observed) -> tuple[GaussianBelief, Tensor]:
        assert observed.action is not None
        predicted, moved = self.recursion.predict(belief, observed.action)
        backward = Backward.through(moved, belief, predicted)
        if observed.alive is not None:  # an episode that is over stands still
            backward = where_alive(observed.alive, backward, backward.stood_still())
        self.backwards.append(backward)
        return self.recursion.condition(predicted, observed)
