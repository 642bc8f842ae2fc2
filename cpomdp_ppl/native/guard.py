"""Whether all that a traced program depends on is still what it was.

A `Reach` begins at what code can name (globals, closures, defaults, the model) and follows the names that the
code uses. Each thing it meets becomes a check, and the checks make up a `Guard`. What libraries do is fixed;
what they hold for the user is not. What could change unseen is refused.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import hashlib
import operator
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from functools import cached_property, partial
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ReferenceType, ref

import numpy as np
import pyro
import torch
from pyro.nn.module import PyroSample
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributions import Transform
from torch.utils._python_dispatch import _disable_current_modes

from cpomdp_ppl.native.trust import (
    has_hidden_state,
    home_of,
    is_trusted_class,
    is_trusted_code,
    is_trusted_module,
    is_unstable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

Expectation: TypeAlias = "Callable[[Any], bool]"
"""Whether what is found is what is expected."""

Check: TypeAlias = "Callable[[], str | None]"
"""What has changed, in words; None if nothing has."""

MISSING: Any = object()
"""Found where there is nothing."""

UNSETTLED: Any = object()
"""Stands for a value that may change while it stays the same object; it is never found."""

LARGE = 2**20
"""Arrays of more bytes are compared by a hash; of others, a copy is kept."""


class Unguardable(Exception):  # noqa: N818  # no fault of a program: it is only not to be kept
    """A program reads what may change unseen, or changes what it reads."""


class Guard:
    """Checks of all that a traced program depends on.

    Args:
        checks: What is looked at, in this order.
    """

    def __init__(self, checks: Iterable[Check]) -> None:
        self._checks = tuple(checks)

    def holds(self) -> bool:
        """Whether nothing has changed. What cannot be looked at any more has."""
        try:
            for check in self._checks:
                if check() is not None:
                    return False
        except Exception:  # whatever was done to objects in between
            return False
        return True

    def changed(self) -> str | None:
        """The first thing that has changed, in words; None if nothing has."""
        for check in self._checks:
            try:
                change = check()
            except Exception as error:
                return f"something that cannot be looked at any more ({type(error).__name__}: {error})"
            if change is not None:
                return change
        return None


# ----------------------------------------------------------------------------------------------- comparisons

PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
        *(decimal.Decimal, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, re.Pattern),
    }
)
"""Types of values that never change."""

_EXACT = frozenset({bool, int, str, bytes})

_FIXED = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, CodeType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType),
    *(np.ufunc, OpOverload, OpOverloadPacket, type(vars(namedtuple("_Fields", "field"))["field"])),
)
"""Objects of Python and libraries that have nothing of the user's in them."""

_WRAPPERS: Mapping[type, str] = {
    property: "fget",
    cached_property: "func",
    staticmethod: "__func__",
    classmethod: "__func__",
}

_PARTS: Mapping[type, Callable[[Any], list[Any]]] = {
    **dict.fromkeys((list, tuple, torch.Size, set, frozenset, deque), list),
    **dict.fromkeys((dict, OrderedDict, Counter, types.MappingProxyType), lambda d: [*d.keys(), *d.values()]),
    defaultdict: lambda d: [d.default_factory, *d.keys(), *d.values()],
    partial: lambda p: [p.func, p.args, p.keywords],
    MethodType: lambda m: [m.__func__, m.__self__],
    types.MethodWrapperType: lambda m: [m.__name__, m.__self__],
    ReferenceType: lambda r: [r()],
}
"""What values consist of, by their exact types; of equal parts, they are equal. Order counts, as in loops."""

_CONTENTS: Mapping[type, Callable[[Any], list[Any]]] = {
    dict: lambda d: [*dict.keys(d), *dict.values(d)],
    list: lambda each: list(list.__iter__(each)),
    tuple: lambda each: list(tuple.__iter__(each)),
    set: lambda each: list(set.__iter__(each)),
    frozenset: lambda each: list(frozenset.__iter__(each)),
    deque: lambda each: list(deque.__iter__(each)),
}
"""What instances of subclasses contain besides their attributes, without the subclasses' code."""


