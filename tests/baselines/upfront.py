"""Problems whose costs come first and whose profits come later, and which one may leave at a small loss."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl import CPOMDP

BROKEN, WORKING, SOLD = range(3)
INSPECT, RUN, SELL = 3, 4, 5


class Workshop(CPOMDP):
    """A machine one of whose three parts is broken: to mend the right one costs 3; running then earns 2.

    To sell it costs 1, once and for all. Whatever is repeated for ever earns less than that: to mend, to
    inspect, or to run what is broken.
    """

    contexts = ("gears", "belt", "motor")
    actions = ("mend gears", "mend belt", "mend motor", "inspect", "run", "sell")
    states = 3
    horizon = 12

    def initial(self, context):
        return torch.tensor(BROKEN)

    def transition(self, state, action, context):
        mended = torch.where((state == BROKEN) & (action == context), WORKING, state)
        return torch.where(action == SELL, SOLD, mended)

    def observation(self, state, action, context):
        says = torch.full((3, 3), 0.1) + 0.7 * torch.eye(3)
        pyro.sample("fault", dist.Categorical(says[context]).mask(action == INSPECT))

    def reward(self, state, action, context):
        costs = torch.tensor([3.0, 3.0, 3.0, 0.5, 0.5, 1.0])[action]
        return torch.where(state == SOLD, 0.0, torch.where((state == WORKING) & (action == RUN), 2.0, -costs))


class Orchard(CPOMDP):
    """Trees grow by planting, which costs; a harvest pays what has grown, in soil that is good or poor.

    To leave costs a little, for ever after nothing is earned. The state is what has grown, and whether one
    has left.
    """

    contexts = ("good soil", "poor soil")
    actions = ("plant", "harvest", "leave")
    horizon = 12

    def initial(self, context):
        return {"grown": pyro.sample("grown", dist.Normal(0.0, 0.1)), "left": torch.tensor(0.0)}

    def transition(self, state, action, context):
        growth = torch.where(action == 0, torch.where(context == 0, 1.0, 0.4), 0.0)
        grown = pyro.sample("grown", dist.Normal(state["grown"] + growth, 0.1))
        return {"grown": grown, "left": torch.maximum(state["left"], (action == 2).float())}

    def observation(self, state, action, context):
        pyro.sample("seen", dist.Normal(state["grown"], 0.3))

    def reward(self, state, action, context):
        planted = torch.tensor([-2.0, -1.0, -1.0])[action]
        earned = planted + torch.where(action == 1, state["grown"], 0.0)
        return torch.where(state["left"] > 0, 0.0, earned)
