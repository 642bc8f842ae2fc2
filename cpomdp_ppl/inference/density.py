"""Densities of distributions that say `-inf`, and nothing else, of what is impossible.

torch does not: with validation off, densities outside the support are arbitrary, and probabilities of 0 and
1 are moved by a machine epsilon before their logarithm is taken, which leaves the impossible at some -16 nats
an event in float32 and -36 in float64. So a density is found in three steps. Distributions that are made of
others (mixtures, transformed, independent, zero-inflated …) are taken apart; what is left is asked for its
support; and inside it the families that torch clamps, or loses digits of, have formulas of their own.

Nothing here has a gradient that is not a number: where a value is impossible, the gradient is zero.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical
from torch.nn.functional import logsigmoid

from cpomdp_ppl.errors import UnsupportedModelError

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

ROUNDINGS = 8
"""Roundings by which a value that was recorded may differ from the one that a program computes again."""


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

    Args:
        fn: The distribution.
        value: `[…, *event]`, of the precision in which it was recorded; it broadcasts with the distribution.
        site: Whose distribution it is, for messages.

    Returns:
        `[…]`, in the distribution's own precision or better.

    Raises:
        UnsupportedModelError: If the distribution has no density.
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
    so the two may differ by a few roundings in the coarser of their precisions, relative to their size. Whole
    numbers are exact in any precision, and have to be the same.
    """
    if not (value.is_floating_point() and computed.is_floating_point()):
        return value == computed
    eps = max(torch.finfo(value.dtype).eps, torch.finfo(computed.dtype).eps)
    size = torch.maximum(value.abs(), computed.abs())
    whole = (value == value.round()) & (computed == computed.round())
    return (value == computed) | (~whole & ((value - computed).abs() <= ROUNDINGS * eps * size))


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


# Distributions that are made of others.


@singledispatch
def _log_density(fn: Any, value: Tensor) -> Tensor:
    """Of a distribution that is made of no others: by its support, and a formula inside."""
    inside = _inside(fn, value)
    value = _precise(value)
    if inside is None or bool(inside.all()):
        return _log_prob(fn, value)
    possible = _possible_value(fn.support, value)
    value = torch.where(inside.reshape(inside.shape + (1,) * len(fn.event_shape)), value, possible)
    return torch.where(inside, _log_prob(fn, value), -torch.inf)


def _precise(value: Tensor) -> Tensor:
    """A record in float32 in the precision in which the program runs; nothing for programs in float32."""
    if value.dtype != torch.float32 or torch.get_default_dtype() == torch.float32:
        return value
    return value.to(torch.get_default_dtype())


@_log_density.register(td.Independent)
def _independent(fn: Any, value: Tensor) -> Tensor:
    log_prob = _log_density(fn.base_dist, value)
    return _sum_rightmost(log_prob, fn.reinterpreted_batch_ndims)


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
    return _logsumexp(torch.where(same, fn._log_weights.log_softmax(-1), -torch.inf))


@_log_density.register
def _mixture(fn: td.MixtureSameFamily, value: Tensor) -> Tensor:
    components = _log_density(fn.component_distribution, value.unsqueeze(-1 - len(fn.event_shape)))  # […, K]
    return _logsumexp(components + _log_probs(fn.mixture_distribution).to(components.dtype))


@_log_density.register(dist.MaskedMixture)
def _masked_mixture(fn: Any, value: Tensor) -> Tensor:
    return torch.where(fn.mask, _log_density(fn.component1, value), _log_density(fn.component0, value))


@_log_density.register
def _zero_inflated(fn: dist.ZeroInflatedDistribution, value: Tensor) -> Tensor:
    log_prob = _log_density(fn.base_dist, value)
    log_gate, log_open = (log.to(log_prob.dtype) for log in _log_odds(fn, "gate", "gate_logits"))
    log_base = log_open + log_prob
    log_zero = log_gate  # of a continuous base, zero has a density, but no probability beside the gate's
    if is_discrete(fn.base_dist):
        log_zero = _logsumexp(torch.stack(torch.broadcast_tensors(log_gate, log_base), -1))
    return torch.where(value == 0, log_zero, log_base)


