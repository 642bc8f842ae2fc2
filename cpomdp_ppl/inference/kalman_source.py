"""The programs of a Gaussian model in C: functions of points, and tables of them by context and action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpomdp_ppl.native.c_code import Text, c_type, table_type
from cpomdp_ppl.native.expressions import PARTICLE, Untraceable
from cpomdp_ppl.native.kernel import MOST_STATEMENTS, MOST_VARIANTS, action_text, known_inputs
from cpomdp_ppl.native.simplify import hoisted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cpomdp_ppl.inference.traced_gaussian import GaussianModel, GaussianObservation, GaussianProgram
    from cpomdp_ppl.native.expressions import Expr, Graph

ARGUMENTS = (
    "int c, int a, const f64 *restrict act, const f64 *restrict K, const f64 *restrict P, "
    "const void *const *restrict tables, "
    "const f64 *restrict val, const u8 *restrict flag, const f64 *restrict x, const f64 *restrict e, "
    "f64 *restrict y, int n"
)
DECLARATIONS = f"""
/* A program at n points x with noise e; it returns whether something failed. */
typedef int (*Function)({ARGUMENTS});
/* A program under one context and action: where its constants begin, and whether it depends on the point. */
typedef struct {{ Function function; int constants, moves; }} Variant;
"""


def kalman_source(
    model: GaussianModel, C: int, A: int, action_dim: int, extended: bool
) -> tuple[str, list[float]]:
    """The C text of a model's programs, and the constants that it takes from an array.

    Args:
        model: The programs.
        C: Number of contexts.
        A: Number of actions; 0 for continuous ones, whose numbers are inputs.
        action_dim: How many numbers those have; 0 for finitely many.
        extended: Whether programs are linearised, rather than run at many points.
    """
    num_noise = max(model.initial_noise, model.transition_noise)
    functions = _Functions(model.graph, C, A, num_noise if extended else 0)
    first = model.first_observation
    sizes = {
        "C_": C,
        "A_": max(A, 1),
        "D_": model.dim,
        "E0_": model.initial_noise,
        "E1_": model.transition_noise,
    }
    sizes |= {"M_": len(model.flag_of), "NF_": len(model.observation.visible)}
    sizes |= {"VARIANTS_": C * max(A, 1) if functions.specialised else 1, "U_": action_dim}
    tables = [
        functions.table("starts", model.initial, by_action=False),
        functions.table("moves", model.transition),
        functions.table("rewards", model.reward, at_many=True),
        functions.sights("sights", model.observation, model.flag_of),
        "static const Variant first_sights[] = {{NULL, 0, 0}};"
        if first is None
        else functions.sights("first_sights", first, model.flag_of, by_action=False),
    ]
    head = [
        f"#define EXTENDED {int(extended)}",
        f"enum {{ {', '.join(f'{name} = {size}' for name, size in sizes.items())} }};",
        f"static const int flag_of[] = {{{', '.join(map(str, model.flag_of))}}};",
        DECLARATIONS,
    ]
    return "\n".join([*head, *functions.texts(), *tables]), functions.constants


class _Functions:
    """Functions, each written once however many variants it serves.

    Args:
        graph: Where the expressions are.
        C: Number of contexts.
        A: Number of actions; 0 for continuous ones.
        num_noise: How many numbers of noise are zero, where slopes are taken; 0 for functions of many points.

    Attributes:
        constants: All constants, one variant's after the other.
    """

    def __init__(self, graph: Graph, C: int, A: int, num_noise: int) -> None:
        self.graph, self.C, self.A = graph, C, A
        self.silent = {("noise", k): graph.const(0.0, "f64") for k in range(num_noise)}
        self.at_many = num_noise == 0
        self.specialised = C * max(A, 1) <= MOST_VARIANTS
        self.constants: list[float] = []
        self._names: dict[str, str] = {}
        self._statements = 0

    def texts(self) -> list[str]:
        """The C text of every function."""
        return [f"static int {name}({ARGUMENTS})\n{{\n    {body}\n}}" for body, name in self._names.items()]

    def _known(self, by_action: bool, silent: bool = True) -> list[dict[Any, Expr]]:
        """What is known in every variant, by context and then action; of noise, if that is silent."""
        noise = self.silent if silent else {}
        known = known_inputs(self.graph, self.C, self.A if by_action else 0) if self.specialised else [{}]
        return [noise | each for each in known]

    def table(
        self, name: str, program: GaussianProgram, *, by_action: bool = True, at_many: bool = False
    ) -> str:
        """A table of the variants of a program."""
        outputs = [*program.values, *(slope for row in program.slopes for slope in row)]
        rows = [
            self._variant(outputs, program, known, [], at_many or self.at_many)
            for known in self._known(by_action, silent=not at_many)
        ]
        return f"static const Variant {name}[] = {{{', '.join(rows)}}};"

    def sights(
        self, name: str, sight: GaussianObservation, flag_of: Sequence[int], *, by_action: bool = True
    ) -> str:
        """A table of the variants of what is observed; what a variant never shows is not computed."""
        program, graph, rows = sight.program, self.graph, []
        slopes = [slope for row in program.slopes for slope in row]
        for known in self._known(by_action):
            visible = graph.substitute(sight.visible, known)
            hidden = {k for k, e in enumerate(visible) if e.op == "const" and not e.value}
            known |= {("flag", k): graph.const(False, "bool") for k in hidden}
            shown = [k not in hidden for k in flag_of]
            parts = program.values, slopes, sight.covariance
            outputs = [e for part in parts for e in self._shown(part, shown)]
            masks = [(k, e) for k, e in enumerate(visible) if not _holds(e)]
            rows.append(self._variant(outputs, program, known, masks, self.at_many))
        return f"static const Variant {name}[] = {{{', '.join(rows)}}};"

    def _shown(self, outputs: Sequence[Expr], shown: Sequence[bool]) -> list[Expr]:
        """Outputs, as many for every value; zero for those of values that are not shown."""
        size, zero = len(outputs) // len(shown), self.graph.const(0.0, "f64")
        return [e if shown[k // size] else zero for k, e in enumerate(outputs)]

    def _variant(
        self,
        outputs: Sequence[Expr],
        program: GaussianProgram,
        known: dict[Any, Expr],
        masks: Sequence[tuple[int, Expr]],
        at_many: bool,
    ) -> str:
        every = self.graph.substitute([*outputs, *program.checks, *program.central], known)
        every = hoisted(self.graph, every) if at_many else every
        outputs, others = every[: len(outputs)], every[len(outputs) :]
        checks, central = others[: len(program.checks)], others[len(program.checks) :]
        text = Text(_input)
        text.add([*every, *(e for _, e in masks)])
        self._statements += len(text.row) + len(text.particle)
        if self._statements > MOST_STATEMENTS:
            raise Untraceable(f"it takes more than {MOST_STATEMENTS:,} statements in C")
        lines = [f"const {table_type(self.graph, k)} *t{k} = tables[{k}];" for k in text.tables]
        lines += text.row
        lines += [f"if (flag[{k}] & !({text.name(e)})) return 1;" for k, e in masks]
        inside = [*text.particle]
        inside += [f"bad |= !({text.name(e)});" for e in checks if not _holds(e)]
        inside += [f"bad |= !({text.name(e)}) & (i == 0);" for e in central if not _holds(e)]
        inside += [f"y[{k} * n + i] = (f64){text.name(e)};" for k, e in enumerate(outputs)]
        lines += [
            "int bad = 0;",
            *(_loop(inside) if at_many else ["const int i = 0;", *inside]),
            "return bad;",
        ]
        body = "\n    ".join(lines)
        name = self._names.setdefault(body, f"f_{len(self._names)}")
        first, moves = len(self.constants), any(e.level == PARTICLE for e in every)
        self.constants += text.constants
        return f"{{{name}, {first}, {int(moves)}}}"


def _holds(e: Expr) -> bool:
    return e.op == "const" and bool(e.value)


def _loop(statements: Iterable[str]) -> list[str]:
    return [
        "#pragma omp simd reduction(| : bad)",
        "for (int i = 0; i < n; i++) {",
        *(f"    {each}" for each in statements),
        "}",
    ]


def _input(e: Expr) -> str:
    what, k = e.value
    return {
        "context": "c",
        "action": action_text(e),
        "value": f"({c_type(e)})val[{k}]",
        "flag": f"flag[{k}]",
        "param": f"({e.kind})P[{k}]",
        "state": f"x[{k} * n + i]",
        "noise": f"e[{k} * n + i]",
    }[what]
