"""A boat looks for its berth behind a breakwater; continuous, with nothing to earn on the way."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl.model import CPOMDP

LOOK, LISTEN = 8, 9  # actions 0 … 7 sail by the compass


class Harbour(CPOMDP):
    """A boat at sea, a breakwater with one open passage of two, and behind it one free berth of four.

    The state is the position, a vector; the boat starts near the origin and always drifts. The breakwater
    is a wall without end, x from 4 to 6, passed at y = 3 (north) or y = −3 (south); the berths are in a row
    at x = 10. The eight contexts decide which passage is open and which berth is free. To `look` shows
    where the open passage lies from here, and to `listen` where the free berth does, both the better the
    nearer; neither moves the boat. A move into the wall runs aground: it costs a little and leads nowhere.
    Each step at the free berth earns 1, and at any other costs 1.

    Args:
        horizon: Number of steps T.
        stride: How far a move goes.
        process_variance: Variance of the drift of either coordinate in a step.
        initial_variance: Variance of either coordinate at the start.
        haze: Standard deviation of either coordinate of what is sensed, for each unit of distance.
        width: Half the width of a passage.
        radius: How near counts as being at a berth.
        aground: What running into the wall costs.
    """

    contexts = tuple(f"{passage}, berth {berth}" for passage in ("north", "south") for berth in "ABCD")
    actions = ("E", "NE", "N", "NW", "W", "SW", "S", "SE", "look", "listen")
    moves: Tensor
    passages: Tensor
    berths: Tensor

    def __init__(
        self,
        horizon: int = 40,
        *,
        stride: float = 1.0,
        process_variance: float = 0.02,
        initial_variance: float = 0.04,
        haze: float = 0.5,
        width: float = 0.8,
        radius: float = 1.0,
        aground: float = 0.25,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        angles = torch.arange(8) * math.pi / 4
        compass = stride * torch.stack([angles.cos(), angles.sin()], -1)
        self.register_buffer("moves", torch.cat([compass, torch.zeros(2, 2)]))  # [A, 2]
        self.register_buffer("passages", torch.tensor([[5.0, 3.0], [5.0, -3.0]]))
        self.register_buffer("berths", torch.tensor([[10.0, 4.5], [10.0, 1.5], [10.0, -1.5], [10.0, -4.5]]))
        self.process_variance = process_variance
        self.initial_variance = initial_variance
        self.haze = haze
        self.width = width
        self.radius = radius
        self.aground = aground

    def initial(self, context: Tensor) -> Tensor:
        """Near the origin, whatever the context."""
        origin = torch.zeros_like(self.berths[0])
        return pyro.sample("position", dist.Normal(origin, self.initial_variance**0.5).to_event(1))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """A move, unless the wall is in its way; drift in any case."""
        target = state + self.moves[action]
        reached = torch.where(self.in_wall(target, context)[..., None], state, target)
        return pyro.sample("position", dist.Normal(reached, self.process_variance**0.5).to_event(1))

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """Where the passage or the berth lies from here; a floor of 0.1 keeps what is at hand uncertain."""
        passage, berth = self.passages[context // 4] - state, self.berths[context % 4] - state
        for site, offset, sensor in (("passage", passage, LOOK), ("berth", berth, LISTEN)):
            spread = (0.1 + self.haze * length(offset))[..., None]
            pyro.sample(site, dist.Normal(offset, spread).to_event(1).mask(action == sensor))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """+1 at the free berth, −1 at the others, a little less where the boat runs aground."""
        at_any = (length(state[..., None, :] - self.berths) < self.radius).to(state.dtype).sum(-1)
        at_free = (length(state - self.berths[context % 4]) < self.radius).to(state.dtype)
        aground = self.in_wall(state + self.moves[action], context).to(state.dtype)
        return 2 * at_free - at_any - self.aground * aground

    def in_wall(self, position: Tensor, context: Tensor) -> Tensor:
        """Whether positions `[…, 2]` are in the breakwater, and not in its open passage; bool `[…]`."""
        offset = (position - self.passages[context // 4]).abs()
        return (offset[..., 0] < 1.0) & (offset[..., 1] > self.width)


def length(vector: Tensor) -> Tensor:
    """Euclidean lengths of vectors `[…, 2]`."""
    return torch.hypot(*vector.unbind(-1))
