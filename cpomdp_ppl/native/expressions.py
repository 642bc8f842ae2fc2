"""Scalar expressions: what a program computes, as a graph in which equal things are one thing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cpomdp_ppl.native.scalars import EVALUATE

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    Bounds = tuple[int, int] | None

KIND_OF = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}
"""The kinds of numbers that expressions have, by the type of a tensor."""

NUMPY = {"f32": np.float32, "f64": np.float64, "i64": np.int64, "i32": np.int32, "bool": np.bool_}
RANGE = {"i64": (-(2**63), 2**63 - 1), "i32": (-(2**31), 2**31 - 1), "bool": (0, 1)}

CONSTANT, ROW, PARTICLE = 0, 1, 2
"""How an expression varies: never; by episode, context and step; by particle."""

LARGEST_TABLE = 2**16
"""Entries that a table made of others may have."""

MOST_EXPRESSIONS = 200_000
"""From so many on, a program is too large to be written out number by number."""


class Untraceable(Exception):  # noqa: N818  # no fault of a program: it is only not to be compiled
    """A program cannot be written as scalar expressions; the message says what stands in the way."""


class Expr:
    """One number: an operation on others, a constant, or an input.

    Attributes:
        op: The operation; `const`, `input` and `table` are the ones with a value of their own.
        args: What it is computed from.
        kind: Type of the number: a key of `NUMPY`.
        value: The number (`const`), what it is and its index (`input`), or a table's index (`table`).
        level: How it varies: `CONSTANT`, `ROW` or `PARTICLE`.
        number: When it was made: no expression is older than what it is computed from.
        bounds: Lowest and highest value, of whole numbers.
    """

    __slots__ = ("args", "bounds", "kind", "level", "number", "op", "value")

    def __init__(
        self, op: str, args: tuple[Expr, ...], kind: str, value: Any, level: int, number: int, bounds: Bounds
    ) -> None:
        self.op, self.args, self.kind, self.value = op, args, kind, value
        self.level, self.number, self.bounds = level, number, bounds

    @property
    def is_float(self) -> bool:
        """Whether it is a real number."""
        return self.kind in ("f32", "f64")

    def __repr__(self) -> str:
        inner = self.value if self.value is not None else ", ".join(map(repr, self.args))
        return f"{self.op}({inner})"


class Graph:
    """Expressions that know each other: what is computed twice is computed once, and constants are folded.

    A constant is folded in the precision in which a program would compute it. Nothing is simplified that
    would not also be true of infinities and NaN: `0 * x` stays.

    Attributes:
        tables: Arrays of constants that are looked up by an index.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Expr] = {}
        self.tables: list[np.ndarray[Any, Any]] = []
        self._table_numbers: dict[Any, int] = {}

    def const(self, value: Any, kind: str) -> Expr:
        """A constant, rounded to its kind."""
        with np.errstate(all="ignore"):
            number: Any = np.asarray(value).astype(NUMPY[kind]).item()
        # 0.0 and -0.0 are equal, but not the same; NaN is the same, but not equal.
        return self._make("const", (), kind, number, key=repr(number))

    def input(self, what: str, index: int, kind: str, bounds: Bounds = None) -> Expr:
        """An input: the `index`-th of some kind, such as `("state", 0)`; see `LEVELS`."""
        return self._make("input", (), kind, (what, index), bounds=bounds)

    def op(self, name: str, args: Sequence[Expr], kind: str) -> Expr:
        """An operation on expressions of the kinds that it needs."""
        arguments = tuple(args)
        if all(arg.op == "const" for arg in arguments):
            return self.const(evaluated(name, arguments, [arg.value for arg in arguments]), kind)
        simpler = self._simpler(name, arguments, kind)
        if simpler is not None:
            return simpler
        folded = self._folded_into_table(name, arguments, kind)
        return self._make(name, arguments, kind, None) if folded is None else folded

    def cast(self, e: Expr, kind: str) -> Expr:
        """The same number in another type, as torch converts it."""
        if e.kind == kind:
            return e
        if kind == "bool":
            return self.op("ne", [e, self.const(0, e.kind)], "bool")
        if e.op == "cast" and e.args[0].kind == "bool":
            return self.cast(e.args[0], kind)
        return self.op("cast", [e], kind)

    def where(self, condition: Expr, yes: Expr, no: Expr) -> Expr:
        """One of two numbers of the same kind."""
        return self.op("where", [condition, yes, no], yes.kind)

    def look_up(self, entries: Sequence[Expr], index: Expr) -> Expr:
        """The entry with an index, which must be inside; see `within`."""
        if index.op == "const":
            found: Expr = entries[index.value]
            return found
        if all(entry is entries[0] for entry in entries):
            return entries[0]
        if all(entry.op == "const" for entry in entries):
            kind = entries[0].kind
            return self.table(np.array([entry.value for entry in entries], NUMPY[kind]), index, kind)
        found = entries[-1]
        for k in range(len(entries) - 2, -1, -1):
            here = self.op("eq", [index, self.const(k, index.kind)], "bool")
            found = self.where(here, entries[k], found)
        return found

    def table(self, values: np.ndarray[Any, Any], index: Expr, kind: str) -> Expr:
        """An entry of a table of constants."""
        if index.op == "const":
            return self.const(values[index.value], kind)
        key = (kind, values.tobytes())
        number = self._table_numbers.setdefault(key, len(self.tables))
        if number == len(self.tables):
            self.tables.append(values)
        return self._make("table", (index,), kind, number)

    def substitute(self, roots: Iterable[Expr], known: Mapping[Any, Expr]) -> list[Expr]:
        """The same expressions with some inputs, by their value, or some expressions replaced by others."""
        done: dict[Expr, Expr] = {}
        for e in in_order(roots):
            if e in known:
                done[e] = known[e]
            elif e.op == "input":
                done[e] = known.get(e.value, e)
            else:
                done[e] = self.rebuilt(e, [done[arg] for arg in e.args])
        return [done[e] for e in roots]

    def rebuilt(self, e: Expr, args: Sequence[Expr]) -> Expr:
        """The same operation on other arguments."""
        if all(new is old for new, old in zip(args, e.args, strict=True)):
            return e
        if e.op == "table":
            return self.table(self.tables[e.value], args[0], e.kind)
        return self.op(e.op, args, e.kind)

    def _make(
        self, op: str, args: tuple[Expr, ...], kind: str, value: Any, key: Any = None, bounds: Bounds = None
    ) -> Expr:
        identity = (op, args, kind, value if key is None else key, bounds)
        found = self._made.get(identity)
        if found is None:
            if len(self._made) >= MOST_EXPRESSIONS:
                raise Untraceable(f"it takes more than {MOST_EXPRESSIONS:,} operations on single numbers")
            level = max((arg.level for arg in args), default=CONSTANT)
            if op == "input":
                level = PARTICLE if value[0] in ("state", "noise") else ROW
            found = Expr(op, args, kind, value, level, len(self._made), bounds)
            if bounds is None and kind in RANGE:
                found.bounds = _bounds(found, self.tables)
            self._made[identity] = found
        return found

    def _simpler(self, name: str, args: tuple[Expr, ...], kind: str) -> Expr | None:
        """Something simpler that is the same for all numbers, infinities and NaN."""
        if name == "where":
            condition, yes, no = args
            if yes is no:
                return yes
            return None if condition.op != "const" else (yes if condition.value else no)
        if name in ("and", "or") and "const" in (args[0].op, args[1].op):
            known, other = (args[0], args[1]) if args[0].op == "const" else (args[1], args[0])
            return other if bool(known.value) == (name == "and") else known
        if name in ("and", "or", "min", "max") and args[0] is args[1]:
            return args[0]
        if name == "not" and args[0].op == "not":
            return args[0].args[0]
        if name in SYMMETRIC and _place(args[0]) > _place(args[1]):
            return self.op(name, (args[1], args[0]), kind)
        if len(args) == 2 and args[1].op == "const":
            return self._by_constant(name, args[0], args[1], kind)
        if name in COMPARED and all(arg.bounds is not None for arg in args):
            known_answer = COMPARED[name](*(arg.bounds for arg in args))
            return None if known_answer is None else self.const(known_answer, "bool")
        return None

    def _by_constant(self, name: str, x: Expr, constant: Expr, kind: str) -> Expr | None:
        v = constant.value
        if x.kind == kind and name in NEUTRAL and _leaves_alone(name, v):
            return x
        if name == "mul" and v == 0 and not x.is_float:
            return constant
        if name == "pow" and v == 2:
            return self.op("mul", (x, x), kind)
        if (
            name == "div"
            and v != 0
            and x.is_float
            and math.frexp(v)[0] in (0.5, -0.5)
            and 2**-100 < abs(v) < 2**100
        ):
            return self.op("mul", (x, self.const(1 / v, kind)), kind)
        if name in COMPARED and x.bounds is not None and constant.bounds is not None:
            answer = COMPARED[name](x.bounds, constant.bounds)
            return None if answer is None else self.const(answer, "bool")
        return None

    def _folded_into_table(self, name: str, args: tuple[Expr, ...], kind: str) -> Expr | None:
        """What is computed from entries of tables at one index alone is itself an entry of a table."""
        tables = [arg for arg in args if arg.op == "table"]
        if not tables or name in DRAWS:
            return None
        index = tables[0].args[0]
        if any(arg.op != "const" and not (arg.op == "table" and arg.args[0] is index) for arg in args):
            return None
        size = min(len(self.tables[each.value]) for each in tables)
        if size > LARGEST_TABLE:
            return None
        columns = [
            [arg.value] * size if arg.op == "const" else self.tables[arg.value][:size].tolist()
            for arg in args
        ]
        values = [evaluated(name, args, row) for row in zip(*columns, strict=True)]
        with np.errstate(all="ignore"):
            return self.table(np.array(values, NUMPY[kind]), index, kind)


