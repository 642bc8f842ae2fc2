"""Operations on every number for itself."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cpomdp_ppl.native.expressions import KIND_OF, Untraceable
from cpomdp_ppl.native.operations.call import Array, OperationCall, operation

if TYPE_CHECKING:
    from collections.abc import Callable

SAME = [
    "mul",
    "neg",
    "abs",
    "sqrt",
    "exp",
    "log",
    "log2",
    "log10",
    "exp2",
    "log1p",
    "expm1",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "tanh",
    "asin",
    "acos",
    "atan",
    "atan2",
    "hypot",
    "floor",
    "ceil",
    "trunc",
    "erf",
    "erfc",
    "erfinv",
    "lgamma",
    "digamma",
    "sigmoid",
]
RENAMED = {
    **{name: name for name in SAME},
    "sign": "sign",
    "sgn": "sign",
    "maximum": "max",
    "minimum": "min",
    "special_ndtri": "ndtri",
    "special_erfinv": "erfinv",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "fmod": "fmod",
    "log_sigmoid_forward": "logsigmoid",
    "arctan2": "atan2",
}


@operation(*RENAMED)
def _same(call: OperationCall) -> Any:
    if call.name in ("floor", "ceil", "trunc") and call.kind in ("i64", "i32"):
        return call.as_kind(call.args[0], call.kind)
    if call.name == "fmod":
        _require_divisor(call)
    out = call.pointwise(RENAMED[call.name], *call.args[:2])
    return [out, out] if call.name == "log_sigmoid_forward" else out


@operation("add", "sub", "rsub")
def _sum(call: OperationCall) -> Array:
    a, b = call.args[:2]
    alpha = call.arg(2, "alpha", 1)
    if call.name == "rsub":
        a, b = b, a
        if alpha != 1:
            b = call.pointwise("mul", b, alpha)
    elif alpha != 1:
        b = call.pointwise("mul", b, alpha)
    return call.pointwise("add" if call.name == "add" else "sub", a, b)


@operation("div", "true_divide", "divide", "floor_divide")
def _quotient(call: OperationCall) -> Array:
    mode = "floor" if call.name == "floor_divide" else call.kwargs.get("rounding_mode")
    if mode == "floor" or (mode == "trunc" and call.kind in ("i64", "i32")):
        _require_divisor(call)
        x, divisor = call.args[:2]
        multiple = x if mode == "floor" else call.pointwise("sub", x, call.pointwise("fmod", x, divisor))
        return call.pointwise("floordiv", multiple, divisor)
    quotient = call.pointwise("div", *call.args[:2])
    return call.pointwise("trunc", quotient) if mode == "trunc" else quotient


@operation("remainder")
def _remainder(call: OperationCall) -> Array:
    _require_divisor(call)
    return call.pointwise("mod", *call.args[:2])


def _require_divisor(call: OperationCall) -> None:
    """Whole numbers have no quotient by zero, and torch raises an error."""
    if call.kind in ("i64", "i32"):
        for e in call.as_kind(call.args[1], call.kind).ravel():
            nonzero = call.graph.op("ne", [e, call.graph.const(0, e.kind)], "bool")
            call.program.check(nonzero, "a whole number is divided by zero")


@operation("pow")
def _power(call: OperationCall) -> Array:
    base, exponent = call.args[:2]
    if call.kind in ("i64", "i32"):
        if isinstance(exponent, int) and 0 <= exponent <= 8:
            one = call.as_kind(1, call.kind)
            return reduce(lambda a, b: call.pointwise("mul", a, b), [base] * exponent, one)
        raise call.refuse("of whole numbers")
    roots_and_products: dict[Any, Callable[[], Array]] = {  # as torch has them, for plain numbers
        0.5: lambda: do("sqrt", base),
        3: lambda: do("mul", do("mul", base, base), base),
        -0.5: lambda: do("div", 1, do("sqrt", base)),
        -1: lambda: do("div", 1, base),
        -2: lambda: do("div", 1, do("mul", base, base)),
    }
    do = call.pointwise
    if isinstance(exponent, int | float) and exponent in roots_and_products:
        return roots_and_products[exponent]()
    return do("pow", base, exponent)


@operation("round")
def _round(call: OperationCall) -> Array:
    if call.kwargs.get("decimals", 0):
        raise call.refuse("to decimals")
    if call.kind in ("i64", "i32"):
        return call.as_kind(call.args[0], call.kind)
    return call.pointwise("round", call.args[0])


@operation("reciprocal", "rsqrt", "square", "relu", "logit", "softplus", "frac")
def _composed(call: OperationCall) -> Array:
    (x, *_), do = call.args, call.pointwise
    if call.name == "reciprocal":
        return do("div", 1, x)
    if call.name == "rsqrt":
        return do("div", 1, do("sqrt", x))
    if call.name == "square":
        return do("mul", x, x)
    if call.name == "relu":
        below = do("le", x, 0, kind="bool", compute=call.kind)
        return call.where(below, 0.0, x)  # at 0, the derivative is 0
    if call.name == "frac":
        return do("sub", x, do("trunc", x))
    if call.name == "softplus":
        if (call.arg(1, "beta", 1), call.arg(2, "threshold", 20)) != (1, 20):
            raise call.refuse("with a beta or threshold of its own")
        return do("softplus", x)
    if call.arg(1, "eps") is not None:
        raise call.refuse("with eps")
    return do("log", do("div", x, do("sub", 1, x)))


@operation("special_xlogy", "xlogy", "special_xlog1py")
def _times_logarithm(call: OperationCall) -> Array:
    x, y = call.args[:2]
    product = call.pointwise("mul", x, call.pointwise("log1p" if "1p" in call.name else "log", y))
    zero = call.pointwise("eq", x, 0, kind="bool", compute=call.kind)
    nan = call.pointwise("isnan", y, kind="bool", compute=call.kind)
    return call.where(nan, y, call.where(zero, 0.0, product))


@operation("logaddexp")
def _log_add_exp(call: OperationCall) -> Array:
    """`max + log(1 + exp(-|a - b|))`; of two infinities of one sign, that one."""
    a, b = call.args[:2]
    do = call.pointwise
    highest, distance = do("max", a, b), do("abs", do("sub", a, b))
    same = do("eq", a, b, kind="bool", compute=call.kind)
    infinite = do("and", same, do("isinf", a, kind="bool", compute=call.kind), kind="bool")
    return call.where(infinite, a, do("add", highest, do("log1p", do("exp", do("neg", distance)))))


@operation("clamp", "clamp_min", "clamp_max")
def _clamp(call: OperationCall) -> Array:
    low = None if call.name == "clamp_max" else call.arg(1, "min")
    high = call.arg(1, "max") if call.name == "clamp_max" else call.arg(2, "max")
    x = call.as_kind(call.args[0], call.kind)
    x = x if low is None else _no_further(call, x, low, "lt", "max")
    return x if high is None else _no_further(call, x, high, "gt", "min")


def _no_further(call: OperationCall, x: Array, limit: Any, beyond: str, op: str) -> Array:
    """A number or, beyond a limit, the limit: at the limit, the derivative is that of the number."""
    if call.kind in ("i64", "i32"):
        return call.pointwise(op, x, limit)
    limit = call.as_kind(limit, call.kind)
    is_beyond = call.pointwise(beyond, x, limit, kind="bool", compute=call.kind)
    is_nan = call.pointwise("isnan", limit, kind="bool", compute=call.kind)
    return call.where(call.pointwise("or", is_beyond, is_nan, kind="bool"), limit, x)


@operation("lerp", "addcmul", "addcdiv")
def _three(call: OperationCall) -> Array:
    a, b, c = call.args[:3]
    if call.name == "lerp":
        return call.pointwise("add", a, call.pointwise("mul", c, call.pointwise("sub", b, a)))
    scaled = call.pointwise("mul" if call.name == "addcmul" else "div", b, c)
    return call.pointwise("add", a, call.pointwise("mul", scaled, call.kwargs.get("value", 1)))


@operation("eq", "ne", "lt", "le", "gt", "ge")
def _compare(call: OperationCall) -> Array:
    common = torch.result_type(*call.given[:2])
    if common not in KIND_OF:
        raise Untraceable(f"numbers of {common}")
    return call.pointwise(call.name, *call.args[:2], kind="bool", compute=KIND_OF[common])


@operation("logical_and", "logical_or", "logical_xor", "logical_not")
def _logic(call: OperationCall) -> Array:
    return call.pointwise(call.name.removeprefix("logical_"), *call.args, kind="bool")


@operation("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__and__", "__or__", "__xor__")
def _bits(call: OperationCall) -> Array:
    name = call.name.strip("_").removeprefix("bitwise_")
    return call.pointwise(name if call.kind == "bool" else f"bit{name}", *call.args)


@operation("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
def _shift(call: OperationCall) -> Array:
    x, bits = call.args[:2]
    known = [e.value if e.op == "const" else -1 for e in call.as_kind(bits, "i64").ravel()]
    if call.kind not in ("i64", "i32") or not all(0 <= n < 31 for n in known):
        raise call.refuse("by bits that are no constant from 0 to 30")
    return call.pointwise("shl" if call.name in ("bitwise_left_shift", "__lshift__") else "shr", x, bits)


@operation("isnan", "isinf", "isfinite")
def _is(call: OperationCall) -> Array:
    (x,) = call.args
    kind = x.ravel()[0].kind
    if kind not in ("f32", "f64"):
        return np.broadcast_to(call.as_kind(call.name == "isfinite", "bool"), x.shape)
    if call.name != "isfinite":
        return call.pointwise(call.name, x, kind="bool", compute=kind)
    bad = (call.pointwise(name, x, kind="bool", compute=kind) for name in ("isnan", "isinf"))
    return call.pointwise("not", call.pointwise("or", *bad, kind="bool"), kind="bool")


@operation("nan_to_num")
def _nan_to_num(call: OperationCall) -> Array:
    limits = torch.finfo(call.first.dtype)
    x = call.args[0]
    nan, high, low = call.arg(1, "nan") or 0.0, call.arg(2, "posinf"), call.arg(3, "neginf")
    out = call.where(call.pointwise("isnan", x, kind="bool", compute=call.kind), nan, x)
    infinite = call.pointwise("isinf", x, kind="bool", compute=call.kind)
    up = call.pointwise("gt", x, 0, kind="bool", compute=call.kind)
    ends = call.where(up, limits.max if high is None else high, limits.min if low is None else low)
    return call.where(infinite, ends, out)


@operation("where")
def _where(call: OperationCall) -> Array:
    return call.where(*call.args[:3])


@operation("masked_fill")
def _masked_fill(call: OperationCall) -> Array:
    return call.where(call.args[1], call.args[2], call.args[0])


@operation(
    "clone", "_to_copy", "copy", "lift_fresh", "lift_fresh_copy", "contiguous", "to", "alias", "detach"
)
def _copy(call: OperationCall) -> Array:
    source = call.args[1] if call.name == "copy" else call.args[0]
    return np.broadcast_to(call.as_kind(source, call.kind), call.shape)


@operation("fill")
def _fill(call: OperationCall) -> Array:
    return np.broadcast_to(call.as_kind(call.args[1], call.kind), call.shape)


@operation("zero")
def _zero(call: OperationCall) -> Array:
    return np.broadcast_to(call.as_kind(0, call.kind), call.shape)


@operation(
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"
)
def _constant(call: OperationCall) -> Array:
    value: Any = 1 if "ones" in call.name else 0
    if "full" in call.name:
        value = call.args[2 if call.name == "new_full" else 1]
    return np.broadcast_to(call.as_kind(value, call.kind), call.shape)


@operation("full", "scalar_tensor")
def _full(call: OperationCall) -> Array:
    value = call.args[1 if call.name == "full" else 0]
    return np.broadcast_to(call.as_kind(value, call.kind), call.shape)
