"""A robot in the wind looks for its charging station, with a sensor that sees only what is near.

cpomdp check examples/problems/robot.py:Robot
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, History

EAST, NORTH, WEST, SOUTH, LOOK = range(5)
COMPASS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
STATIONS = 3.0 * torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])


class Robot(CPOMDP):
    """One of four stations works, and one of four winds blows: sixteen contexts.

    The state is the position on the plane. To `look` may detect the working station, the likelier the nearer
    it is, and what was detected shows in which direction and how far it lies. Where the robot itself
    is, it knows from its own moves and what it guesses of the wind. Each step at the station earns 1.
    """

    contexts = tuple(
        f"station {station}, wind {wind}"
        for station in ("NE", "NW", "SW", "SE")
        for wind in ("east", "north", "west", "south")
    )
    actions = ("east", "north", "west", "south", "look")
    horizon = 16

    def initial(self, context: Tensor) -> Tensor:
        """Near the origin."""
        return pyro.sample("position", dist.Normal(torch.zeros(2), 0.3).to_event(1))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """A step, and what the wind adds to it."""
        step = torch.where((action == LOOK)[..., None], 0.0, COMPASS[action.clamp(max=3)])
        drift = 0.15 * COMPASS[context % 4]
        return pyro.sample("position", dist.Normal(state + step + drift, 0.1).to_event(1))

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """Whether the station was detected, and if so, where it is from here."""
        offset = STATIONS[context // 4] - state
        chance = 0.95 * (-(offset**2).sum(-1) / 18).exp()  # 0.35 from the origin
        detected = pyro.sample("detected", dist.Bernoulli(chance).mask(action == LOOK))
        gate = (detected == 1) & (action == LOOK)
        pyro.sample("offset", dist.Normal(offset, 0.3).to_event(1).mask(gate))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """1 at the working station; steps cost a little, looks nothing."""
        there = ((STATIONS[context // 4] - state) ** 2).sum(-1) < 1.0
        return there.float() - 0.05 * (action != LOOK)


def rule(history: History) -> Tensor:
    """Look until the station was detected; go to where it was then, less what was gone since; look there."""
    B, seen = history.num_episodes, history.observed["offset"]  # [B, t + 1]
    if history.time == 0:
        return torch.full((B,), LOOK)
    times = torch.arange(history.time + 1)
    last = torch.where(seen, times, -1).max(1).values  # [B], −1 where nothing was detected yet
    moves = torch.cat([COMPASS, torch.zeros(1, 2)])[history.actions]  # [B, t, 2]
    since = (moves * (times[:-1] >= last[:, None])[..., None]).sum(1)
    left = history.observations["offset"][torch.arange(B), last.clamp(min=0)] - since  # [B, 2]
    step = (left @ COMPASS.T).argmax(1)
    arrived = left.abs().amax(1) < 0.5
    return torch.where((last < 0) | arrived, LOOK, step)
