"""What policies lose by the exact solution, and problems whose costs come first and profits later."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl import CPOMDP
from cpomdp_ppl.policy import History, Percept
from tests.solvers import truth

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


class Regretful:
    """A policy, and by how much each of its actions fell short of the best, by the exact solution.

    In expectation the shortfalls add up to what the policy's return lacks; unlike returns, they are not a
    matter of luck.
    """

    def __init__(self, policy, model):
        self.policy, self.plan, self.shortfall = policy, truth.solve(truth.tables(model), model.horizon), 0.0

    def start(self, prior):
        return self.policy.start(prior), self.plan.start(prior)

    def act(self, history, memory):
        actions, ours = self.policy.act(history, memory[0])
        _, n = self.plan.act(history, memory[1])
        Q = torch.as_tensor(self.plan.q_values[history.time][n])  # [B, A]
        self.shortfall = self.shortfall + Q.amax(1) - Q.gather(1, actions[:, None])[:, 0]
        return actions, (ours, n)

    @property
    def value(self):
        """What the policy is worth."""
        return self.plan.value - float(self.shortfall.mean())


def first_decision(policy, prior):
    """What a policy does in Light–Dark before it has seen anything, and its memory."""
    nothing = Percept(None, {"z": torch.zeros(len(prior))}, {"z": torch.zeros(len(prior)).bool()})
    return policy.act(History((nothing,)), policy.start(prior))
