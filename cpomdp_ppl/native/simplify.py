"""Expressions of few values: what depends on a particle only through a truth is computed once a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.native.expressions import PARTICLE, in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.native.expressions import Expr, Graph


def hoisted(graph: Graph, roots: Sequence[Expr]) -> list[Expr]:
    """The same numbers, with less to compute for every particle.

    `f(s)` of a truth `s`, or of the sign of a number, becomes a choice between `f(1)` and `f(0)`, which are
    the same for all particles. Selectors themselves stay.
    """
    selector = _selectors(roots)

    def is_few(e: Expr) -> bool:
        return e.level == PARTICLE and selector[e] is not None and selector[e] is not e

    needed: set[Expr] = set()
    stack = list(roots)
    while stack:
        e = stack.pop()
        if e in needed:
            continue
        needed.add(e)
        chosen = selector[e] if is_few(e) else None
        stack += e.args if chosen is None else chosen.args if chosen.op == "sign" else (chosen,)
    new: dict[Expr, Expr] = {}
    for e in sorted(needed, key=lambda each: each.number):
        chosen = selector[e] if is_few(e) else None
        new[e] = (
            graph.rebuilt(e, [new[arg] for arg in e.args])
            if chosen is None
            else _chosen(graph, e, chosen, new)
        )
    return [new[e] for e in roots]


def _selectors(roots: Sequence[Expr]) -> dict[Expr, Expr | None]:
    """For every expression, the one truth or sign through which it depends on a particle; None for others."""
    found: dict[Expr, Expr | None] = {}
    for e in in_order(roots):
        inner = {found[arg] for arg in e.args if arg.level == PARTICLE}
        if len(inner) == 1 and None not in inner:
            found[e] = inner.pop()
        else:
            found[e] = e if e.level == PARTICLE and (e.kind == "bool" or e.op == "sign") and e.args else None
    return found


def _chosen(graph: Graph, e: Expr, selector: Expr, new: dict[Expr, Expr]) -> Expr:
    def at(value: int) -> Expr:
        return graph.substitute([e], {selector: graph.const(value, selector.kind)})[0]

    if selector.op != "sign":
        return graph.where(new[selector], at(1), at(0))
    x = new[selector.args[0]]
    zero = graph.const(0, x.kind)
    up, middle, down = at(1), at(0), at(-1)
    rest = graph.where(graph.op("lt", [x, zero], "bool"), down, middle)
    if up is middle:
        return rest
    return graph.where(graph.op("gt", [x, zero], "bool"), up, rest)
