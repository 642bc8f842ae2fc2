"""A ball on a rail is to be held in the middle by a motor whose strength nobody knows: continuous actions.

cpomdp check examples/problems/regulator.py:Regulator
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl import CPOMDP, Box

if TYPE_CHECKING:
    from torch import Tensor


class Regulator(CPOMDP):
    """A linear system with a quadratic cost, whose gain is the context: `x' = x + b_c a + noise`.

    With one gain this is the LQG problem, whose best controller is known: see `least_cost`.

    Args:
        gains: The motor's strength b of each context.
        horizon: Number of steps T.
    """

    actions = Box(-3.0, 3.0, names=("force",))
    effort, shaken, blurred = 0.5, 0.3, 0.3

    def __init__(self, gains: tuple[float, ...] = (0.5, 1.0), horizon: int = 20) -> None:
        super().__init__()
        self.contexts = tuple(f"gain {gain:g}" for gain in gains)
        self.horizon = horizon
        self.register_buffer("gains", torch.tensor(gains))

    def initial(self, context: Tensor) -> Tensor:
        """Somewhere about the middle."""
        return pyro.sample("x", dist.Normal(torch.zeros(()), 1.0))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The motor pushes, and the rail shakes."""
        pushed = state + self.gains[context] * action[..., 0]
        return pyro.sample("x", dist.Normal(pushed, self.shaken))

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """The position, blurred."""
        pyro.sample("z", dist.Normal(state, self.blurred))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Squares of position and force are what it costs."""
        return -(state**2) - self.effort * action[..., 0] ** 2

    def least_cost(self) -> Tensor:
        """The expected cost of the best controller that knows the gain, and feels no bounds, `[C]`.

        By the Riccati equation, and the variance P of a Kalman filter.
        """
        b = self.gains.double()
        S = torch.zeros_like(b)  # the cost to come is S x², and what noise adds
        gains, values = [], [S]
        for _ in range(self.horizon):
            K = S * b / (self.effort + S * b**2)
            S = 1 + S - S * b * K
            gains.insert(0, K)
            values.insert(0, S)
        P, cost = torch.ones_like(b), values[0]
        for K, S in zip(gains, values[1:], strict=True):
            cost = cost + S * self.shaken**2 + P * K**2 * (self.effort + S * b**2)
            predicted = P + self.shaken**2
            P = predicted * self.blurred**2 / (predicted + self.blurred**2)
        return cost
