"""Exact derivatives of expressions, as expressions: those that automatic differentiation by torch has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cpomdp_ppl.native.expressions import DRAWS, Expr, Graph, Untraceable, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FLAT = frozenset(["sign", "floor", "ceil", "round", "trunc", "floordiv"])
"""Functions whose derivative is zero, also where they jump."""


def derivatives(
    graph: Graph, outputs: Sequence[Expr], inputs: Sequence[Expr], conditions: list[Expr] | None = None
) -> list[list[Expr]]:
    """The derivative of every output by every input, which are real numbers.

    The derivative of a choice is that of what is chosen, so that what is not chosen may be NaN.

    Args:
        graph: Where the expressions are, and where the derivatives are made.
        outputs: What to differentiate.
        inputs: By what.
        conditions: Where to add conditions without which torch has another derivative: there is none where
            several numbers tie for the largest, and torch takes one by convention.

    Raises:
        Untraceable: If there is no formula for one.
    """
    order = in_order(outputs)
    columns = [_Slopes(graph, x, conditions).through(order) for x in inputs]
    return [[_or_zero(graph, column.get(y), y) for column in columns] for y in outputs]


def _or_zero(graph: Graph, slope: Expr | None, like: Expr) -> Expr:
    return graph.const(0, like.kind) if slope is None else slope


class _Slopes:
    """Derivatives by one input; those that are zero whatever the input are left out."""

    def __init__(self, graph: Graph, by: Expr, conditions: list[Expr] | None) -> None:
        self.graph, self.by = graph, by
        self.conditions = [] if conditions is None else conditions
        self.known: dict[Expr, Expr] = {by: graph.const(1, by.kind)}

    def through(self, order: Sequence[Expr]) -> dict[Expr, Expr]:
        """Those of all expressions, each of which comes after what it is computed from."""
        for e in order:
            if e not in self.known and e.is_float and any(arg in self.known for arg in e.args):
                slope = self.slope(e)
                if slope is not None:
                    self.known[e] = slope
        return self.known

    def slope(self, e: Expr) -> Expr | None:
        """By the chain rule."""
        if e.op in FLAT:
            return None
        if e.op == "cast":
            return self.graph.cast(self.known[e.args[0]], e.kind)
        if e.op in ("where", "max", "min"):
            return self._chosen(e)
        if e.op not in PARTIAL or e.op in DRAWS:
            raise Untraceable(f"there is no derivative of '{e.op}'")
        do, total = _Arithmetic(self.graph, e.kind), None
        for k, arg in enumerate(e.args):
            if arg in self.known:
                term = do("mul", PARTIAL[e.op][k](do, e, *e.args), self.known[arg])
                total = term if total is None else do("add", total, term)
        return total

    def _chosen(self, e: Expr) -> Expr:
        """The derivative of whichever is chosen; half of either where two numbers are the largest."""
        g, (a, b) = self.graph, e.args[-2:]
        of_a, of_b = (_or_zero(g, self.known.get(arg), e) for arg in (a, b))
        if of_a is of_b:
            return of_a
        if e.op == "where":
            return g.where(e.args[0], of_a, of_b)
        do = _Arithmetic(g, e.kind)
        if any(arg.op == e.op for arg in e.args):  # among more than two, torch shares it out evenly
            self.conditions.append(g.op("ne", [a, b], "bool"))
        half = do("mul", do("add", of_a, of_b), 0.5)
        beyond, behind = ("gt", "lt") if e.op == "max" else ("lt", "gt")
        rest = g.where(g.op(behind, [a, b], "bool"), of_b, half)
        return g.where(g.op(beyond, [a, b], "bool"), of_a, rest)


class _Arithmetic:
    """Operations on expressions and plain numbers, in one kind."""

    def __init__(self, graph: Graph, kind: str) -> None:
        self.graph, self.kind = graph, kind

    def __call__(self, op: str, *args: Expr | float) -> Expr:
        return self.graph.op(op, [self.of(arg) for arg in args], self.kind)

    def of(self, x: Expr | float) -> Expr:
        """A plain number as an expression."""
        return x if isinstance(x, Expr) else self.graph.const(x, self.kind)

    def where(self, comparison: str, a: Expr, b: float, yes: Expr | float, no: Expr | float) -> Expr:
        """One of two, by a comparison."""
        condition = self.graph.op(comparison, [a, self.of(b)], "bool")
        return self.graph.where(condition, self.of(yes), self.of(no))


def _root_of_complement(do: _Arithmetic, x: Expr) -> Expr:
    """`√(1 - x²)`."""
    return do("sqrt", do("sub", 1, do("mul", x, x)))


def _square_distance(do: _Arithmetic, a: Expr, b: Expr) -> Expr:
    return do("add", do("mul", a, a), do("mul", b, b))


def _power_by_base(do: _Arithmetic, e: Expr, base: Expr, exponent: Expr) -> Expr:
    slope = do("mul", exponent, do("pow", base, do("sub", exponent, 1)))
    return do.where("eq", exponent, 0, 0, slope)


def _power_by_exponent(do: _Arithmetic, e: Expr, base: Expr, exponent: Expr) -> Expr:
    slope = do("mul", e, do("log", base))
    return do.where("eq", base, 0, do.where("ge", exponent, 0, 0, slope), slope)


PARTIAL: dict[str, tuple[Callable[..., Expr], ...]] = {
    "add": (lambda do, e, a, b: do.of(1), lambda do, e, a, b: do.of(1)),
    "sub": (lambda do, e, a, b: do.of(1), lambda do, e, a, b: do.of(-1)),
    "mul": (lambda do, e, a, b: b, lambda do, e, a, b: a),
    "div": (lambda do, e, a, b: do("div", 1, b), lambda do, e, a, b: do("neg", do("div", e, b))),
    "mod": (lambda do, e, a, b: do.of(1), lambda do, e, a, b: do("neg", do("floordiv", a, b))),
    "fmod": (lambda do, e, a, b: do.of(1), lambda do, e, a, b: do("neg", do("trunc", do("div", a, b)))),
    "pow": (_power_by_base, _power_by_exponent),
    "atan2": (
        lambda do, e, a, b: do("div", b, _square_distance(do, a, b)),
        lambda do, e, a, b: do("neg", do("div", a, _square_distance(do, a, b))),
    ),
    "hypot": (lambda do, e, a, b: do("div", a, e), lambda do, e, a, b: do("div", b, e)),
    "neg": (lambda do, e, x: do.of(-1),),
    "abs": (lambda do, e, x: do("sign", x),),
    "sqrt": (lambda do, e, x: do("div", 0.5, e),),
    "exp": (lambda do, e, x: e,),
    "log": (lambda do, e, x: do("div", 1, x),),
    "log2": (lambda do, e, x: do("div", 1, do("mul", x, math.log(2))),),
    "log10": (lambda do, e, x: do("div", 1, do("mul", x, math.log(10))),),
    "exp2": (lambda do, e, x: do("mul", e, math.log(2)),),
    "log1p": (lambda do, e, x: do("div", 1, do("add", x, 1)),),
    "expm1": (lambda do, e, x: do("add", e, 1),),
    "sin": (lambda do, e, x: do("cos", x),),
    "cos": (lambda do, e, x: do("neg", do("sin", x)),),
    "tan": (lambda do, e, x: do("add", do("mul", e, e), 1),),
    "sinh": (lambda do, e, x: do("cosh", x),),
    "cosh": (lambda do, e, x: do("sinh", x),),
    "tanh": (lambda do, e, x: do("sub", 1, do("mul", e, e)),),
    "asin": (lambda do, e, x: do("div", 1, _root_of_complement(do, x)),),
    "acos": (lambda do, e, x: do("div", -1, _root_of_complement(do, x)),),
    "atan": (lambda do, e, x: do("div", 1, do("add", do("mul", x, x), 1)),),
    "sigmoid": (lambda do, e, x: do("mul", e, do("sub", 1, e)),),
    "logsigmoid": (lambda do, e, x: do("sigmoid", do("neg", x)),),
    "softplus": (lambda do, e, x: do.where("gt", x, 20, 1, do("sigmoid", x)),),
    "erf": (lambda do, e, x: do("mul", do("exp", do("neg", do("mul", x, x))), 2 / math.sqrt(math.pi)),),
    "erfc": (lambda do, e, x: do("mul", do("exp", do("neg", do("mul", x, x))), -2 / math.sqrt(math.pi)),),
    "erfinv": (lambda do, e, x: do("mul", do("exp", do("mul", e, e)), math.sqrt(math.pi) / 2),),
    "ndtri": (
        lambda do, e, x: do("mul", do("exp", do("mul", do("mul", e, e), 0.5)), math.sqrt(2 * math.pi)),
    ),
    "lgamma": (lambda do, e, x: do("digamma", x),),
}
"""By operation, its partial derivatives."""
