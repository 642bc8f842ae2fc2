"""What Python code runs inside a block, and under which names it reads: where a guard begins."""

from __future__ import annotations

import dis
import gc
import importlib.util
import itertools
import random
import sys
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import pyro
import torch
from pyro.nn import PyroModule
from pyro.params.param_store import ParamStoreDict
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _len_torch_function_stack

from cpomdp_ppl.native.guard import (
    Guard,
    Reach,
    Unguardable,
    weakly,
)
from cpomdp_ppl.native.trust import is_trusted_class, is_trusted_code
from cpomdp_ppl.rng import drawn_from, generators

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

PYTHONS_GENERATOR = random.random.__self__  # type: ignore[attr-defined]

PROGRAMS = ("initial", "transition", "observation", "percept", "ends", "reward", "forward")
"""Names under which programs are called from outside."""


# ----------------------------------------------------------------------------------- what code reads by name


class Reading(NamedTuple):
    """What a piece of code reads by name.

    Attributes:
        attributes: Names of attributes that are read, written or deleted.
        globals: Names of globals, each with the attributes that are read of it there and then: `a.b.c`.
        imports: Modules that are imported as it runs: how many dots, and the name.
        any_name: Whether it may read attributes whose names do not stand in it.
    """

    attributes: frozenset[str]
    globals: frozenset[tuple[str, ...]]
    imports: frozenset[tuple[int, str]]
    any_name: bool


_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_SIMPLE = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_CONST", "PUSH_NULL")
_NAMED_ACCESS = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_ANY_NAME = frozenset(
    {
        *("vars", "dir", "__dict__", "__getattribute__", "__getattr__", "__reduce__", "__reduce_ex__"),
        *("__getstate__", "__globals__", "__closure__", "__code__"),
    }
)


def reading(code: CodeType) -> Reading:
    """What a piece of code reads by name; functions inside it are read by themselves."""
    attributes, paths, imports = set(), set(), set()
    any_name = False
    instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    for i, instruction in enumerate(instructions):
        operation, name = instruction.opname, instruction.argval
        if operation in _ATTRIBUTE:
            attributes.add(name)
        elif operation in _GLOBAL:
            following = itertools.takewhile(lambda each: each.opname in _ATTRIBUTE[:2], instructions[i + 1 :])
            paths.add((name, *(each.argval for each in following)))
            if name in _NAMED_ACCESS:
                literal = _literal_name(instructions[i + 1 :])
                any_name |= literal is None
                attributes |= {literal} - {None}
        elif operation == "IMPORT_NAME":
            imports.add((instructions[i - 2].argval, name))  # the second but last is the number of dots
        any_name |= operation == "MATCH_CLASS"
    any_name |= not _ANY_NAME.isdisjoint(attributes | {path[0] for path in paths})
    return Reading(frozenset(attributes), frozenset(paths), frozenset(imports), any_name)


def _literal_name(following: list[dis.Instruction]) -> str | None:
    """The name in `getattr(a.b, "name", c)`, if it stands there; None if it may be computed."""
    arguments: list[Any] = []
    for instruction in following:
        operation = instruction.opname
        if operation in ("PRECALL", "CALL"):
            name = arguments[1] if len(arguments) == instruction.arg and len(arguments) > 1 else None
            return name if isinstance(name, str) else None
        if not operation.startswith(_SIMPLE):
            return None
        if operation not in ("LOAD_ATTR", "PUSH_NULL"):
            arguments.append(instruction.argval if operation == "LOAD_CONST" else None)
    return None


