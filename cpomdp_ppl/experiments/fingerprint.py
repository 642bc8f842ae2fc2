"""What tells a value from others: the same in every process, another when the value or its code changes."""

from __future__ import annotations

import copyreg
import hashlib
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ReferenceType

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

Observed: TypeAlias = dict[int, tuple[Any, str]]
"""What was described before, by id, and its hash, so that nothing is described twice; while that is under
way, a number for what leads back to it. The values are kept alive, as ids are only those of the living."""

MACHINERY = frozenset(vars(PyroModule())) - {
    "_parameters",
    "_buffers",
    "_modules",
    "_pyro_params",
    "_pyro_samples",
    "training",
}
"""Attributes of modules that are not their content."""

PARTS: dict[type, tuple[str, ...]] = {
    FunctionType: (
        *("__module__", "__qualname__", "__code__", "__defaults__", "__kwdefaults__", "__closure__"),
        "__dict__",
    ),
    # All of it but for where it stands.
    CodeType: (
        *("co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_names"),
        *("co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable", "co_code", "co_consts"),
    ),
    MethodType: ("__self__", "__func__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    cached_property: ("func",),
}
"""What makes up those things of Python's own that it does not pickle, or by name alone."""

NOT_CODE = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate_func__"),
        *("__firstlineno__", "__static_attributes__", "__slotnames__", "_abc_impl"),
    }
)
"""Attributes of classes that make no difference to what they do."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
STANDARD = Path(os.__file__).parent


class UndigestibleError(ValueError):
    """A value, or a part of it, cannot be told from others; says which, in one sentence."""


def digest(value: Any) -> str:
    """Sixteen letters that differ if values do.

    Numbers, words, arrays, tensors, and what is made up of them, are told apart by what they hold; functions
    by name, bytecode, defaults and what they close over; other objects by class and by what `pickle` would
    keep of them, where the fields of a dataclass that take no part in its comparison are left out, and what
    a `cached_property` keeps. A class is told from others by its attributes and its bases; those of libraries
    that are installed, like modules, by name and version. Comments and layout make no difference, but the
    version of Python does.

    What a function calls or finds in its module is not looked at.

    Raises:
        UndigestibleError: If a part of it holds what cannot be seen, such as a lock or an open file.

    Example:
        >>> digest({"a": [1, 2.0]}) == digest({"a": [1, 2.0]}), digest(1) == digest(1.0)
        (True, False)
    """
    try:
        return _hash(_described(value, {}))[:16]
    except RecursionError as error:
        what = f"a {name_of(type(value))}"
        raise UndigestibleError(f"{what} cannot be told from others: it is nested too deeply") from error


def name_of(function: Any) -> str:
    """Module and qualified name of a function, or of the class of what is called like one.

    Example:
        >>> name_of(digest), name_of(partial(digest, 1))
        ('cpomdp_ppl.experiments.fingerprint:digest', 'cpomdp_ppl.experiments.fingerprint:digest')
    """
    if isinstance(function, partial):
        return name_of(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _described(value: Any, seen: Observed) -> Any:
    """Lists and words, to be written as JSON."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return [kind.__name__, value]
    if kind is int:
        return ["int", f"{value:x}"]
    if kind in (float, bytes):
        return [kind.__name__, value.hex()]
    if kind is CellType:  # as if it were not there: whether functions share one changes on the way to others
        return ["cell", *(_described(each, seen) for each in _contents(value))]
    if id(value) not in seen:
        seen[id(value)] = value, f"#{len(seen)}"
        seen[id(value)] = value, _hash([kind.__name__, *_parts(value, seen)])
    return seen[id(value)][1]


