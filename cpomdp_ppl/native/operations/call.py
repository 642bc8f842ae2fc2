"""An operation of torch at work on arrays of expressions: what it is given, and how to compute with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cpomdp_ppl.native.expressions import KIND_OF, Expr, Graph, Untraceable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array: TypeAlias = "np.ndarray[Any, Any]"
"""An array of `Expr`, of the shape of a tensor."""


@dataclass
class Program:
    """What is noted of a program while it runs.

    Attributes:
        graph: Where its expressions are made.
        noise: What each of its random inputs is, `normal`, `uniform` or `bits`, and of which kind.
        checks: Conditions that must hold for every particle, with what is wrong if they do not.
        engine_axes: The first axes of everything: contexts, episodes, particles.
    """

    graph: Graph
    noise: list[tuple[str, str]] = field(default_factory=list)
    checks: list[tuple[Expr, str]] = field(default_factory=list)
    engine_axes: tuple[int, ...] = (1, 1, 1)

    def check(self, condition: Expr, fault: str) -> None:
        """Note a condition."""
        if condition.op != "const" or not condition.value:
            self.checks.append((condition, fault))

    def new_noise(self, what: str, shape: Sequence[int], kind: str) -> Array:
        """Random numbers of a shape: each particle has its own, but all under the same names."""
        lead, cells = len(self.engine_axes), math.prod(self.engine_axes)
        if tuple(shape[:lead]) == self.engine_axes:
            inner = tuple(shape[lead:])
        elif shape and shape[0] % cells == 0:  # axes that torch has laid end to end
            inner = (shape[0] // cells, *shape[1:])
        else:
            raise Untraceable("random numbers are drawn that are no sample site")
        first = len(self.noise)
        self.noise += [(what, kind)] * math.prod(inner)
        own = array([self.graph.input("noise", first + k, kind) for k in range(math.prod(inner))], inner)
        return np.broadcast_to(own, (cells, *inner)).reshape(tuple(shape)).copy()


@dataclass(frozen=True)
class OperationCall:
    """One operation at work.

    Attributes:
        program: What is noted of the program.
        name: Name of the operation, without the underscore of its in-place variant.
        args: Its arguments, tensors as arrays of expressions.
        kwargs: Likewise, by name.
        given: All its arguments as they are.
        result: What torch made of them: shapes and types are taken from it.
        function: The operation itself.
    """

    program: Program
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    given: tuple[Any, ...]
    result: Any
    function: Any

    @property
    def graph(self) -> Graph:
        """Where expressions are made."""
        return self.program.graph

    @property
    def kind(self) -> str:
        """The kind of the (first) result."""
        return kind_of(self.first)

    @property
    def first(self) -> Tensor:
        """The first result of torch."""
        return self.result if isinstance(self.result, Tensor) else self.result[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) result."""
        return tuple(self.first.shape)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def dims(self, position: int = 1, name: str = "dim") -> tuple[int, ...]:
        """Axes that an operation goes over; all, if it does not say."""
        given = self.arg(position, name)
        ndim = self.args[0].ndim
        if given is None or (isinstance(given, list | tuple) and not given):
            return tuple(range(ndim))
        several = given if isinstance(given, list | tuple) else (given,)
        return tuple(dim % max(ndim, 1) for dim in several)

    def pointwise(self, op: str, *args: Any, kind: str | None = None, compute: str | None = None) -> Array:
        """An operation on every number; arguments broadcast."""
        kind = self.kind if kind is None else kind
        lifted = [self.as_kind(arg, kind if compute is None else compute) for arg in args]
        return each(lambda *e: self.graph.op(op, e, kind), *lifted)

    def as_kind(self, x: Any, kind: str) -> Array:
        """An array of a kind, made of anything."""
        if isinstance(x, np.ndarray):
            return each(lambda e: self.graph.cast(e, kind), x)
        return array([self.graph.const(x, kind)], ())

    def where(self, condition: Any, yes: Any, no: Any, kind: str | None = None) -> Array:
        """One of two arrays."""
        kind = self.kind if kind is None else kind
        parts = self.as_kind(condition, "bool"), self.as_kind(yes, kind), self.as_kind(no, kind)
        return each(self.graph.where, *parts)

    def fold(self, op: str, x: Array, dims: Sequence[int], keepdim: bool = False) -> Array:
        """Put the numbers along some axes together."""
        if not x.ndim:
            return x
        kept = [axis for axis in range(x.ndim) if axis not in dims]
        rows = x.transpose([*kept, *dims]).reshape([x.shape[axis] for axis in kept] + [-1])
        out = np.empty(rows.shape[:-1], object)
        for place in np.ndindex(*out.shape):
            row = rows[place]
            out[place] = reduce(lambda a, b: self.graph.op(op, [a, b], a.kind), row)
        if keepdim:
            return out.reshape([1 if axis in dims else size for axis, size in enumerate(x.shape)])
        return out

    def refuse(self, why: str = "") -> Untraceable:
        """The error that this operation has no expressions."""
        return Untraceable(f"operation '{self.name}'" + (f" {why}" if why else "") + " is not known")


def array(flat: Sequence[Expr], shape: Sequence[int]) -> Array:
    """Expressions as an array."""
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(tuple(shape))


def each(function: Callable[..., Expr], *arrays: Array) -> Array:
    """A function of the expressions at every place; arrays broadcast."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    flat = [np.broadcast_to(a, shape).ravel() for a in arrays]
    return array([function(*e) for e in zip(*flat, strict=True)], shape)


def kind_of(tensor: Tensor) -> str:
    """The kind of a tensor's numbers."""
    kind = KIND_OF.get(tensor.dtype)
    if kind is None:
        raise Untraceable(f"numbers of {tensor.dtype}")
    return kind


OPERATIONS: dict[str, Callable[[OperationCall], Any]] = {}
"""By the name of the operation of torch."""


def operation(*names: str) -> Callable[[Callable[[OperationCall], Any]], Callable[[OperationCall], Any]]:
    """Register a function as what operations of torch come to."""

    def register(function: Callable[[OperationCall], Any]) -> Callable[[OperationCall], Any]:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in the arguments of an operation."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
