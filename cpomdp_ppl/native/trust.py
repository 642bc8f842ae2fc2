"""Who is trusted not to change, and what is not to be relied on: libraries, clocks, files, hidden states."""

from __future__ import annotations

import datetime
import os
import sys
import types
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_MODELS = f"{Path(__file__).parents[1] / 'models'}{os.sep}"  # programs, whoever wrote them
_LIBRARIES = (_PACKAGE, *(f"{Path(str(each.__file__)).parent}{os.sep}" for each in (torch, pyro, np)))
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = tuple(f"{_STANDARD_LIBRARY}{name}" for name in ("site-packages", "dist-packages"))


def is_trusted_code(code: CodeType, namespace: Mapping[str, Any]) -> bool:
    """Whether code is a library's, and fixed; what it made from text, as for dataclasses, is as well."""
    file = code.co_filename
    return _is_trusted_file(namespace.get("__file__") or "" if file == "<string>" else file)


def is_trusted_class(kind: type) -> bool:
    """Whether a class is a library's."""
    return is_trusted_module(kind.__module__)


def _is_trusted_file(file: str) -> bool:
    if file.startswith(_LIBRARIES):
        return not file.startswith(_MODELS)
    return file.startswith("<frozen ") or (
        file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)
    )


def is_trusted_module(name: Any) -> bool:
    """Whether a module is one of the libraries, or of Python."""
    if name in sys.builtin_module_names:
        return True
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None:
        return False
    file = vars(module).get("__file__")
    if isinstance(file, str) and os.path.isabs(file):
        return _is_trusted_file(file)
    parent = name.rpartition(".")[0]
    return bool(parent) and is_trusted_module(parent)  # a library made it as it went


UNSTABLE = (
    *("random", "_random", "numpy.random", "secrets", "uuid", "time", "os", "posix", "nt", "io", "_io"),
    *("pathlib", "tempfile", "socket", "subprocess", "threading", "_thread", "multiprocessing", "concurrent"),
    *("asyncio", "inspect", "gc", "importlib", "ctypes", "_ctypes"),
)
"""Libraries' modules that answer differently from call to call, from outside, or lead around all names."""

UNSTABLE_OBJECTS = {
    id(each): each
    for each in (
        *(open, input, eval, exec, compile, globals, __import__, breakpoint, sys.modules, sys._getframe),
        *(np.load, np.loadtxt, np.genfromtxt, np.fromfile, np.memmap, torch.load, torch.initial_seed),
        *(torch.get_num_threads, torch.is_grad_enabled, torch.is_inference_mode_enabled),
    )
}
CLOCKS = frozenset({"now", "today", "utcnow"})


def home_of(value: Any) -> Any:
    """The module that a value, or else its class, comes from."""
    if isinstance(value, ModuleType):
        return value.__name__
    if type(value) is BuiltinFunctionType:  # a method in C has none
        return value.__module__ or type(value.__self__).__module__
    return value.__module__ if isinstance(value, FunctionType | type) else type(value).__module__


def is_unstable(value: Any, names: Collection[str]) -> bool:
    """Whether a value that code names may not answer the same each time."""
    home = home_of(value)
    if isinstance(home, str) and any(f"{home}.".startswith(f"{each}.") for each in UNSTABLE):
        return is_trusted_module(home)  # somebody's own module may have the same name
    clock = value is datetime.datetime or value is datetime.date
    return id(value) in UNSTABLE_OBJECTS or (clock and not CLOCKS.isdisjoint(names))


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made while running, as by a class statement
_POINTER = np.dtype(np.intp).itemsize
_OPEN_BASES = frozenset(
    {
        *(object, int, float, complex, str, bytes, tuple, list, dict, set, frozenset),
        *(deque, OrderedDict, defaultdict, types.SimpleNamespace),
    }
)


def has_hidden_state(kind: type) -> bool:
    """Whether instances have room for what is no attribute, as those of types written in C have."""
    while kind not in _OPEN_BASES:
        base = kind.__base__
        if base is None or not kind.__flags__ & _HEAP_TYPE:
            return True
        slots = sum(type(each) is types.MemberDescriptorType for each in vars(kind).values())
        if kind.__basicsize__ - base.__basicsize__ > _POINTER * (slots + 2):  # attributes and weak references
            return True
        kind = base
    return False