def _parts(value: Any, seen: Observed) -> list[Any]:
    def within(part: Any) -> Any:
        return _described(part, seen)

    kind = type(value)
    if isinstance(value, Tensor):
        return [within(kind), str(value.dtype), list(value.shape), value.requires_grad, _bits(value)]
    if kind is np.ndarray:
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return [within(value.dtype), list(value.shape), within(content)]
    if kind in (list, tuple):
        return [within(each) for each in value]
    if kind in (dict, MappingProxyType):
        keys = sorted(((within(key), key) for key in value), key=lambda pair: json.dumps(pair[0]))
        return [[described, within(value[key])] for described, key in keys]
    if isinstance(value, set | frozenset):
        # Each by itself: their order is another in every process, and numbers follow from what came before.
        members = sorted(_hash(_described(each, dict(seen))) for each in value)
        return [members, within(kind), within(getattr(value, "__dict__", None))]
    if isinstance(value, ModuleType):
        return [value.__name__, str(getattr(value, "__version__", None))]
    if isinstance(value, ReferenceType):
        return [within(value())]
    if isinstance(value, type):
        version = _version_of_library(value.__module__)
        if version is not None:
            return [name_of(value), version, within(value.__bases__)]
        own = {name: each for name, each in vars(value).items() if name not in NOT_CODE}
        # Not where it was defined, which does not survive the way to other processes.
        return [value.__module__, value.__name__, within(value.__bases__), within(own)]
    if kind in PARTS:
        return [sys.implementation.cache_tag, *(within(getattr(value, name)) for name in PARTS[kind])]
    reduced = _reduced(value)
    if isinstance(reduced, str):
        return [reduced, within(getattr(value, "__module__", None)), within(getattr(value, "__dict__", None))]
    function, arguments, state, *items = (*reduced, None, None, None)[:5]
    contents = [None if each is None else list(each) for each in items]
    return [within(part) for part in (kind, function, arguments, _kept(kind, state), *contents)]


def _bits(tensor: Tensor) -> str:
    with _refusing(tensor):
        plain = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg()
        array = plain.contiguous().flatten().view(torch.uint8).numpy() if plain.numel() else np.empty(0)
    return hashlib.sha256(array.tobytes()).hexdigest()


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing in it yet
        return []


def _reduced(value: Any) -> Any:
    """A name, or a function, its arguments, state and items, as `pickle` would have them."""
    kind = type(value)
    if isinstance(value, nn.Module):  # Pyro's way of pickling changes the parameters
        return kind, (), object.__getstate__(value)
    with _refusing(value):
        function = copyreg.dispatch_table.get(kind)
        reduced: Any = value.__reduce_ex__(4) if function is None else function(value)
    if is_dataclass(value) and not isinstance(reduced, str):  # those with slots give no names
        return *reduced[:2], object.__getstate__(value), *reduced[3:]
    return reduced


def _kept(kind: type, state: Any) -> Any:
    """The state of an object without those attributes that make no difference."""
    passing = MACHINERY if issubclass(kind, nn.Module) else frozenset()
    if is_dataclass(kind):
        passing |= {field.name for field in fields(kind) if not field.compare}

    def passes(name: Any) -> bool:
        return name in passing or isinstance(getattr(kind, str(name), None), cached_property)

    if type(state) is tuple:  # attributes, and slots
        return [_kept(kind, each) for each in state]
    if type(state) is dict:
        return {name: each for name, each in state.items() if not passes(name)} or None
    return state


@contextmanager
def _refusing(value: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever they raise who cannot be pickled
        raise UndigestibleError(f"a {name_of(type(value))} cannot be told from others: {error}") from error


def _version_of_library(module: str) -> str | None:
    """None for code that is not installed, but somebody's own."""
    top = module.partition(".")[0]
    if top == "__main__":  # which is another file in processes of joblib
        return None
    found = [sys.modules[name] for name in (module, top) if name in sys.modules]
    file = next((each.__file__ for each in found if getattr(each, "__file__", None)), None)
    if file is None:
        return "Python" if top in sys.stdlib_module_names else None
    if not INSTALLED.isdisjoint(Path(file).parts):
        return str(getattr(sys.modules.get(top), "__version__", ""))
    return "Python" if STANDARD in Path(file).parents else None


def _hash(description: Any) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()