NEUTRAL = frozenset({"add", "sub", "mul", "div", "pow"})
"""Operations that leave a number as it is, if the other one is 0 (of a sum) or 1."""

SYMMETRIC = frozenset({"add", "mul", "eq", "ne", "and", "or", "xor", "bitand", "bitor", "bitxor"})
"""Operations that give the same whichever argument is the first."""

DRAWS = frozenset({"draw_gamma", "draw_poisson", "draw_binomial"})
"""Operations that draw: functions of random bits and parameters."""


def _place(e: Expr) -> tuple[bool, int]:
    """Where an argument of a symmetric operation stands: constants last, and otherwise the older first."""
    return e.op == "const", e.number


def _leaves_alone(name: str, v: Any) -> bool:
    """Whether any number stays the same, if an operation of `NEUTRAL` puts it together with a constant."""
    if name in ("mul", "div", "pow"):
        return bool(v == 1)
    # The one zero that leaves -0.0 alone is -0.0 in a sum, 0.0 in a difference.
    return v == 0 and (isinstance(v, int) or (math.copysign(1.0, v) < 0) == (name == "add"))


def evaluated(name: str, args: Sequence[Expr], values: Sequence[Any]) -> Any:
    """An operation on numbers, computed in the kinds of its arguments."""
    with np.errstate(all="ignore"):
        return EVALUATE[name](*(NUMPY[arg.kind](value) for arg, value in zip(args, values, strict=True)))


