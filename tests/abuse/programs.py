"""Random CPOMDPs of many kinds, for Hypothesis to choose from."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
from hypothesis import strategies as st

from cpomdp_ppl import CPOMDP


@dataclass(frozen=True)
class Plan:
    """What a random program is like; its numbers come from the seed."""

    kind: str
    contexts: int
    actions: int
    horizon: int
    mask: str  # "on", "off" or "by action"
    initial_observation: bool
    scale: float
    dtype: torch.dtype
    dim: int
    seed: int
    noise: str = "Normal"
    sensor: str = "Normal"

    @property
    def tame(self) -> bool:
        """Whether its numbers are of ordinary size, so that there is no excuse."""
        return 1e-3 <= self.scale <= 1e3

    def model(self) -> CPOMDP:
        """The program itself; call it where the default type is the plan's."""
        return KINDS[self.kind](self)


@contextmanager
def default_dtype(dtype: torch.dtype):
    """The default type inside, and what it was outside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Random(CPOMDP):
    """What all of them share."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.contexts, self.actions, self.horizon = plan.contexts, plan.actions, plan.horizon
        self.initial_observation = plan.initial_observation
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.build()

    def build(self) -> None:
        """Draw the program's numbers."""
        raise NotImplementedError

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(torch.get_default_dtype())

    def uniform(self, *shape):
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(torch.get_default_dtype())

    def mask(self, action):
        if self.plan.mask == "by action":
            return torch.tensor(True) if action is None else action == 0
        return torch.tensor(self.plan.mask == "on")

    def rows(self, *shape):
        """Distributions over the last axis; about half of the entries are zero."""
        weight = self.uniform(*shape) * (self.uniform(*shape) < 0.5)
        certain = torch.nn.functional.one_hot((self.uniform(*shape[:-1]) * shape[-1]).long(), shape[-1])
        weight = torch.where(weight.sum(-1, keepdim=True) > 0, weight, certain.to(weight.dtype))
        return weight / weight.sum(-1, keepdim=True)


class Tables(Random):
    """A finite model out of sparse tables."""

    SYMBOLS = 3

    def build(self):
        C, A, N = self.plan.contexts, self.plan.actions, self.plan.dim + 1
        self.states = N
        self.first = self.rows(C, N)
        self.moves = self.rows(C, A, N, N)
        self.symbols = self.rows(C, A, N, self.SYMBOLS)
        self.rewards = self.plan.scale * self.normal(C, A, N)

    def initial(self, context):
        return pyro.sample("s", dist.Categorical(self.first[context]))

    def transition(self, state, action, context):
        return pyro.sample("s", dist.Categorical(self.moves[context, action, state]))

    def observation(self, state, action, context):
        a = torch.zeros((), dtype=torch.long) if action is None else action
        probs = self.symbols[context, a, state]
        fn = {
            "Bernoulli": lambda: dist.Bernoulli(probs[..., 0]),
            "Binomial": lambda: dist.Binomial(3, probs[..., 0]),
            "Poisson": lambda: dist.Poisson(probs[..., 0]),
        }.get(self.plan.sensor, lambda: dist.Categorical(probs))()
        pyro.sample("o", fn.mask(self.mask(action)))

    def reward(self, state, action, context):
        return self.rewards[context, action, state]


class Mortal(Tables):
    """The same, with episodes that may end, in some states for sure; rewards are for arrival."""

    discount = 0.9

    def build(self):
        super().build()
        C, A, N = self.rewards.shape
        self.dying = (1.6 * self.uniform(C, A, N) - 0.6).clamp(0, 1)
        self.rewards = self.plan.scale * self.normal(C, A, N, N)

    def ends(self, state, action, context):
        return self.dying[context, action, state]

    def reward(self, state, action, context, next_state):
        return self.rewards[context, action, state, next_state]


class Linear(Random):
    """Linear and Gaussian; the context switches the dynamics."""

    def build(self):
        C, A, D = self.plan.contexts, self.plan.actions, self.plan.dim
        self.F = 0.9 * torch.linalg.qr(self.normal(C, D, D))[0]
        self.push = self.plan.scale * self.normal(A, D)
        self.H = self.normal(C, D, D)
        self.q = self.plan.scale * (0.1 + self.uniform(C, 1))
        self.r = self.plan.scale * (0.1 + self.uniform(C, 1))

    def initial(self, context):
        D = self.plan.dim
        return pyro.sample("x", dist.Normal(0.0, self.q[context].expand(*context.shape, D)).to_event(1))

    def transition(self, state, action, context):
        mean = (self.F[context] @ state[..., None])[..., 0] + self.push[action]
        return pyro.sample("x", dist.Normal(mean, self.q[context]).to_event(1))

    def observation(self, state, action, context):
        mean = (self.H[context] @ state[..., None])[..., 0]
        pyro.sample("z", dist.Normal(mean, self.r[context]).to_event(1).mask(self.mask(action)))

    def reward(self, state, action, context):
        return state.sum(-1) * (1 + context)


