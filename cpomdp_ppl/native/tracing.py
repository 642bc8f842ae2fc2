"""A function of tensors as expressions, and proof that they compute what it computes."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cpomdp_ppl.native.expressions import KIND_OF, Expr, Graph, Untraceable, evaluate, inputs_of
from cpomdp_ppl.native.operations import Program, array
from cpomdp_ppl.native.recording import ExitsRefused, Recorder, unwatched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from cpomdp_ppl.native.operations import Array

ENGINE_AXES = 3
"""Axes that all arguments and results begin with: contexts, episodes, particles."""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Relative difference that rounding may make between a function and its expressions."""

LIBRARIES = (
    "/torch/",
    "/pyro/",
    "/functools.py",
    "/contextlib.py",
    "/cpomdp_ppl/native/",
    "/cpomdp_ppl/inference/",
    "/cpomdp_ppl/handlers.py",
)
"""Where lines are not those of a user's program."""


@dataclass(frozen=True)
class Argument:
    """An argument of a function that is traced.

    Attributes:
        values: Some values, `[C, B, N, …]`; each of the engine's axes has size 1 or 2.
        expressions: What stands for it, of the shape right of the engine's axes.
    """

    values: Tensor
    expressions: Array


@dataclass(frozen=True)
class Traced:
    """A function written out.

    Attributes:
        outputs: The numbers that it returns, one after the other.
        noise: What each of its random inputs is, `("noise", k)`, and of which kind.
        checks: Conditions that must hold, with what is wrong if they do not.
    """

    outputs: tuple[Expr, ...]
    noise: tuple[tuple[str, str], ...]
    checks: tuple[tuple[Expr, str], ...] = field(default=())


def argument(graph: Graph, what: str, first: int, values: Tensor, bounds: Any = None) -> Argument:
    """An argument whose numbers are the inputs `(what, first)`, `(what, first + 1)` and so on."""
    inner = tuple(values.shape[ENGINE_AXES:])
    kind = KIND_OF.get(values.dtype)
    if kind is None:
        raise Untraceable(f"numbers of {values.dtype}")
    limits = bounds if bounds is not None else [None] * math.prod(inner)
    numbers = [graph.input(what, first + k, kind, limits[k]) for k in range(math.prod(inner))]
    return Argument(values, array(numbers, inner))


def trace(
    graph: Graph,
    method: str,
    function: Callable[..., Sequence[Tensor]],
    arguments: Sequence[Argument],
    constants: Sequence[Argument] = (),
) -> Traced:
    """Write a function of arguments out as expressions.

    It is run on two of everything along the engine's axes, and on one: expressions must be the same for each,
    and come to the same numbers.

    Args:
        graph: Where to make expressions.
        method: Name of the function, for messages.
        function: It returns tensors `[C, B, N, …]`, whose numbers are the outputs. It takes its arguments as
            tensors, each new for every call.
        arguments: Its arguments.
        constants: Tensors that it finds elsewhere, but that are inputs, too.

    Raises:
        Untraceable: If that cannot be done; the message says where.
    """
    try:
        twice = _run(graph, function, arguments, constants, None)
        once = _run(graph, function, arguments, constants, 0)
    except Untraceable as error:
        raise Untraceable(f"{method}{_line(error)}: {error}") from error
    if (once.outputs, once.noise, once.checks) != (twice.outputs, twice.noise, twice.checks):
        raise Untraceable(f"{method}: it depends on how many contexts, episodes or particles there are")
    return Traced(tuple(once.outputs), tuple(once.noise), tuple(once.checks))


@dataclass
class _Run:
    outputs: list[Expr]
    noise: list[tuple[str, str]]
    checks: list[tuple[Expr, str]]


def _run(
    graph: Graph,
    function: Any,
    arguments: Sequence[Argument],
    constants: Sequence[Argument],
    place: int | None,
) -> _Run:
    """Run a function on everything, or on one place along the engine's axes, and compare."""
    tensors = [argument.values.clone() for argument in arguments]
    if place is not None:
        tensors = [tensor[:1, :1, :1].clone() for tensor in tensors]
    axes = (2, 2, 2) if place is None else (1, 1, 1)
    program = Program(graph, engine_axes=axes)
    recorder = Recorder(program)
    for tensor, each in zip(tensors, arguments, strict=True):
        recorder.give(tensor, np.broadcast_to(each.expressions, tuple(tensor.shape)))
    for each in constants:
        recorder.give(each.values, each.expressions)
    with ExitsRefused(recorder), recorder:
        results = [result.expand(*axes, *result.shape[ENGINE_AXES:]) for result in function(*tensors)]
    given = list(zip(tensors, (each.expressions for each in arguments), strict=True))
    outputs: list[Expr] = []
    for result in results:
        found = recorder.of(result).reshape(math.prod(axes), -1)
        if any(e is not first for row in found for e, first in zip(row, found[0], strict=True)):
            raise Untraceable("a value depends on other contexts, episodes or particles")
        with unwatched():
            _compare(graph, axes, found[0], result, given, constants, recorder.drawn)
        outputs += list(found[0])
    return _Run(outputs, program.noise, list(dict.fromkeys(program.checks)))


def _compare(
    graph: Graph,
    axes: tuple[int, ...],
    expressions: Array,
    result: Tensor,
    given: Sequence[tuple[Tensor, Array]],
    constants: Sequence[Argument],
    drawn: Sequence[tuple[Array, Tensor]],
) -> None:
    """Raise unless expressions come to what torch computed, everywhere along the engine's axes."""
    used = inputs_of(expressions)
    for place in np.ndindex(*axes):
        inputs: dict[Any, Any] = {}
        for tensor, names in given:
            here = tensor.expand(*axes, *tensor.shape[ENGINE_AXES:])[place].reshape(-1).tolist()
            inputs |= {e.value: x for e, x in zip(names.ravel(), here, strict=True) if e.value in used}
        for each in constants:
            here = each.values.detach().reshape(-1).tolist()
            inputs |= {e.value: x for e, x in zip(each.expressions.ravel(), here, strict=True)}
        draws = {
            e: x
            for names, tensor in drawn
            for e, x in zip(
                names.reshape(*axes, -1)[place], tensor.reshape(*axes, -1)[place].tolist(), strict=True
            )
        }
        computed = np.array(evaluate(graph, list(expressions), inputs, draws), np.float64)
        expected = result[place].detach().reshape(-1).double().numpy()
        tolerance = TOLERANCE.get(result.dtype, 0.0)
        close = np.isclose(computed, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not close.all():
            k = int((~close).nonzero()[0][0])
            raise Untraceable(f"its expressions come to {computed[k]:g} where it computes {expected[k]:g}")


def _line(error: Untraceable) -> str:
    """The line of a user's program at which tracing failed, for a message."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(library in frame.filename.replace("\\", "/") for library in LIBRARIES):
            return f" ({frame.name}, line {frame.lineno}: {frame.line})"
    return ""
