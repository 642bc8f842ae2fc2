"""Densities of distributions that say `-inf`, and nothing else, of what is impossible."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.inference.families import (
    log_p_and_q,
    log_prob_inside,
    log_probabilities,
    logsumexp,
    sum_rightmost,
)
from cpomdp_ppl.native.recording import certain

ROUNDINGS = 8
"""Number of roundings by which a recorded value may differ from the one that a program computes."""


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
        if certain(support.check(candidate)):
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


def unmasked(fn: Any) -> Any:
    """A distribution without its masks."""
    if isinstance(fn, dist.MaskedDistribution):
        return unmasked(fn.base_dist)
    if isinstance(fn, dist.Independent):
        base = unmasked(fn.base_dist)
        return fn if base is fn.base_dist else dist.Independent(base, fn.reinterpreted_batch_ndims)
    return fn


def log_density(fn: Any, value: Tensor, site: str | None = None) -> Tensor:
    """`fn.log_prob(value)`, but `-inf` wherever the value is impossible.

    The value `[…, *event]` has the precision in which it was recorded, the result `[…]` that of the
    distribution, or better. A distribution without a density raises `UnsupportedModelError`.
    """
    try:
        return _log_density(fn, value)
    except (NotImplementedError, AssertionError) as error:  # Pyro asserts that there is no batch
        name = type(fn).__name__
        where = name if site is None else f"site '{site}' ({name})"
        why = f": {error}" if str(error) else ""
        raise UnsupportedModelError(f"{where} has no density for a batch of states{why}") from error


def equal(value: Tensor, computed: Tensor) -> Tensor:
    """Whether a value that was recorded is the one that a program computes, up to rounding.

    Programs that draw in float32 are scored in float64 by some backends, and records are made elsewhere, too:
    so the two may differ by a few roundings in the coarser of their precisions, relative to their size.
    Integers are exact in any precision, and have to be the same.
    """
    if not (value.is_floating_point() and computed.is_floating_point()):
        return value == computed
    eps = max(torch.finfo(value.dtype).eps, torch.finfo(computed.dtype).eps)
    size = torch.maximum(value.abs(), computed.abs())
    integers = (value == value.round()) & (computed == computed.round())
    return (value == computed) | (~integers & ((value - computed).abs() <= ROUNDINGS * eps * size))


def unfit(fn: Any) -> str | None:
    """Why torch or Pyro do not draw from a distribution as its parameters say; None if they do."""
    if isinstance(fn, dist.CoalescentTimes):
        return "Pyro draws it without regard to its rate"
    if isinstance(fn, dist.TruncatedPolyaGamma):
        return "Pyro draws it but roughly"
    if isinstance(fn, td.RelaxedOneHotCategorical) and fn.base_dist.temperature.numel() > 1:
        return "torch mixes up temperatures, if there are several"
    if isinstance(fn, td.ContinuousBernoulli) and vars(fn).get("probs") is fn._param:
        eps = torch.finfo(fn.probs.dtype).eps
        if not bool(((fn.probs > eps) & (fn.probs < 1 - eps)).all()):
            return f"torch moves probabilities away from 0 and 1, by {eps:.0e}"
    return None


@singledispatch
def _log_density(fn: Any, value: Tensor) -> Tensor:
    """The density of a distribution that is made of no others: by its support, and a formula inside."""
    inside = inside_support(fn, value)
    value = _precise(value)
    if inside is None or certain(inside):
        return log_prob_inside(fn, value)
    possible = possible_value(fn.support, value)
    value = torch.where(inside.reshape(inside.shape + (1,) * len(fn.event_shape)), value, possible)
    return torch.where(inside, log_prob_inside(fn, value), -torch.inf)


def _precise(value: Tensor) -> Tensor:
    """A record in float32 in the precision in which the program runs."""
    if value.dtype != torch.float32 or torch.get_default_dtype() == torch.float32:
        return value
    return value.to(torch.get_default_dtype())


@_log_density.register(td.Independent)
def _independent(fn: Any, value: Tensor) -> Tensor:
    log_prob = _log_density(fn.base_dist, value)
    return sum_rightmost(log_prob, fn.reinterpreted_batch_ndims)


@_log_density.register
def _masked(fn: dist.MaskedDistribution, value: Tensor) -> Tensor:
    log_prob = _log_density(fn.base_dist, value)
    return torch.where(torch.as_tensor(fn._mask, device=log_prob.device), log_prob, 0.0)


@_log_density.register
def _expanded(fn: dist.ExpandedDistribution, value: Tensor) -> Tensor:
    log_prob = _log_density(fn.base_dist, value)
    return log_prob.expand(torch.broadcast_shapes(log_prob.shape, fn.batch_shape))


@_log_density.register
def _delta(fn: dist.Delta, value: Tensor) -> Tensor:
    same = equal(value, fn.v)
    same = same.flatten(-fn.event_dim).all(-1) if fn.event_dim else same
    return torch.where(same, fn.log_density, -torch.inf)


@_log_density.register
def _empirical(fn: dist.Empirical, value: Tensor) -> Tensor:
    n = len(fn.event_shape)
    same = equal(value.unsqueeze(-1 - n), fn._samples)  # [… , sample, *event]
    same = same.flatten(-n).all(-1) if n else same
    return logsumexp(torch.where(same, fn._log_weights.log_softmax(-1), -torch.inf))


@_log_density.register
def _mixture(fn: td.MixtureSameFamily, value: Tensor) -> Tensor:
    components = _log_density(fn.component_distribution, value.unsqueeze(-1 - len(fn.event_shape)))  # […, K]
    return logsumexp(components + log_probabilities(fn.mixture_distribution).to(components.dtype))


@_log_density.register(dist.MaskedMixture)
def _masked_mixture(fn: Any, value: Tensor) -> Tensor:
    return torch.where(fn.mask, _log_density(fn.component1, value), _log_density(fn.component0, value))


@_log_density.register
def _zero_inflated(fn: dist.ZeroInflatedDistribution, value: Tensor) -> Tensor:
    log_prob = _log_density(fn.base_dist, value)
    log_gate, log_open = (log.to(log_prob.dtype) for log in log_p_and_q(fn, "gate", "gate_logits"))
    log_base = log_open + log_prob
    log_zero = log_gate  # of a continuous base, zero has a density, but no probability beside the gate's
    if is_discrete(fn.base_dist):
        log_zero = logsumexp(torch.stack(torch.broadcast_tensors(log_gate, log_base), -1))
    return torch.where(value == 0, log_zero, log_base)


@_log_density.register
def _folded(fn: dist.FoldedDistribution, value: Tensor) -> Tensor:
    there, opposite = _log_density(fn.base_dist, value), _log_density(fn.base_dist, -value)
    if is_discrete(fn.base_dist):  # zero is met once
        opposite = torch.where(value == 0, -torch.inf, opposite)
    return torch.where(value >= 0, logsumexp(torch.stack([there, opposite], -1)), -torch.inf)


@_log_density.register
def _transformed(fn: td.TransformedDistribution, value: Tensor) -> Tensor:
    if type(fn).log_prob is not td.TransformedDistribution.log_prob:  # it has a formula of its own
        return _log_density.dispatch(object)(fn, value)
    discrete, n = is_discrete(fn.base_dist), len(fn.event_shape)
    batch = torch.broadcast_shapes(value.shape[: value.dim() - n], fn.batch_shape)
    value = value.expand(batch + value.shape[value.dim() - n :])  # splines, for instance, do not broadcast
    y, log_prob = value, torch.zeros((), device=value.device)
    possible = torch.ones((), dtype=torch.bool, device=value.device)
    codomains = [transform.codomain for transform in fn.transforms]
    if not discrete and fn.support is not codomains[-1]:  # a simplex, say, which no transform knows of
        codomains[-1] = fn.support
    for transform, codomain in zip(reversed(fn.transforms), reversed(codomains), strict=True):
        if not transform.bijective:
            raise NotImplementedError(f"{transform} cannot be inverted")
        if not discrete:
            inside = inside_constraint(codomain, y)
            if inside is not None and not certain(inside):
                at_events = inside.reshape(inside.shape + (1,) * codomain.event_dim)
                y = torch.where(at_events, y, possible_value(codomain, y))
                possible = possible & all_rightmost(inside, n - codomain.event_dim)
        y = _precise(y)
        x = transform.inv(y)
        n += transform.domain.event_dim - transform.codomain.event_dim
        if not discrete:  # probabilities are not stretched, as densities are
            stretch = transform.log_abs_det_jacobian(x, y)
            log_prob = log_prob - sum_rightmost(stretch, n - transform.domain.event_dim)
        y = x
    if discrete:
        y = again = y.round()
        for transform in fn.transforms:
            again = transform(again)
        possible = all_rightmost(equal(value, again), len(fn.event_shape))
    log_prob = log_prob + sum_rightmost(_log_density(fn.base_dist, y), n - len(fn.base_dist.event_shape))
    return torch.where(possible, log_prob, -torch.inf)


@_log_density.register
def _hidden_markov(fn: dist.DiscreteHMM, value: Tensor) -> Tensor:
    seen = _log_density(fn.observation_dist, value.unsqueeze(-1 - fn.observation_dist.event_dim))  # […, T, S]
    steps = seen.unsqueeze(-2) + fn.transition_logits  # […, T, S, S]
    log_alpha = fn.initial_logits
    for step in steps.unbind(-3):
        log_alpha = logsumexp((log_alpha.unsqueeze(-1) + step).mT)
    return logsumexp(log_alpha)


@_log_density.register
def _rejector(fn: dist.Rejector, value: Tensor) -> Tensor:
    log_accept: Tensor = fn.log_prob_accept(_precise(value)) - fn._log_scale
    return _log_density(fn.propose, value) + log_accept


@_log_density.register(dist.CoalescentTimes)
@_log_density.register(dist.TruncatedPolyaGamma)
@_log_density.register(td.RelaxedOneHotCategorical)
@_log_density.register(td.ContinuousBernoulli)
def _perhaps_unfit(fn: Any, value: Tensor) -> Tensor:
    why = unfit(fn)
    if why is not None:
        raise NotImplementedError(why)
    general = td.TransformedDistribution if isinstance(fn, td.TransformedDistribution) else object
    return _log_density.dispatch(general)(fn, value)


@_log_density.register(dist.RelaxedBernoulliStraightThrough)
@_log_density.register(dist.RelaxedOneHotCategoricalStraightThrough)
def _straight_through(fn: Any, value: Tensor) -> Tensor:
    raise NotImplementedError("it draws corners of a continuum, and is a density between them")
