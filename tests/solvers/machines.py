"""Small finite models made from random tables, which are thereby known without their programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl import CPOMDP

if TYPE_CHECKING:
    from tests.solvers.truth import Reals


class Machine(CPOMDP):
    """Everything is drawn from tables; action 0 sees a symbol out of K, the last action sees nothing.

    The tables have zeros: some contexts cannot lead where others do.
    """

    def __init__(
        self, seed: int, *, C: int = 2, A: int = 2, N: int = 2, K: int = 2, horizon: int = 3
    ) -> None:
        super().__init__()
        self.contexts, self.actions, self.states, self.horizon = C, A, N, horizon
        self.K = K
        rng = np.random.default_rng(seed)
        self.tables = {
            "initial": sparse(rng, C, N),
            "transition": sparse(rng, C, A, N, N),
            "emission": sparse(rng, C, A, N, K),
            "first": sparse(rng, C, N, K),
            "reward": rng.normal(size=(C, A, N)),
        }
        self.tensors = {name: torch.as_tensor(table) for name, table in self.tables.items()}
        self.context_prior = (np.arange(1, C + 1) / np.arange(1, C + 1).sum()).tolist()

    def initial(self, context):
        return pyro.sample("s", dist.Categorical(self.tensors["initial"][context]))

    def transition(self, state, action, context):
        return pyro.sample("s", dist.Categorical(self.tensors["transition"][context, action, state]))

    def observation(self, state, action, context):
        if action is None:
            pyro.sample("o", dist.Categorical(self.tensors["first"][context, state]))
            return
        seen = dist.Categorical(self.tensors["emission"][context, action, state])
        pyro.sample("o", seen.mask(action < self.num_actions - 1))

    def reward(self, state, action, context):
        return self.tensors["reward"][context, action, state]

    def chances(self, action: int | None) -> Reals:
        """`P(o | s, a, c)` `[C, N, K]`; not to see is one outcome, which is certain."""
        if action is None:
            C, N = self.tables["initial"].shape
            return self.tables["first"] if self.initial_observation else np.ones((C, N, 1))
        emission = self.tables["emission"][:, action]
        return emission if action < self.num_actions - 1 else np.ones((*emission.shape[:2], 1))


class Awake(Machine):
    """Sees something before it acts."""

    initial_observation = True


class Mortal(Machine):
    """Episodes may end, in some states for sure and in some never; rewards are for arrival, and discounted.

    If they end or not for `certain`, the model says so by truth values, else by probabilities.
    """

    discount = 0.8

    def __init__(self, seed: int, *, certain: bool = False, awake: bool = False, **sizes: int) -> None:
        super().__init__(seed, **sizes)
        self.initial_observation = awake
        rng = np.random.default_rng([seed, 1])
        C, A, N = self.tables["reward"].shape
        chances = np.clip(rng.uniform(-0.3, 1.1, size=(C, A, N)), 0, 1)
        self.tables["end"] = (chances > 0.6).astype(float) if certain else chances
        self.tables["reward"] = rng.normal(size=(C, A, N, N))
        end = torch.as_tensor(self.tables["end"])
        self.tensors["end"] = end > 0.5 if certain else end
        self.tensors["reward"] = torch.as_tensor(self.tables["reward"])

    def ends(self, state, action, context):
        return self.tensors["end"][context, action, state]

    def reward(self, state, action, context, next_state):
        return self.tensors["reward"][context, action, state, next_state]


def sparse(rng: np.random.Generator, *shape: int) -> Reals:
    """Random distributions, of which about one entry in four is zero."""
    weights = rng.exponential(size=shape) * (rng.random(shape) > 0.25)
    weights[..., 0] += weights.sum(-1) == 0
    table: Reals = weights / weights.sum(-1, keepdims=True)
    return table
