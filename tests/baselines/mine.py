"""A finite model with all that the language has for its episodes: ends, a discount, rewards on arrival."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl import CPOMDP

DIG, TAP, LEAVE = range(3)
GETS_DEEPER = 0.8
CAVES_IN = (0.02, 0.6)  # in each context
SOUNDS_HOLLOW = (0.1, 0.9)
PRICE = 4.0


class Mine(CPOMDP):
    """A shaft is dug deeper, and each time pays what depth one comes to; it may cave in, in loose rock soon.

    To leave pays what the mine can be sold for. To tap the rock tells something about it.
    """

    contexts = ("firm", "loose")
    actions = ("dig", "tap", "leave")
    states = 4
    horizon = 5
    discount = 0.9

    def initial(self, context):
        return torch.tensor(0)

    def transition(self, state, action, context):
        deeper = pyro.sample("deeper", dist.Bernoulli(torch.where(action == DIG, GETS_DEEPER, 0.0)))
        return (state + deeper.long()).clamp(max=3)

    def observation(self, state, action, context):
        hollow = torch.tensor(SOUNDS_HOLLOW)[context]
        pyro.sample("hollow", dist.Bernoulli(hollow).mask(action == TAP))

    def ends(self, state, action, context):
        in_danger = torch.where(action == DIG, torch.tensor(CAVES_IN)[context], 0.0)
        return torch.where(action == LEAVE, 1.0, in_danger)

    def reward(self, state, action, context, next_state):
        return torch.where(action == DIG, next_state.float(), torch.where(action == TAP, -0.1, PRICE))


def values_of(plan, time):
    """What a plan (an action for each time) earns from a time on, by context and state, `[2, 4]`.

    As it is worth at that time; by going backwards through the definition above.
    """
    T = Mine.horizon
    V = np.zeros((2, 4))
    for t in range(T - 1, time - 1, -1):
        V = action_values(V)[:, :, plan[t]]
    return V


def action_values(V):
    """Of each action, `[2, 4, 3]`, if what comes after it is worth V, `[2, 4]`, where the episode goes on."""
    Q = np.zeros((2, 4, 3))
    for c in range(2):
        for s in range(4):
            deeper = min(s + 1, 3)
            for after, p in ((deeper, GETS_DEEPER), (s, 1 - GETS_DEEPER)):
                Q[c, s, DIG] += p * (after + Mine.discount * (1 - CAVES_IN[c]) * V[c, after])
            Q[c, s, TAP] = -0.1 + Mine.discount * V[c, s]
            Q[c, s, LEAVE] = PRICE
    return Q
