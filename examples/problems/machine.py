"""A machine with one of six faults: inspect, repair, and only then earn. A finite model.

cpomdp check examples/problems/machine.py:Machine
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, History

LISTEN, PROBE, RUN, REPAIR = range(4)  # repairs of the six faults are actions 3 … 8
BROKEN, SOUND, WRECKED = range(3)


class Machine(CPOMDP):
    """Six faults make three noises and two traces: who listens and probes knows the fault, more or less.

    A repair costs 4, and mends the machine if it is of the right fault. Run, a sound machine earns 3 and a
    broken one loses 1 and may be wrecked, after which nothing can be earned. So costs come at once, and
    profits late.
    """

    contexts = ("bearing", "belt", "gear", "valve", "motor", "sensor")
    actions = ("listen", "probe", "run", *(f"repair {fault}" for fault in contexts))
    states = 3
    horizon = 15

    def initial(self, context: Tensor) -> Tensor:
        """Broken."""
        return torch.full_like(context, BROKEN)

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The right repair mends; running a broken machine wrecks it one time in five."""
        mended = pyro.sample("mended", dist.Bernoulli(torch.where(action == REPAIR + context, 0.9, 0.0)))
        wrecked = pyro.sample("wrecked", dist.Bernoulli(torch.where(action == RUN, 0.2, 0.0)))
        after = torch.where(mended == 1, SOUND, torch.where(wrecked == 1, WRECKED, BROKEN))
        return torch.where(state == BROKEN, after, state)

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """A noise tells faults apart by threes, a trace by twos; sound or wrecked machines tell nothing."""
        noise = torch.where((state == BROKEN)[..., None], torch.eye(3)[context % 3] * 0.7 + 0.1, 1 / 3)
        trace = torch.where(state == BROKEN, torch.where(context >= 3, 0.85, 0.15), 0.5)
        pyro.sample("noise", dist.Categorical(noise).mask(action == LISTEN))
        pyro.sample("trace", dist.Bernoulli(trace).mask(action == PROBE))
        pyro.sample("output", dist.Bernoulli(torch.where(state == SOUND, 0.95, 0.05)).mask(action == RUN))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Inspections cost a little, repairs much; running pays if the machine is sound."""
        run = torch.where(state == SOUND, 3.0, torch.where(state == BROKEN, -1.0, 0.0))
        return torch.where(action == RUN, run, torch.where(action >= REPAIR, -4.0, -0.5))


def rule(history: History) -> Tensor:
    """Listen and probe twice each, repair what they say most often, and run from then on."""
    if history.time < 4:
        return torch.full((history.num_episodes,), LISTEN if history.time % 2 == 0 else PROBE)
    seen, heard = history.observations, history.observed["noise"]
    if history.time == 4:
        noise = torch.where(heard, seen["noise"], -1)  # [B, t + 1]
        most = torch.stack([(noise == n).sum(1) for n in range(3)], 1).argmax(1)
        return REPAIR + most + 3 * (seen["trace"].sum(1) >= 1.5).long()
    return torch.full((history.num_episodes,), RUN)