def _inner(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _inner(each)


# ------------------------------------------------------------------------------------------------- the watch

_LOOKUPS = frozenset(
    method.__code__
    for method in (
        *(nn.Module.__getattr__, nn.Module.__setattr__, PyroModule.__getattr__, PyroModule.__setattr__),
        *(PyroModule._pyro_get_fullname, PyroModule._pyro_set_supermodule),
    )
)
"""How modules find attributes, which a walk does in its own way."""

_STORED = ParamStoreDict.__getitem__.__code__


class Watch:
    """Notes every Python function that runs inside, with what it may read, for a guard of all that.

    What the functions could read is looked at before each of them runs for the first time, and again at the
    end: what they change is a state of their own, which no guard can keep.

    Code of Python, torch, Pyro, NumPy and this package counts as fixed, and only that of users is watched,
    whoever calls it. A profiler that is set goes on; one written in C pauses.

    Examples:
        >>> scale = [2.0]
        >>> def program():
        ...     return scale[0] * 3
        >>> with Watch() as watch:
        ...     _ = program()
        >>> guard = watch.guard()
        >>> guard.holds()
        True
        >>> scale[0] = 2.5
        >>> guard.holds()
        False
    """

    def __init__(self) -> None:
        # Code goes by its id, as that of two files may be equal; `_codes` keeps ids from being used again.
        self._codes: list[CodeType] = []
        self._trusted: dict[int, bool] = {}
        self._own: dict[type, bool] = {}
        self._ran: dict[int, tuple[dict[str, Any], Reading]] = {}
        self._inner: set[int] = set()
        self._names = set(PROGRAMS)
        self._lent: set[str] = set()  # names under which libraries read users' objects
        self._readers: dict[str, str] = {}
        self._any_name = False
        self._whole: dict[int, Any] = {}  # objects of which libraries may read every name
        self._made: dict[int, Any] = {}  # objects that were made inside
        self._roots: list[Any] = []  # where the walk begins, besides globals
        self._passed: list[Callable[[], Any]] = []  # objects that came from nobody knows where
        self._met: dict[int, Any] = {}
        self._stored: dict[str, tuple[Tensor, Any]] = {}
        self._ahead: list[Guard] = []
        self._refusals: list[Unguardable] = []
        self._depth = 0
        self._importing: FrameType | None = None  # what runs as a module is imported is nobody's program
        self._previous: Any = None
        self._event = self._on_event  # one object, to be recognised
        self._draws = False  # whether Python's generator was called

    def __enter__(self) -> Watch:
        self._drawn = generators()
        self._defaults = _torch_defaults()
        self._known = frozenset(pyro.get_param_store()._params)
        self._previous = sys.getprofile()
        if self._previous is not None and not callable(self._previous):
            self._previous.disable()
        # Callbacks of the collector would be taken for a program's, whenever they happen to run.
        self._collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        undisturbed = sys.getprofile() is self._event
        sys.setprofile(self._previous if callable(self._previous) else None)
        if self._collects:
            gc.enable()
        if self._previous is not None and not callable(self._previous):
            self._previous.enable()
        if not undisturbed:
            self._refuse("a program sets a profiler, so that nobody sees what runs")
        for module in drawn_from(self._drawn, generators()):
            # Other threads may draw from Python's generator, too: those of a Dask worker do.
            if module == "numpy.random" or (module == "random" and self._draws):
                self._refuse(f"a program draws from {module}, and draws differ each time")
        change = next(filter(None, (guard.changed() for guard in self._ahead)), None)
        if change is not None:
            self._refuse(f"a program changes {change} as it runs: it has a state of its own")
        self._roots = [weakly(root) for root in self._roots]
        self._ahead, self._made, self._met = [], {}, {}

    def guard(self, inputs: Collection[int] = ()) -> Guard:
        """All that the functions that ran may have read, as it is now.

        Args:
            inputs: The ids of tensors whose values may change, but not their shapes and types.

        Raises:
            Unguardable: If they read what may change unseen, or changed what they read.
        """
        if self._refusals:
            raise self._refusals[0]
        roots = [root() for root in (*self._roots, *self._passed)]
        try:
            walk = self._walk([root for root in roots if root is not None], inputs)
            for name, (unconstrained, constraint) in self._stored.items():
                walk.parameter(name, unconstrained, constraint, known=name in self._known)
        except Exception as error:
            raise _refusal(error) from error
        defaults = self._defaults

        def torch_defaults() -> str | None:
            return None if _torch_defaults() == defaults else "torch's default dtype or device"

        guard = Guard([*walk.checks, torch_defaults])
        change = guard.changed()
        if change is not None:
            raise Unguardable(f"{change} does not stay what it is by itself")
        return guard

    def _refuse(self, why: str) -> None:
        self._refusals.append(Unguardable(why))

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._previous is not None and callable(self._previous):
            self._previous(frame, event, arg)
        if self._importing is not None:
            if event == "return" and frame is self._importing:
                self._importing = None
        elif event == "c_call":
            self._draws = self._draws or getattr(arg, "__self__", None) is PYTHONS_GENERATOR
        elif event == "call":
            code = frame.f_code
            trusted = self._trusted.get(id(code))
            if trusted is None:
                trusted = self._trusted[id(code)] = is_trusted_code(code, frame.f_globals)
                self._codes.append(code)
            try:
                # A mode would take what is looked at here for the program's doing.
                with DisableTorchFunction():
                    if not trusted:
                        self._on_call(frame, code)
                    elif code.co_filename.startswith("<frozen importlib"):
                        self._importing = frame
                    elif code.co_name == "__init__" or self._depth:
                        self._on_library(frame, code)
            except Exception as error:  # raised here, it would look like the program's
                self._refusals.append(_refusal(error))
            self._depth += not trusted
        elif event == "return" and not self._trusted.get(id(frame.f_code), True):
            self._depth = max(0, self._depth - 1)  # a generator may have begun outside

    def _on_library(self, frame: FrameType, code: CodeType) -> None:
        """A library may read attributes of a user's object, under names that stand in the library's code."""
        variables = frame.f_locals
        if code is _STORED:
            store, name = variables["self"], variables["name"]
            if name in store._params:
                self._stored[name] = store._params[name], store._constraints[name]
        if code in _LOOKUPS:
            return
        given = _arguments(code, variables)
        own = [each for each in given if self._is_own(each)]
        if not own:
            return
        if code.co_name == "__init__" and own[0] is given[0]:
            self._made[id(own[0])] = own[0]
        if self._depth:
            read = reading(code)
            self._lent |= read.attributes
            if read.any_name:
                self._whole.update((id(each), each) for each in own)

    def _on_call(self, frame: FrameType, code: CodeType) -> None:
        variables, new = frame.f_locals, id(code) not in self._ran
        if new:
            read = reading(code)
            self._ran[id(code)] = frame.f_globals, read
            self._names |= {*read.attributes, code.co_name}
            for name in {*read.attributes, *(path[0] for path in read.globals)}:
                self._readers.setdefault(name, code.co_qualname)
            self._any_name |= read.any_name
            self._inner.update(map(id, _inner(code)))
        given = _arguments(code, variables)
        own = [each for each in given if self._is_own(each)]
        if code.co_name == "__init__" and own and own[0] is given[0]:
            self._made[id(own[0])] = own[0]
        for each in own:
            if id(each) in self._made or id(each) in self._met or isinstance(each, tuple):
                continue
            if self._depth == 0:
                self._roots.append(each)
                self._met[id(each)], new = each, True
            else:
                self._passed.append(weakly(each))
        if new:
            self._look_ahead(code)

    def _is_own(self, value: Any) -> bool:
        kind = type(value)
        own = self._own.get(kind)
        if own is None:
            own = self._own[kind] = not issubclass(kind, Tensor) and not is_trusted_class(kind)
        return own

    def _look_ahead(self, code: CodeType) -> None:
        walk = self._walk(self._roots, before=True)
        if id(code) not in walk.reached | self._inner:
            # Nothing that is named leads to this function, so it is looked for among all objects.
            self._roots += [
                each
                for each in gc.get_referrers(code)
                if type(each) is FunctionType and each.__code__ is code
            ]
            walk = self._walk(self._roots, before=True)
        self._ahead.append(Guard(walk.checks))
        self._met.update(walk.seen)

    def _walk(self, roots: Collection[Any], inputs: Collection[int] = (), *, before: bool = False) -> Reach:
        walk = Reach(
            *(self._names, self._lent, self._readers, self._ran, inputs),
            everything=self._any_name,
            whole=self._whole,
            before=before,
        )
        for root in roots:
            walk.expect(root, (root if type(root) is FunctionType else type(root)).__qualname__)
        named: dict[int, tuple[dict[str, Any], set[tuple[str, ...]]]] = {}
        imported = set()
        for namespace, read in self._ran.values():
            named.setdefault(id(namespace), (namespace, set()))[1].update(read.globals)
            for dots, name in read.imports:
                package = namespace.get("__package__") or namespace.get("__name__", "")
                imported.add(importlib.util.resolve_name("." * dots + name, package))
        for namespace, paths in named.values():
            walk.globals(namespace, paths, str(namespace.get("__name__")))
        if before:
            imported &= sys.modules.keys()  # others will be
        if imported:
            walk.table("sys.modules", lambda: sys.modules, imported)
        if walk.everything and not self._any_name:  # found out on the way
            self._any_name = True
            return self._walk(roots, inputs, before=before)
        return walk


def _refusal(error: Exception) -> Unguardable:
    """What is raised if something cannot be looked at, for whatever reason."""
    if isinstance(error, Unguardable):
        return error
    return Unguardable(f"what a program reads cannot be looked at ({type(error).__name__}: {error})")


def _arguments(code: CodeType, variables: dict[str, Any]) -> list[Any]:
    """The arguments of a call that has just begun."""
    number = code.co_argcount + code.co_kwonlyargcount
    return [variables[name] for name in code.co_varnames[:number] if name in variables]


def _torch_defaults() -> tuple[torch.dtype, torch.device | None]:
    """The default dtype and device; None for the CPU, which it is where nothing is overridden."""
    device = torch.get_default_device() if _len_torch_function_stack() else None
    return torch.get_default_dtype(), None if device is None or device.type == "cpu" else device
