"""What every operation means on single numbers: constants are folded by it, C code is compared with it."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function of torch on NumPy's scalars, in their precision."""

    def of_scalars(*values: Any) -> Any:
        return function(*(torch.from_numpy(np.asarray(value)) for value in values)).numpy()[()]

    return of_scalars


def _integer_or_float(of_integers: Callable[..., Any], of_floats: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(a: Any, b: Any) -> Any:
        return of_floats(a, b) if isinstance(a, np.floating) else of_integers(a, b)

    return chosen


def _sign(x: Any) -> Any:
    return x.dtype.type(int(x > 0) - int(x < 0)) if x.dtype != bool else x  # of NaN, as torch has it, 0


def _shift_right(x: Any, bits: Any) -> Any:
    return x >> bits


EVALUATE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": _integer_or_float(np.floor_divide, _by_torch(torch.floor_divide)),
    "mod": _integer_or_float(np.mod, _by_torch(torch.remainder)),
    "fmod": np.fmod,
    "neg": operator.neg,
    "abs": abs,
    "sign": _sign,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "exp2": np.exp2,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "pow": _by_torch(torch.pow),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "min": np.minimum,
    "max": np.maximum,
    "sigmoid": _by_torch(torch.sigmoid),
    "logsigmoid": _by_torch(torch.nn.functional.logsigmoid),
    "softplus": _by_torch(torch.nn.functional.softplus),
    "erf": _by_torch(torch.erf),
    "erfc": _by_torch(torch.erfc),
    "erfinv": _by_torch(torch.erfinv),
    "ndtri": _by_torch(torch.special.ndtri),
    "lgamma": _by_torch(torch.lgamma),
    "digamma": _by_torch(torch.digamma),
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "xor": np.logical_xor,
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
    "bitnot": operator.invert,
    "shl": operator.lshift,
    "shr": _shift_right,
    "where": lambda condition, yes, no: yes if condition else no,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "cast": lambda x: x,
    "draw_gamma": lambda bits, concentration: math.nan,  # draws are not computed but looked up
    "draw_poisson": lambda bits, rate: math.nan,
    "draw_binomial": lambda bits, count, p: math.nan,
}
