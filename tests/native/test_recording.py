"""What is noted of a program, through views and writes, and what is refused, with its line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from cpomdp_ppl.native.expressions import Graph, Untraceable
from cpomdp_ppl.native.operations import Program
from cpomdp_ppl.native.recording import ExitsRefused, Recorder, certain, is_traced
from cpomdp_ppl.native.tracing import Argument, argument, trace

X = torch.linspace(-1.3, 2.1, 24).reshape(2, 2, 2, 3)
WHOLE = torch.arange(8).reshape(2, 2, 2)


def traced(function, *values: torch.Tensor, method: str = "transition"):
    graph, arguments, first = Graph(), [], 0
    for value in values:
        arguments.append(argument(graph, "state", first, value))
        first += arguments[-1].expressions.size
    return trace(graph, method, lambda *given: [function(*given)], arguments)


KEPT = torch.tensor([1.0, 2.0, 3.0])


def writes_to_what_it_did_not_make(x):
    KEPT.add_(x.sum())
    return x


def draws_from_a_generator(x):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def branches(x):
    return x if bool(x.sum() > 0) else -x


def goes_through_numpy(x):
    return torch.from_numpy(np.sin(x.numpy()))


def goes_through_a_list(x):
    return torch.tensor(x.tolist())


def sorts(x):
    return x.sort(-1).values


REFUSED = [
    (writes_to_what_it_did_not_make, X, "a tensor is written to that the program did not make"),
    (draws_from_a_generator, X, "random numbers are drawn from a generator of its own"),
    (branches, X, "looks at a value that depends on its inputs"),
    (lambda x: x[x > 0], X, "the shape of what it picks depends on values"),
    (lambda x: x.masked_select(x > 0), X, "looks at a value"),
    (lambda x: (x > 0).nonzero(), X, "looks at a value"),
    (lambda x: x * x.sum().item(), X, "looks at a value"),
    (lambda x: torch.tensor([float(v) for v in x.flatten()]), X, "looks at a value"),
    (goes_through_numpy, X, "leaves torch"),
    (goes_through_a_list, X, "leaves torch"),
    (lambda x: x.view(torch.int32), X, "the bits of a number are taken for another number"),
    (lambda x: x.half().float(), X, "numbers of torch.float16"),
    (lambda x: x.to(torch.complex64).abs(), X, "numbers of torch.complex64"),
    (sorts, X, "operation 'sort' is not known"),
    (lambda x: torch.linalg.svdvals(x[..., None]), X, "is not known"),
    (lambda x: x + torch.randn(3), X, "drawn that are no sample site"),
    (lambda x: x + torch.rand(x.shape[0]), X[..., 0], "random numbers are drawn that are no sample site"),
    (lambda x: x - x.mean((0, 1, 2)), X, "its expressions come to .* where it computes"),
    (lambda x: x.cumsum(2), X, "a value depends on other contexts, episodes or particles"),
    (lambda x: x.flip(2), X, "its expressions come to .* where it computes"),
    (lambda x: x * x.shape[2], X, "it depends on how many contexts, episodes or particles there are"),
    (lambda i: functional.one_hot(i) * 1.0, WHOLE, "without a number of classes"),
    (lambda x: functional.softplus(x, beta=2.0), X, "with a beta or threshold of its own"),
    (lambda x: x.round(decimals=1), X, "to decimals"),
    (lambda i: 2**i, WHOLE, "of whole numbers"),
    (lambda i: 1 << i, WHOLE, "by bits that are no constant"),
    (lambda x: functional.dropout(x, 0.5).sort().values, X, "is not known"),
]


@pytest.mark.parametrize(("function", "value", "why"), REFUSED)
def test_what_cannot_be_followed_is_refused(function, value, why):
    before = KEPT.clone()
    with pytest.raises(Untraceable, match=why):
        traced(function, value)
    assert torch.equal(KEPT, before), "a write that is refused was done all the same"


def test_a_refusal_names_the_line():
    with pytest.raises(
        Untraceable, match=r"transition \(sorts, line \d+: return x\.sort\(-1\)\.values\): operation 'sort'"
    ):
        traced(sorts, X)


def test_a_constant_may_be_looked_at():
    def function(x):
        table = torch.arange(3.0)
        copy = torch.zeros_like(x).add_(1.0)
        steps = int(table.sum()) + int(copy.sum() / copy.numel())
        return x * steps + table.numpy().sum() + float(table[table > 1])

    found = traced(function, X)
    assert len(found.outputs) == 3
    assert not found.checks


def test_what_is_overwritten_is_forgotten():
    def function(x):
        room = torch.empty_like(x)
        view = room[..., 1:]
        room.copy_(x)
        view.fill_(3.0)
        room[..., 0] = view[..., 0] * 2
        return room

    assert [e.value for e in traced(function, X).outputs] == [6.0, 3.0, 3.0]


def test_the_arguments_of_a_trace_stay_as_they_are():
    values = X.clone()

    def function(x):
        return x.clone().mul_(2.0)

    traced(function, values)
    assert torch.equal(values, X)


def test_an_index_outside_is_a_check_and_is_never_looked_up():
    table = torch.arange(10.0)
    found = traced(lambda i: table[i], WHOLE)
    ((check, fault),) = found.checks
    assert fault == "an index is outside of 0 to 9"
    assert check.op == "and"
    assert not traced(lambda i: table[i % 10], WHOLE).checks
    assert not traced(lambda i: table[i.clamp(0, 9)], WHOLE).checks
    assert traced(lambda i: functional.one_hot(i, 9), WHOLE).checks
    assert traced(lambda i: table.gather(0, i.flatten()).reshape(i.shape), WHOLE).checks


def test_a_divisor_that_may_be_zero_is_a_check():
    ((_, fault),) = traced(lambda i: 5 // (i + 1), WHOLE).checks
    assert fault == "a whole number is divided by zero"
    assert not traced(lambda i: i // 3 + i % 4, WHOLE).checks
    assert not traced(lambda x: 5.0 // x, X).checks


def test_noise_is_counted_and_shared_by_no_two_numbers():
    found = traced(lambda x: torch.randn(*x.shape[:3], 2) + torch.rand(*x.shape[:3], 1), X)
    assert found.noise == (("normal", "f32"), ("normal", "f32"), ("uniform", "f32"))
    inputs = [{e.value for e in output.args} for output in found.outputs]
    assert inputs == [{("noise", 0), ("noise", 2)}, {("noise", 1), ("noise", 2)}]


def test_learned_constants_are_inputs():
    graph = Graph()
    weight = torch.tensor([0.5, -2.0])
    names = np.array([graph.input("param", k, "f32") for k in range(2)], object)
    x = argument(graph, "state", 0, X)
    found = trace(graph, "transition", lambda x: [x[..., :2] * weight.exp()], [x], [Argument(weight, names)])
    assert all("exp" in repr(e) and "param" in repr(e) for e in found.outputs)


def test_whether_something_is_certain_is_unknown_while_it_is_traced():
    told = []

    def function(x):
        told.append((is_traced(), certain(x > -100), certain(torch.ones(2) > 0)))
        return x

    traced(function, X)
    assert set(told) == {(True, False, True)}
    assert not is_traced()
    assert certain(X > -100)


def test_kinds_are_those_of_tensors_after_writes_in_place():
    recorder = Recorder(Program(Graph()))
    x = X.clone()
    recorder.give(x, argument(recorder.program.graph, "state", 0, X[:1, :1, :1]).expressions)
    with ExitsRefused(recorder), recorder:
        y = x.clone().gt_(0.5)
        z = torch.zeros(x.shape, dtype=torch.long).copy_(x)
    assert {e.kind for e in recorder.of(y).ravel()} == {"f32"}
    assert {e.kind for e in recorder.of(z).ravel()} == {"i64"}
