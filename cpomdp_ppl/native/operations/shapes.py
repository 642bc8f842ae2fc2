"""Operations that put numbers elsewhere, and look them up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cpomdp_ppl.native.expressions import KIND_OF, Expr, Untraceable
from cpomdp_ppl.native.operations.call import Array, OperationCall, Program, array, each, operation

if TYPE_CHECKING:
    from collections.abc import Sequence


@operation("cat", "stack")
def _join(call: OperationCall) -> Array:
    parts = [call.as_kind(part, call.kind) for part in call.args[0]]
    dim = call.arg(1, "dim", 0)
    if call.name == "stack":
        return np.stack(parts, dim)
    parts = [part for part in parts if part.shape != (0,)]
    return np.concatenate(parts, dim)


@operation("flip")
def _flip(call: OperationCall) -> Array:
    return np.flip(call.args[0], call.args[1])


@operation("roll")
def _roll(call: OperationCall) -> Array:
    shifts, dims = call.args[1], call.arg(2, "dims") or None
    return np.roll(call.args[0], shifts, dims)


@operation("repeat")
def _repeat(call: OperationCall) -> Array:
    x, times = call.args[:2]
    return np.tile(x.reshape((1,) * (len(times) - x.ndim) + x.shape), times)


@operation("diag_embed", "tril", "triu", "constant_pad_nd")
def _with_zeros(call: OperationCall) -> Array:
    """Places are those that torch gives to numbers 1, 2, …; the others hold a constant."""
    x = call.args[0]
    numbers = torch.arange(1, x.size + 1).reshape(x.shape)
    fill: Any = 0
    if call.name == "constant_pad_nd":
        fill = call.arg(2, "value", 0)
        places = torch.constant_pad_nd(numbers, call.args[1], 0)
    else:
        function = getattr(torch, call.name)
        places = function(numbers, *call.args[1:], **call.kwargs)
    entries = [call.graph.const(fill, call.kind), *x.ravel()]
    return array([entries[i] for i in places.reshape(-1).tolist()], call.shape)


@operation("view_as_real", "view_as_complex", "_conj")
def _complex(call: OperationCall) -> Array:
    raise call.refuse("of complex numbers")


def _index(call: OperationCall, e: Expr, size: int, wraps: bool) -> Expr:
    """An index as torch takes it, inside the bounds: it is checked, and what fails is not looked up."""
    g = call.graph
    e = g.cast(e, "i64")
    if wraps and (e.bounds is None or e.bounds[0] < 0):
        negative = g.op("lt", [e, g.const(0, "i64")], "bool")
        e = g.where(negative, g.op("add", [e, g.const(size, "i64")], "i64"), e)
    return within(call.program, e, size)


def within(program: Program, e: Expr, size: int) -> Expr:
    """An index that is checked to be from 0 to `size - 1`, and cut off if it is not."""
    g = program.graph
    low, high = g.const(0, "i64"), g.const(size - 1, "i64")
    if e.bounds is not None and e.bounds[0] >= 0 and e.bounds[1] < size:
        return e
    inside = g.op("and", [g.op("ge", [e, low], "bool"), g.op("le", [e, high], "bool")], "bool")
    program.check(inside, f"an index is outside of 0 to {size - 1}")
    return g.op("min", [g.op("max", [e, low], "i64"), high], "i64")


@operation("index")
def _advanced(call: OperationCall) -> Array:
    x, indices = call.args[:2]
    lead, at = _adjacent(call, indices)
    sizes = x.shape[lead : lead + len(at)]
    places = np.broadcast_arrays(*at)
    shape = (*x.shape[:lead], *places[0].shape, *x.shape[lead + len(at) :])
    flat: Any = _flat_index(call, places, sizes)
    moved = x.reshape((*x.shape[:lead], -1, *x.shape[lead + len(at) :]))
    out = np.empty(shape, object)
    for place in np.ndindex(*shape):
        head, mid = place[:lead], place[lead : lead + flat.ndim]
        entries = moved[(*head, slice(None), *place[lead + flat.ndim :])]
        out[place] = call.graph.look_up(list(entries), flat[mid])
    return out


def _adjacent(call: OperationCall, indices: Sequence[Any]) -> tuple[int, list[Array]]:
    """Index arrays that stand side by side, and how many axes come before."""
    given = [k for k, index in enumerate(indices) if index is not None]
    if given != list(range(given[0], given[-1] + 1)):
        raise call.refuse("with gaps between indices")
    at: list[Array] = []
    for k in given:
        at += _where_true(call, indices[k]) if _is_mask(indices[k]) else [indices[k]]
    return given[0], at


def _is_mask(index: Array) -> bool:
    return bool(index.size and index.ravel()[0].kind == "bool")


def _where_true(call: OperationCall, mask: Array) -> list[Array]:
    """Truth values as indices of the true ones, which must not depend on anything."""
    if any(e.op != "const" for e in mask.ravel()):
        raise Untraceable("an index of truth values: the shape of what it picks depends on values")
    places = each(lambda e: e.value, mask).astype(bool).nonzero()
    return [array([call.graph.const(i, "i64") for i in axis], axis.shape) for axis in places]


def _flat_index(call: OperationCall, places: Sequence[Array], sizes: Sequence[int]) -> Array:
    """Indices into several axes as indices into all of them, laid end to end."""
    g = call.graph
    flat = None
    for index, size in zip(places, sizes, strict=True):
        inside = each(lambda e, size=size: _index(call, e, size, wraps=True), index)
        if flat is None:
            flat = inside
        else:
            flat = each(
                lambda a, b, size=size: g.op(
                    "add", [g.op("mul", [a, g.const(size, "i64")], "i64"), b], "i64"
                ),
                flat,
                inside,
            )
    assert flat is not None
    return flat


@operation("index_put", "_index_put_impl")
def _assign(call: OperationCall) -> Array:
    x, indices, values = call.args[:3]
    if call.arg(3, "accumulate", False):
        raise call.refuse("that accumulates")
    if len(indices) == 1 and _is_mask(indices[0]):
        rest = x.ndim - indices[0].ndim
        if math.prod(values.shape[: max(values.ndim - rest, 0)]) == 1:  # `x[mask] = value`, the same for all
            mask = indices[0].reshape(indices[0].shape + (1,) * rest)
            return call.where(mask, values.reshape(values.shape[max(values.ndim - rest, 0) :]), x)
    lead, at = _adjacent(call, indices)
    flat: Any = _flat_index(call, np.broadcast_arrays(*at), x.shape[lead : lead + len(at)])
    before, rest = x.shape[:lead], x.shape[lead + len(at) :]
    values = np.broadcast_to(call.as_kind(values, call.kind), (*before, *flat.shape, *rest))
    values = np.moveaxis(values, range(lead, lead + flat.ndim), range(flat.ndim))
    out: Array = np.moveaxis(x.reshape((*before, -1, *rest)), lead, 0).copy()
    for place in np.ndindex(*flat.shape):
        for k in range(len(out)):
            here = call.graph.op("eq", [flat[place], call.graph.const(k, "i64")], "bool")
            pair = (np.asarray(part, object) for part in (values[place], out[k]))
            new = each(lambda new, old, here=here: call.graph.where(here, new, old), *pair)
            out[k] = new if new.ndim else new[()]
    assigned: Array = np.moveaxis(out, 0, lead).reshape(call.shape)
    return assigned


@operation("index_select")
def _select_by_index(call: OperationCall) -> Array:
    x, dim, index = call.args[:3]
    moved = np.moveaxis(x, dim, 0)
    out = np.empty((index.size, *moved.shape[1:]), object)
    for k, e in enumerate(index.ravel()):
        inside = _index(call, e, len(moved), wraps=False)
        for place in np.ndindex(*moved.shape[1:]):
            out[(k, *place)] = call.graph.look_up(list(moved[(slice(None), *place)]), inside)
    return np.moveaxis(out, 0, dim)


@operation("embedding")
def _embedding(call: OperationCall) -> Array:
    table, index = call.args[:2]
    out = np.empty((*index.shape, table.shape[1]), object)
    for place in np.ndindex(*index.shape):
        inside = _index(call, index[place], len(table), wraps=False)
        for k in range(table.shape[1]):
            out[(*place, k)] = call.graph.look_up(list(table[:, k]), inside)
    return out


@operation("gather")
def _gather(call: OperationCall) -> Array:
    x, dim, index = call.args[:3]
    if not x.ndim:
        return np.broadcast_to(x, index.shape)
    dim %= x.ndim
    out = np.empty(index.shape, object)
    for place in np.ndindex(*index.shape):
        inside = _index(call, index[place], x.shape[dim], wraps=False)
        entries = x[(*place[:dim], slice(None), *place[dim + 1 :])]
        out[place] = call.graph.look_up(list(entries), inside)
    return out


@operation("scatter", "scatter_add")
def _scatter(call: OperationCall) -> Array:
    x, dim, index, source = call.args[:4]
    if call.kwargs.get("reduce") is not None:
        raise call.refuse("that reduces")
    g, out = call.graph, np.array(x, object)
    dim %= max(x.ndim, 1)
    source = call.as_kind(source, call.kind)
    if not source.ndim:
        source = np.broadcast_to(source, index.shape)
    for place in np.ndindex(*index.shape):
        inside = _index(call, index[place], x.shape[dim], wraps=False)
        for k in range(x.shape[dim]):
            at = (*place[:dim], k, *place[dim + 1 :])
            new: Any = source[place]
            old: Any = out[at]
            if call.name == "scatter_add":
                new = g.op("add", [old, new], call.kind)
            out[at] = g.where(g.op("eq", [inside, g.const(k, "i64")], "bool"), new, old)
    return out


@operation("bucketize", "searchsorted")
def _bucket(call: OperationCall) -> Array:
    """How many boundaries are below: they are sorted, and NaN is above all."""
    x, bounds = call.args[:2] if call.name == "bucketize" else call.args[1::-1]
    if call.kwargs.get("sorter") is not None or bounds.ndim != 1:
        raise call.refuse("with a sorter or a batch")
    right = call.kwargs.get("right", False) or call.kwargs.get("side") == "right"
    common = torch.result_type(*call.given[:2])
    above = call.pointwise(
        "gt" if right else "ge", bounds, _as_array(x, call)[..., None], kind="bool", compute=KIND_OF[common]
    )
    below = call.pointwise("not", above, kind="bool")
    return call.fold("add", call.as_kind(below, call.kind), [below.ndim - 1])


def _as_array(x: Any, call: OperationCall) -> Array:
    """A number as an array of its own; arrays as they are."""
    return x if isinstance(x, np.ndarray) else call.as_kind(x, "f64" if isinstance(x, float) else "i64")
