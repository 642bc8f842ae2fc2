"""Small programs with constants to be learned, whose likelihood is known otherwise."""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP
from tests.programs import Still


def positive(value):
    return PyroParam(torch.tensor(value), constraints.positive)


class Constant(Still):
    """Nothing moves, and noise is seen: its variance is known in closed form."""

    actions, horizon = 2, 5

    def __init__(self, variance=2.0):
        super().__init__()
        self.variance = positive(variance)

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.variance.sqrt()))


class Walk(Constant):
    """A random walk from a known place, seen with noise: jointly Gaussian."""

    def __init__(self, q=0.5, variance=2.0):
        super().__init__(variance)
        self.q = positive(q)

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, self.q.sqrt()))


class Curved(CPOMDP):
    """Nothing linear, and a parameter for each context, with equal values, so that only slopes differ."""

    contexts, actions, horizon = 2, 2, 4

    def __init__(self):
        super().__init__()
        self.pull = PyroParam(torch.tensor([0.5, 0.5]))
        self.q = positive(0.3)
        self.spread = positive(0.7)
        self.context_prior = PyroParam(torch.tensor([0.3, 0.7]), constraints.simplex)

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.2, self.spread))

    def transition(self, state, action, context):
        pushed = state + self.pull[context] * (torch.sin(state) + action * (0.5 + context))
        return pyro.sample("x", dist.Normal(pushed, self.q.sqrt()))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(torch.tanh(state) + 0.3 * state, 0.4 + 0.1 * state.square() * self.q))

    def reward(self, state, action, context):
        return state


class Plane(Curved):
    """The same with two numbers for a state, and two sites."""

    def initial(self, context):
        y = pyro.sample("y", dist.Normal(torch.zeros(2), self.spread).to_event(1))
        return {"x": y[..., 0], "v": y[..., 1]}

    def transition(self, state, action, context):
        x, v = state["x"], state["v"]
        v = pyro.sample("v", dist.Normal(v - self.pull[context] * torch.sin(x), self.q.sqrt()))
        return {"x": x + 0.5 * v, "v": v}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(torch.tanh(state["x"]), 0.5))
        pyro.sample("w", dist.Normal(state["v"], 0.5 + self.q).mask(action == 1))

    def reward(self, state, action, context):
        return state["x"]


class Alarm(Still):
    """Something is there or not, and stays so; an alarm goes off at each step, more often if it is.

    In context 1 false alarms are twice as frequent.
    """

    horizon, states = 6, 2

    def __init__(self, power=0.6):
        super().__init__()
        self.power = PyroParam(torch.tensor(power), constraints.unit_interval)

    def initial(self, context):
        return pyro.sample("there", dist.Bernoulli(0.5)).long()

    def observation(self, state, action, context):
        pyro.sample("alarm", dist.Bernoulli(torch.where(state == 1, self.power, 0.3 * (1 + context))))


class Sensor(Still):
    """The state is the context, and a sensor is right about it with a probability to be learned."""

    horizon, states = 4, 2

    def __init__(self, accuracy=0.6):
        super().__init__()
        self.accuracy = PyroParam(torch.tensor(accuracy), constraints.unit_interval)

    def initial(self, context):
        return context

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.where(state == 1, self.accuracy, 1 - self.accuracy)))


class Window(Still):
    """One of a hundred places, and a look at it through a window: outside of that nothing is possible."""

    places = 100

    def __init__(self, width=0.6):
        super().__init__()
        self.width = positive(width)

    def initial(self, context):
        return pyro.sample("x", dist.Categorical(torch.ones(self.places)))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Uniform(state - self.width, state + self.width))


class Door(CPOMDP):
    """Two states, constants in all three programs, and a look before the first action."""

    contexts, actions, horizon = 2, 2, 4
    states = 2
    initial_observation = True

    def __init__(self):
        super().__init__()
        unit = constraints.unit_interval
        self.open = PyroParam(torch.tensor(0.4), unit)
        self.moves = PyroParam(torch.tensor([0.2, 0.35]), unit)
        self.accuracy = PyroParam(torch.tensor(0.75), unit)
        self.context_prior = PyroParam(torch.tensor([0.3, 0.7]), constraints.simplex)

    def initial(self, context):
        return pyro.sample("s", dist.Bernoulli(self.open)).long()

    def transition(self, state, action, context):
        changes = pyro.sample("changes", dist.Bernoulli(self.moves[context] * (0.5 + 0.5 * action)))
        return (state + changes.long()) % 2

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.where(state == 1, self.accuracy, 1 - self.accuracy)))

    def reward(self, state, action, context):
        return torch.zeros(state.shape)


class ByHand(Walk):
    """The same walk, but its sites have no constants: states are functions of them."""

    def transition(self, state, action, context):
        return state + self.q.sqrt() * pyro.sample("epsilon", dist.Normal(0.0, 1.0))


class Gauge(Walk):
    """A reading that depends on another one, the temperature, which may not have been taken."""

    def __init__(self):
        super().__init__()
        self.warmth = PyroParam(torch.tensor(0.6))
        self.drift = PyroParam(torch.tensor(0.8))
        self.spread = positive(0.7)

    def observation(self, state, action, context):
        warm = pyro.sample("warm", dist.Normal(self.warmth, self.spread).mask(action == 1))
        pyro.sample("z", dist.Normal(state + self.drift * warm, self.variance.sqrt()))


class Cart(CPOMDP):
    """Place, speed and grip; wheels slip at times, and the push is lost. Speed is not seen."""

    contexts, actions, horizon = 2, 2, 6

    def __init__(self, slip=0.3, push=1.0, variance=0.2):
        super().__init__()
        self.slip = PyroParam(torch.tensor(slip), constraints.unit_interval)
        self.push = PyroParam(torch.tensor(push))
        self.variance = positive(variance)

    def initial(self, context):
        return {"x": torch.zeros(()), "v": pyro.sample("v", dist.Normal(0.0, 0.3)), "worn": torch.zeros(())}

    def transition(self, state, action, context):
        slips = pyro.sample("slips", dist.Bernoulli(self.slip.expand(context.shape)))
        force = self.push * (2 * action - 1) * (1 - slips) * (1 + 0.5 * context)
        v = pyro.sample("v", dist.Normal(0.8 * state["v"] + force, 0.2))
        worn = state["worn"] + 0.1 * slips
        return {"x": state["x"] + 0.5 * v, "v": v, "worn": worn}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["x"] - state["worn"], self.variance.sqrt()))

    def reward(self, state, action, context):
        return -state["x"].square()
