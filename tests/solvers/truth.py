"""Finite CPOMDPs solved exactly, in plain numpy: the truth that learned policies are tested against.

The tables are written by hand from each model's definition, and not derived from its programs, so that they
are a truth of their own. Everything else follows from the tables alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from cpomdp_ppl.models import ContextualTiger, LineGrid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.policy import History, Percept

Reals: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

DECIMALS = 11  # beliefs that agree so far are one belief: they came to it by different orders of rounding
TIE = 1e-9  # actions whose values differ by less are tied, and the first of them is taken


LOPSIDED: dict[str, Any] = dict(num_cells=5, start=1, accuracy=0.7, penalty=15.0, low_value=3.0)
DEAF: dict[str, Any] = dict(sharp=0.9, dull=0.5, mauling=20.0, listening=0.5)


@dataclass(frozen=True)
class Tables:
    """A finite CPOMDP as numbers.

    Every site of `observation` is binary, and all are seen or none is. Outcome 0 is that nothing was seen;
    outcome 1 + k is that they were seen, and say k, written in binary with the first site in front.
    """

    sites: tuple[str, ...]
    prior: Reals  # [C]
    initial: Reals  # [C, S]
    transition: Reals  # [C, A, S, S]
    observation: Reals  # [C, A, S, O], of the state after the move
    reward: Reals  # [C, A, S], of the state before the move


@singledispatch
def tables(model: CPOMDP) -> Tables:
    """The tables of a model."""
    raise NotImplementedError(f"nobody has written out the tables of {type(model).__name__}")


@tables.register
def _(model: LineGrid) -> Tables:
    left, right, sense = range(3)
    C, A, last, done = 2, 3, model.done - 1, model.done
    S = done + 1
    transition = np.zeros((C, A, S, S))
    transition[:, :, [0, last, done], done] = 1
    for cell in range(1, last):
        transition[:, left, cell, cell - 1] = 1
        transition[:, right, cell, cell + 1] = 1
        transition[:, sense, cell, cell] = 1

    observation = np.zeros((C, A, S, 3))  # nothing, the detector is left, it is right
    observation[:, [left, right], :, 0] = 1
    q = model.accuracy
    observation[0, sense, :, 1:] = [1 - q, q]
    observation[1, sense, :, 1:] = [q, 1 - q]

    reward = np.zeros((C, A, S))
    for c, (high_end, watched_end) in enumerate([(0, last), (last, 0)]):
        reward[c, :, high_end] = model.high_value
        reward[c, :, watched_end] = model.low_value - model.penalty
    initial = np.zeros((C, S))
    initial[:, model.start] = 1
    return Tables(("side",), _prior(model, C), initial, transition, observation, reward)


@tables.register
def _(model: ContextualTiger) -> Tables:
    listen, opening = 0, [1, 2]  # action 1 + d opens door d
    C, A, S = 3, 3, 2
    transition = np.full((C, A, S, S), 0.5)
    transition[:, listen] = np.eye(S)

    observation = np.zeros((C, A, S, 5))  # nothing, then (left ear, right ear) = 00, 01, 10, 11
    observation[:, opening, :, 0] = 1
    accuracies = [(model.sharp, model.sharp), (model.dull, model.sharp), (model.sharp, model.dull)]
    for c, (q_left, q_right) in enumerate(accuracies):
        for door in range(S):
            left, right = _report(door, q_left), _report(door, q_right)  # [2], [2]
            observation[c, listen, door, 1:] = np.outer(left, right).ravel()

    reward = np.full((C, A, S), model.treasure)
    reward[:, listen] = -model.listening
    for door in range(S):
        reward[:, 1 + door, door] = -model.mauling
    return Tables(
        ("left_ear", "right_ear"), _prior(model, C), np.full((C, S), 0.5), transition, observation, reward
    )


def _report(door: int, accuracy: float) -> Reals:
    """Probabilities `[2]` of what an ear says."""
    return np.array([1 - accuracy, accuracy] if door == 1 else [accuracy, 1 - accuracy])


def _prior(model: CPOMDP, C: int) -> Reals:
    prior = getattr(model, "context_prior", None)
    return np.full(C, 1 / C) if prior is None else np.asarray(prior, dtype=np.float64)


@dataclass(frozen=True)
class Plan:
    """All beliefs that can be reached from a prior, in layers by time, and what is best in each.

    It is a `Policy`, which remembers the number n of its belief in the layer, `[B]`, and so never has to find
    a belief among rounded ones. It believes in its own prior, whatever prior it is started with.
    """

    sites: tuple[str, ...]
    value: float  # the expected return, if its prior is right
    beliefs: list[Reals]  # P(c, s | h), T × [N, C, S]
    successors: list[Indices]  # the next belief's number, (T - 1) × [N, A, O]
    q_values: list[Reals]  # the expected return from here on, by action, T × [N, A]
    actions: list[Indices]  # the best, T × [N]

    def start(self, prior: Tensor) -> Indices:
        """There is one belief at time 0."""
        return np.zeros(len(prior), dtype=np.int64)

    def act(self, history: History, memory: Indices) -> tuple[Tensor, Indices]:
        """Take in what was just done and seen, and do what is best."""
        t, n = history.time, memory
        if t > 0:
            a = history.latest.action
            assert a is not None
            n = self.successors[t - 1][n, a.numpy(), outcomes(history.latest, self.sites)]
        return torch.as_tensor(self.actions[t][n]), n


def outcomes(percept: Percept, sites: tuple[str, ...]) -> Indices:
    """What was seen, as the column of `Tables.observation`, `[B]`."""
    k = np.zeros(len(percept.observed[sites[0]]), dtype=np.int64)
    for site in sites:
        k = 2 * k + percept.observations[site].numpy().astype(np.int64)
    return np.where(percept.observed[sites[0]].numpy(), 1 + k, 0)


def solve(tables: Tables, horizon: int, prior: Sequence[float] | Reals | None = None) -> Plan:
    """The optimal policy, by dynamic programming over all beliefs that can be reached.

    Args:
        tables: The CPOMDP.
        horizon: Number of steps T.
        prior: What the agent believes about the contexts, `[C]`; the model's own prior if left out.
    """
    beliefs, successors = [_first(tables, prior)[None]], []
    for _ in range(horizon - 1):
        reached, following = _reach(tables, beliefs[-1])
        beliefs.append(reached)
        successors.append(following)

    q_values = [np.einsum("ncs,cas->na", beliefs[-1], tables.reward)]
    for b, following in zip(beliefs[-2::-1], successors[::-1], strict=True):
        V = q_values[0].max(1)[following]  # [N, A, O]
        P = _joint(tables, b).sum((-2, -1))  # P(o | h, a), [N, A, O]
        q_values.insert(0, np.einsum("ncs,cas->na", b, tables.reward) + (P * V).sum(-1))
    best = [(Q.max(1, keepdims=True) - Q <= TIE).argmax(1) for Q in q_values]
    return Plan(tables.sites, float(q_values[0].max()), beliefs, successors, q_values, best)


def _first(tables: Tables, prior: Sequence[float] | Reals | None) -> Reals:
    """P(c, s_0), `[C, S]`."""
    return (tables.prior if prior is None else np.asarray(prior))[:, None] * tables.initial


def _joint(tables: Tables, b: Reals) -> Reals:
    """P(c, s', o | h, a), `[N, A, O, C, S]`."""
    predicted = np.einsum("ncs,cast->nact", b, tables.transition)
    joint: Reals = np.einsum("nact,cato->naoct", predicted, tables.observation)
    return joint


def _reach(tables: Tables, b: Reals) -> tuple[Reals, Indices]:
    """The beliefs one step later, `[N', C, S]`, and which of them follows on what, `[N, A, O]`."""
    joint = _joint(tables, b)
    P = joint.sum((-2, -1), keepdims=True)  # [N, A, O, 1, 1]
    # What the agent thinks impossible may yet be seen, if its belief is wrong: it learns nothing from it.
    predicted = np.einsum("ncs,cast->nact", b, tables.transition)[:, :, None]
    posterior = np.where(P > 0, joint / np.where(P > 0, P, 1), predicted)

    possible = (tables.observation > 0).any((0, 2))  # [A, O], in some context and state
    flat = posterior[:, possible].reshape(-1, b[0].size)  # [N × possible, C × S]
    _, first, number = np.unique(flat.round(DECIMALS), axis=0, return_index=True, return_inverse=True)
    following = np.zeros(P.shape[:3], dtype=np.int64)  # the impossible has probability 0, wherever it leads
    following[:, possible] = number.reshape(len(b), -1)
    return flat[first].reshape(-1, *b.shape[1:]), following


def evaluate(tables: Tables, plan: Plan, prior: Sequence[float] | Reals | None = None) -> float:
    """The expected return of a plan when contexts come from `prior` (the model's, if left out).

    It follows P(n, c, s), where n is the number of the belief that the agent holds, right or wrong.
    """
    p, total = _first(tables, prior)[None], 0.0  # [N, C, S]
    for t, actions in enumerate(plan.actions):
        n = np.flatnonzero(p.sum((1, 2)))  # nobody holds the other beliefs
        p, a = p[n], actions[n]
        total += float((p * tables.reward[:, a].swapaxes(0, 1)).sum())
        if t + 1 < len(plan.actions):
            moved = np.einsum("ncs,cnst->cnt", p, tables.transition[:, a])
            seen = np.einsum("cnt,cnto->noct", moved, tables.observation[:, a])
            p = np.zeros_like(plan.beliefs[t + 1])
            np.add.at(p, plan.successors[t][n, a], seen)
    return total


def value(
    tables: Tables,
    horizon: int,
    policy_prior: Sequence[float] | Reals,
    prior: Sequence[float] | Reals | None = None,
) -> float:
    """The expected return, when contexts come from `prior`, of the policy that is optimal for another.

    Where that policy is indifferent, it takes the first action; with another choice its return may differ,
    because only by its own belief are the actions equally good.
    """
    return evaluate(tables, solve(tables, horizon, policy_prior), prior)


def fixed_context_values(tables: Tables, horizon: int) -> Reals:
    """The expected return of each policy that is certain of one context, `[C]`."""
    return np.array([value(tables, horizon, certain) for certain in np.eye(len(tables.prior))])


def known_context_value(tables: Tables, horizon: int) -> float:
    """The expected return of an agent that is told the context: no policy can do better."""
    own = [solve(tables, horizon, certain).value for certain in np.eye(len(tables.prior))]
    return float(tables.prior @ np.array(own))


def random_value(tables: Tables, horizon: int) -> float:
    """The expected return of a policy that takes every action equally often, whatever it sees."""
    p, total = _first(tables, None), 0.0  # [C, S]
    for _ in range(horizon):
        total += float((p * tables.reward.mean(1)).sum())
        p = np.einsum("cs,cst->ct", p, tables.transition.mean(1))
    return total


class Wanderer:
    """Keeps the memory of a plan (of this module or of `solvers.exact`), but acts at random."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.start = plan, plan.start
        self.beliefs: list[Any] = []  # P(c, s | h_t), T × [B, C, S]

    def act(self, history: History, memory: Any) -> tuple[Tensor, Any]:
        action, n = self.plan.act(history, memory)
        self.beliefs.append(self.plan.beliefs[history.time][n])
        return torch.randint(self.plan.q_values[0].shape[1], action.shape), n
