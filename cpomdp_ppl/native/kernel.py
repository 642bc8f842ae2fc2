"""Programs as C functions over particles: one text for all contexts and actions that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.native.c_code import Text, c_type, table_type
from cpomdp_ppl.native.expressions import PARTICLE, ROW, Expr, Untraceable, in_order, inputs_of
from cpomdp_ppl.native.simplify import hoisted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.native.expressions import Graph
    from cpomdp_ppl.native.tracing import Traced

MOST_VARIANTS = 32
"""At most so many pairs of context and action have code of their own."""

MOST_STATEMENTS = 60_000
"""From so many on, a compiler takes minutes."""

SIGNATURE = (
    "int c, int a, const f64 *restrict act, const f64 *restrict K, const f64 *restrict P, "
    "const void *const *restrict tables, "
    "const f64 *restrict val, const u8 *restrict flag, "
    "void *const *xs, void *const *es, void *const *ys, int N"
)
NOISE = {
    ("normal", "f32"): "NORMAL",
    ("uniform", "f32"): "UNIFORM",
    ("normal", "f64"): "NORMAL_D",
    ("uniform", "f64"): "UNIFORM_D",
    ("bits", "i64"): "BITS",
}


@dataclass
class Source:
    """C functions of a model's programs, and the numbers that they take from arrays.

    Args:
        graph: Where the expressions are.
        num_contexts: Number of contexts C.
        num_actions: Number of actions A; 0 for continuous ones, whose numbers are inputs.
        num_noise: How many random inputs there is room for.
        state: C types in which the numbers of a state are kept.

    Attributes:
        functions: Texts of the functions, by their bodies.
        tables: Texts of the tables of variants.
        programs: What the library hands over.
        constants: All constants, one variant's after the other.
    """

    graph: Graph
    num_contexts: int
    num_actions: int
    num_noise: int
    state: Sequence[str]
    functions: dict[str, str] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    statements: int = 0

    @property
    def rows(self) -> int:
        """How many actions have a row of their own in tables."""
        return max(self.num_actions, 1)

    @property
    def specialised(self) -> bool:
        """Whether every pair of context and action has a variant."""
        return self.num_contexts * self.rows <= MOST_VARIANTS

    def variants(self) -> list[dict[Any, Expr]]:
        """What is known in every variant, by context and then action."""
        if not self.specialised:
            return [{}]
        return known_inputs(self.graph, self.num_contexts, self.num_actions)

    def add(self, name: str, traced: Traced | None, *, output: str | None = None, num_masks: int = 0) -> None:
        """Write a program as a table of variants, with the noise that it needs.

        Args:
            name: Name of the program.
            traced: The program; None for one without functions.
            output: Type of the only output; None for a state.
            num_masks: How many outputs follow that say whether something is seen.
        """
        variants = [
            ("{0}", set()) if traced is None else self._variant(traced, known, output, num_masks)
            for known in self.variants()
        ]
        noise = [] if traced is None else [NOISE[each] for each in traced.noise]
        self.tables += [
            f"static const Variant {name}_variants[] = {{{', '.join(row for row, _ in variants)}}};",
            f"static const u8 {name}_noise[] = {{{', '.join(noise) or '0'}}};",
            f"static const u8 {name}_needed[] = {{{self._needed([used for _, used in variants])}}};",
        ]
        self.programs.append(f".{name} = {{{name}_variants, {name}_noise, {name}_needed}}")

    def _needed(self, used: Sequence[set[int]]) -> str:
        """For every action, the noise that it takes in any context."""
        A, C = self.rows, self.num_contexts
        flags = []
        for a in range(A):
            of_action = [used[c * A + a] for c in range(C)] if self.specialised else used
            flags += [str(int(k in set().union(*of_action))) for k in range(self.num_noise)]
        return ", ".join(flags) or "0"

    def _variant(
        self, traced: Traced, known: dict[Any, Expr], output: str | None, num_masks: int
    ) -> tuple[str, set[int]]:
        """A row of a table of variants, and the noise that it takes."""
        roots, masks, checks = self._known(traced, known, num_masks)
        stays = [e.op == "input" and e.value == ("state", k) for k, e in enumerate(roots)]
        if output is None and all(stays) and not checks:
            return "{0}", set()
        written = [k for k, same in enumerate(stays) if not (same and output is None)]
        body, constants = self._body(roots, masks, checks, written, output)
        name = self.functions.setdefault(body, f"f_{len(self.functions)}")
        first = len(self.constants)
        self.constants += constants
        flags = ", ".join(str(int(k in written)) for k in range(len(roots)))
        used = {k for what, k in inputs_of([*roots, *checks]) if what == "noise"}
        return f"{{{name}, {first}, (const u8[]){{{flags}}}}}", used

    def _known(
        self, traced: Traced, known: dict[Any, Expr], num_masks: int
    ) -> tuple[list[Expr], list[tuple[int, Expr]], list[Expr]]:
        """Outputs, masks that may hide something, and checks of a variant, as simple as they get."""
        g, number = self.graph, len(traced.outputs) - num_masks
        roots = g.substitute([*traced.outputs, *(check for check, _ in traced.checks)], known)
        masks = list(enumerate(roots[number : number + num_masks]))
        hidden = {("flag", k): g.const(False, "bool") for k, e in masks if e.op == "const" and not e.value}
        if num_masks == 1 and not hidden:  # what was not observed is not scored at all
            hidden = {("flag", 0): g.const(True, "bool")}
        roots = hoisted(g, g.substitute(roots, hidden))
        masks = [(k, e) for k, e in masks if not (e.op == "const" and e.value)]
        checks = [e for e in roots[number + num_masks :] if not (e.op == "const" and e.value)]
        return roots[:number], masks, checks

    def _body(
        self,
        roots: Sequence[Expr],
        masks: Sequence[tuple[int, Expr]],
        checks: Sequence[Expr],
        written: Sequence[int],
        output: str | None,
    ) -> tuple[str, list[float]]:
        text = Text(_input)
        wanted = [roots[k] for k in written]
        text.add([*wanted, *(e for _, e in masks), *checks])
        self.statements += len(text.row) + len(text.particle)
        if self.statements > MOST_STATEMENTS:
            raise Untraceable(f"it takes more than {MOST_STATEMENTS:,} statements in C")
        lines = _pointers([*wanted, *checks])
        lines += [f"const {table_type(self.graph, k)} *t{k} = tables[{k}];" for k in text.tables]
        types = self.state if output is None else [output]
        lines += [f"{types[k]} *restrict y{k} = ys[{k}];" for k in written]
        lines += text.row
        lines += [f"if (flag[{k}] & !({text.name(e)})) return 2;" for k, e in masks]
        lines += [f"if (!({text.name(e)})) return 1;" for e in checks if e.level < PARTICLE]
        inside = [f"bad |= !({text.name(e)});" for e in checks if e.level == PARTICLE]
        inside += [f"y{k}[i] = ({types[k]}){text.name(roots[k])};" for k in written]
        lines += ["int bad = 0;", "#pragma omp simd reduction(| : bad)", "for (int i = 0; i < N; i++) {"]
        lines += [*(f"    {line}" for line in [*text.particle, *inside]), "}", "return bad;"]
        return "\n    ".join(lines), text.constants

    def text(self, **others: Any) -> str:
        """All functions and tables, and what the library hands over: numbers, and arrays of a type."""
        for name, value in others.items():
            if isinstance(value, int):
                self.programs.append(f".{name} = {value}")
            else:
                kind, numbers = value
                listed = ", ".join(map(str, numbers)) or "0"
                self.tables.append(f"static const {kind} the_{name}[] = {{{listed}}};")
                self.programs.append(f".{name} = the_{name}")
        functions = [
            f"static int {name}({SIGNATURE})\n{{\n    {body}\n}}" for body, name in self.functions.items()
        ]
        programs = f"const Programs programs = {{{', '.join(self.programs)}}};"
        return "\n".join([*functions, *self.tables, programs])


def known_inputs(graph: Graph, num_contexts: int, num_actions: int) -> list[dict[Any, Expr]]:
    """What is known of a context and an action, by context and then action; of 0 actions, of contexts."""
    contexts: list[dict[Any, Expr]] = [{("context", 0): graph.const(c, "i64")} for c in range(num_contexts)]
    actions: list[dict[Any, Expr]] = [{("action", 0): graph.const(a, "i64")} for a in range(num_actions)]
    return [context | action for context in contexts for action in actions or [{}]]


def action_text(e: Expr) -> str:
    """C text of an action: its number, or one of the numbers of a continuous one."""
    return f"({c_type(e)})act[{e.value[1]}]" if e.is_float else "a"


def _input(e: Expr) -> str:
    what, k = e.value
    number = "val" if e.is_float else "((const i64 *)val)"
    return {
        "context": "c",
        "action": action_text(e),
        "value": f"({c_type(e)}){number}[{k}]",
        "flag": f"flag[{k}]",
        "param": f"({e.kind})P[{k}]",
        "state": f"x{k}[i]",
        "noise": f"e{k}[i]",
    }[what]


def _pointers(roots: Sequence[Expr]) -> list[str]:
    """Where the inputs of particles are."""
    return [
        f"const {c_type(e)} *restrict {'x' if e.value[0] == 'state' else 'e'}{e.value[1]} = "
        f"{'xs' if e.value[0] == 'state' else 'es'}[{e.value[1]}];"
        for e in in_order(roots)
        if e.op == "input" and e.level > ROW
    ]
