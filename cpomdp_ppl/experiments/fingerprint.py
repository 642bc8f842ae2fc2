"""Is it the same run? One answer for fits, run folders and sweeps.

`fingerprint` hashes a value with the code behind it. `describe` and `describe_model` say in plain JSON what a
run was made with, for people to read as well, and `require_same` compares two such descriptions.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import os
import sys
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ReferenceType

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

Described: TypeAlias = dict[int, tuple[Any, str]]
"""Values that were described before, by id, and their hashes: shared ones are described once, and those that
lead back to themselves end. The values are kept, as an id belongs to a living value only."""

MODULE_MACHINERY = frozenset(vars(PyroModule())) - {
    *("_parameters", "_buffers", "_modules", "_pyro_params", "_pyro_samples", "training")
}
"""Attributes of modules, such as hooks, that are not their content."""

WRAPPED = ("__func__", "fget", "fset", "fdel", "func")
"""Where static and class methods, properties and cached properties keep their functions."""

CODE = (
    *("co_name", "co_argcount", "co_kwonlyargcount", "co_flags", "co_names", "co_varnames", "co_freevars"),
    "co_exceptiontable",
)
"""What makes up a piece of code besides instructions and constants; not where it stands."""

STANDARD_LIBRARY = Path(os.__file__).parent


class FingerprintError(ValueError):
    """A value, or a part of it, cannot be told from others."""


def fingerprint(value: Any) -> str:
    """Sixteen letters, the same in every process, and others if the value or the code behind it changes.

    Numbers, text, arrays, tensors and what is made up of them count by what they hold; functions by module,
    bytecode, defaults and closures; other objects by their class and what `pickle` would keep of them, except
    for the fields of a dataclass that take no part in its comparison and what a `cached_property` keeps. A
    class counts by its attributes and bases, or by name and version if it belongs to an installed library.

    What a function calls or finds in its module is not looked at. Comments and layout make no difference;
    another version of Python does.

    Raises:
        FingerprintError: If a part cannot be looked into, such as a lock or an open file.

    Examples:
        >>> fingerprint({"a": [1, 2.0]}) == fingerprint({"a": [1, 2.0]}), fingerprint(1) == fingerprint(1.0)
        (True, False)
    """
    try:
        return _hash(_content(value, {}))[:16]
    except RecursionError as error:
        raise FingerprintError(f"a {name_of(type(value))} is nested too deeply to tell it apart") from error


def name_of(function: Any) -> str:
    """Module and qualified name of a function, or of the class of an object that is called like one.

    Examples:
        >>> name_of(name_of), name_of(partial(name_of, 1))
        ('cpomdp_ppl.experiments.fingerprint:name_of', 'cpomdp_ppl.experiments.fingerprint:name_of')
    """
    if isinstance(function, partial):
        return name_of(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def file_hash(path: Path) -> str:
    """The SHA-256 of a file; of a folder, that of its files' names and hashes."""
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.is_file())
        content = "\n".join(f"{each.relative_to(path)} {file_hash(each)}" for each in inside).encode()
    else:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def describe(value: Any) -> Any:
    """A value as JSON that tells it from others of its kind, the same in every process.

    Dataclasses are described by their fields, what can be called by name and, if it is a schedule, by some of
    its values; any other object by the name of its class alone.
    """
    if isinstance(value, Tensor | np.ndarray | np.generic):  # before float, which NumPy's is
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [describe(each) for each in value]
    if isinstance(value, dict):
        return {str(name): describe(each) for name, each in value.items()}
    kind = getattr(value, "__qualname__", type(value).__qualname__)
    if is_dataclass(value):
        return {"": kind, **{f.name: describe(getattr(value, f.name)) for f in fields(value)}}
    if callable(value) and not isinstance(value, type):
        try:  # a schedule, perhaps
            return [kind, *[float(value(progress)) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]]
        except Exception:  # nobody knows what it takes
            return kind
    return kind


def describe_model(model: CPOMDP) -> dict[str, Any]:
    """What tells a model from others: its interface, and those constants that are numbers and text."""
    sites = signature(model)
    kinds = (bool, int, float, str, list, tuple, Tensor, np.ndarray, np.generic)
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, CPOMDP) and kind is not CPOMDP]
    spaces = [*map(vars, reversed(classes)), vars(model)]  # what comes later overrides what comes before
    attributes = {name: value for space in spaces for name, value in space.items()}
    return {
        "model": type(model).__name__,
        "contexts": list(model.context_names),
        "actions": list(model.action_names) if model.box is None else describe(model.box),
        "horizon": model.horizon,
        "state": {name: list(leaf.shape) for name, leaf in leaves(sites.state)},
        "observations": {name: list(site.shape) for name, site in sites.observations.items()},
        "constants": {
            name: describe(value)
            for name, value in sorted(attributes.items())
            if isinstance(value, kinds) and not name.startswith("_") and name != "training"
        },
        "tensors": {name: describe(tensor.detach()) for name, tensor in model.state_dict().items()},
    }


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Names under which two descriptions differ, in their order; NaN equals itself, and 1 is not 1.0.

    Examples:
        >>> differences({"seed": 1, "prior": [0.5, 0.5]}, {"seed": 2, "prior": (0.5, 0.5)})
        ['seed']
    """

    def text(description: Mapping[str, Any], name: str) -> str:
        return json.dumps(describe(description.get(name)), sort_keys=True)

    return [name for name in {**expected, **found} if text(found, name) != text(expected, name)]


def require_same(
    path: Path,
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    error: type[ValueError] = CheckpointError,
) -> None:
    """Raise unless a file's description of its run is the one expected, naming the first difference."""
    for name in differences(found, expected):
        one, other = found.get(name), expected.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            names = differences(one, other)
            one, other = ({each: d[each] for each in names if each in d} for d in (one, other))
        raise error(
            f"{path} was made with {name} = {one!r}, but expected {other!r}; "
            "use another folder, or the same settings"
        )


