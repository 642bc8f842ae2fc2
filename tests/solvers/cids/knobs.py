"""Models with continuous actions, of which much is known."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch.nn.functional import one_hot

from cpomdp_ppl import CPOMDP
from cpomdp_ppl.actions import Box
from tests.programs import Still


class Knob(CPOMDP):
    """Two knobs: one turns a wheel of three places, the other makes what is seen clearer. It may break."""

    contexts, actions, states = 2, Box([-1.0, 0.0], [3.0, 0.5], ("turn", "look")), 3
    horizon, discount, context_prior = 4, 0.9, (0.4, 0.6)

    def initial(self, context):
        return pyro.sample("s", dist.Categorical(torch.tensor([0.5, 0.5, 0.0])))

    def transition(self, state, action, context):
        turns = torch.sigmoid(action[..., 0] - 2.0 * context)[..., None]
        after = turns * one_hot((state + 1) % 3, 3) + (1 - turns) * one_hot(state, 3)
        return pyro.sample("s", dist.Categorical(after))

    def observation(self, state, action, context):
        pyro.sample("o", dist.Bernoulli(0.5 + action[..., 1] * (2 * context - 1) * (state != 0)))

    def ends(self, state, action, context):
        return torch.where(state == 2, 0.7, 0.1)

    def reward(self, state, action, context, next_state):
        return (next_state == 1).float() - (action[..., 0] - context).square() - 0.2 * action[..., 1]


class Glide(CPOMDP):
    """Linear and Gaussian: pushed along a line that is seen better in one context, until something breaks."""

    contexts, actions, horizon, discount = 2, Box(-1.0, 2.0), 5, 0.9

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + 0.5 * action[..., 0], 0.3))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.2 + 0.6 * context))

    def ends(self, state, action, context):
        return 0.1 + 0.2 * context + 0.0 * state

    def reward(self, state, action, context):
        return -state.square() - 0.1 * action[..., 0].square()


class Dial(Still):
    """Two steps, of which the second may not come; it is best to take one more than the context."""

    actions, states, horizon, discount = Box(-1.0, 3.0), 1, 2, 0.5

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.where(context == 0, 0.3, 0.6)))

    def ends(self, state, action, context):
        return 0.3 + 0.0 * state

    def reward(self, state, action, context):
        return -(action[..., 0] - 1.0 - context).square() + 0.0 * state