@_log_density.register
def _folded(fn: dist.FoldedDistribution, value: Tensor) -> Tensor:
    there, opposite = _log_density(fn.base_dist, value), _log_density(fn.base_dist, -value)
    if is_discrete(fn.base_dist):  # zero is met once
        opposite = torch.where(value == 0, -torch.inf, opposite)
    return torch.where(value >= 0, _logsumexp(torch.stack([there, opposite], -1)), -torch.inf)


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
            inside = _inside_of(codomain, y)
            if inside is not None and not bool(inside.all()):
                at_events = inside.reshape(inside.shape + (1,) * codomain.event_dim)
                y = torch.where(at_events, y, _possible_value(codomain, y))
                possible = possible & _all_rightmost(inside, n - codomain.event_dim)
        y = _precise(y)
        x = transform.inv(y)
        n += transform.domain.event_dim - transform.codomain.event_dim
        if not discrete:  # probabilities are not stretched, as densities are
            stretch = transform.log_abs_det_jacobian(x, y)
            log_prob = log_prob - _sum_rightmost(stretch, n - transform.domain.event_dim)
        y = x
    if discrete:
        y = again = y.round()
        for transform in fn.transforms:
            again = transform(again)
        possible = _all_rightmost(equal(value, again), len(fn.event_shape))
    log_prob = log_prob + _sum_rightmost(_log_density(fn.base_dist, y), n - len(fn.base_dist.event_shape))
    return torch.where(possible, log_prob, -torch.inf)


@_log_density.register
def _hidden_markov(fn: dist.DiscreteHMM, value: Tensor) -> Tensor:
    seen = _log_density(fn.observation_dist, value.unsqueeze(-1 - fn.observation_dist.event_dim))  # […, T, S]
    steps = seen.unsqueeze(-2) + fn.transition_logits  # […, T, S, S]
    log_alpha = fn.initial_logits
    for step in steps.unbind(-3):
        log_alpha = _logsumexp((log_alpha.unsqueeze(-1) + step).mT)
    return _logsumexp(log_alpha)


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


# Supports.


@singledispatch
def _inside(fn: Any, value: Tensor) -> Tensor | None:
    """Where a value is in a distribution's support, `[…]`; None for everywhere."""
    try:
        support = fn.support
    except NotImplementedError:  # it does not say
        return None
    inside = _inside_of(support, value)
    below = len(fn.event_shape) - support.event_dim  # a constraint may speak of components
    return inside if inside is None or below <= 0 else _all_rightmost(inside, below)


def is_discrete(fn: Any) -> bool:
    """Whether a distribution's densities are probabilities."""
    try:
        return bool(fn.support.is_discrete)
    except NotImplementedError:
        return False


@_inside.register(td.Multinomial)
@_inside.register(dist.DirichletMultinomial)
def _counts(fn: Any, value: Tensor) -> Tensor:
    """Where they are counts of the total: torch takes any that add up to less, and fractions, too."""
    counts = (value >= 0) & (value == value.round())
    inside: Tensor = counts.all(-1) & (value.sum(-1) == fn.total_count)
    return inside


@_inside.register(dist.ExtendedBinomial)
@_inside.register(dist.ExtendedBetaBinomial)
def _count(fn: Any, value: Tensor) -> Tensor:
    inside: Tensor = (value >= 0) & (value <= fn.total_count) & (value == value.round())
    return inside


