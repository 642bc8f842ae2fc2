"""A robot among beacons, one of which marks the goal; continuous, with a dict for a state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl.model import CPOMDP

if TYPE_CHECKING:
    from collections.abc import Sequence

FORWARD, TURN_LEFT, TURN_RIGHT, RANGE, BEARING = range(5)


class Beacons(CPOMDP):
    """A robot on a plane looks for the one beacon of two that marks the goal, with one bad sensor of two.

    The state is `position` (a vector) and `heading` (an angle, from the x-axis); both drift whatever the
    robot does. The goal's beacon answers: `range` gives its distance, and `bearing` the direction in which
    it lies seen from the robot, as a unit vector with noise (an angle would jump at ±π). The four contexts
    decide which beacon marks the goal, and which of the two sensors is degraded. Each step within `radius`
    of the goal earns 1, and within `radius` of the other beacon costs 1.

    Args:
        horizon: Number of steps T.
        beacons: Positions of the two beacons, 2 × 2.
        radius: How near counts as being there.
        stride: How far `forward` goes.
        turn: By how much `turn left` and `turn right` change the heading, in radians.
        position_variance: Variance of the drift of either coordinate in a step.
        heading_variance: Variance of the drift of the heading in a step.
        initial_variance: Variance of either coordinate and of the heading at the start.
        range_variance: Variance of a measured distance.
        bearing_variance: Variance of either component of a measured direction.
        degradation: By how much the degraded sensor's variance is larger.
    """

    contexts = (
        "goal left, range bad",
        "goal left, bearing bad",
        "goal right, range bad",
        "goal right, bearing bad",
    )
    actions = ("forward", "turn left", "turn right", "range", "bearing")
    beacons: Tensor

    def __init__(
        self,
        horizon: int = 20,
        *,
        beacons: Sequence[Sequence[float]] = ((3.0, 2.0), (3.0, -2.0)),
        radius: float = 1.0,
        stride: float = 0.8,
        turn: float = math.pi / 6,
        position_variance: float = 0.01,
        heading_variance: float = 0.003,
        initial_variance: float = 0.01,
        range_variance: float = 0.04,
        bearing_variance: float = 0.04,
        degradation: float = 25.0,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.register_buffer("beacons", torch.as_tensor(beacons, dtype=torch.get_default_dtype()))
        self.radius = radius
        self.stride = stride
        self.turn = turn
        self.position_variance = position_variance
        self.heading_variance = heading_variance
        self.initial_variance = initial_variance
        self.range_variance = range_variance
        self.bearing_variance = bearing_variance
        self.degradation = degradation

    def initial(self, context: Tensor) -> dict[str, Tensor]:
        """Near the origin, facing along the x-axis."""
        spread = self.initial_variance**0.5
        origin = torch.zeros_like(self.beacons[0])
        return {
            "position": pyro.sample("position", dist.Normal(origin, spread).to_event(1)),
            "heading": pyro.sample("heading", dist.Normal(origin[0], spread)),
        }

    def transition(self, state: dict[str, Tensor], action: Tensor, context: Tensor) -> dict[str, Tensor]:
        """Forward along the heading, or a turn on the spot; either way a little drift."""
        stride = torch.where(action == FORWARD, self.stride, 0.0)[..., None]
        turn = torch.where(action == TURN_LEFT, self.turn, torch.where(action == TURN_RIGHT, -self.turn, 0.0))
        position = state["position"] + stride * direction(state["heading"])
        heading = state["heading"] + turn
        return {
            "position": pyro.sample(
                "position", dist.Normal(position, self.position_variance**0.5).to_event(1)
            ),
            "heading": pyro.sample("heading", dist.Normal(heading, self.heading_variance**0.5)),
        }

    def observation(self, state: dict[str, Tensor], action: Tensor, context: Tensor) -> None:
        """Distance or direction of the goal's beacon, from whichever sensor was asked."""
        goal = self.beacons[context // 2]
        offset = goal - state["position"]
        bearing = torch.atan2(offset[..., 1], offset[..., 0]) - state["heading"]
        range_bad, bearing_bad = context % 2 == 0, context % 2 == 1
        range_variance = self.range_variance * torch.where(range_bad, self.degradation, 1.0)
        bearing_variance = self.bearing_variance * torch.where(bearing_bad, self.degradation, 1.0)
        pyro.sample(
            "range",
            dist.Normal(distance(state["position"], goal), range_variance.sqrt()).mask(action == RANGE),
        )
        pyro.sample(
            "bearing",
            dist.Normal(direction(bearing), bearing_variance.sqrt()[..., None])
            .to_event(1)
            .mask(action == BEARING),
        )

    def reward(self, state: dict[str, Tensor], action: Tensor, context: Tensor) -> Tensor:
        """+1 at the goal's beacon, −1 at the other."""
        goal = context // 2
        at_goal = distance(state["position"], self.beacons[goal]) < self.radius
        at_other = distance(state["position"], self.beacons[1 - goal]) < self.radius
        return at_goal.to(self.beacons.dtype) - at_other.to(self.beacons.dtype)


def distance(point: Tensor, other: Tensor) -> Tensor:
    """Euclidean distance between points `[…, 2]`."""
    return torch.hypot(*(point - other).unbind(-1))


def direction(angle: Tensor) -> Tensor:
    """The unit vector at an angle, `[…, 2]`."""
    return torch.stack([angle.cos(), angle.sin()], -1)
