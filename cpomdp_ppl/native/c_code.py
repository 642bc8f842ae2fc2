"""The C text of expressions: statements before a loop over particles, and inside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpomdp_ppl.native.expressions import PARTICLE, RANGE, Expr, Untraceable, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cpomdp_ppl.native.expressions import Graph

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
    "bitand": "&",
    "bitor": "|",
    "bitxor": "^",
    "shl": "<<",
    "shr": ">>",
}
LIBM = {
    "abs": "fabs",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "round": "rint",
    "sqrt": "sqrt",
    "log2": "log2",
    "log10": "log10",
    "exp2": "exp2",
}
PRELUDE = frozenset(
    [
        "exp",
        "log",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "tanh",
        "asin",
        "acos",
        "atan",
        "atan2",
        "hypot",
        "pow",
        "sigmoid",
        "logsigmoid",
        "softplus",
        "erf",
        "erfc",
        "erfinv",
        "ndtri",
        "lgamma",
        "digamma",
        "fmod",
        "min",
        "max",
        "sign",
    ]
)
"""Functions of the prelude: `m_exp` of float32, `m_exp_d` of float64."""

LITERALS = (0.0, 1.0, -1.0, 2.0, 0.5)
"""Real constants that stand in the text; others come from an array, and may change without a compiler."""


def c_type(e: Expr) -> str:
    """The C type of a number: small whole numbers take four bytes."""
    if e.is_float:
        return e.kind
    low, high = RANGE["i32"]
    return "i32" if e.bounds is not None and low <= e.bounds[0] and e.bounds[1] <= high else type_of(e.kind)


def type_of(kind: str) -> str:
    """The C type of any number of a kind."""
    return "i32" if kind == "bool" else kind


@dataclass
class Text:
    """Statements for some expressions.

    Args:
        name_input: C text of an input.

    Attributes:
        row: Statements that are carried out once.
        particle: Statements that are carried out for every particle.
        constants: The constants that the text takes from its array, in order.
        tables: Numbers of the tables that it looks up.
    """

    name_input: Callable[[Expr], str]
    row: list[str] = field(default_factory=list)
    particle: list[str] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    _names: dict[Expr, str] = field(default_factory=dict)

    def add(self, roots: Iterable[Expr]) -> None:
        """Write statements for expressions, and for all that they are computed from."""
        for e in in_order(roots):
            if e in self._names:
                continue
            if e.op == "const":
                self._names[e] = self._constant(e)
                continue
            text = self.name_input(e) if e.op == "input" else self._operation(e)
            name = f"v{len(self._names)}"
            (self.particle if e.level == PARTICLE else self.row).append(f"const {c_type(e)} {name} = {text};")
            self._names[e] = name

    def name(self, e: Expr) -> str:
        """The C text of an expression that was added."""
        return self._names[e]

    def _constant(self, e: Expr) -> str:
        v = e.value
        if not e.is_float:
            return f"({int(v)}{'LL' if c_type(e) == 'i64' else ''})" if v != RANGE["i64"][0] else "INT64_MIN"
        if math.isnan(v):
            return f"(({e.kind})NAN)"
        if math.isinf(v):
            return f"({'-' if v < 0 else ''}({e.kind})INFINITY)"
        if v in LITERALS:
            return f"(({e.kind}){v!r})"
        self.constants.append(v)
        self.row.append(f"const {e.kind} k{len(self.constants)} = ({e.kind})K[{len(self.constants) - 1}];")
        return f"k{len(self.constants)}"

    def _operation(self, e: Expr) -> str:
        op, a = e.op, [self._names[arg] for arg in e.args]
        suffix = "_d" if e.args[0].kind == "f64" else ""
        if op in INFIX:
            return self._infix(e, a)
        if op == "table":
            if e.value not in self.tables:
                self.tables.append(e.value)
            return f"({c_type(e)})t{e.value}[{a[0]}]"
        if op == "where":
            return f"{a[0]} ? {a[1]} : {a[2]}"
        if op == "cast":
            return f"({c_type(e)}){a[0]}"
        if op == "neg":
            return f"-{a[0]}" if e.is_float else self._negative(e, a[0])
        if op == "not":
            return f"!{a[0]}"
        if op == "bitnot":
            return f"~{a[0]}"
        if op in ("isnan", "isinf"):
            return f"({a[0]} != {a[0]})" if op == "isnan" else f"(fabs({a[0]}) == INFINITY)"
        if not e.args[0].is_float and op in ("min", "max", "abs", "sign", "mod", "fmod", "floordiv"):
            return self._whole(e, a)
        if op in ("mod", "floordiv"):
            return f"{'m_remainder' if op == 'mod' else 'm_floor_div'}{suffix}({a[0]}, {a[1]})"
        if op in LIBM:
            return f"{LIBM[op]}{'' if suffix else 'f'}({a[0]})"
        if op in PRELUDE:
            return f"m_{op}{suffix}({', '.join(a)})"
        if op.startswith("draw_"):
            return f"{op}((u64){a[0]}, {', '.join(a[1:])})"
        raise Untraceable(f"there is no C code for '{op}'")

    def _infix(self, e: Expr, a: Sequence[str]) -> str:
        sign = INFIX[e.op]
        if e.kind == "bool" and e.op == "add":
            return f"{a[0]} | {a[1]}"
        if e.is_float or e.op not in ("add", "sub", "mul", "shl"):
            return f"{a[0]} {sign} {a[1]}"
        if e.bounds is None:  # it may overflow, and wraps around
            unsigned = "u64" if c_type(e) == "i64" else "u32"
            return f"({c_type(e)})(({unsigned}){a[0]} {sign} ({unsigned}){a[1]})"
        return f"({c_type(e)}){a[0]} {sign} {a[1]}"

    def _negative(self, e: Expr, a: str) -> str:
        """A whole number with the other sign; of the least there is, itself."""
        return f"({c_type(e)})(0u - ({'u64' if c_type(e) == 'i64' else 'u32'}){a})"

    def _whole(self, e: Expr, a: Sequence[str]) -> str:
        """Operations on whole numbers."""
        if e.op in ("min", "max"):
            return f"{a[0]} {'<' if e.op == 'min' else '>'} {a[1]} ? {a[0]} : {a[1]}"
        if e.op == "abs":
            return f"{a[0]} < 0 ? {self._negative(e, a[0])} : {a[0]}"
        if e.op == "sign":
            return f"({a[0]} > 0) - ({a[0]} < 0)"
        if e.op == "fmod":
            return f"{a[1]} == 0 || {a[1]} == -1 ? 0 : {a[0]} % {a[1]}"
        divisor = e.args[1]
        if (
            e.op == "mod"
            and divisor.op == "const"
            and divisor.value > 0
            and divisor.value & (divisor.value - 1) == 0
        ):
            return f"({c_type(e)})({a[0]} & {divisor.value - 1})"
        return f"({c_type(e)}){'i_remainder' if e.op == 'mod' else 'i_floor_div'}({a[0]}, {a[1]})"


def table_type(graph: Graph, number: int) -> str:
    """The C type of a table's entries in memory."""
    types = {"float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32", "bool": "u8"}
    return types[graph.tables[number].dtype.name]
