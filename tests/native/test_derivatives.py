"""Derivatives of expressions against those of torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cpomdp_ppl.native.derivatives import FLAT, PARTIAL, derivatives
from cpomdp_ppl.native.expressions import DRAWS, Graph, Untraceable, evaluate
from cpomdp_ppl.native.scalars import EVALUATE
from cpomdp_ppl.native.tracing import argument, trace

ANY = torch.linspace(-3.3, 3.1, 23, dtype=torch.float64)
POSITIVE = torch.linspace(0.05, 4.1, 23, dtype=torch.float64)
INSIDE = torch.linspace(-0.93, 0.97, 23, dtype=torch.float64)
ONE = {  # of one number: the function of torch, and where it is defined
    "neg": (torch.neg, ANY),
    "abs": (torch.abs, torch.cat([ANY, torch.zeros(1)])),
    "sign": (torch.sign, torch.cat([ANY, torch.zeros(1)])),
    "sqrt": (torch.sqrt, POSITIVE),
    "exp": (torch.exp, ANY),
    "log": (torch.log, POSITIVE),
    "log2": (torch.log2, POSITIVE),
    "log10": (torch.log10, POSITIVE),
    "exp2": (torch.exp2, ANY),
    "log1p": (torch.log1p, POSITIVE),
    "expm1": (torch.expm1, ANY),
    "sin": (torch.sin, ANY),
    "cos": (torch.cos, ANY),
    "tan": (torch.tan, ANY),
    "sinh": (torch.sinh, ANY),
    "cosh": (torch.cosh, ANY),
    "tanh": (torch.tanh, ANY),
    "asin": (torch.asin, INSIDE),
    "acos": (torch.acos, INSIDE),
    "atan": (torch.atan, ANY),
    "floor": (torch.floor, ANY),
    "ceil": (torch.ceil, ANY),
    "round": (torch.round, ANY),
    "trunc": (torch.trunc, ANY),
    "sigmoid": (torch.sigmoid, ANY),
    "logsigmoid": (torch.nn.functional.logsigmoid, ANY),
    "softplus": (torch.nn.functional.softplus, torch.cat([ANY, torch.tensor([19.9, 20.1])])),
    "erf": (torch.erf, ANY),
    "erfc": (torch.erfc, ANY),
    "erfinv": (torch.erfinv, INSIDE),
    "ndtri": (torch.special.ndtri, (INSIDE + 1) / 2),
    "lgamma": (torch.lgamma, POSITIVE),
}
TWO = {
    "add": (torch.add, ANY, POSITIVE),
    "sub": (torch.sub, ANY, POSITIVE),
    "mul": (torch.mul, ANY, POSITIVE),
    "div": (torch.div, ANY, POSITIVE),
    "mod": (torch.remainder, ANY, POSITIVE),
    "fmod": (torch.fmod, ANY, POSITIVE),
    "floordiv": (lambda a, b: torch.div(a, b, rounding_mode="floor"), ANY, POSITIVE),
    "pow": (torch.pow, POSITIVE, torch.cat([ANY[1:], torch.zeros(1)])),
    "atan2": (torch.atan2, ANY, ANY.flip(0)),
    "hypot": (torch.hypot, ANY, POSITIVE),
    "max": (torch.maximum, ANY, torch.cat([ANY[:3], POSITIVE[3:]])),
    "min": (torch.minimum, ANY, torch.cat([ANY[:3], POSITIVE[3:]])),
}
TRUTHS = {
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "isnan", "isinf"),
    *("bitand", "bitor", "bitxor", "bitnot", "shl", "shr", "where", "cast", "digamma"),
}
"""Operations that have no derivative, or have a test of their own."""


def close(found, expected):
    np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-12, atol=1e-12)


def test_every_operation_is_tested():
    assert set(EVALUATE) == ONE.keys() | TWO.keys() | TRUTHS | DRAWS
    assert PARTIAL.keys() | FLAT <= ONE.keys() | TWO.keys()


@pytest.mark.parametrize("op", ONE)
def test_functions_of_one_number(op):
    function, points = ONE[op]
    graph = Graph()
    x = graph.input("state", 0, "f64")
    ((slope,),) = derivatives(graph, [graph.op(op, [x], "f64")], [x])
    at = points.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(at).sum(), at)
    close([evaluate(graph, [slope], {("state", 0): float(p)})[0] for p in points], expected)


@pytest.mark.parametrize("op", TWO)
def test_functions_of_two_numbers(op):
    function, left, right = TWO[op]
    graph = Graph()
    a, b = graph.input("state", 0, "f64"), graph.input("state", 1, "f64")
    (slopes,) = derivatives(graph, [graph.op(op, [a, b], "f64")], [a, b])
    at = left.clone().requires_grad_(), right.clone().requires_grad_()
    found = torch.autograd.grad(function(*at).sum(), at, allow_unused=True)
    expected = [torch.zeros_like(p) if each is None else each for p, each in zip(at, found, strict=True)]
    places = [{("state", 0): float(p), ("state", 1): float(q)} for p, q in zip(left, right, strict=True)]
    close([evaluate(graph, slopes, place) for place in places], torch.stack(expected, -1))


def traced_slopes(function, points):
    """Derivatives of a function of a vector, by its expressions and by torch, at points `[2, 2, 2, n]`."""
    graph = Graph()
    given = argument(graph, "state", 0, points)
    program = trace(graph, "program", lambda x: [function(x)], [given])
    slopes = derivatives(graph, program.outputs, list(given.expressions))
    for place in np.ndindex(2, 2, 2):
        x = points[place]
        inputs = {("state", k): float(value) for k, value in enumerate(x)}
        found = [evaluate(graph, row, inputs) for row in slopes]
        yield found, torch.autograd.functional.jacobian(lambda v: function(v[None, None, None])[0, 0, 0], x)


COMPOSED = {
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp by a number": lambda x: x.clamp(min=x[..., :1]),
    "relu": lambda x: x.relu(),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "where": lambda x: torch.where(x > 0.2, x.square(), -x),
    "a polynomial": lambda x: x**3 - x * x.flip(-1) + 2 / (x + 7),
    "powers": lambda x: (x.abs() + 1) ** 1.5 + 2**x + (x.abs() + 1) ** x,
    "norm": lambda x: torch.linalg.vector_norm(x + 3, dim=-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1).log(),
    "log of a sum": lambda x: x.logsumexp(-1, keepdim=True),
    "a product of matrices": lambda x: (torch.arange(9.0).double().reshape(3, 3).sin() @ x[..., None])[
        ..., 0
    ],
    "Cholesky": lambda x: torch.linalg.cholesky(
        x[..., :, None] * x[..., None, :] + 3 * torch.eye(3).double()
    ).flatten(-2),
    "steps": lambda x: x.floor() + x.sign() + x.round() * x,
    "single precision": lambda x: (x.float() * 2).double() + x,
    "a look-up": lambda x: torch.tensor([1.0, 5.0, 7.0]).double()[(x > 0).long() + 1] * x,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_programs(name):
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(2, 2, 2, 3, generator=draw, dtype=torch.float64)
    points[0, 0, 0] = torch.tensor([0.5, 0.0, -0.5])  # where functions have corners
    for found, expected in traced_slopes(COMPOSED[name], points):
        close(found, expected)


def test_what_is_not_chosen_may_be_nan():
    graph = Graph()
    x = graph.input("state", 0, "f64")
    root = graph.op("sqrt", [x], "f64")
    chosen = graph.where(graph.op("gt", [x, graph.const(0, "f64")], "bool"), root, x)
    ((slope,),) = derivatives(graph, [chosen], [x])
    assert evaluate(graph, [slope], {("state", 0): -2.0}) == [1.0]
    assert evaluate(graph, [slope], {("state", 0): 0.0}) == [1.0]
    assert evaluate(graph, [slope], {("state", 0): 4.0}) == [0.25]


def test_where_more_than_two_tie_there_is_a_condition():
    graph = Graph()
    x = [graph.input("state", k, "f64") for k in range(3)]
    conditions = []
    most = graph.op("max", [graph.op("max", x[:2], "f64"), x[2]], "f64")
    derivatives(graph, [most], x, conditions)
    assert conditions

    def holds(*values):
        inputs = {("state", k): value for k, value in enumerate(values)}
        return all(evaluate(graph, conditions, inputs))

    assert holds(1.0, 1.0, 0.0)
    assert not holds(1.0, 1.0, 1.0)


def test_nothing_depends_on_what_is_no_real_number():
    graph = Graph()
    x = graph.input("state", 0, "f64")
    index = graph.cast(x, "i64")
    looked_up = graph.table(np.array([1.0, 2.0]), index, "f64")
    truth = graph.cast(graph.op("gt", [x, graph.const(0, "f64")], "bool"), "f64")
    assert all(
        row[0].value == 0 for row in derivatives(graph, [looked_up, truth, graph.const(3, "f64")], [x])
    )


def test_what_has_no_derivative_is_refused():
    graph = Graph()
    x = graph.input("state", 0, "f64")
    with pytest.raises(Untraceable, match="no derivative of 'digamma'"):
        derivatives(graph, [graph.op("digamma", [x], "f64")], [x])
    drawn = graph.op("draw_gamma", [graph.input("noise", 0, "i64"), x], "f64")
    with pytest.raises(Untraceable, match="no derivative of 'draw_gamma'"):
        derivatives(graph, [drawn], [x])


def test_equal_derivatives_are_one_expression():
    graph = Graph()
    x = graph.input("state", 0, "f64")
    wave = graph.op("sin", [x], "f64")
    once = derivatives(graph, [wave], [x])[0][0]
    again = derivatives(graph, [wave, graph.op("add", [wave, graph.const(math.pi, "f64")], "f64")], [x])
    assert once is again[0][0] is again[1][0]