def evaluate(
    graph: Graph, roots: Sequence[Expr], inputs: Mapping[Any, Any], drawn: Mapping[Expr, Any] | None = None
) -> list[Any]:
    """The numbers that expressions come to, given inputs by their value, and what was drawn."""
    known: dict[Expr, Any] = {}
    drawn = {} if drawn is None else drawn
    for e in in_order(roots, drawn):
        if e in drawn:
            result = drawn[e]
        elif e.op == "const":
            result = e.value
        elif e.op == "input":
            result = inputs[e.value]
        elif e.op == "table":
            entries = graph.tables[e.value]
            result = entries[min(max(int(known[e.args[0]]), 0), len(entries) - 1)]
        elif e.op == "cast":
            result = known[e.args[0]]
        else:
            result = evaluated(e.op, e.args, [known[arg] for arg in e.args])
        with np.errstate(all="ignore"):
            known[e] = np.asarray(result).astype(NUMPY[e.kind])[()]
    return [known[e] for e in roots]


def in_order(roots: Iterable[Expr], known: Container[Expr] = ()) -> list[Expr]:
    """All expressions that some are computed from, and they themselves, the oldest first.

    Those that are known are not asked what they are computed from.
    """
    found: set[Expr] = set()
    stack = list(roots)
    while stack:
        e = stack.pop()
        if e not in found:
            found.add(e)
            stack += () if e in known else e.args
    return sorted(found, key=lambda e: e.number)


