"""Light–Dark on a plane: the nearer the goal, the better one sees, and where it is, nobody says.

cpomdp check examples/problems/light_dark_plane.py:LightDarkPlane
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl import CPOMDP, Box

if TYPE_CHECKING:
    from torch import Tensor


class LightDarkPlane(CPOMDP):
    """A robot looks for one of four goals, on a plane that is lit around it.

    It always sees where it is, but badly in the dark: that is what tells contexts apart. Each step costs the
    distance to the goal.

    Args:
        directions: How many directions there are to move in, besides not to move at all; None for a velocity,
            which is continuous. Nobody moves by more than 1.
        horizon: Number of steps T.
    """

    contexts = ("north-east", "north-west", "south-west", "south-east")

    def __init__(self, directions: int | None = None, horizon: int = 20) -> None:
        super().__init__()
        self.horizon = horizon
        corners = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
        self.register_buffer("goals", 3.0 * corners)
        if directions is None:
            self.actions = Box([-1.0, -1.0], 1.0, names=("east", "north"))
        else:
            self.actions = ("stay", *(f"{360 * k / directions:g}°" for k in range(directions)))
            angles = 2 * math.pi * torch.arange(directions) / directions
            moves = torch.stack([angles.cos(), angles.sin()], 1)
            self.register_buffer("moves", torch.cat([torch.zeros(1, 2), moves]))

    def initial(self, context: Tensor) -> Tensor:
        """About the middle."""
        return pyro.sample("position", dist.Normal(torch.zeros(2), 0.5).to_event(1))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """A step, and some slipping."""
        move = action / action.norm(dim=-1, keepdim=True).clamp(min=1.0) if self.box else self.moves[action]
        return pyro.sample("position", dist.Normal(state + move, 0.1).to_event(1))

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """The position; in the dark, it is blurred."""
        blur = 0.1 + 0.4 * self._distance(state, context)
        pyro.sample("z", dist.Normal(state, blur[..., None]).to_event(1))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The distance to the goal is what it costs."""
        return -self._distance(state, context)

    def _distance(self, state: Tensor, context: Tensor) -> Tensor:
        return (state - self.goals[context]).norm(dim=-1)
