"""Programs as C functions: variants, masks, checks, tables and types."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch

from cpomdp_ppl.native import kernel as kernels
from cpomdp_ppl.native.c_code import Text, c_type
from cpomdp_ppl.native.compiler import compiled
from cpomdp_ppl.native.expressions import Graph, Untraceable, evaluate
from cpomdp_ppl.native.kernel import Source
from cpomdp_ppl.native.prelude import prelude, program_declarations
from cpomdp_ppl.native.tracing import Traced, argument, trace
from tests.native.compiled import FIRST, Compiled

WHOLE = [0, 1, -1, 3, -7, 2**31 - 1, -(2**31), 2**31, 2**53 + 1, 2**62 + 3, -(2**63), 2**63 - 1]


def whole_operations(graph: Graph, x, y):
    known = {name: graph.op(name, [x, y], "i64") for name in ("add", "sub", "mul", "min", "max")}
    known |= {
        name: graph.op(name, [x, y], "i64")
        for name in ("mod", "fmod", "floordiv", "bitand", "bitor", "bitxor")
    }
    known |= {name: graph.op(name, [x], "i64") for name in ("neg", "abs", "sign", "bitnot")}
    known |= {name: graph.op(name, [x, y], "bool") for name in ("eq", "ne", "lt", "le", "gt", "ge")}
    known |= {
        "to int32": graph.cast(x, "i32"),
        "to float32": graph.cast(x, "f32"),
        "to float64": graph.cast(x, "f64"),
    }
    known |= {
        f"mod {k}": graph.op("mod", [x, graph.const(k, "i64")], "i64") for k in (1, 2, 8, 10, -3, 2**40)
    }
    return known


@pytest.mark.slow
def test_whole_numbers_overflow_in_c_as_in_expressions():
    graph = Graph()
    x, y = (graph.input("state", FIRST + k, "i64") for k in range(2))
    known = whole_operations(graph, x, y)
    pairs = [(a, b) for a, b in itertools.product(WHOLE, WHOLE) if b]
    columns = np.array(pairs, np.int64).T
    status, outputs = Compiled(graph, Traced(tuple(known.values()), ()))(dict(enumerate(columns)))
    assert status == 0
    for row, (a, b) in enumerate(pairs):
        expected = evaluate(graph, list(known.values()), {("state", FIRST): a, ("state", FIRST + 1): b})
        for name, found, wanted in zip(known, outputs, expected, strict=True):
            assert found[row] == wanted, (name, a, b)


@pytest.mark.slow
def test_small_whole_numbers_take_four_bytes_and_never_overflow():
    """Bounds are given: what fits into four bytes is computed in four, and what does not, in eight."""
    graph = Graph()
    ends = (0, 2**31 - 1), (-(2**31), 0)
    x, y = (graph.input("state", FIRST + k, "i64", end) for k, end in enumerate(ends))
    known = whole_operations(graph, x, y)
    assert c_type(x) == c_type(y) == c_type(known["max"]) == "i32"
    assert c_type(known["add"]) == "i32"
    assert {c_type(known[name]) for name in ("sub", "mul")} == {"i64"}
    assert c_type(graph.op("neg", [y], "i64")) == "i64"
    pairs = list(itertools.product([0, 1, 77, 2**31 - 2, 2**31 - 1], [-(2**31), -5, -1]))
    columns = np.array(pairs, np.int64).T
    status, outputs = Compiled(graph, Traced(tuple(known.values()), ()))(dict(enumerate(columns)))
    assert status == 0
    for row, (a, b) in enumerate(pairs):
        expected = evaluate(graph, list(known.values()), {("state", FIRST): a, ("state", FIRST + 1): b})
        for name, found, wanted in zip(known, outputs, expected, strict=True):
            assert found[row] == wanted, (name, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 7, 16, 33])
def test_one_particle_that_fails_a_check_is_enough(number):
    graph = Graph()
    values = torch.arange(8).reshape(2, 2, 2)
    table = torch.linspace(0, 1, 8)
    traced = trace(
        graph, "observation", lambda i: [table[i], 5 // (i + 9)], [argument(graph, "state", FIRST, values)]
    )
    run = Compiled(graph, traced)
    good = np.arange(number) % 8
    status, (found, _) = run({0: good})
    assert status == 0
    np.testing.assert_array_equal(found, table.numpy()[good])
    status, (found, _) = run({0: -good - 1})
    assert status == 0, "torch counts negative indices from the end"
    np.testing.assert_array_equal(found, table.numpy()[-good - 1])
    for bad in (8, -9, 2**40, -(2**63), 2**63 - 1):
        for place in {0, number // 2, number - 1}:
            broken = good.copy()
            broken[place] = bad
            assert run({0: broken})[0] == 1, (bad, place)


def test_a_check_that_always_fails_is_kept():
    graph = Graph()
    x = graph.input("state", FIRST, "f32")
    never = graph.const(False, "bool")
    assert Compiled(graph, Traced((x,), (), ((never, "it is wrong"),)))({0: np.zeros(3)})[0] == 1


def test_what_was_observed_but_is_hidden_is_reported():
    """A mask that depends on what else was seen; and one that never lets anything through."""
    graph = Graph()
    x, z = graph.input("state", 0, "f32"), [graph.input("value", k, "f32") for k in range(2)]
    flags = [graph.input("flag", k, "bool") for k in range(2)]
    zero = graph.const(0.0, "f32")
    scores = [graph.where(flags[k], graph.op("mul", [x, z[k]], "f32"), zero) for k in range(2)]
    total = graph.op("add", scores, "f32")
    open_ = graph.op("gt", [z[0], zero], "bool")
    source = Source(graph, 1, 1, 0, ["f32"])
    source.add("score", Traced((total, graph.const(True, "bool"), open_), ()), output="f32", num_masks=2)
    text = source.text(C=1, A=1, D=1, E=0)
    assert "if (flag[1] & !(" in text
    assert "flag[0] & !" not in text
    source = Source(graph, 1, 1, 0, ["f32"])
    shut = graph.const(False, "bool")
    source.add("score", Traced((total, graph.const(True, "bool"), shut), ()), output="f32", num_masks=2)
    assert "val[1]" not in source.text(C=1, A=1, D=1, E=0), "what is never seen is not scored"


def test_contexts_and_actions_have_code_of_their_own_up_to_a_limit():
    graph = Graph()
    x = graph.input("state", 0, "f32")
    c, a = graph.input("context", 0, "i64", (0, 3)), graph.input("action", 0, "i64", (0, 1))
    row = graph.op("add", [graph.op("mul", [c, graph.const(2, "i64")], "i64"), a], "i64")
    push = graph.table(np.array([0, 0, 1, 2, 3, 4, 5, 6], np.float32), row, "f32")
    moved = Traced((graph.op("sub", [x, push], "f32"),), ())
    source = Source(graph, 4, 2, 0, ["f32"])
    source.add("move", moved)
    assert source.tables[0].count("{f") == 6
    assert source.tables[0].count("{0}") == 2, "by nothing at all, nothing is moved"
    assert len(source.functions) == 3, "by 1, by 2 (both of which stand in the text), and by another constant"
    assert source.constants == [3.0, 4.0, 5.0, 6.0]
    general = Source(graph, 4, kernels.MOST_VARIANTS, 0, ["f32"])
    general.add("move", moved)
    assert len(general.functions) == 1
    assert "tables[0]" in general.text(C=4)


def test_only_the_noise_that_is_needed_is_drawn():
    graph = Graph()
    x, a = graph.input("state", 0, "f32"), graph.input("action", 0, "i64", (0, 1))
    noise = [graph.input("noise", k, "f32") for k in range(2)]
    first = graph.op("eq", [a, graph.const(0, "i64")], "bool")
    moved = graph.op("add", [x, graph.where(first, *noise)], "f32")
    source = Source(graph, 1, 2, 2, ["f32"])
    source.add("move", Traced((moved,), (("normal", "f32"), ("uniform", "f32"))))
    assert "move_noise[] = {NORMAL, UNIFORM}" in source.text(C=1)
    assert "move_needed[] = {1, 0, 0, 1}" in source.text(C=1)


def test_constants_are_no_part_of_the_text():
    """So that other numbers need no compiler."""
    texts = []
    for value in (0.3, 0.7):
        graph = Graph()
        x = graph.input("state", FIRST, "f32")
        kernel = Compiled(graph, Traced((graph.op("mul", [x, graph.const(value, "f32")], "f32"),), ()))
        np.testing.assert_allclose(kernel({0: np.ones(5)})[1][0], np.full(5, value, np.float32))
        texts.append(kernel.text)
    assert texts[0] == texts[1]
    assert not re.search(r"0\.[37]\b", texts[0].split("static int f_0")[1])


def test_too_many_statements_are_refused(monkeypatch):
    monkeypatch.setattr(kernels, "MOST_STATEMENTS", 3)
    graph = Graph()
    e = graph.input("state", 0, "f32")
    for _ in range(5):
        e = graph.op("exp", [e], "f32")
    with pytest.raises(Untraceable, match="more than 3 statements"):
        Source(graph, 1, 1, 0, ["f32"]).add("move", Traced((e,), ()))


def test_an_operation_without_c_code_is_refused():
    graph = Graph()
    unknown = graph._make("gudermannian", (graph.input("state", 0, "f32"),), "f32", None)
    with pytest.raises(Untraceable, match="there is no C code for 'gudermannian'"):
        Text(lambda e: "x").add([unknown])


@pytest.mark.slow
def test_many_functions_have_names_of_their_own():
    """More than 64 of them, and `f32` and `f64` are types."""
    graph, contexts = Graph(), 24
    x, c = graph.input("state", 0, "f32"), graph.input("context", 0, "i64", (0, contexts - 1))
    source = Source(graph, contexts, 1, 0, ["f32"])
    for name, op in (("start", "exp"), ("move", "tanh"), ("reward", "sin")):
        powers = [x]
        for _ in range(contexts):
            powers.append(graph.op(op, [powers[-1]], "f32"))
        source.add(name, Traced((graph.look_up(powers[1:], c),), ()), output="f32")
    assert len(source.functions) == 3 * contexts > 64
    compiled("\n".join([prelude(), program_declarations(), source.text(C=contexts, A=1)]))
