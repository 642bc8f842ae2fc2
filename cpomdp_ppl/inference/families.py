"""Formulas for the log-densities of families that torch clamps, or loses digits of, inside their support."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical
from torch.nn.functional import logsigmoid

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


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


@singledispatch
def log_prob_inside(fn: Any, value: Tensor) -> Tensor:
    """`fn.log_prob(value)` of a value inside the support, `[…]`."""
    log_prob: Tensor = fn.log_prob(value)
    return log_prob


@log_prob_inside.register
def _normal(fn: dist.Normal, value: Tensor) -> Tensor:
    if type(fn) is not dist.Normal:
        log_prob: Tensor = fn.log_prob(value)
        return log_prob
    z = (value - fn.loc).div_(fn.scale)  # in half the passes over memory that torch takes
    return z.square_().mul_(-0.5).sub_(fn.scale.log()).sub_(HALF_LOG_2PI)


@log_prob_inside.register
def _uniform(fn: td.Uniform, value: Tensor) -> Tensor:
    log_prob = -(fn.high - fn.low).log()
    return log_prob.expand(torch.broadcast_shapes(log_prob.shape, value.shape))


@log_prob_inside.register
def _von_mises(fn: td.VonMises, value: Tensor) -> Tensor:
    log_i0e: Tensor = torch.special.i0e(fn.concentration).log()  # torch has it to seven digits
    return fn.concentration * (torch.cos(value - fn.loc) - 1) - log_i0e - math.log(2 * math.pi)


@log_prob_inside.register
def _bernoulli(fn: td.Bernoulli, value: Tensor) -> Tensor:
    if "logits" not in vars(fn):
        return safe_log(torch.where(value > 0.5, fn.probs, 1 - fn.probs))
    if "probs" not in vars(fn):
        return logsigmoid(torch.where(value > 0.5, fn.logits, -fn.logits))
    log_p, log_q = log_p_and_q(fn)
    return torch.where(value > 0.5, log_p, log_q).to(fn.logits.dtype)


@log_prob_inside.register
def _categorical(fn: td.Categorical, value: Tensor) -> Tensor:
    if "logits" not in vars(fn):
        return safe_log(entries_at(fn.probs, value))
    if "probs" not in vars(fn):
        return entries_at(fn.logits, value)
    return entries_at(log_probabilities(fn), value).to(fn.logits.dtype)


@log_prob_inside.register
def _ordered(fn: dist.OrderedLogistic, value: Tensor) -> Tensor:
    """`σ(a) - σ(b) = σ(a) σ(-b) (1 - exp(b - a))`: differences of probabilities would lose all digits."""
    cuts = fn.cutpoints - fn.predictor[..., None]
    end = torch.full_like(cuts[..., :1], torch.inf)
    a, b = entries_at(torch.cat([cuts, end], -1), value), entries_at(torch.cat([-end, cuts], -1), value)
    return logsigmoid(a) + logsigmoid(-b) + safe_log(-torch.expm1(b - a))


@log_prob_inside.register
def _one_hot(fn: td.OneHotCategorical, value: Tensor) -> Tensor:
    return log_prob_inside(fn._categorical, value.argmax(-1))


@log_prob_inside.register
def _binomial(fn: td.Binomial, value: Tensor) -> Tensor:
    k, n, (log_p, log_q) = value.double(), fn.total_count.double(), log_p_and_q(fn)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (ways + times_log(k, log_p) + times_log(n - k, log_q)).to(fn._param.dtype)


@log_prob_inside.register
def _beta_binomial(fn: dist.BetaBinomial, value: Tensor) -> Tensor:
    k, n = value.double(), fn.total_count.double()
    a, b = fn.concentration1.double(), fn.concentration0.double()
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (ways + log_beta(k + a, n - k + b) - log_beta(a, b)).to(fn.concentration1.dtype)


@log_prob_inside.register
def _multinomial(fn: td.Multinomial, value: Tensor) -> Tensor:
    k, log_probs = value.double(), log_probabilities(fn._categorical)
    ways = torch.lgamma(k.sum(-1) + 1) - torch.lgamma(k + 1).sum(-1)
    return (ways + times_log(k, log_probs).sum(-1)).to(fn._categorical._param.dtype)


@log_prob_inside.register
def _dirichlet_multinomial(fn: dist.DirichletMultinomial, value: Tensor) -> Tensor:
    k, a = value.double(), fn.concentration.double()
    n, total = k.sum(-1), a.sum(-1)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1).sum(-1)
    rising = (torch.lgamma(k + a) - torch.lgamma(a)).sum(-1)
    return (ways + rising + torch.lgamma(total) - torch.lgamma(n + total)).to(fn.concentration.dtype)


@log_prob_inside.register
def _geometric(fn: td.Geometric, value: Tensor) -> Tensor:
    log_p, log_q = log_p_and_q(fn)
    return (times_log(value.double(), log_q) + log_p).to(fn.probs.dtype)


@log_prob_inside.register
def _negative_binomial(fn: td.NegativeBinomial, value: Tensor) -> Tensor:
    k, r, (log_p, log_q) = value.double(), fn.total_count.double(), log_p_and_q(fn)
    never = r == 0  # to go on: the count is zero
    safe = torch.where(never, 1.0, r)
    ways = torch.lgamma(k + safe) - torch.lgamma(k + 1) - torch.lgamma(safe)
    log_prob = ways + times_log(safe, log_q) + times_log(k, log_p)
    return torch.where(never, torch.where(k == 0, 0.0, -torch.inf), log_prob).to(fn._param.dtype)


@log_prob_inside.register
def _gamma_poisson(fn: dist.GammaPoisson, value: Tensor) -> Tensor:
    k = value.double()
    a, rate = fn.concentration.double(), fn.rate.double()
    ways = torch.lgamma(k + a) - torch.lgamma(k + 1) - torch.lgamma(a)
    log_prob: Tensor = ways - a * (1 / rate).log1p() - k * rate.log1p()
    return log_prob.to(fn.rate.dtype)


@log_prob_inside.register
def _poisson(fn: td.Poisson, value: Tensor) -> Tensor:
    k, rate = value.double(), fn.rate.double()
    return (times_log(k, safe_log(rate)) - rate - torch.lgamma(k + 1)).to(fn.rate.dtype)


@log_prob_inside.register
def _continuous_bernoulli(fn: td.ContinuousBernoulli, value: Tensor) -> Tensor:
    """An exponential, cut off at 0 and 1."""
    log_p, log_q = log_p_and_q(fn)
    logits, x = (log_p - log_q).double(), value.double()
    slope = logits.abs()
    flat = slope < 1e-4  # then log((1 - exp(-slope)) / slope) is as follows, to 1e-18
    steep = torch.where(flat, 1.0, slope)
    log_mass = torch.where(flat, slope * (slope / 24 - 0.5), (-torch.expm1(-steep) / steep).log())
    down = torch.where(logits > 0, 1 - x, x) * slope  # from the likelier end
    return (-down - log_mass).to(fn._param.dtype)


@log_prob_inside.register
def _relaxed_bernoulli(fn: LogitRelaxedBernoulli, value: Tensor) -> Tensor:
    log_p, log_q = log_p_and_q(fn)
    away = ((log_p - log_q) - value * fn.temperature).abs()
    away = torch.where(away.isinf(), 0.0, away)
    log_prob = fn.temperature.log() - away - 2 * (-away).exp().log1p()
    return torch.where((log_p - log_q).isinf(), -torch.inf, log_prob)


@log_prob_inside.register
def _relaxed_categorical(fn: ExpRelaxedCategorical, value: Tensor) -> Tensor:
    log_probs, K = log_probabilities(fn._categorical), fn._categorical.logits.shape[-1]
    possible = (log_probs > -torch.inf).all(-1)  # a component without a chance is zero, not small
    score = torch.where(possible[..., None], log_probs, 0.0) - value * fn.temperature
    log_scale = math.lgamma(K) + fn.temperature.log() * (K - 1)
    return torch.where(possible, score.log_softmax(-1).sum(-1) + log_scale, -torch.inf)


def log_probabilities(fn: td.Categorical) -> Tensor:
    """The logarithms of a categorical distribution's probabilities, `[…, K]`; as `log_p_and_q`."""
    if isinstance(fn, dist.OrderedLogistic):
        K = fn.cutpoints.shape[-1] + 1
        return torch.stack([_ordered(fn, torch.tensor(k)) for k in range(K)], -1)
    p, log_p = given_parameter(fn, "probs", "logits")
    if log_p is None:
        assert p is not None
        return safe_log(p.double())
    if p is not None:
        unclamped = log_p < math.log(torch.finfo(p.dtype).eps) - 1e-3
        log_p = torch.where(unclamped, log_p, safe_log(p))
    return log_p.double()
