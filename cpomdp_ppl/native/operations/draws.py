"""Operations that draw: functions of random inputs."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.native.operations.call import OPERATIONS, Array, OperationCall, each, operation


@operation("randn", "randn_like", "normal_functional", "rand", "rand_like")
def _noise(call: OperationCall) -> Array:
    what = "uniform" if call.name in ("rand", "rand_like") else "normal"
    return call.program.new_noise(what, call.shape, call.kind)


@operation("normal")
def _normal(call: OperationCall) -> Array:
    given = [arg for arg in call.args if isinstance(arg, np.ndarray | float | int)]
    if isinstance(call.given[0], Tensor) and call.function._schema.name.endswith("normal_"):
        given = given[1:]
    loc, scale = (*given, *(0.0, 1.0)[len(given) :])[:2]
    noise = call.program.new_noise("normal", call.shape, call.kind)
    return call.pointwise("add", loc, call.pointwise("mul", scale, noise))


@operation("uniform", "exponential", "cauchy", "log_normal")
def _inverted(call: OperationCall) -> Array:
    """In-place draws, by inverting the distribution function."""
    do, a = call.pointwise, [*call.args[1:], *call.kwargs.values()]
    a = [x for x in a if isinstance(x, float | int)]
    if call.name == "log_normal":
        mean, std = _with_defaults(a, 1.0, 2.0)
        return do(
            "exp", do("add", do("mul", call.program.new_noise("normal", call.shape, call.kind), std), mean)
        )
    if call.name == "uniform":
        low, high = _with_defaults(a, 0.0, 1.0)
        return do("add", do("mul", call.program.new_noise("uniform", call.shape, call.kind), high - low), low)
    u = call.program.new_noise("uniform", call.shape, "f64")
    if call.name == "exponential":
        rate = a[0] if a else 1.0
        return do("div", do("neg", _in(call, "log", u)), rate)
    if call.name == "cauchy":
        median, sigma = _with_defaults(a, 0.0, 1.0)
        angle = each(lambda e: call.graph.op("mul", [e, call.graph.const(math.pi, "f64")], "f64"), u)
        cotangent = do("div", 1, _in(call, "tan", angle))  # -cot is symmetric, too
        return do("add", do("mul", cotangent, sigma), median)
    raise call.refuse()


def _with_defaults(given: list[float], *defaults: float) -> list[float]:
    return [*given, *defaults[len(given) :]]


def _in(call: OperationCall, op: str, x: Array) -> Array:
    """A function in float64, in which uniform numbers get far into the tails."""
    return each(lambda e: call.graph.op(op, [e], "f64"), x)


@operation("bernoulli")
def _bernoulli(call: OperationCall) -> Array:
    p = call.args[1] if len(call.args) > 1 and call.args[1] is not None else call.args[0]
    kind = p.ravel()[0].kind if isinstance(p, np.ndarray) else "f32"
    u = call.program.new_noise("uniform", call.shape, kind)
    return call.as_kind(call.pointwise("lt", u, p, kind="bool", compute=kind), call.kind)


@operation("multinomial")
def _multinomial(call: OperationCall) -> Array:
    """Indices by inverting distribution functions, `[rows, draws]` from weights `[rows, K]`."""
    weights = call.args[0]
    if call.shape[-1] > 1 and not call.arg(2, "replacement", False):
        raise call.refuse("without replacement")
    kind = weights.ravel()[0].kind
    total = [weights[:, 0]]
    for k in range(1, weights.shape[1]):
        total.append(call.pointwise("add", total[-1], weights[:, k], kind=kind))
    levels = call.program.new_noise("uniform", call.shape, kind)
    last = total[-1][:, None]
    above = [
        call.pointwise(
            "le", call.pointwise("div", each[:, None], last, kind=kind), levels, kind="bool", compute=kind
        )
        for each in total[:-1]
    ]
    zero = np.broadcast_to(call.as_kind(0, "i64"), call.shape)
    return reduce(lambda a, b: call.pointwise("add", a, b, kind="i64"), above, zero)


@operation("_standard_gamma", "poisson", "binomial")
def _sampled(call: OperationCall) -> Array:
    """Draws that have no formula: functions of random bits, that C code computes."""
    op = {"_standard_gamma": "draw_gamma", "poisson": "draw_poisson", "binomial": "draw_binomial"}[call.name]
    parameters = [call.as_kind(x, "f64") for x in call.args if isinstance(x, np.ndarray)]
    bits = call.program.new_noise("bits", call.shape, "i64")
    drawn = call.as_kind(each(lambda *e: call.graph.op(op, e, "f64"), bits, *parameters), call.kind)
    return _above_zero(call, drawn) if call.name == "_standard_gamma" else drawn


def _above_zero(call: OperationCall, x: Array) -> Array:
    """As torch has it, a positive number is never rounded to zero."""
    return call.pointwise("max", x, torch.finfo(call.first.dtype).tiny)


@operation("_sample_dirichlet")
def _dirichlet(call: OperationCall) -> Array:
    alpha = call.as_kind(call.args[0], "f64")
    bits = call.program.new_noise("bits", call.shape, "i64")
    gammas = each(lambda *e: call.graph.op("draw_gamma", e, "f64"), bits, alpha)
    total = call.fold("add", gammas, [gammas.ndim - 1], keepdim=True)
    return _above_zero(call, call.as_kind(call.pointwise("div", gammas, total, kind="f64"), call.kind))


UNKNOWN = {"geometric", "randint", "randint_like", "randperm", "random", "native_dropout", "rrelu_with_noise"}
RANDOM = UNKNOWN | {name for name, function in OPERATIONS.items() if function.__module__ == __name__}
"""Operations that draw, whatever their arguments."""
