"""Expressions: constants are folded as torch computes, and nothing is simplified that is not the same."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from cpomdp_ppl.native import expressions
from cpomdp_ppl.native.expressions import (
    CONSTANT,
    KIND_OF,
    NUMPY,
    PARTICLE,
    ROW,
    Graph,
    Untraceable,
    evaluate,
    in_order,
    inputs_of,
)
from cpomdp_ppl.native.simplify import hoisted

REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.7, 1e-42, 3e38, -3e38, math.inf, -math.inf, math.nan]
WHOLE = [0, 1, -1, 2, 7, -8, 2**31, 2**53 + 1, 2**62 + 3, -(2**63), 2**63 - 1]
TWO = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "mod": torch.remainder,
    "fmod": torch.fmod,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "min": torch.minimum,
    "max": torch.maximum,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
TRUTHS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan", "isinf"}


def same(a: float, b: float) -> bool:
    """Whether two numbers are one: NaN is NaN, and the zeros are two."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def close(a: float, b: float, dtype: torch.dtype) -> bool:
    return same(a, b) or (math.isfinite(a) and abs(a - b) <= 4 * torch.finfo(dtype).eps * abs(b) != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TWO)
def test_reals_are_folded_as_torch_computes(name, dtype):
    graph, kind = Graph(), KIND_OF[dtype]
    for x, y in itertools.product(REALS, REALS):
        expected = TWO[name](torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)).item()
        folded = graph.op(
            name, [graph.const(x, kind), graph.const(y, kind)], "bool" if name in TRUTHS else kind
        )
        assert folded.op == "const"
        if name in ("min", "max", "pow") and folded.value == expected:
            continue  # of which sign a zero is, torch itself does not always agree
        assert folded.value == expected if name in TRUTHS else close(folded.value, expected, dtype), (x, y)


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "mod", "fmod", "floordiv", "min", "max", "eq", "lt", "ge"]
)
def test_whole_numbers_are_folded_exactly_and_wrap_around(name):
    graph = Graph()
    for x, y in itertools.product(WHOLE, WHOLE):
        if y == 0 and name in ("mod", "fmod", "floordiv"):
            continue  # an error, which is noted as a check
        expected = TWO[name](torch.tensor(x), torch.tensor(y)).item()
        kind = "bool" if name in TRUTHS else "i64"
        assert graph.op(name, [graph.const(x, "i64"), graph.const(y, "i64")], kind).value == expected, (x, y)


def test_zeros_are_two_and_nan_is_one():
    graph = Graph()
    assert graph.const(0.0, "f32") is not graph.const(-0.0, "f32")
    assert graph.const(math.nan, "f32") is graph.const(math.nan, "f32")
    assert graph.const(1, "f32") is graph.const(1.0, "f32")
    assert graph.const(1, "i64") is not graph.const(True, "bool")
    assert graph.const(2**53 + 1, "i64").value == 2**53 + 1
    assert graph.const(0.1, "f32").value == float(np.float32(0.1))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow", "min", "max", "mod", "floordiv"])
def test_no_real_is_too_odd_to_be_simplified_with(name, kind):
    """With a constant on either side, and with itself, an operation comes to what it does unsimplified."""
    graph = Graph()
    x = graph.input("state", 0, kind)
    for constant in [*REALS, 0.25, -4.0, 2.0**-140, 2.0**-149]:
        k = graph.const(constant, kind)
        pairs = ((x, k), (k, x), (x, x))
        expressions_ = [graph.op(name, pair, kind) for pair in pairs]
        for value in REALS:
            found = evaluate(graph, expressions_, {("state", 0): value})
            for e, pair in zip(found, pairs, strict=True):
                numbers = [NUMPY[kind](value if arg is x else arg.value) for arg in pair]
                with np.errstate(all="ignore"):
                    expected = expressions.EVALUATE[name](*numbers)
                assert close(float(e), float(expected), torch.float32), (constant, value, pair)


def test_a_sum_with_zero_is_kept_since_it_changes_minus_zero():
    graph = Graph()
    x = graph.input("state", 0, "f32")
    assert graph.op("add", [x, graph.const(0.0, "f32")], "f32") is not x
    assert graph.op("add", [x, graph.const(-0.0, "f32")], "f32") is x
    assert graph.op("sub", [x, graph.const(0.0, "f32")], "f32") is x
    assert graph.op("mul", [x, graph.const(0.0, "f32")], "f32").op == "mul"
    i = graph.input("state", 1, "i64")
    assert graph.op("add", [i, graph.const(0, "i64")], "i64") is i
    assert graph.op("mul", [i, graph.const(0, "i64")], "i64").value == 0


