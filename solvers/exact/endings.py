"""How episodes may end: the posteriors over contexts, and how likely each is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from solvers.exact.beliefs import DECIMALS, parts
from solvers.exact.tables import distinct_rows

if TYPE_CHECKING:
    from torch import Tensor

    from solvers.exact.tables import Finite, Reals


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


def last_contexts(tables: Finite, p: Reals) -> Reals:
    """Measures `[n, C, N]` over context and state as such over context and the last outcome, `[n, K, C]`."""
    after, likelihood = tables.outcomes.action, tables.outcomes.likelihood
    starts = [*tables.outcomes.starts, len(after)]
    moved = tables.predict(p)  # [n, A, C, N]
    last = [
        np.einsum("ncs,kcs->nkc", moved[:, a], likelihood[i:j]) for a, (i, j) in enumerate(pairwise(starts))
    ]
    return np.concatenate(last, 1)


def last_step(tables: Finite, weights: Reals, beliefs: Reals, chances: Reals) -> Endings:
    """The endings of those who hold beliefs `[n, C, N]` before the last step.

    Args:
        tables: Tables of the model.
        weights: How likely they are to be there, and in which state, in each context, `[n, C, N]`.
        beliefs: What they believe, `[n, C, N]`.
        chances: How likely they take each action, `[n, A]`.
    """
    C, after = len(tables.prior), tables.outcomes.action
    posteriors, probabilities = [], []
    for part in parts(tables, len(weights)):
        seen = chances[part][:, after, None] * last_contexts(tables, weights[part])  # [n, K, C]
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