@_inside.register(dist.OneOneMatching)
@_inside.register(dist.OneTwoMatching)
def _matching(fn: Any, value: Tensor) -> Tensor:
    """Pyro's constraint speaks of a batch as a whole."""
    sources, destinations = fn.logits.shape
    used = (value[..., None] == torch.arange(destinations, device=value.device)).sum(-2)  # […, destination]
    inside: Tensor = (used == sources // destinations).all(-1)
    return inside


@_inside.register
def _between(fn: td.Uniform, value: Tensor) -> Tensor:
    """Bounds count, as a draw may be rounded to them; and in the precision of the record."""
    return (value >= fn.low.to(value.dtype)) & (value <= fn.high.to(value.dtype))


def _inside_of(support: Any, value: Tensor) -> Tensor | None:
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    if base is constraints.real or constraints.is_dependent(base):
        return None  # observations are finite where they count
    if base is constraints.simplex:  # up to rounding, which there is more of for more components
        eps = torch.finfo(value.dtype).eps
        off = (value.sum(-1) - 1).abs() > max(1e-6, eps * value.shape[-1])
        inside = (value >= 0).all(-1) & ~off
        return _all_rightmost(inside, support.event_dim - 1)
    checked: Tensor = support.check(value)
    return checked


def _possible_value(support: Any, like: Tensor) -> Tensor:
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


# Formulas inside the support.


@singledispatch
def _log_prob(fn: Any, value: Tensor) -> Tensor:
    log_prob: Tensor = fn.log_prob(value)
    return log_prob


@_log_prob.register
def _normal(fn: dist.Normal, value: Tensor) -> Tensor:
    if type(fn) is not dist.Normal:
        log_prob: Tensor = fn.log_prob(value)
        return log_prob
    z = (value - fn.loc).div_(fn.scale)  # in half the passes over memory that torch takes
    return z.square_().mul_(-0.5).sub_(fn.scale.log()).sub_(HALF_LOG_2PI)


@_log_prob.register
def _uniform(fn: td.Uniform, value: Tensor) -> Tensor:
    log_prob = -(fn.high - fn.low).log()
    return log_prob.expand(torch.broadcast_shapes(log_prob.shape, value.shape))


@_log_prob.register
def _von_mises(fn: td.VonMises, value: Tensor) -> Tensor:
    log_i0e: Tensor = torch.special.i0e(fn.concentration).log()  # torch has it to seven digits
    return fn.concentration * (torch.cos(value - fn.loc) - 1) - log_i0e - math.log(2 * math.pi)


@_log_prob.register
def _bernoulli(fn: td.Bernoulli, value: Tensor) -> Tensor:
    if "logits" not in vars(fn):
        return _log(torch.where(value > 0.5, fn.probs, 1 - fn.probs))
    if "probs" not in vars(fn):
        return logsigmoid(torch.where(value > 0.5, fn.logits, -fn.logits))
    log_p, log_q = _log_odds(fn)
    return torch.where(value > 0.5, log_p, log_q).to(fn.logits.dtype)


@_log_prob.register
def _categorical(fn: td.Categorical, value: Tensor) -> Tensor:
    if "logits" not in vars(fn):
        return _log(_at(fn.probs, value))
    if "probs" not in vars(fn):
        return _at(fn.logits, value)
    return _at(_log_probs(fn), value).to(fn.logits.dtype)


@_log_prob.register
def _ordered(fn: dist.OrderedLogistic, value: Tensor) -> Tensor:
    """`σ(a) - σ(b) = σ(a) σ(-b) (1 - exp(b - a))`: differences of probabilities would lose all digits."""
    cuts = fn.cutpoints - fn.predictor[..., None]
    end = torch.full_like(cuts[..., :1], torch.inf)
    a, b = _at(torch.cat([cuts, end], -1), value), _at(torch.cat([-end, cuts], -1), value)
    return logsigmoid(a) + logsigmoid(-b) + _log(-torch.expm1(b - a))


@_log_prob.register
def _one_hot(fn: td.OneHotCategorical, value: Tensor) -> Tensor:
    return _log_prob(fn._categorical, value.argmax(-1))


@_log_prob.register
def _binomial(fn: td.Binomial, value: Tensor) -> Tensor:
    k, n, (log_p, log_q) = value.double(), fn.total_count.double(), _log_odds(fn)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (ways + _times(k, log_p) + _times(n - k, log_q)).to(fn._param.dtype)


@_log_prob.register
def _beta_binomial(fn: dist.BetaBinomial, value: Tensor) -> Tensor:
    k, n = value.double(), fn.total_count.double()
    a, b = fn.concentration1.double(), fn.concentration0.double()
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (ways + _log_beta(k + a, n - k + b) - _log_beta(a, b)).to(fn.concentration1.dtype)


@_log_prob.register
def _multinomial(fn: td.Multinomial, value: Tensor) -> Tensor:
    k, log_probs = value.double(), _log_probs(fn._categorical)
    ways = torch.lgamma(k.sum(-1) + 1) - torch.lgamma(k + 1).sum(-1)
    return (ways + _times(k, log_probs).sum(-1)).to(fn._categorical._param.dtype)


@_log_prob.register
def _dirichlet_multinomial(fn: dist.DirichletMultinomial, value: Tensor) -> Tensor:
    k, a = value.double(), fn.concentration.double()
    n, total = k.sum(-1), a.sum(-1)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1).sum(-1)
    rising = (torch.lgamma(k + a) - torch.lgamma(a)).sum(-1)
    return (ways + rising + torch.lgamma(total) - torch.lgamma(n + total)).to(fn.concentration.dtype)