def same(expected: Any, found: Any) -> bool:
    """Whether two plain values are the same: NaN is, but -0.0 and 0.0, or 1, True and 1.0, are not.

    Examples:
        >>> same(float("nan"), float("nan")), same(0.0, -0.0), same(1, True)
        (True, False, False)
    """
    kind = type(expected)
    if type(found) is not kind:
        return False
    return bool(found == expected) if kind in _EXACT else repr(found) == repr(expected)


def _is_settled(value: Any) -> bool:
    """Whether the very same object is the same value for certain."""
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_settled, value)))


def weakly(value: Any) -> Callable[[], Any]:
    """The value, without keeping it alive where that can be."""
    try:
        return ref(value)
    except TypeError:
        return lambda: value


def _is_that(value: Any) -> Expectation:
    reference = weakly(value)
    return lambda found: found is not None and reference() is found


def _digest(data: bytes) -> bytes:
    return data if len(data) <= LARGE else hashlib.blake2b(data).digest()


def _bytes(tensor: Tensor) -> bytes:
    """What a tensor holds, whatever its layout, and unseen by whoever records operations."""
    with _disable_current_modes(), torch.no_grad():
        plain = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg().flatten()
        plain = plain.clone(memory_format=torch.contiguous_format)  # a single element may have any stride
        return _digest(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")


class _TensorContent:
    """Whether a tensor holds what it held: quickly for the same one, and for any other."""

    __slots__ = ("data", "dtype", "place", "pointer", "reference", "shape", "stride", "view")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.place = tensor.shape, tensor.dtype, (tensor.device, tensor.layout)
        self.data = _bytes(tensor)
        self.view: np.ndarray[Any, Any] | None = None
        if tensor.layout is torch.strided:
            self.reference: Callable[[], Any] = ref(tensor)
            self.stride, self.pointer = tensor.stride(), tensor.data_ptr()
            if tensor.numel() * tensor.element_size() <= LARGE:
                try:  # it shares memory, so that it shows whatever is written by whatever way
                    with _disable_current_modes():
                        self.view = tensor.detach().numpy()
                except (TypeError, RuntimeError):  # a type or a device that NumPy does not know
                    pass

    def __call__(self, found: Any) -> bool:
        if (
            self.view is not None
            and found is self.reference()
            and found.data_ptr() == self.pointer  # the view keeps its memory, so that nothing else is there
            and found.shape == self.shape
            and found.stride() == self.stride
            and found.dtype is self.dtype
        ):
            return self.view.tobytes() == self.data
        return (
            _is_tensor(found)
            and found.dtype is self.dtype
            and found.shape == self.shape
            and (found.device, found.layout) == self.place
            and _bytes(found) == self.data
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and is_trusted_class(type(value))


def _like(tensor: Tensor) -> Expectation:
    shape, dtype = tensor.shape, tensor.dtype
    return lambda found: isinstance(found, Tensor) and found.shape == shape and found.dtype is dtype


def _array(value: Any) -> Expectation:
    kind, dtype, shape, data = type(value), value.dtype, value.shape, _digest(value.tobytes())

    def holds(found: Any) -> bool:
        return (
            type(found) is kind
            and found.dtype == dtype
            and found.shape == shape
            and _digest(found.tobytes()) == data
        )

    return holds


# ---------------------------------------------------------------------------------------------------- checks


class _Table:
    """Names and what they stand for: attributes, globals.

    Args:
        where: What has the names.
        source: The dictionary as it is now, or None.
        present: Names, what settles them at a glance, and what is expected otherwise.
        absent: Names that nothing must have.
        size: Number of all names, where any other name would count.
    """

    __slots__ = ("absent", "present", "size", "source", "where")

    def __init__(
        self,
        where: str,
        source: Callable[[], Any],
        present: Iterable[tuple[str, Any, Expectation]],
        absent: Iterable[str] = (),
        size: int | None = None,
    ) -> None:
        self.where, self.source, self.size = where, source, size
        self.present, self.absent = tuple(present), frozenset(absent)

    def __call__(self) -> str | None:
        table = self.source()
        if table is None:
            return f"{self.where}, which is gone or of another class"
        get = table.get
        for name, value, expectation in self.present:
            found = get(name, MISSING)
            if found is not value and not expectation(found):
                return f"{self.where}.{name}"
        if self.size is not None and len(table) != self.size:
            return f"the names in {self.where}"
        absent = self.absent
        few = len(absent) < len(table)
        if any(map(table.__contains__, absent)) if few else not absent.isdisjoint(table):
            return f"{self.where}.{min(absent.intersection(table))}, which is new"
        return None


class _ClassContent:
    """All attributes of a class at a glance; if that shows a difference, those that count one by one."""

    __slots__ = ("content", "counts", "kind", "order", "values", "where")

    def __init__(self, kind: type, counts: Callable[[str], bool], data: Collection[str]) -> None:
        self.kind, self.order = kind, kind.__mro__
        self.where = kind.__qualname__
        self.counts: Callable[[str], bool] = lambda name: counts(name) and name not in data  # in a table
        self.content = {name: each for name, each in vars(kind).items() if self.counts(name)}
        self.values = tuple(vars(kind).values())

    def __call__(self) -> str | None:
        kind = self.kind
        table, values = vars(kind), self.values
        if kind.__mro__ is not self.order:
            return f"the bases of {self.where}"
        if len(table) == len(values) and all(map(is_, table.values(), values)):
            return None
        for name in {**self.content, **table}:
            found, expected = table.get(name, MISSING), self.content.get(name, MISSING)
            if found is not expected and self.counts(name) and not self._equal(expected, found):
                return f"{self.where}.{name}"
        self.values = tuple(table.values())  # what changed does not count
        return None

    @staticmethod
    def _equal(expected: Any, found: Any) -> bool:
        return type(expected) in PLAIN and same(expected, found)


class _FunctionContent:
    """Code, defaults and closure of a function."""

    __slots__ = ("bare", "cells", "code", "defaults", "keywords", "reference", "settled", "where")

    def __init__(self, function: FunctionType, walk: Reach) -> None:
        self.where = f"{function.__module__}.{function.__qualname__}"
        self.reference, self.code, self.bare = ref(function), function.__code__, not vars(function)
        defaults, keywords = function.__defaults__, function.__kwdefaults__
        self.settled = defaults if _is_settled(defaults) else UNSETTLED
        self.defaults = walk.expect(defaults, f"the defaults of {self.where}")
        self.keywords = walk.expect(keywords, f"the defaults of {self.where}") if keywords else None
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = [
            (name, walk.expect(_content(cell), f"'{name}' in {self.where}")) for name, cell in cells
        ]

    def __call__(self) -> str | None:
        function = self.reference()
        if function is None or function.__code__ is not self.code:
            return f"the code of {self.where}"
        if function.__defaults__ is not self.settled and not self.defaults(function.__defaults__):
            return f"the defaults of {self.where}"
        keywords = function.__kwdefaults__
        if bool(keywords) if self.keywords is None else not self.keywords(keywords):
            return f"the defaults of {self.where}"
        if self.bare and function.__dict__:
            return f"the attributes of {self.where}"
        if self.cells:
            for (name, expectation), cell in zip(self.cells, function.__closure__ or (), strict=True):
                if not expectation(_content(cell)):
                    return f"'{name}' in {self.where}"
        return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # deleted, or not there yet
        return MISSING


class _Slots:
    """Attributes of an instance that have their own places in it."""

    __slots__ = ("kind", "present", "reference", "where")

    def __init__(self, where: str, value: Any, present: Sequence[tuple[str, Any, Expectation]]) -> None:
        self.where, self.kind, self.present = where, type(value), present
        self.reference = weakly(value)

    def __call__(self) -> str | None:
        value = self.reference()
        if type(value) is not self.kind:
            return f"{self.where}, which is gone or of another class"
        for name, descriptor, expectation in self.present:
            if not expectation(_slot(descriptor, value)):
                return f"{self.where}.{name}"
        return None


class _Spaces:
    """Parameters, buffers and the like, which modules keep in dictionaries of their own."""

    __slots__ = ("source", "spaces", "where")

    def __init__(
        self,
        where: str,
        source: Callable[[], Any],
        spaces: Sequence[tuple[str, Sequence[tuple[str, Any, Expectation]], frozenset[str]]],
    ) -> None:
        self.where, self.source, self.spaces = where, source, spaces

    def __call__(self) -> str | None:
        own = self.source()
        if own is None:
            return f"{self.where}, which is gone or of another class"
        for space, present, absent in self.spaces:
            table = own.get(space, {})
            for name, value, expectation in present:
                found = table.get(name, MISSING)
                if found is not value and not expectation(found):
                    return f"{self.where}.{name}"
            if table and not absent.isdisjoint(table):
                return f"{self.where}.{min(absent.intersection(table))}, which is new"
        return None


def _slot(descriptor: Any, value: Any) -> Any:
    try:
        return descriptor.__get__(value, type(value))
    except AttributeError:
        return MISSING


def _attributes(reference: Callable[[], Any], kind: type) -> Any:
    value = reference()
    return object.__getattribute__(value, "__dict__") if type(value) is kind else None


# -------------------------------------------------------------------------------------------------- the walk

_SPACES = ("_parameters", "_buffers", "_modules", "_pyro_params", "_pyro_samples")
"""Where modules keep attributes."""

_BOOKKEEPING: Mapping[type, frozenset[str]] = {
    nn.Module: frozenset({"_pyro_context", "_pyro_name"}),
    Transform: frozenset({"_cached_x_y", "_inv"}),
    PyroSample: frozenset({"name"}),
}
"""Attributes in which libraries keep account, and which change by mere use."""

_OF_PYTHON = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"),
        *("__slotnames__", "__parameters__", "__firstlineno__", "__static_attributes__", "__annotate__"),
        *("__module__", "__qualname__", "__orig_bases__", "__annotations_cache__"),
    }
)
"""Attributes of classes with which programs have nothing to do."""

