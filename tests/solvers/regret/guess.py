"""A small model whose policies can all be listed, and the policy that is best from any prior."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from cpomdp_ppl.models import LineGrid
from cpomdp_ppl.policy import History, Percept
from solvers import exact
from tests.programs import Still

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP

SHORT = LineGrid(4)
"""There is time to walk to an end and collect, or to sense: information has a price."""


class Guess(Still):
    """One state; a look tells a little about the context, and guesses pay differently."""

    actions, states = ("look", "first", "second"), 1
    heads = (0.3, 0.85)
    pays = ((-0.11, 1.0, -1.7), (-0.11, -0.9, 1.3))  # by context and action

    def __init__(self, horizon: int = 2, heads: tuple[float, float] = (0.3, 0.85)) -> None:
        super().__init__()
        self.horizon, self.heads = horizon, heads

    def observation(self, state, action, context):
        heads = torch.where(context == 0, *self.heads)
        pyro.sample("heads", dist.Bernoulli(heads).mask(action == 0))

    def reward(self, state, action, context):
        return torch.tensor(self.pays)[context, action]


class Alone(Guess):
    """The same with its first context alone."""

    contexts = 1


class Amortised:
    """The exact maximiser for whatever prior it is started from."""

    def __init__(self, model: CPOMDP, temperature: float) -> None:
        self.model, self.temperature = model, temperature

    def start(self, prior):
        p = prior.double() / prior.double().sum(-1, keepdim=True)
        distinct, number = np.unique(p.numpy().round(6), axis=0, return_inverse=True)
        groups = [np.flatnonzero(number.reshape(-1) == i) for i in range(len(distinct))]
        plans = [exact.plan(self.model, prior=p[g[0]], temperature=self.temperature) for g in groups]
        return [(plan, torch.as_tensor(g), plan.start(p[g])) for plan, g in zip(plans, groups, strict=True)]

    def act(self, history, memory):
        actions, after = torch.zeros(history.num_episodes, dtype=torch.long), []
        for plan, rows, memo in memory:
            actions[rows], memo = plan.act(rows_of(history, rows), memo)
            after.append((plan, rows, memo))
        return actions, after


def rows_of(history: History, rows: torch.Tensor) -> History:
    def of(percept: Percept) -> Percept:
        return Percept(
            None if percept.action is None else percept.action[rows],
            {site: value[rows] for site, value in percept.observations.items()},
            {site: flags[rows] for site, flags in percept.observed.items()},
        )

    return History(tuple(of(percept) for percept in history.percepts))


def always(action: int):
    """A policy that does the same all the time."""
    return lambda history: torch.full((history.num_episodes,), action)
