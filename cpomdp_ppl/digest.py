"""What tells a value from others: the same in every process, another when the value or its code changes."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

MACHINERY = vars(PyroModule()).keys() - {
    "_parameters",
    "_buffers",
    "_modules",
    "_pyro_params",
    "_pyro_samples",
    "training",
}


def digest(value: Any) -> str:
    """Sixteen letters that differ if values do.

    Numbers, words, arrays, tensors, and what is made up of them, are told apart by what they hold; functions
    by name, code, defaults and what they close over; other objects by class and attributes, where the fields
    of a dataclass that take no part in its comparison are left out. The code of a class is its own and that
    of its bases in the same package. Comments and layout make no difference.

    What a function calls or finds in its module is not looked at. Nor can it be seen what an object keeps
    outside Python: it is told from others by its `repr`, or if that shows an address by its class alone.

    Example:
        >>> digest({"a": [1, 2.0]}) == digest({"a": [1, 2.0]}), digest(1) == digest(1.0)
        (True, False)
    """
    text = json.dumps(_described(value, ()), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def name_of(function: Any) -> str:
    """Module and qualified name of a function, or of the class of what is called like one.

    Example:
        >>> name_of(digest), name_of(partial(digest, 1))
        ('cpomdp_ppl.digest:digest', 'cpomdp_ppl.digest:digest')
    """
    if isinstance(function, partial):
        return name_of(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _described(value: Any, above: tuple[int, ...]) -> Any:
    """Lists and words, to be written as JSON."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return [type(value).__name__, value]
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, complex | bytes | PurePath | range | slice | np.dtype):
        return [type(value).__name__, repr(value)]
    if id(value) in above:  # a circle
        return ["above", len(above) - above.index(id(value))]
    return [name_of(type(value)), *_parts(value, (*above, id(value)))]


def _parts(value: Any, above: tuple[int, ...]) -> list[Any]:
    def within(part: Any) -> Any:
        return _described(part, above)

    if isinstance(value, Tensor):
        plain = value.detach().cpu().to_dense().resolve_conj().resolve_neg()
        bits = plain.contiguous().flatten().view(torch.uint8).numpy() if plain.numel() else np.empty(0)
        return [str(value.dtype), list(value.shape), _hash(bits.tobytes())]
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            return [list(value.shape), within(value.tolist())]
        return [value.dtype.str, list(value.shape), _hash(value.tobytes())]
    if isinstance(value, Mapping):
        return sorted(([within(key), within(each)] for key, each in value.items()), key=json.dumps)
    if isinstance(value, Set):
        return sorted((within(each) for each in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [within(each) for each in value]
    if isinstance(value, Enum):
        return [value.name]
    if isinstance(value, partial):
        return [within(part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return [within(value.__self__), within(value.__func__)]
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [name_of(value), _code(value), *map(within, (value.__defaults__, value.__kwdefaults__, cells))]
    if isinstance(value, type):
        return _class(value)
    if isinstance(value, BuiltinFunctionType):
        return [value.__name__]
    return [_class(type(value)), *_state(value, within)]


def _state(value: Any, within: Any) -> list[Any]:
    """Attributes of an object, but for those that are merely kept for later."""
    kind = type(value)
    if is_dataclass(value):
        return [[f.name, within(getattr(value, f.name))] for f in fields(value) if f.compare]
    slots = [name for each in kind.__mro__ for name in _names(vars(each).get("__slots__", ()))]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    attributes.pop("__weakref__", None)
    passing = MACHINERY if isinstance(value, nn.Module) else set()
    passing |= {name for name in attributes if isinstance(getattr(kind, name, None), cached_property)}
    if not hasattr(value, "__dict__") and not slots:
        shown = repr(value)
        return [] if " at 0x" in shown else [shown]
    return [[name, within(attributes[name])] for name in sorted(attributes) if name not in passing]


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return None


def _class(kind: type) -> list[Any]:
    package = kind.__module__.partition(".")[0]
    bases = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == package]
    if package in ("builtins", "torch", "numpy", "pyro"):  # theirs is not ours to watch
        bases = []
    return [name_of(kind), *[_source(base) for base in bases]]


def _code(function: FunctionType) -> Any:
    # The lines of a lambda are those of what it stands in the middle of.
    text = None if function.__name__ == "<lambda>" else _source(function)
    return _bytecode(function.__code__) if text is None else text


@lru_cache(maxsize=1024)
def _source(thing: Any) -> str | None:
    """Code without comments and layout; None if it is not to be had."""
    try:
        text = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return None
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:
        return text


def _bytecode(code: CodeType) -> list[Any]:
    constants = [_bytecode(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [_hash(code.co_code), list(code.co_names), list(code.co_varnames), constants]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