@_log_prob.register
def _geometric(fn: td.Geometric, value: Tensor) -> Tensor:
    log_p, log_q = _log_odds(fn)
    return (_times(value.double(), log_q) + log_p).to(fn.probs.dtype)


@_log_prob.register
def _negative_binomial(fn: td.NegativeBinomial, value: Tensor) -> Tensor:
    k, r, (log_p, log_q) = value.double(), fn.total_count.double(), _log_odds(fn)
    never = r == 0  # to go on: the count is zero
    safe = torch.where(never, 1.0, r)
    ways = torch.lgamma(k + safe) - torch.lgamma(k + 1) - torch.lgamma(safe)
    log_prob = ways + _times(safe, log_q) + _times(k, log_p)
    return torch.where(never, torch.where(k == 0, 0.0, -torch.inf), log_prob).to(fn._param.dtype)


@_log_prob.register
def _gamma_poisson(fn: dist.GammaPoisson, value: Tensor) -> Tensor:
    k = value.double()
    a, rate = fn.concentration.double(), fn.rate.double()
    ways = torch.lgamma(k + a) - torch.lgamma(k + 1) - torch.lgamma(a)
    log_prob: Tensor = ways - a * (1 / rate).log1p() - k * rate.log1p()
    return log_prob.to(fn.rate.dtype)


@_log_prob.register
def _poisson(fn: td.Poisson, value: Tensor) -> Tensor:
    k, rate = value.double(), fn.rate.double()
    return (_times(k, _log(rate)) - rate - torch.lgamma(k + 1)).to(fn.rate.dtype)


@_log_prob.register
def _continuous_bernoulli(fn: td.ContinuousBernoulli, value: Tensor) -> Tensor:
    """An exponential, cut off at 0 and 1."""
    log_p, log_q = _log_odds(fn)
    logits, x = (log_p - log_q).double(), value.double()
    slope = logits.abs()
    flat = slope < 1e-4  # then log((1 - exp(-slope)) / slope) is as follows, to 1e-18
    steep = torch.where(flat, 1.0, slope)
    log_mass = torch.where(flat, slope * (slope / 24 - 0.5), (-torch.expm1(-steep) / steep).log())
    down = torch.where(logits > 0, 1 - x, x) * slope  # from the likelier end
    return (-down - log_mass).to(fn._param.dtype)


@_log_prob.register
def _relaxed_bernoulli(fn: LogitRelaxedBernoulli, value: Tensor) -> Tensor:
    log_p, log_q = _log_odds(fn)
    away = ((log_p - log_q) - value * fn.temperature).abs()
    away = torch.where(away.isinf(), 0.0, away)
    log_prob = fn.temperature.log() - away - 2 * (-away).exp().log1p()
    return torch.where((log_p - log_q).isinf(), -torch.inf, log_prob)