class Scalar(Random):
    """One real number, with noise and sensors of many kinds."""

    NOISE: ClassVar = {
        "Normal": dist.Normal,
        "StudentT": lambda loc, scale: dist.StudentT(2.5, loc, scale),
        "Cauchy": dist.Cauchy,
        "Laplace": dist.Laplace,
    }

    def build(self):
        C, A = self.plan.contexts, self.plan.actions
        self.factor = self.uniform(C) * 1.8 - 0.9
        self.push = self.plan.scale * self.normal(A)
        self.q = self.plan.scale * (0.1 + self.uniform(C))
        self.r = self.plan.scale * (0.1 + self.uniform(C))
        self.logit = self.normal(C, 3)

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, self.q[context]))

    def transition(self, state, action, context):
        mean = self.factor[context] * state + self.push[action]
        return pyro.sample("x", self.NOISE[self.plan.noise](mean, self.q[context]))

    def observation(self, state, action, context):
        sensor, unit = self.plan.sensor, state / self.plan.scale
        if sensor in self.NOISE:
            fn = self.NOISE[sensor](state, self.r[context])
        elif sensor == "Poisson":
            fn = dist.Poisson(torch.nn.functional.softplus(unit) + 1e-3)
        elif sensor == "Binomial":
            fn = dist.Binomial(5, logits=unit.clamp(-20, 20))
        elif sensor == "Bernoulli":
            fn = dist.Bernoulli(logits=unit)
        else:
            fn = dist.Categorical(logits=self.logit[context] * unit.clamp(-20, 20)[..., None])
        pyro.sample("z", fn.mask(self.mask(action)))

    def reward(self, state, action, context):
        return torch.where(state > 0, 1.0, -1.0) * (1 + action)


class Parts(Random):
    """A state of two parts, a place and a velocity, seen by two sensors."""

    def build(self):
        C, A = self.plan.contexts, self.plan.actions
        self.push = self.plan.scale * self.normal(A)
        self.q = self.plan.scale * (0.1 + self.uniform(C))

    def initial(self, context):
        place = pyro.sample("place", dist.Normal(0.0, self.q[context]))
        return {"place": place, "velocity": torch.zeros_like(place)}

    def transition(self, state, action, context):
        velocity = pyro.sample(
            "velocity", dist.Normal(0.5 * state["velocity"] + self.push[action], self.q[context])
        )
        return {"place": state["place"] + 0.1 * velocity, "velocity": velocity}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["place"], self.q[context]).mask(self.mask(action)))
        pyro.sample("w", dist.Normal(state["velocity"], 2 * self.q[context]))

    def reward(self, state, action, context):
        return state["place"] - state["velocity"]


class Hybrid(Parts):
    """A mode that jumps beside a place: what neither tables nor Gaussians can hold."""

    def build(self):
        super().build()
        self.modes = self.rows(self.plan.contexts, 3, 3)

    def initial(self, context):
        place = pyro.sample("place", dist.Normal(0.0, self.q[context]))
        return {"place": place, "mode": torch.zeros_like(place, dtype=torch.long)}

    def transition(self, state, action, context):
        mode = pyro.sample("mode", dist.Categorical(self.modes[context, state["mode"]]))
        place = pyro.sample("place", dist.Normal(state["place"] + mode * self.push[action], self.q[context]))
        return {"place": place, "mode": mode}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["place"], self.q[context]).mask(self.mask(action)))

    def reward(self, state, action, context):
        return state["place"] * state["mode"]


class Plated(Random):
    """Plates of the program's own: legs, and sensors of which one is broken."""

    max_plate_nesting = 1

    def build(self):
        C, A = self.plan.contexts, self.plan.actions
        self.push = self.plan.scale * self.normal(A)
        self.q = self.plan.scale * (0.1 + self.uniform(C))
        self.working = torch.tensor([True, False, True])

    def initial(self, context):
        with pyro.plate("legs", self.plan.dim):
            return pyro.sample("x", dist.Normal(0.0, self.q[context]))

    def transition(self, state, action, context):
        with pyro.plate("legs", self.plan.dim):
            return pyro.sample("x", dist.Normal(0.8 * state + self.push[action], self.q[context]))

    def observation(self, state, action, context):
        mean = state.sum(-1, keepdim=True)
        with pyro.plate("sensors", 3):
            seen = self.working & self.mask(action)
            pyro.sample("z", dist.Normal(mean, self.q[context]).mask(seen))

    def reward(self, state, action, context):
        return state.sum(-1, keepdim=True)


KINDS = {kind.__name__: kind for kind in (Tables, Mortal, Linear, Scalar, Parts, Hybrid, Plated)}

TAILS = ["Normal", "StudentT", "Cauchy", "Laplace"]
COUNTS = ["Poisson", "Binomial", "Bernoulli", "Categorical"]


@st.composite
def plans(draw, kinds=tuple(KINDS), longest=200):
    """A random plan; large ones are rare."""
    kind = draw(st.sampled_from(kinds))
    rarely = draw(st.integers(0, 39))
    short = st.integers(1, 6)
    sensors = COUNTS if kind in ("Tables", "Mortal") else TAILS + COUNTS
    return Plan(
        kind=kind,
        contexts=64 if rarely == 23 else draw(st.sampled_from([1, 2, 2, 3, 5])),
        actions=draw(st.integers(1, 3)),
        horizon=longest if rarely == 31 else draw(short),
        mask=draw(st.sampled_from(["on", "by action", "off"])),
        initial_observation=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 1.0, 1.0, 1e-8, 1e-4, 1e4, 1e8])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        dim=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**16)),
        noise=draw(st.sampled_from(TAILS)),
        sensor=draw(st.sampled_from(sensors)),
    )
