"""The paper's 1-D Light–Dark environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import Normal

from cpomdp_ppl.model import CPOMDP

if TYPE_CHECKING:
    from torch import Tensor

LEFT, RIGHT, OBSERVE = range(3)

Constant: TypeAlias = Any
"""A number, a tensor or a `PyroParam`."""


class LightDark(CPOMDP):
    """A robot on a line, one half of it lit: which one is the context, and says where the reward is.

    In context 0 it is light, and position is seen well, right of the origin; beyond `goal` each step
    earns 1, and left of the origin it costs 1. Context 1 is the mirror image. Position is seen only by
    choosing to `observe`, which takes a step but moves nothing.

    Args:
        horizon: Number of steps T.
        step: How far a move goes, s.
        process_variance: σ_p² of a move.
        light_variance: σ_L² of an observation in the light.
        dark_variance: σ_D² of an observation in the dark.
        initial_variance: σ_u² of the first position.
        goal: How far into the light the reward begins.

    Any constant but the horizon may be a number, a tensor, or a `PyroParam` to be learned.
    """

    contexts = ("light right", "light left")
    actions = ("left", "right", "observe")

    def __init__(
        self,
        horizon: int = 20,
        *,
        step: Constant = 1.0,
        process_variance: Constant = 0.1,
        light_variance: Constant = 1.0,
        dark_variance: Constant = 8.0,
        initial_variance: Constant = 0.09,
        goal: Constant = 1.0,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.step = step
        self.process_variance = process_variance
        self.light_variance = light_variance
        self.dark_variance = dark_variance
        self.initial_variance = initial_variance
        self.goal = goal

    def initial(self, context: Tensor) -> Tensor:
        """Near the origin, whatever the context."""
        return pyro.sample("x", dist.Normal(0.0, self.initial_variance**0.5))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Moves are noisy; to observe is to stay exactly."""
        noise = pyro.sample("noise", dist.Normal(0.0, self.process_variance**0.5))
        move = (action == RIGHT).float() - (action == LEFT).float()  # −1, 0 or 1
        moved: Tensor = state + (move * self.step + move.abs() * noise)
        return moved

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """Position, seen well in the light and badly in the dark."""
        lit = into_the_light(state, context).sign().clamp(min=0)  # 1 in the light, 0 in the dark
        variance = self.dark_variance + lit * (self.light_variance - self.dark_variance)
        pyro.sample("z", dist.Normal(state, variance.sqrt()).mask(action == OBSERVE))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """+1 deep in the light, −1 in the dark."""
        depth = into_the_light(state, context)
        reward: Tensor = (depth - self.goal).sign().clamp(min=0) + depth.sign().clamp(max=0)
        return reward

    def context_known_return(self) -> Tensor:
        """The return of walking into the light all the time: depth at time t is `N(s t, σ_u² + σ_p² t)`."""
        t = torch.arange(self.horizon, dtype=torch.float64)
        depth = Normal(self.step * t, (self.initial_variance + self.process_variance * t).sqrt())
        rewards = 1 - depth.cdf(torch.as_tensor(self.goal)) - depth.cdf(torch.tensor(0.0))
        best: Tensor = (self.discount**t * rewards).sum()
        return best.detach().expand(self.num_contexts)


def into_the_light(state: Tensor, context: Tensor) -> Tensor:
    """How far the robot is on the lit side of the origin."""
    side = (0.5 - context).sign()  # 1 in context 0, −1 in context 1
    return side * state