def inputs_of(roots: Iterable[Expr]) -> set[tuple[str, int]]:
    """The inputs that expressions are computed from."""
    return {e.value for e in in_order(roots) if e.op == "input"}


def _less(a: Any, b: Any) -> bool | None:
    return True if a[1] < b[0] else False if a[0] >= b[1] else None


def _less_or_equal(a: Any, b: Any) -> bool | None:
    return True if a[1] <= b[0] else False if a[0] > b[1] else None


def _equal(a: Any, b: Any) -> bool | None:
    if a[1] < b[0] or b[1] < a[0]:
        return False
    return True if a[0] == a[1] == b[0] == b[1] else None


def _negated(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


COMPARED: dict[str, Callable[[Any, Any], bool | None]] = {
    "lt": _less,
    "le": _less_or_equal,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _less_or_equal(b, a),
    "eq": _equal,
    "ne": lambda a, b: _negated(_equal(a, b)),
}
"""What a comparison of whole numbers within bounds comes to, if that is certain."""


def _bounds(e: Expr, tables: Sequence[np.ndarray[Any, Any]]) -> Bounds:
    """Lowest and highest value of a whole number; None if it may be anything."""
    if e.kind == "bool":
        return 0, 1
    if e.op == "const":
        return e.value, e.value
    if e.op == "table":
        return int(tables[e.value].min()), int(tables[e.value].max())
    if e.op == "cast" and e.args[0].bounds is not None:
        return _inside(e.args[0].bounds, e.kind)
    inner = [arg.bounds for arg in e.args]
    if e.op == "where":
        inner = inner[1:]
    if e.op in ("min", "max"):  # one that is known is enough
        inner = [each or RANGE[e.kind] for each in inner]
    known = [each for each in inner if each is not None]
    if e.op == "mod" and e.args[1].op == "const" and e.args[1].value > 0:
        return 0, e.args[1].value - 1
    if e.op == "sign":
        return -1, 1
    if len(known) < len(inner) or not known:
        return None
    corners = _corners(e.op, known)
    if corners is None or (min(corners), max(corners)) == RANGE[e.kind]:
        return None
    return _inside((min(corners), max(corners)), e.kind)


def _corners(op: str, bounds: Sequence[tuple[int, int]]) -> list[int] | None:
    if op == "where":
        return [corner for each in bounds for corner in each]
    if op in ("min", "max"):
        pick = min if op == "min" else max
        return [pick(each[0] for each in bounds), pick(each[1] for each in bounds)]
    if op == "neg":
        return [-bounds[0][0], -bounds[0][1]]
    if op == "abs":
        low, high = bounds[0]
        return [0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high))]
    if op in ("add", "sub", "mul"):
        (a, b), (c, d) = bounds
        pairs = ((x, y) for x in (a, b) for y in (c, d))
        return [x + y if op == "add" else x - y if op == "sub" else x * y for x, y in pairs]
    return None


def _inside(bounds: tuple[int, int], kind: str) -> Bounds:
    """Bounds that a kind can hold; what may overflow may be anything."""
    low, high = RANGE[kind]
    return bounds if low <= bounds[0] and bounds[1] <= high else None