@_log_prob.register
def _relaxed_categorical(fn: ExpRelaxedCategorical, value: Tensor) -> Tensor:
    log_probs, K = _log_probs(fn._categorical), fn._categorical.logits.shape[-1]
    possible = (log_probs > -torch.inf).all(-1)  # a component without a chance is zero, not small
    score = torch.where(possible[..., None], log_probs, 0.0) - value * fn.temperature
    log_scale = math.lgamma(K) + fn.temperature.log() * (K - 1)
    return torch.where(possible, score.log_softmax(-1).sum(-1) + log_scale, -torch.inf)


# Logarithms.


def _log_odds(fn: Any, probs: str = "probs", logits: str = "logits") -> tuple[Tensor, Tensor]:
    """`log p` and `log (1 - p)`, in float64, by the parameter that was given: torch clamps the other."""
    p, l_p = _given(fn, probs, logits)
    if l_p is None:
        assert p is not None
        return _log(p.double()), _log1m(p.double())
    log_p, log_q = logsigmoid(l_p.double()), logsigmoid(-l_p.double())
    if p is not None:
        clamped = (l_p.abs() + math.log(torch.finfo(p.dtype).eps)).abs() < 1e-3
        log_p = torch.where(clamped, _log(p.double()), log_p)
        log_q = torch.where(clamped, _log1m(p.double()), log_q)
    return log_p, log_q


def _log_probs(fn: td.Categorical) -> Tensor:
    """The logarithms of a categorical distribution's probabilities, `[…, K]`; as `_log_odds`."""
    if isinstance(fn, dist.OrderedLogistic):
        K = fn.cutpoints.shape[-1] + 1
        return torch.stack([_ordered(fn, torch.tensor(k)) for k in range(K)], -1)
    p, log_p = _given(fn, "probs", "logits")
    if log_p is None:
        assert p is not None
        return _log(p.double())
    if p is not None:
        unclamped = log_p < math.log(torch.finfo(p.dtype).eps) - 1e-3
        log_p = torch.where(unclamped, log_p, _log(p))
    return log_p.double()


def _given(fn: Any, probs: str, logits: str) -> tuple[Tensor | None, Tensor | None]:
    """The parameter that a distribution was made with; both, where it does not tell.

    `expand` keeps both if both are computed, but forgets which was first. It was the probabilities if the
    log-odds are where torch clamps them.
    """
    have = vars(fn)
    p, l_p = have.get(probs), have.get(logits)
    if p is not None and getattr(fn, "_param", None) is p:
        return p, None
    return p, l_p


def _log1m(p: Tensor) -> Tensor:
    """`log (1 - p)`, with the gradient of `_log`."""
    possible = p < 1
    return torch.where(possible, torch.log1p(-torch.where(possible, p, 0.0)), -torch.inf)


def _log(p: Tensor) -> Tensor:
    """Whose gradient is zero, not infinite, at zero: there it is multiplied by probabilities of zero."""
    if not p.requires_grad:
        return p.log()
    possible = p != 0
    return torch.where(possible, torch.where(possible, p, 1.0).log(), -torch.inf)


def _times(k: Tensor, log_p: Tensor) -> Tensor:
    """`k log p`, which is zero for k = 0 whatever p."""
    return torch.where(k == 0, 0.0, k * torch.where(k == 0, 0.0, log_p))


def _logsumexp(terms: Tensor) -> Tensor:
    """Over the last axis; without a gradient where nothing is possible."""
    if not terms.requires_grad:
        return terms.logsumexp(-1)
    nowhere = (terms == -torch.inf).all(-1)
    return torch.where(nowhere, -torch.inf, torch.where(nowhere[..., None], 0.0, terms).logsumexp(-1))


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _at(table: Tensor, index: Tensor) -> Tensor:
    """The entries `[…]` of a table `[…, K]`."""
    shape = torch.broadcast_shapes(table.shape[:-1], index.shape)
    return table.expand(*shape, -1).gather(-1, index.long().expand(shape)[..., None]).squeeze(-1)


def _sum_rightmost(x: Tensor, n: int) -> Tensor:
    return x.flatten(-n).sum(-1) if n else x


def _all_rightmost(x: Tensor, n: int) -> Tensor:
    return x.flatten(-n).all(-1) if n else x