def test_a_quotient_by_a_power_of_two_is_a_product_unless_that_overflows():
    graph = Graph()
    x = graph.input("state", 0, "f32")
    assert graph.op("div", [x, graph.const(4.0, "f32")], "f32").op == "mul"
    assert graph.op("div", [x, graph.const(2.0**-140, "f32")], "f32").op == "div"
    assert graph.op("div", [x, graph.const(3.0, "f32")], "f32").op == "div"


def test_what_is_computed_twice_is_one_whichever_comes_first():
    graph = Graph()
    x, y = graph.input("state", 0, "f32"), graph.input("state", 1, "f32")
    for name in ("add", "mul"):
        assert graph.op(name, [x, y], "f32") is graph.op(name, [y, x], "f32")
    assert graph.op("sub", [x, y], "f32") is not graph.op("sub", [y, x], "f32")
    assert graph.op("max", [x, y], "f32") is not graph.op("max", [y, x], "f32")


def test_how_expressions_vary():
    graph = Graph()
    x, z, c = (graph.input(what, 0, "f32") for what in ("state", "value", "param"))
    assert [x.level, z.level, c.level, graph.const(1, "f32").level] == [PARTICLE, ROW, ROW, CONSTANT]
    assert graph.op("add", [z, c], "f32").level == ROW
    assert graph.op("add", [z, x], "f32").level == PARTICLE
    assert inputs_of([graph.op("add", [z, x], "f32")]) == {("value", 0), ("state", 0)}


WITHIN = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "min": torch.minimum, "max": torch.maximum}


def bounded(graph, name, x, y, truth):
    if name in ("neg", "abs"):
        return graph.op(name, [x], "i64")
    if name == "where":
        return graph.where(truth, x, y)
    if name == "mod":
        return graph.op("mod", [x, graph.const(4, "i64")], "i64")
    return graph.cast(graph.cast(x, "i32"), "i64") if name == "cast" else graph.op(name, [x, y], "i64")


@pytest.mark.parametrize("name", [*WITHIN, "neg", "abs", "where", "mod", "cast"])
def test_bounds_hold_all_that_a_whole_number_can_be(name):
    generator = np.random.default_rng(0)
    for _ in range(20):
        ends = np.sort(generator.integers(-5, 6, (2, 2)), 1).tolist()
        graph = Graph()
        x, y = (graph.input("state", k, "i64", tuple(end)) for k, end in enumerate(ends))
        e = bounded(graph, name, x, y, graph.input("state", 2, "bool"))
        ranges = [range(low, high + 1) for low, high in ends]
        found = [
            int(evaluate(graph, [e], {("state", 0): a, ("state", 1): b, ("state", 2): t})[0])
            for a, b, t in itertools.product(*ranges, [True, False])
        ]
        assert e.bounds[0] <= min(found)
        assert e.bounds[1] >= max(found)
        if name not in ("mod", "where"):
            assert e.bounds == (min(found), max(found))


def test_what_may_overflow_has_no_bounds():
    graph = Graph()
    x = graph.input("state", 0, "i64", (0, 2**62))
    assert graph.op("add", [x, graph.const(2**62 - 1, "i64")], "i64").bounds == (2**62 - 1, 2**63 - 1)
    assert graph.op("add", [x, graph.const(2**62, "i64")], "i64").bounds is None
    assert graph.cast(x, "i32").bounds is None
    assert graph.op("neg", [graph.input("state", 1, "i64", (-(2**63), 0))], "i64").bounds is None


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons_within_bounds_are_settled_only_if_they_are_certain(name):
    for (a, b), (c, d) in itertools.product([(0, 2), (2, 2), (3, 5), (-1, 0)], repeat=2):
        graph = Graph()
        x, y = graph.input("state", 0, "i64", (a, b)), graph.input("state", 1, "i64", (c, d))
        e = graph.op(name, [x, y], "bool")
        answers = {
            bool(TWO[name](torch.tensor(p), torch.tensor(q)))
            for p, q in itertools.product(range(a, b + 1), range(c, d + 1))
        }
        assert (e.op == "const") == (len(answers) == 1), (a, b, c, d)
        assert e.op != "const" or answers == {e.value}