_BY_NAME = frozenset(
    map(id, (getattr, hasattr, setattr, delattr, vars, dir, operator.attrgetter, operator.methodcaller))
)
"""What reads attributes of any name, if it goes by another name itself."""


class Reach:
    """What can be read from where code begins, under the names that it uses.

    Args:
        names: Names of attributes that the code reads or writes.
        lent: Further ones, which libraries read or write of the user's objects.
        readers: Which code reads a name, for messages.
        ran: The ids of code that ran, as code of two files may be equal; functions that did not run count as
            objects only.
        inputs: The ids of tensors that may have other values.
        everything: Whether any name may be read, as by `getattr` of a name that was computed.
        whole: The ids of objects of which every name may be read.
        before: Whether the code has yet to run. What it changes then shows, even if by an equal value, but
            not what libraries put in place at the first use.

    Attributes:
        checks: What was met.
        reached: The ids of the code of functions that were met.
        seen: Objects that were met, by id.
    """

    def __init__(
        self,
        names: Collection[str],
        lent: Collection[str],
        readers: Mapping[str, str],
        ran: Collection[int],
        inputs: Collection[int] = (),
        *,
        everything: bool = False,
        whole: Collection[int] = (),
        before: bool = False,
    ) -> None:
        self.names, self._own_names, self._readers = frozenset({*names, *lent}), frozenset(names), readers
        self._ran, self._inputs, self._whole, self._before = ran, frozenset(inputs), whole, before
        self.everything = everything
        self.checks: list[Check] = []
        self.reached: set[int] = set()
        self.seen: dict[int, Any] = {}
        self._inside: set[int] = set()  # values whose parts are being looked at

    def expect(self, value: Any, where: str) -> Expectation:
        """What is expected where a value was found, after a look at all behind it."""
        kind = type(value)
        if kind in PLAIN or value is MISSING:
            return partial(same, value)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.dtype):
            return lambda found: type(found) is kind and bool(found == value)
        array = isinstance(value, np.ndarray | np.generic) and is_trusted_class(kind)
        if array and not value.dtype.hasobject:
            return self._itself(value, _array(value))
        if kind in _PARTS:
            return self._itself(value, self._parts(value, where))
        if isinstance(value, ModuleType):
            self._module(value, where)
        elif id(value) not in self.seen:
            self.seen[id(value)] = value
            self._look_into(value, where)
        return _is_that(value)

    def table(
        self,
        where: str,
        source: Callable[[], Any],
        names: Iterable[str],
        size: int | None = None,
    ) -> None:
        """Expect the values of those names that there are, and nothing under the others."""
        self.checks.append(_Table(where, source, *self._named(where, source(), names), size))

    def _named(
        self, where: str, table: Mapping[str, Any], names: Iterable[str]
    ) -> tuple[list[tuple[str, Any, Expectation]], list[str]]:
        """Names that there are, with what is expected of them, and those that there are not."""
        present, absent = [], []
        for name in sorted(names):
            value = table.get(name, MISSING)
            if value is MISSING:
                absent.append(name)
                continue
            expectation = self.expect(value, f"{where}.{name}")
            present.append((name, value if _is_settled(value) else UNSETTLED, expectation))
        return present, absent

    def globals(self, namespace: dict[str, Any], paths: Collection[tuple[str, ...]], where: str) -> None:
        """Expect the globals that code names, and those of Python that none of them hides.

        Args:
            namespace: The globals.
            paths: Names, each with the attributes that are read of it there and then: `a.b.c`.
            where: Whose globals they are.
        """
        names = {path[0] for path in paths}
        modules = {name for name in names if isinstance(namespace.get(name), ModuleType)}
        self.table(where, lambda: namespace, names - modules)
        self._fixed(vars(builtins), {name for name in names if name not in namespace}, "builtins")
        for name in sorted(modules):
            self._module(namespace[name], f"{where}.{name}", {path[1:] for path in paths if path[0] == name})
        present = [(name, namespace[name], _is_that(namespace[name])) for name in sorted(modules)]
        if present:
            self.checks.append(_Table(where, lambda: namespace, present))

    def parameter(self, name: str, unconstrained: Tensor, constraint: Any, *, known: bool) -> None:
        """Expect a parameter of Pyro's store, which only has to be there if it was known before."""
        where = f"parameter '{name}'"
        value, within = self.expect(unconstrained, where), self.expect(constraint, f"{where}.constraint")
        store = pyro.get_param_store()
        known = known and id(unconstrained) not in self._inputs

        def check() -> str | None:
            found = store._params.get(name)
            if found is None:
                return where if known else None
            return None if value(found) and within(store._constraints.get(name)) else where

        self.checks.append(check)

    def _refuse(self, where: str, why: str) -> Unguardable:
        named = [name for name in re.findall(r"\w+", where) if name in self._readers]
        reader = f", which {self._readers[named[-1]]} reads," if named else ""
        return Unguardable(f"{where}{reader} {why}")

    def _require_stable(self, value: Any, where: str) -> None:
        if is_unstable(value, self.names):
            why = f"is of the module '{home_of(value)}', and may answer differently each time"
            raise self._refuse(where, why)

    def _itself(self, value: Any, expectation: Expectation) -> Expectation:
        if not self._before:
            return expectation
        return lambda found: found is value and expectation(found)

    def _tensor(self, value: Tensor, where: str) -> Expectation:
        if not _is_tensor(value):
            raise self._refuse(where, f"is a tensor of a class of its own, {type(value).__qualname__}")
        if id(value) in self._inputs:
            return _like(value)
        named = self.names & vars(value).keys()
        if named and id(value) not in self.seen:
            self.seen[id(value)] = value
            self.table(where, partial(_attributes, ref(value), type(value)), named)
        try:
            content = _TensorContent(value)
        except (RuntimeError, TypeError) as error:
            raise self._refuse(where, f"is a tensor that cannot be looked into: {error}") from error
        if self._before and isinstance(value, nn.Parameter):
            # Pyro exchanges parameters for those of its store when they are first read.
            like = _like(value)
            return lambda found: content(found) if found is value else like(found)
        return self._itself(value, content)

    def _parts(self, value: Any, where: str) -> Expectation:
        if id(value) in self._inside:
            raise self._refuse(where, "contains itself")
        self._inside.add(id(value))
        kind, parts_of = type(value), _PARTS[type(value)]
        matches = self._matching(parts_of(value), where)
        self._inside.discard(id(value))
        return lambda found: type(found) is kind and matches(parts_of(found))

    def _matching(self, parts: list[Any], where: str) -> Callable[[list[Any]], bool]:
        expectations = [self.expect(part, f"{where}[{i}]") for i, part in enumerate(parts)]
        settled = parts if all(map(_is_settled, parts)) else None

        def matches(now: list[Any]) -> bool:
            if len(now) != len(expectations):
                return False
            if settled is not None and all(map(is_, now, settled)):
                return True
            return all(expectation(part) for expectation, part in zip(expectations, now, strict=True))

        return matches

    def _look_into(self, value: Any, where: str) -> None:
        kind = type(value)
        self._require_stable(value, where)
        if id(value) in _BY_NAME or isinstance(value, operator.attrgetter | operator.methodcaller):
            self.everything = True
        elif kind is FunctionType:
            self._function(value, where)
        elif kind is BuiltinFunctionType:
            if not isinstance(value.__self__, ModuleType | type | None):
                self._contents(value, where, lambda method: [method.__self__])
        elif isinstance(value, type):
            self._class(value)
        elif kind in _WRAPPERS:
            self._contents(value, where, lambda wrapper: [getattr(wrapper, _WRAPPERS[kind])])
        elif not isinstance(value, _FIXED):
            self._instance(value, where)

    def _function(self, function: FunctionType, where: str) -> None:
        if is_trusted_code(function.__code__, function.__globals__):
            module = sys.modules.get(function.__module__)
            if module is None or vars(module).get(function.__name__) is not function:  # it may wrap a user's
                cells = operator.attrgetter("__closure__")
                self._contents(function, where, lambda wrapper: [*map(_content, cells(wrapper) or ())])
            return
        ran = id(function.__code__) in self._ran
        self.reached.add(id(function.__code__))
        if ran:
            self.checks.append(_FunctionContent(function, self))
        if not ran or vars(function):
            self.table(where, partial(_attributes, ref(function), FunctionType), self.names)

    def _module(self, module: ModuleType, where: str, paths: Collection[tuple[str, ...]] = ((),)) -> None:
        """Expect what is read of a module: exactly that, unless the module itself is passed on."""
        self._require_stable(module, where)
        name, table, trusted = module.__name__, vars(module), is_trusted_module(module.__name__)
        names = {path[0] for path in paths if path}
        if () in paths and id(module) not in self.seen:
            self.seen[id(module)] = module
            everything = self.everything and not trusted
            names |= {each for each in table if not each.startswith("__")} if everything else self._own_names
        inner = {each for each in names if isinstance(table.get(each), ModuleType)}
        if trusted:
            self._fixed(table, names - inner, name)
        else:
            self.table(name, lambda: table, names - inner)
        for each in sorted(inner):
            beyond = {path[1:] for path in paths if path and path[0] == each}
            self._module(table[each], f"{name}.{each}", beyond or {()})
        present = [(each, table[each], _is_that(table[each])) for each in sorted(inner)]
        if present:
            self.checks.append(_Table(name, lambda: table, present))

    def _fixed(self, table: dict[str, Any], names: Collection[str], where: str) -> None:
        """Expect that a library's own names stand for the same objects, and look into what is no code."""
        present = []
        for name in sorted(table.keys() & names):
            value, settled = table[name], True
            if callable(value):
                self._require_stable(value, f"{where}.{name}")
                self.everything |= id(value) in _BY_NAME and table is not vars(builtins)
            else:
                settled = _is_settled(value)
            expectation = _is_that(value) if callable(value) else self.expect(value, f"{where}.{name}")
            present.append((name, value if settled else UNSETTLED, expectation))
        if present:
            self.checks.append(_Table(where, lambda: table, present))

    def _class(self, kind: type) -> None:
        names, everything = self.names, self.everything

        def counts(name: str) -> bool:
            return (everything or name in names or name.startswith("__")) and name not in _OF_PYTHON

        for each in kind.__mro__:
            if each is not kind and id(each) in self.seen:
                continue
            self.seen[id(each)] = each
            if is_trusted_class(each) and not each.__module__.startswith("cpomdp_ppl."):
                continue
            data = []
            for name, value in tuple(vars(each).items()):
                if name in names or (everything and counts(name) and not name.startswith("__")):
                    expectation = self.expect(value, f"{each.__qualname__}.{name}")
                    if not _is_settled(value) and id(value) not in self.seen:  # it is no object of its own
                        data.append((name, UNSETTLED, expectation))
            self.checks.append(_ClassContent(each, counts, {name for name, *_ in data}))
            if data:
                self.checks.append(_Table(each.__qualname__, partial(vars, each), data))
        if not is_trusted_class(type(kind)):
            self.expect(type(kind), type(kind).__qualname__)

    def _instance(self, value: Any, where: str) -> None:
        kind, reference = type(value), weakly(value)
        if has_hidden_state(kind):
            why = f"is of {kind.__module__}.{kind.__qualname__}, and may change unseen"
            raise self._refuse(where, why)
        self.expect(kind, kind.__qualname__)
        whole = self.everything or id(value) in self._whole or is_trusted_class(kind)
        try:
            own = _attributes(reference, kind)
        except AttributeError:  # slots only
            own = None
        if own is not None:
            ignored = {name for base in _BOOKKEEPING if base in kind.__mro__ for name in _BOOKKEEPING[base]}
            names = (frozenset(own) if whole else self._lookups(value, own)) - ignored
            size = len(own) if whole and not self._before else None
            source = partial(_attributes, reference, kind)
            self.table(where, source, names, size)
            if isinstance(value, nn.Module) and not whole:
                self._spaces(where, source)
        self._slots(value, where, whole, own is None)
        for base, contents_of in _CONTENTS.items():
            if isinstance(value, base):
                self._contents(value, where, contents_of)

    def _lookups(self, value: Any, own: Mapping[str, Any]) -> frozenset[str]:
        """The names under which an instance may be read; not those that are put there when first read."""
        names = self.names | {"_value_"} if isinstance(value, Enum) else self.names
        if not self._before:
            return names
        return frozenset(name for name in names if name in own or not _is_lazy(type(value), name))

    def _spaces(self, where: str, source: Callable[[], Any]) -> None:
        names = self.names | {f"{name}_unconstrained" for name in self.names}
        spaces = []
        for space in _SPACES:
            present, absent = self._named(where, source().get(space, {}), names)
            spaces.append((space, present, frozenset() if self._before else frozenset(absent)))
        self.checks.append(_Spaces(where, source, spaces))

    def _slots(self, value: Any, where: str, whole: bool, only: bool) -> None:
        present = [
            (name, descriptor, self.expect(_slot(descriptor, value), f"{where}.{name}"))
            for each in type(value).__mro__
            for name, descriptor in vars(each).items()
            if type(descriptor) is types.MemberDescriptorType and (whole or name in self.names)
        ]
        if present or only:
            self.checks.append(_Slots(where, value, present))

    def _contents(self, value: Any, where: str, contents_of: Callable[[Any], list[Any]]) -> None:
        reference, matches = weakly(value), self._matching(contents_of(value), where)
        self.checks.append(lambda: None if matches(contents_of(reference())) else f"what {where} contains")


def _is_lazy(kind: type, name: str) -> bool:
    """Whether a library's descriptor puts an attribute in place when it is first read."""
    found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    lasting = (FunctionType, property, staticmethod, classmethod)
    descriptor = type(found)
    return hasattr(descriptor, "__get__") and not isinstance(found, lasting) and is_trusted_class(descriptor)