def _content(value: Any, seen: Described) -> Any:
    """A value as lists and text for JSON; anything but plain numbers and text as a hash."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return [kind.__name__, hex(value) if kind is int else repr(value)]
    if id(value) not in seen:
        seen[id(value)] = value, f"#{len(seen)}"  # for what leads back here while it is described
        try:
            parts = _parts(value, seen)
        except (FingerprintError, RecursionError):
            raise
        except Exception as error:  # whatever those raise that cannot be pickled
            reason = f"a {name_of(kind)} cannot be told from others: {error}"
            raise FingerprintError(reason) from error
        seen[id(value)] = value, _hash([kind.__name__, parts])
    return seen[id(value)][1]


def _parts(value: Any, seen: Described) -> list[Any]:
    def contents(*parts: Any) -> list[Any]:
        return [_content(part, seen) for part in parts]

    kind = type(value)
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), value.requires_grad, _bits(value)]
    if kind is np.ndarray:
        data = value.tolist() if value.dtype.hasobject else hashlib.sha256(value.tobytes()).hexdigest()
        return contents(value.dtype.descr, value.shape, data)
    if kind in (list, tuple):
        return contents(*value)
    if kind in (dict, MappingProxyType):  # keys first: circles are numbered in the order of what is in them
        keys = sorted(((_content(key, seen), key) for key in value), key=lambda pair: json.dumps(pair[0]))
        return [[content, _content(value[key], seen)] for content, key in keys]
    if isinstance(value, set | frozenset):  # each by itself: their order is another in every process
        members = sorted(_hash(_content(each, dict(seen))) for each in value)
        return [members, *contents(kind, getattr(value, "__dict__", None))]
    if isinstance(value, ModuleType):
        return [value.__name__, str(getattr(value, "__version__", None))]
    if isinstance(value, ReferenceType):  # as LSTMs have to their weights
        return contents(value())
    if isinstance(value, type):
        return _class(value, seen)
    if kind is CodeType:
        return [value.co_code.hex(), *contents(*(getattr(value, name) for name in CODE), value.co_consts)]
    if kind is FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, cells, vars(value))
        return contents(value.__module__, *parts)
    if kind is MethodType:
        return contents(value.__self__, value.__func__)
    if isinstance(value, staticmethod | classmethod | property | cached_property):
        return contents(*(getattr(value, name, None) for name in WRAPPED))
    if isinstance(value, nn.Module):  # Pyro's way of pickling changes the parameters
        return contents(kind, _compared(kind, vars(value)))
    reduce = copyreg.dispatch_table.get(kind)
    reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        return [reduced, *contents(getattr(value, "__module__", None), getattr(value, "__dict__", None))]
    state = object.__getstate__(value) if is_dataclass(value) else (*reduced, None)[2]
    items = [None if each is None else list(each) for each in reduced[3:5]]
    return contents(kind, *reduced[:2], _compared(kind, state), items)


def _class(kind: type, seen: Described) -> list[Any]:
    """A class by name and version if it is a library's, and else by its attributes."""
    own: Any = _library_version(kind.__module__) or {
        name: each for name, each in vars(kind).items() if _is_content(name, each)
    }
    # Not by `__qualname__`, which does not survive the way to other processes.
    return [_content(part, seen) for part in (kind.__module__, kind.__name__, kind.__bases__, own)]


def _is_content(name: str, attribute: Any) -> bool:
    """Whether an attribute of a class belongs to what the class does, rather than to Python."""
    if name in ("__dict__", "__weakref__", "_abc_impl"):
        return False
    return not name.startswith("__") or callable(attribute) or hasattr(type(attribute), "__get__")


def _bits(tensor: Tensor) -> str:
    """The hash of a tensor's elements, of whatever type and layout."""
    plain = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous().flatten()
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.sha256(data).hexdigest()


def _compared(kind: type, state: Any) -> Any:
    """The state of an object without those attributes that make no difference."""
    if type(state) is tuple:  # attributes, and slots
        return [_compared(kind, each) for each in state]
    if type(state) is not dict:
        return state
    ignored = {name for name in state if isinstance(getattr(kind, str(name), None), cached_property)}
    ignored |= {field.name for field in fields(kind) if not field.compare} if is_dataclass(kind) else set()
    ignored |= MODULE_MACHINERY if issubclass(kind, nn.Module) else set()
    return {name: each for name, each in state.items() if name not in ignored} or None


def _library_version(module: str) -> str | None:
    """Version of the installed library that a module belongs to; None for code that may be edited."""
    top = module.partition(".")[0]
    if top == "__main__":  # whose file is one of joblib's in the processes that joblib starts
        return None
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    standard = not file or STANDARD_LIBRARY in Path(file).parents  # somebody's own may have the same name
    if standard and top in sys.stdlib_module_names:
        return str(sys.implementation.cache_tag)
    installed = "site-packages" in file or "dist-packages" in file
    return str(getattr(sys.modules[top], "__version__", "unknown")) if installed else None


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