def test_casts_go_through_truths_and_never_drop_a_rounding():
    graph = Graph()
    truth, x = graph.input("state", 0, "bool"), graph.input("state", 1, "f64")
    assert graph.cast(graph.cast(truth, "i64"), "f32").args == (truth,)
    assert graph.cast(graph.cast(x, "f32"), "f64") is not x
    assert evaluate(graph, [graph.cast(graph.cast(x, "f32"), "f64")], {("state", 1): 0.1}) == [
        np.float32(0.1)
    ]
    assert evaluate(graph, [graph.cast(x, "bool")], {("state", 1): math.nan}) == [True]
    assert evaluate(graph, [graph.cast(x, "i64")], {("state", 1): -2.9}) == [-2]


def test_tables_fold_into_tables():
    graph = Graph()
    i = graph.input("state", 0, "i64", (0, 2))
    entries = [graph.const(v, "f32") for v in (0.0, -0.0, math.inf)]
    table = graph.look_up(entries, i)
    inverse = graph.op("div", [graph.const(1.0, "f32"), table], "f32")
    both = graph.op("add", [inverse, table], "f32")
    assert (table.op, inverse.op, both.op) == ("table", "table", "table")
    found = [evaluate(graph, [inverse, both], {("state", 0): k}) for k in range(3)]
    assert [float(x) for x, _ in found] == [math.inf, -math.inf, 0.0]
    assert [float(x) for _, x in found] == [math.inf, -math.inf, math.inf]
    other = graph.look_up(entries, graph.input("state", 1, "i64", (0, 2)))
    assert graph.op("add", [table, other], "f32").op == "add"


def test_entries_that_are_no_constants_are_chosen():
    graph = Graph()
    i, x = graph.input("state", 0, "i64", (0, 2)), graph.input("state", 1, "f32")
    e = graph.look_up([x, graph.const(5.0, "f32"), graph.op("neg", [x], "f32")], i)
    assert [float(evaluate(graph, [e], {("state", 0): k, ("state", 1): 2.0})[0]) for k in range(3)] == [
        2,
        5,
        -2,
    ]


def test_substitution_folds_again():
    graph = Graph()
    c, x = graph.input("context", 0, "i64", (0, 3)), graph.input("state", 0, "f32")
    scale = graph.table(np.array([1.0, 2.0, 3.0, 4.0], np.float32), c, "f32")
    e = graph.op("mul", [x, scale], "f32")
    assert graph.substitute([e], {("context", 0): graph.const(0, "i64")}) == [x]
    (third,) = graph.substitute([e], {("context", 0): graph.const(2, "i64")})
    assert third.args[1].value == 3.0


def test_a_program_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(expressions, "MOST_EXPRESSIONS", 10)
    graph = Graph()
    for k in range(10):
        graph.input("state", k, "f32")
    with pytest.raises(Untraceable, match="more than 10 operations"):
        graph.input("state", 10, "f32")


def test_functions_of_a_truth_or_a_sign_are_computed_once_a_row():
    """Also where one of two choices divides by zero, or is no number."""
    graph = Graph()
    x, z = graph.input("state", 0, "f32"), graph.input("value", 0, "f32")
    positive = graph.cast(graph.op("gt", [x, graph.const(0, "f32")], "bool"), "f32")
    by_truth = graph.op("log", [graph.op("mul", [positive, z], "f32")], "f32")
    by_sign = graph.op("div", [z, graph.op("sign", [x], "f32")], "f32")
    whole = graph.op("floordiv", [graph.const(7, "i64"), graph.cast(positive, "i64")], "i64")
    roots = [by_truth, by_sign, whole]
    lifted = hoisted(graph, roots)
    costly = {e.op for e in in_order(lifted) if e.level == PARTICLE}
    assert costly.isdisjoint({"log", "div", "mul", "floordiv"})
    for value, seen in itertools.product(
        [2.0, -1.0, 0.0, -0.0, math.nan, math.inf], [3.0, 0.0, -2.0, math.nan]
    ):
        inputs = {("state", 0): value, ("value", 0): seen}
        pairs = zip(evaluate(graph, roots, inputs), evaluate(graph, lifted, inputs), strict=True)
        assert all(same(float(a), float(b)) for a, b in pairs), (value, seen)
