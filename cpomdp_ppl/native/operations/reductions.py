"""Operations that put the numbers along an axis together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cpomdp_ppl.native.operations.call import Array, OperationCall, each, operation

FOLDED = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "any": "or", "all": "and"}


@operation("sum", "prod", "amax", "amin", "any", "all")
def _fold(call: OperationCall) -> Array:
    keep = bool(call.arg(2, "keepdim", False))
    return call.fold(FOLDED[call.name], call.as_kind(call.args[0], call.kind), call.dims(), keep)


@operation("mean", "var", "std")
def _moments(call: OperationCall) -> Array:
    x = call.as_kind(call.args[0], call.kind)
    dims = call.dims()
    count = math.prod(x.shape[dim] for dim in dims)
    mean = call.pointwise("div", call.fold("add", x, dims, keepdim=True), count)
    keep = bool(call.arg(2, "keepdim", False)) if call.name == "mean" else bool(call.kwargs.get("keepdim"))
    if call.name != "mean":
        correction = call.kwargs.get("correction", 1)
        deviation = call.pointwise("sub", x, mean)
        square = call.fold("add", call.pointwise("mul", deviation, deviation), dims, keepdim=True)
        mean = call.pointwise("div", square, count - (1 if correction is None else correction))
        mean = call.pointwise("sqrt", mean) if call.name == "std" else mean
    return mean if keep else mean.reshape(call.shape)


@operation("max", "min")
def _extreme(call: OperationCall) -> Any:
    op = call.name
    if len(call.args) == 1:
        return call.fold(op, call.args[0], call.dims())
    if isinstance(call.args[1], np.ndarray):
        return call.pointwise(op, *call.args[:2])
    values, indices = _best(call, call.args[0], call.dims()[0], op)
    return [values.reshape(call.shape), indices.reshape(call.shape)]


@operation("argmax", "argmin")
def _arg_extreme(call: OperationCall) -> Array:
    x = call.args[0]
    if call.arg(1, "dim") is None:
        return _best(call, x.reshape(-1), 0, call.name.removeprefix("arg"))[1].reshape(call.shape)
    return _best(call, x, call.dims()[0], call.name.removeprefix("arg"))[1].reshape(call.shape)


def _best(call: OperationCall, x: Array, dim: int, op: str) -> tuple[Array, Array]:
    """The largest or smallest along an axis, and where it first is; NaN wins."""
    g = call.graph
    rows = np.moveaxis(x, dim, 0) if x.ndim else x.reshape(1)
    best, where = rows[0], each(lambda e: g.const(0, "i64"), np.asarray(rows[0], object))
    best = np.asarray(best, object)
    for k in range(1, len(rows)):
        row = np.asarray(rows[k], object)
        kind = row.ravel()[0].kind
        better = call.pointwise("gt" if op == "max" else "lt", row, best, kind="bool", compute=kind)
        if kind in ("f32", "f64"):
            nan = call.pointwise("isnan", row, kind="bool", compute=kind)
            was = call.pointwise("isnan", best, kind="bool", compute=kind)
            new = call.pointwise("and", nan, call.pointwise("not", was, kind="bool"), kind="bool")
            better = call.pointwise("or", better, new, kind="bool")
        best = call.where(better, row, best, kind)
        where = call.where(better, k, where, "i64")
    return best, where


@operation("cumsum", "cumprod")
def _cumulative(call: OperationCall) -> Array:
    x = call.as_kind(call.args[0], call.kind)
    if not x.ndim:
        return x
    rows = np.moveaxis(x, call.args[1], 0)
    op = "add" if call.name == "cumsum" else "mul"
    out = [rows[0]]
    for row in rows[1:]:
        out.append(call.pointwise(op, np.asarray(out[-1], object), np.asarray(row, object)))
    return np.moveaxis(np.stack([np.asarray(row, object) for row in out]), 0, call.args[1])


@operation("_softmax", "_log_softmax", "logsumexp")
def _soft(call: OperationCall) -> Array:
    x = call.as_kind(call.args[0], call.kind)
    dims = call.dims()
    highest = call.fold("max", x, dims, keepdim=True)
    if call.name == "logsumexp":  # of nothing but -inf, it is -inf
        finite = call.pointwise(
            "not", call.pointwise("isinf", highest, kind="bool", compute=call.kind), kind="bool"
        )
        highest = call.where(finite, highest, 0.0)
    shifted = call.pointwise("sub", x, highest)
    terms = call.pointwise("exp", shifted)
    total = call.fold("add", terms, dims, keepdim=True)
    if call.name == "_softmax":
        return call.pointwise("div", terms, total)
    log_total = call.pointwise("log", total)
    if call.name == "_log_softmax":
        return call.pointwise("sub", shifted, log_total)
    return call.pointwise("add", highest, log_total).reshape(call.shape)


@operation("linalg_vector_norm", "norm")
def _norm(call: OperationCall) -> Array:
    order = call.arg(1, "ord", 2)
    x = call.as_kind(call.args[0], call.kind)
    dims, keep = call.dims(2), bool(call.arg(3, "keepdim", False))
    if order == 2:
        total = call.fold("add", call.pointwise("mul", x, x), dims, keep)
        return call.pointwise("sqrt", total)
    if order in (1, math.inf):
        return call.fold("add" if order == 1 else "max", call.pointwise("abs", x), dims, keep)
    raise call.refuse(f"of order {order}")
