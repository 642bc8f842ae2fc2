"""Where the values of a distribution may lie."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints


@singledispatch
def inside_support(fn: Any, value: Tensor) -> Tensor | None:
    """Where a value is in a distribution's support, `[…]`; None for everywhere."""
    try:
        support = fn.support
    except NotImplementedError:  # it does not say
        return None
    inside = inside_constraint(support, value)
    below = len(fn.event_shape) - support.event_dim  # a constraint may speak of components
    return inside if inside is None or below <= 0 else all_rightmost(inside, below)


def is_discrete(fn: Any) -> bool:
    """Whether a distribution's densities are probabilities."""
    try:
        return bool(fn.support.is_discrete)
    except NotImplementedError:
        return False


@inside_support.register(td.Multinomial)
@inside_support.register(dist.DirichletMultinomial)
def _counts(fn: Any, value: Tensor) -> Tensor:
    """Where values are counts of the total: torch accepts any that add up to less, and fractions, too."""
    counts = (value >= 0) & (value == value.round())
    inside: Tensor = counts.all(-1) & (value.sum(-1) == fn.total_count)
    return inside


@inside_support.register(dist.ExtendedBinomial)
@inside_support.register(dist.ExtendedBetaBinomial)
def _count(fn: Any, value: Tensor) -> Tensor:
    inside: Tensor = (value >= 0) & (value <= fn.total_count) & (value == value.round())
    return inside


@inside_support.register(dist.OneOneMatching)
@inside_support.register(dist.OneTwoMatching)
def _matching(fn: Any, value: Tensor) -> Tensor:
    """Where values are matchings: Pyro's constraint checks a batch only as one."""
    sources, destinations = fn.logits.shape
    used = (value[..., None] == torch.arange(destinations, device=value.device)).sum(-2)  # […, destination]
    inside: Tensor = (used == sources // destinations).all(-1)
    return inside


@inside_support.register
def _between(fn: td.Uniform, value: Tensor) -> Tensor:
    """The bounds are inside, since a draw may be rounded to them; they have the precision of the record."""
    return (value >= fn.low.to(value.dtype)) & (value <= fn.high.to(value.dtype))


def inside_constraint(support: Any, value: Tensor) -> Tensor | None:
    """Where a value satisfies a constraint, `[…]`; None for everywhere."""
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    if base is constraints.real or constraints.is_dependent(base):
        return None  # observations are finite where they count
    if base is constraints.simplex:  # up to rounding, which there is more of for more components
        eps = torch.finfo(value.dtype).eps
        off = (value.sum(-1) - 1).abs() > max(1e-6, eps * value.shape[-1])
        inside = (value >= 0).all(-1) & ~off
        return all_rightmost(inside, support.event_dim - 1)
    checked: Tensor = support.check(value)
    return checked


def possible_value(support: Any, like: Tensor) -> Tensor:
    """Some value inside a support, to evaluate a density where it will not count."""
    for constant in (0.0, 1.0, 0.5):
        candidate = torch.full_like(like, constant)
        if bool(support.check(candidate).all()):
            return candidate
    try:
        transform = td.transform_to(support)
        inner = transform.inverse_shape(like.shape)
        found: Tensor = transform(torch.zeros(inner, dtype=like.dtype, device=like.device))
    except NotImplementedError:
        return like
    return found


def all_rightmost(x: Tensor, n: int) -> Tensor:
    """Whether all are true over the last n axes."""
    return x.flatten(-n).all(-1) if n else x
