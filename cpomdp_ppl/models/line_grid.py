"""The paper's line grid (its Figure 1), a finite model."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl.model import CPOMDP

LEFT, RIGHT, SENSE = range(3)


class LineGrid(CPOMDP):
    """A robot in a row of cells with a target at either end, one of them watched by a detector.

    In context 0 the left end holds the high-value target, and the right end the low-value one and the
    detector; context 1 is the mirror image. The robot collects what is at an end in the step after it gets
    there (the reward comes before the move), and is then done: the last state, in which nothing happens.
    `sense` reports on which side the detector is; the other actions observe nothing.

    The paper gives only some of the rewards, and contradicts itself on the rest; the defaults below are ours.

    Args:
        horizon: Number of steps T.
        num_cells: Number of cells; the ends are 0 and `num_cells - 1`.
        start: The first cell.
        high_value: Reward for the high-value target.
        low_value: Reward for the low-value target.
        penalty: What being detected costs.
        accuracy: Probability that `sense` reports the right side.
    """

    contexts = ("detector right", "detector left")
    actions = ("left", "right", "sense")

    def __init__(
        self,
        horizon: int = 10,
        *,
        num_cells: int = 7,
        start: int = 3,
        high_value: float = 20.0,
        low_value: float = 10.0,
        penalty: float = 50.0,
        accuracy: float = 0.85,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.states = num_cells + 1
        self.start = start
        self.high_value = high_value
        self.low_value = low_value
        self.penalty = penalty
        self.accuracy = accuracy

    @property
    def done(self) -> int:
        """The state after a target was collected."""
        return self.states - 1  # type: ignore[operator]  # this model is finite

    def initial(self, context: Tensor) -> Tensor:
        """Always in the same cell."""
        return torch.tensor(self.start)

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """A step to the side, with no noise; from either end, done."""
        move = torch.where(action == SENSE, 0, torch.where(action == LEFT, -1, 1))
        inside = (state > 0) & (state < self.done - 1)
        return torch.where(inside, state + move, self.done)

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """The side of the detector: 1 for right."""
        right = torch.where(context == 0, self.accuracy, 1 - self.accuracy)
        pyro.sample("side", dist.Bernoulli(right).mask(action == SENSE))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """What is at the end where the robot is."""
        high_end = torch.where(context == 0, 0, self.done - 1)
        watched_end = self.done - 1 - high_end
        reward = torch.where(state == high_end, self.high_value, 0.0)
        return torch.where(state == watched_end, self.low_value - self.penalty, reward)

    def context_known_return(self) -> Tensor:
        """The return of walking straight to the high-value target, or of staying put if it is too far."""
        steps = torch.tensor([self.start, self.done - 1 - self.start])  # to the left and the right end
        reached = (steps < self.horizon).double()
        return (reached * self.discount**steps * self.high_value).clamp(min=0.0)
