"""Small models for tests: each uses one feature of the language."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP
from cpomdp_ppl.actions import Box


class Still(CPOMDP):
    """Nothing moves and nothing is earned, in a single state or at 0.0; programs of it say what is seen."""

    contexts, actions, horizon = 2, 1, 1

    def initial(self, context):
        return torch.zeros((), dtype=torch.long) if self.states else torch.zeros(())

    def transition(self, state, action, context):
        return state

    def reward(self, state, action, context):
        return torch.zeros(())


class Walk(CPOMDP):
    """The plainest continuous model: a random walk, always seen."""

    contexts = 2
    actions = 2
    horizon = 3

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + action, 1.0 + context))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0))

    def reward(self, state, action, context):
        return state * context


class Needle(Walk):
    """A state that is seen without noise, up to rounding to a third: few particles are ever right."""

    horizon = 2

    def observation(self, state, action, context):
        pyro.sample("z", dist.Delta((3.0 * state).round()))


class Plates(Walk):
    """A program with plates of its own: three sensors, and a robot with two legs."""

    max_plate_nesting = 1

    def initial(self, context):
        with pyro.plate("legs", 2):
            return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        with pyro.plate("legs", 2):
            return pyro.sample("x", dist.Normal(state + action, 1.0))

    def observation(self, state, action, context):
        with pyro.plate("sensors", 3):
            mean = state.sum(-1, keepdim=True)
            working = torch.tensor([True, False, True])
            pyro.sample("z", dist.Normal(mean, 1.0).mask(working))
        pyro.sample("battery", dist.Normal(1.0, 0.1))

    def reward(self, state, action, context):
        return state.sum(-1, keepdim=True)


class EyesOpen(Walk):
    """Sees something before it acts, and with two kinds of mask."""

    initial_observation = True

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0))
        with pyro.poutine.mask(mask=torch.tensor(False) if action is None else action == 1):
            pyro.sample("w", dist.Normal(state, 1.0).expand_by([]).mask(torch.tensor(True)))


class Learnable(Walk):
    """Constants that can be learned."""

    def __init__(self):
        super().__init__()
        self.drift = PyroParam(torch.tensor(0.5), constraints.positive)

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + self.drift * action, 1.0))


class Dice(CPOMDP):
    """Observations that are indices, an event of two, and a number far from zero; also before acting."""

    contexts, actions, horizon = 2, 3, 4
    initial_observation = True

    def initial(self, context):
        return pyro.sample("x", dist.Normal(300.0, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 1.0))

    def observation(self, state, action, context):
        looks = torch.tensor(True) if action is None else action == 2
        pyro.sample("face", dist.Categorical(torch.ones(6)).mask(looks))
        pyro.sample("pair", dist.Categorical(torch.ones(2, 4)).to_event(1).mask(looks))
        pyro.sample("warm", dist.Normal(state, 0.1).mask(looks))

    def reward(self, state, action, context):
        return torch.zeros_like(state)


class Skewed(CPOMDP):
    """One step in which nothing can be done: the return is `means[c]`, give or take `spreads[c]`.

    What is seen is 1 with probability 0.3 in context 0, and 0.6 in others.
    """

    actions, horizon, states = 2, 1, 2

    def __init__(self, prior=(0.97, 0.03), means=(1.0, -100.0), spreads=(0.0, 0.0)):
        super().__init__()
        self.contexts, self.context_prior = len(prior), list(prior)
        self.means, self.spreads = torch.tensor(means), torch.tensor(spreads)

    def initial(self, context):
        return pyro.sample("lucky", dist.Bernoulli(0.5)).long()

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.where(context == 0, 0.3, 0.6)))

    def reward(self, state, action, context):
        return self.means[context] + self.spreads[context] * (2 * state - 1)


class Noting:
    """In front of a model: its states, noted by `pyro.deterministic`."""

    def initial(self, context):
        return pyro.deterministic("start", super().initial(context))

    def transition(self, state, action, context):
        return pyro.deterministic("moved", super().transition(state, action, context))

    def observation(self, state, action, context):
        super().observation(pyro.deterministic("seen", state), action, context)


class Reef(CPOMDP):
    """A robot on a line, and a reef at 2 on one side by context, where the episode ends; rocks end it, too.

    What it earns depends on where it lands. Finite: states are positions −3 … 3.
    """

    contexts, actions, horizon, states = ("reef left", "reef right"), ("left", "right"), 4, 7
    discount = 0.9
    rocks = 0.0

    def initial(self, context):
        return torch.tensor(3)

    def transition(self, state, action, context):
        slips = pyro.sample("slips", dist.Bernoulli(0.2))
        return (state + torch.where(slips == 1, 0, 2 * action - 1)).clamp(0, 6)

    def observation(self, state, action, context):
        towards = torch.where(context == 0, state < 3, state > 3)
        pyro.sample("surf", dist.Bernoulli(torch.where(towards, 0.7, 0.4)))

    def ends(self, state, action, context):
        return torch.where(state == torch.where(context == 0, 1, 5), 1.0, self.rocks)

    def reward(self, state, action, context, next_state):
        return (next_state - state).abs().float() - 5.0 * (self.ends(next_state, action, context) == 1)


class Sail(CPOMDP):
    """A boat steered by a real number and driven by another; wind by context, and the episode may end.

    Whether it does is noisy, and depends on where it is.
    """

    contexts, horizon, discount = 2, 4, 0.8
    actions = Box((-1.0, 0.0), (1.0, 3.0), names=("steer", "drive"))

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 0.5))

    def transition(self, state, action, context):
        drift = torch.where(context == 0, -0.5, 0.5)
        return pyro.sample("x", dist.Normal(state + action[..., 0] * action[..., 1] + drift, 0.3))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.5).mask(action[..., 1] < 2.0))

    def ends(self, state, action, context):
        return torch.sigmoid(2.0 * (state.abs() - 2.0))

    def reward(self, state, action, context):
        return state - 0.1 * action.square().sum(-1)
