"""A well, which is pumped until it is dry or bursts: an episode that ends.

cpomdp check examples/problems/well.py:Well
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, History

PUMP, PUMP_HARD, VENT, GAUGE = range(4)
BURST = 6.0


class Well(CPOMDP):
    """Oil under pressure in rock that nobody has seen: a tight well runs dry, a gassy one bursts.

    The state is the pressure. Pumping lowers it, and earns the more the higher it is; gas raises it again. At
    or below 0 the well is dry, at or above 6 it has burst: either way the episode ends. A survey before the
    first action shows the pressure roughly, and the gauge shows it well.
    """

    contexts = ("tight", "porous", "gassy")
    actions = ("pump", "pump hard", "vent", "gauge")
    initial_observation = True
    horizon = 20

    def initial(self, context: Tensor) -> Tensor:
        """High enough to flow."""
        return pyro.sample("pressure", dist.Normal(3.5, 0.5))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Gas raises pressure, and pumping and venting lower it."""
        inflow = torch.tensor([0.1, 0.4, 0.8])[context]
        taken = torch.tensor([0.4, 1.0, 0.8, 0.0])[action]
        return pyro.sample("pressure", dist.Normal(state + inflow - taken, 0.25))

    def observation(self, state: Tensor, action: Tensor | None, context: Tensor) -> None:
        """The pressure, roughly from the survey and well from the gauge."""
        gauged = torch.tensor(True) if action is None else action == GAUGE
        noise = 0.8 if action is None else 0.2
        pyro.sample("reading", dist.Normal(state, noise).mask(gauged))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """What is pumped, at the pressure that there is."""
        return torch.tensor([0.4, 1.0, 0.0, 0.0])[action] * state

    def ends(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Dry, or burst."""
        return (state <= 0) | (state >= BURST)


def rule(history: History) -> Tensor:
    """Gauge every third day; pump hard where the pressure was last seen above 2.5, else gently."""
    B = history.num_episodes
    if history.time % 3 == 1:
        return torch.full((B,), GAUGE)
    seen = history.observed["reading"]  # [B, t + 1]
    last = torch.where(seen, torch.arange(history.time + 1), -1).max(1).values
    pressure = history.observations["reading"][torch.arange(B), last]
    return torch.where(pressure > 2.5, PUMP_HARD, PUMP)
