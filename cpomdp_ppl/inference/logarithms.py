"""Logarithms of probabilities that may be zero, whose gradients are numbers everywhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_p_and_q(fn: Any, probs: str = "probs", logits: str = "logits") -> tuple[Tensor, Tensor]:
    """`log p` and `log (1 - p)`, in float64, by the parameter that was given: torch clamps the other."""
    p, l_p = given_parameter(fn, probs, logits)
    if l_p is None:
        assert p is not None
        return safe_log(p.double()), safe_log1m(p.double())
    log_p, log_q = logsigmoid(l_p.double()), logsigmoid(-l_p.double())
    if p is not None:
        clamped = (l_p.abs() + math.log(torch.finfo(p.dtype).eps)).abs() < 1e-3
        log_p = torch.where(clamped, safe_log(p.double()), log_p)
        log_q = torch.where(clamped, safe_log1m(p.double()), log_q)
    return log_p, log_q


def given_parameter(fn: Any, probs: str, logits: str) -> tuple[Tensor | None, Tensor | None]:
    """The parameter that a distribution was made with, or both where it does not say.

    `expand` keeps both if both are computed, but forgets which was first. It was the probabilities if the
    log-odds are where torch clamps them.
    """
    have = vars(fn)
    p, l_p = have.get(probs), have.get(logits)
    if p is not None and getattr(fn, "_param", None) is p:
        return p, None
    return p, l_p


def safe_log1m(p: Tensor) -> Tensor:
    """`log (1 - p)`, with the gradient of `safe_log`."""
    possible = p < 1
    return torch.where(possible, torch.log1p(-torch.where(possible, p, 0.0)), -torch.inf)


def safe_log(p: Tensor) -> Tensor:
    """`log p`, with a gradient of zero at zero, where it is multiplied by probabilities of zero."""
    if not p.requires_grad:
        return p.log()
    possible = p != 0
    return torch.where(possible, torch.where(possible, p, 1.0).log(), -torch.inf)


def times_log(k: Tensor, log_p: Tensor) -> Tensor:
    """`k log p`, which is zero for k = 0 whatever p."""
    return torch.where(k == 0, 0.0, k * torch.where(k == 0, 0.0, log_p))


def logsumexp(terms: Tensor) -> Tensor:
    """Log-sum-exp over the last axis, without a gradient where nothing is possible."""
    if not terms.requires_grad:
        return terms.logsumexp(-1)
    nowhere = (terms == -torch.inf).all(-1)
    return torch.where(nowhere, -torch.inf, torch.where(nowhere[..., None], 0.0, terms).logsumexp(-1))


def log_beta(a: Tensor, b: Tensor) -> Tensor:
    """`log B(a, b)`."""
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def entries_at(table: Tensor, index: Tensor) -> Tensor:
    """The entries `[…]` of a table `[…, K]`."""
    shape = torch.broadcast_shapes(table.shape[:-1], index.shape)
    return table.expand(*shape, -1).gather(-1, index.long().expand(shape)[..., None]).squeeze(-1)


def sum_rightmost(x: Tensor, n: int) -> Tensor:
    """Sum over the last n axes."""
    return x.flatten(-n).sum(-1) if n else x
