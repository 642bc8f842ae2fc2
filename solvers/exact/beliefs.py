"""The beliefs of a finite model that can be reached from a prior, in layers by time, and how episodes end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from cpomdp_ppl.arrays import how_many_fit, pieces
from solvers.exact.tables import Finite, Flags, Indices, Reals, distinct_rows, row_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

Keys: TypeAlias = NDArray[np.uint64]

DECIMALS = 11
"""Beliefs that agree so far are one belief: they came to it by different orders of rounding."""

MAX_BELIEFS = 200_000
"""How many beliefs there may be at any one time, unless asked otherwise."""

NUMBERS_AT_ONCE = 2**22
"""Numbers that one array may hold while the successors of beliefs are computed."""


class TooManyBeliefsError(ValueError):
    """A model has more beliefs than may be gone through."""


@dataclass(frozen=True, eq=False)
class Layer:
    """All beliefs of one time."""

    beliefs: Reals  # P(c, s | h), [n, C, N]
    # 1 where context and state are possible after some history that leads to the belief, though the agent may
    # hold them impossible, [n, C, N]; None if it holds no context impossible.
    possible: Reals | None

    def __len__(self) -> int:
        return len(self.beliefs)

    def parts(self, tables: Finite) -> Iterator[Layer]:
        """Some beliefs at a time."""
        for part in parts(tables, len(self)):
            yield Layer(self.beliefs[part], None if self.possible is None else self.possible[part])


class _Distinct:
    """Collects beliefs, and keeps one of each."""

    def __init__(self, time: int, most: int) -> None:
        self.time, self.most = time, most
        self.parts: list[tuple[Keys, Reals, Reals | None]] = []

    def add(self, beliefs: Reals, possible: Reals | None) -> Keys:
        """Beliefs `[n, C, N]`, and what is possible with them: a key for each, `[n]`."""
        all_keys = row_keys(beliefs.reshape(len(beliefs), math.prod(beliefs.shape[1:])), DECIMALS)
        self.parts.append(_distinct(all_keys, beliefs, possible))
        if sum(len(keys) for keys, *_ in self.parts) > 2 * self.most:
            self.layer(finished=False)
        return all_keys

    def layer(self, finished: bool = True) -> tuple[Layer, Keys]:
        """The distinct beliefs, and their keys in ascending order."""
        of_keys, of_beliefs, of_possible = zip(*self.parts, strict=True)
        possible = None if of_possible[0] is None else np.concatenate(of_possible)
        keys, beliefs, possible = _distinct(np.concatenate(of_keys), np.concatenate(of_beliefs), possible)
        if len(keys) > self.most:
            least = "" if finished else "at least "
            raise TooManyBeliefsError(
                f"{least}{len(keys)} beliefs can be reached at time {self.time}, and "
                f"max_beliefs = {self.most}: shorten the horizon, or raise max_beliefs; "
                "cpomdp_ppl.bounds.informed_return tells what is earned at most, of any number of beliefs"
            )
        self.parts = [(keys, beliefs, possible)]
        return Layer(beliefs, possible), keys


def _distinct(keys: Keys, beliefs: Reals, possible: Reals | None) -> tuple[Keys, Reals, Reals | None]:
    """The first belief of each key, and all that is possible with any."""
    if possible is None or not len(keys):
        keys, first = np.unique(keys, return_index=True)
        return keys, beliefs[first], possible
    order = np.argsort(keys, kind="stable")
    keys, first = np.unique(keys[order], return_index=True)
    return keys, beliefs[order[first]], np.maximum.reduceat(possible[order], first, axis=0)


def condition(predicted: Reals, likelihood: Reals) -> tuple[Reals, Reals]:
    """Bayes' rule for `[n, K, C, N]`: the posteriors, and the evidence `[n, K]`.

    What is held impossible may yet be seen, if the belief is wrong: nothing is learned from it.
    """
    joint = predicted * likelihood
    P = joint.sum((-2, -1))
    held = (P > 0)[..., None, None]
    return np.where(held, joint / np.where(held, P[..., None, None], 1.0), predicted), P


@dataclass(frozen=True, eq=False)
class Reachable:
    """All beliefs in which there is something to do that can be reached from a prior, whatever is done.

    No belief, which is -1, follows on what cannot happen, nor on the end of the episode.
    """

    layers: tuple[Layer, ...]  # the beliefs by time, T layers; the last are empty if all have ended before
    first: Indices  # the belief after each outcome at time 0, [K]
    first_probabilities: Reals  # how likely these outcomes are, [K]
    successors: tuple[Indices, ...]  # the belief after each belief and outcome, (T - 1) × [n, K]
    probabilities: tuple[Reals, ...]  # how likely these outcomes are, (T - 1) × [n, K]


def reachable(tables: Finite, prior: Reals, horizon: int, most: int, step: Callable[[], object]) -> Reachable:
    """Go through all beliefs from a prior `[C]`, at most so many in a layer; `step` is called after each."""
    layer, first, first_probabilities = _first_layer(tables, prior, most)
    layers, successors, probabilities = [layer], [], []
    step()
    for t in range(1, horizon):
        layer, following, P = _next_layer(tables, layer, t, most)
        layers.append(layer)
        successors.append(following)
        probabilities.append(P)
        step()
    return Reachable(tuple(layers), first, first_probabilities, tuple(successors), tuple(probabilities))


def _first_layer(tables: Finite, prior: Reals, most: int) -> tuple[Layer, Indices, Reals]:
    """The beliefs at time 0, which of them follows on what, `[K]`, and how likely that is, `[K]`."""
    predicted = (prior[:, None] * tables.initial)[None, None]  # [1, 1, C, N]
    likelihood = tables.before.likelihood
    beliefs, P = condition(predicted, likelihood)
    possible = None if prior.all() else ((tables.initial * likelihood) > 0).astype(np.float64)[None]
    distinct = _Distinct(0, most)
    keys, met = _collect(distinct, beliefs, P, possible)
    layer, known = distinct.layer()
    return layer, _numbers(known, keys, met)[0], P[0]


def _next_layer(tables: Finite, layer: Layer, t: int, most: int) -> tuple[Layer, Indices, Reals]:
    """The beliefs at time t, which of them follows on what, `[n, K]`, and how likely that is, `[n, K]`."""
    after, likelihood = tables.outcomes.action, tables.outcomes.likelihood
    if not len(layer):
        return layer, np.zeros((0, len(after)), dtype=np.int64), np.zeros((0, len(after)))
    distinct, collected, evidence = _Distinct(t, most), [], []
    for part in layer.parts(tables):
        beliefs, P = condition(tables.predict(part.beliefs)[:, after], likelihood)
        possible = None
        if part.possible is not None:
            possible = (tables.predict(part.possible)[:, after] * likelihood > 0).astype(np.float64)
        collected.append(_collect(distinct, beliefs, P, possible, tables.outcomes.ended))
        evidence.append(P)
    following, known = distinct.layer()
    numbers = [_numbers(known, keys, met) for keys, met in collected]
    return following, np.concatenate(numbers), np.concatenate(evidence)


def _collect(
    distinct: _Distinct, beliefs: Reals, P: Reals, possible: Reals | None, ended: Flags | bool = False
) -> tuple[Keys, Flags]:
    """Keys of the beliefs `[n, K, C, N]` that can be reached and acted in, and which these are, `[n, K]`."""
    met = (P > 0 if possible is None else possible.sum((-2, -1)) > 0) & ~np.asarray(ended)
    return distinct.add(beliefs[met], None if possible is None else possible[met]), met


def _numbers(known: Keys, keys: Keys, met: Flags) -> Indices:
    """Which belief it is, `[n, K]`; -1 for none."""
    numbers = np.full(met.shape, -1, dtype=np.int64)
    numbers[met] = np.searchsorted(known, keys)
    return numbers


def parts(tables: Finite, n: int) -> Iterator[slice]:
    """Slices of n rows, few enough for what follows on them to be computed at once."""
    return pieces(n, how_many_fit(NUMBERS_AT_ONCE, tables.outcomes.likelihood.size))


@dataclass(frozen=True, eq=False)
class Endings:
    """How episodes may end, as far as the context is concerned.

    Attributes:
        posteriors: The posteriors over contexts that the agent may end with, all different, `[M, C]`.
        probabilities: `P(m | c)`, how likely each is in each context, `[M, C]`; every column sums to 1.
    """

    posteriors: Tensor
    probabilities: Tensor

    @staticmethod
    def of(posteriors: Reals, probabilities: Reals) -> Endings:
        """Merge equal posteriors, and leave out what has no probability in any context."""
        met = probabilities.any(1)
        posteriors, probabilities = posteriors[met], probabilities[met]
        first, number = distinct_rows(posteriors, DECIMALS)
        merged = np.zeros((len(first), posteriors.shape[1]))
        np.add.at(merged, number, probabilities)
        return Endings(torch.from_numpy(posteriors[first]), torch.from_numpy(merged))

    @staticmethod
    def of_all(several: Sequence[Endings]) -> Endings:
        """All of several ways to end."""
        if len(several) == 1:
            return several[0]
        posteriors, probabilities = (
            np.concatenate([getattr(each, name).numpy() for each in several])
            for name in ("posteriors", "probabilities")
        )
        return Endings.of(posteriors, probabilities)


def last_contexts(tables: Finite, p: Reals) -> Reals:
    """Measures `[n, C, N]` over context and state as such over context and the last outcome, `[n, K, C]`."""
    after, likelihood = tables.outcomes.action, tables.outcomes.likelihood
    starts = [*tables.outcomes.starts, len(after)]
    moved = tables.predict(p)  # [n, A, C, N]
    last = [
        np.einsum("ncs,kcs->nkc", moved[:, a], likelihood[i:j]) for a, (i, j) in enumerate(pairwise(starts))
    ]
    return np.concatenate(last, 1)


def endings_of_step(tables: Finite, weights: Reals, beliefs: Reals, chances: Reals, *, last: bool) -> Endings:
    """How those end, in a step, who hold beliefs `[n, C, N]` before it; in the last step all of them.

    In each context they are there, and in which state, with probabilities `weights [n, C, N]`, and take each
    action with the `chances [n, A]`.
    """
    C, after = len(tables.prior), tables.outcomes.action
    over = tables.outcomes.ended | last
    posteriors, probabilities = [np.zeros((0, C))], [np.zeros((0, C))]
    for part in parts(tables, len(weights)):
        seen = (chances[part][:, after] * over)[..., None] * last_contexts(tables, weights[part])  # [n, K, C]
        joint = last_contexts(tables, beliefs[part])
        evidence = joint.sum(-1, keepdims=True)
        unmoved = beliefs[part].sum(-1)[:, None]  # as `condition` has it
        posteriors.append(np.where(evidence > 0, joint / positive(evidence), unmoved).reshape(-1, C))
        probabilities.append(seen.reshape(-1, C))
    return Endings.of(np.concatenate(posteriors), np.concatenate(probabilities))


def information(prior: Reals, probabilities: Reals) -> float:
    """`I(C; M)` of an ending M with probabilities `P(m | c)`, `[M, C]`, in nats."""
    evidence = positive(probabilities @ prior)[:, None]
    return max(0.0, float((prior * xlogy(probabilities, probabilities / evidence)).sum()))


def xlogy(x: Reals, y: Reals) -> Reals:
    """`x log y`, and 0 where x is."""
    product: Reals = x * np.log(np.where(x > 0, y, 1.0))
    return product


def positive(x: Reals) -> Reals:
    """The numbers themselves where they are positive, and else 1, to divide by."""
    positive: Reals = np.where(x > 0, x, 1.0)
    return positive
