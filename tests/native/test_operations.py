"""Every operation of torch that is known, as expressions and as C, against torch itself."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from cpomdp_ppl.native.expressions import Graph, evaluate, inputs_of
from cpomdp_ppl.native.operations import OPERATIONS
from cpomdp_ppl.native.tracing import Traced, argument, trace
from tests.native.compiled import FIRST, Compiled

N = 70
"""Particles on which C is compared with torch: no multiple of a register's width."""

SHAPES = {"x": (2, 3), "y": (2, 3), "u": (3,), "s": (), "i": (3,), "j": (2,), "k": (), "b": (3,), "n": (2,)}
"""Real numbers x, y and s, u in (0, 1), whole numbers i and n (int32), indices j and k up to 2, truths b."""


def drawn(dtype: torch.dtype, axes: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, name):
        draws = torch.rand(*axes, *SHAPES[name], generator=generator, dtype=torch.float64)
        return (low + (high - low) * draws).to(dtype)

    def whole(low, high, name, kind=torch.long):
        return torch.randint(low, high, (*axes, *SHAPES[name]), generator=generator).to(kind)

    return {
        "x": uniform(-3, 3, "x"),
        "y": uniform(-2, 2, "y"),
        "u": uniform(0.02, 0.98, "u"),
        "s": uniform(-1, 1, "s"),
        "i": whole(-7, 8, "i"),
        "j": whole(0, 3, "j"),
        "k": whole(0, 3, "k"),
        "b": whole(0, 2, "b", torch.bool),
        "n": whole(-9, 10, "n", torch.int32),
    }


def in_place(v, *changes):
    """A copy of a tensor after some changes to it."""
    out = v.clone()
    for change in changes:
        change(out)
    return out


def assigned(v, *places_and_values):
    out = v.clone()
    for place, value in places_and_values:
        out[place] = value
    return out


def two_by_two(v):
    """Positive definite matrices `[…, 2, 2]` of numbers `[…, 2, 3]`."""
    return v @ v.mT + 2 * torch.eye(2, dtype=v.dtype)


def constant(v, *values):
    return torch.tensor(values, dtype=v.dtype)


CASES = {
    "arithmetic": lambda v: (
        (v.x + v.y) * v.u[..., None, :] - v.x / (v.y.abs() + 1) + 2.5 * v.s[..., None, None]
    ),
    "alpha": lambda v: torch.add(v.x, v.y, alpha=3) - torch.sub(v.x, v.u[..., None, :], alpha=0.5),
    "rsub": lambda v: torch.rsub(v.x, 4.0, alpha=2) + torch.rsub(v.x, v.y),
    "whole arithmetic": lambda v: (v.i + 3) * (v.i - 2) - 4 * v.i,
    "mixed kinds": lambda v: v.i * v.u + v.b - (v.n.sum(-1, keepdim=True) + v.i),
    "int32": lambda v: v.n * 3 - v.n.abs() + torch.sign(v.n),
    "truths added": lambda v: (v.b + (v.i > 0)) * v.b,
    "truths summed": lambda v: (v.b + v.b).sum(-1) + v.b.sum(-1),
    "wraps around": lambda v: v.i * 6364136223846793005 + 1442695040888963407,
    "int32 wraps around": lambda v: v.n * 2000000011 - 2000000000,
    "beyond 2 ** 53": lambda v: (v.i + 2**53 + 1) * 3 + (v.i + 2**60 - 1) % 1000003,
    "floor division": lambda v: torch.stack([v.i // 3, v.i // -3, 11 // (v.i.abs() + 1)], -1),
    "towards zero": lambda v: torch.stack(
        [torch.div(v.i, d, rounding_mode="trunc") for d in (3, -3, v.i.abs() + 1)], -1
    ),
    "real floor division": lambda v: torch.stack(
        [v.x // 0.7, torch.div(v.x, v.y, rounding_mode="trunc")], -1
    ),
    "remainder": lambda v: torch.stack([v.i % 4, v.i % -5, v.i % 8, 17 % (v.i.abs() + 1)], -1),
    "real remainder": lambda v: torch.stack([v.x % 0.7, v.x % -0.4, torch.fmod(v.x, 0.7)], -1),
    "fmod": lambda v: torch.stack([torch.fmod(v.i, 4), torch.fmod(v.i + 2**60, 1000003)], -1),
    "powers": lambda v: torch.stack(
        [v.x**2, v.x**3, v.u.unsqueeze(-2) ** v.y, 2.0**v.x, v.x.abs() ** 0.5], -1
    ),
    "whole powers": lambda v: torch.stack([v.i**0, v.i**2, v.i**5], -1),
    "rounding": lambda v: torch.stack([v.x.floor(), v.x.ceil(), v.x.round(), v.x.trunc(), v.x.frac()], -1),
    "rounding of whole numbers": lambda v: torch.stack(
        [(v.i + 2**60 + 1).floor(), (v.i + 2**60 + 1).round(), v.i.ceil(), v.i.trunc()], -1
    ),
    "roots and logarithms": lambda v: torch.stack(
        [v.u.sqrt(), v.u.rsqrt(), v.u.log(), v.u.log2(), v.u.log10(), v.u.log1p(), v.u.logit()], -1
    ),
    "exponentials": lambda v: torch.stack(
        [
            v.x.exp(),
            v.x.exp2(),
            v.x.expm1(),
            v.x.sigmoid(),
            functional.softplus(v.x),
            functional.logsigmoid(v.x),
            v.x.tanh(),
        ],
        -1,
    ),
    "powers of two": lambda v: torch.stack(
        [(2.0 ** (v.i + 9)).to(v.x.dtype).log2().floor(), (v.i.to(v.x.dtype)).exp2().log2().round()], -1
    ),
    "trigonometry": lambda v: torch.stack(
        [v.x.sin(), v.x.cos(), v.s[..., None, None].tan() + 0 * v.x, v.x.sinh(), v.x.cosh(), v.x.atan()], -1
    ),
    "inverse trigonometry": lambda v: torch.stack(
        [v.u.asin(), v.u.acos(), torch.atan2(v.u, v.i), torch.hypot(v.u, v.i)], -1
    ),
    "special functions": lambda v: torch.stack(
        [v.u.erf(), v.u.erfc(), v.u.erfinv(), torch.special.ndtri(v.u), v.u.lgamma(), v.u.digamma()], -1
    ),
    "special names": lambda v: torch.stack(
        [torch.special.erfinv(v.u), torch.special.expm1(v.u), torch.special.log1p(v.u), v.u.arctan2(v.u)], -1
    ),
    "of one number": lambda v: torch.stack(
        [-v.x, v.x.abs(), v.x.sign(), v.x.sgn(), v.x.reciprocal(), v.x.square(), v.x.relu()], -1
    ),
    "products with logarithms": lambda v: torch.stack(
        [torch.xlogy(v.u, v.u), torch.special.xlog1py(v.i, v.u), torch.xlogy(v.u - v.u, v.u)], -1
    ),
    "extremes": lambda v: torch.stack([torch.maximum(v.x, v.y), torch.minimum(v.x, v.y), v.x.max(v.y)], -1),
    "whole extremes": lambda v: torch.stack(
        [torch.maximum(v.i, v.i.flip(-1)), v.i.clamp(min=v.i.flip(-1))], -1
    ),
    "logaddexp": lambda v: torch.logaddexp(v.x, v.y),
    "limits": lambda v: torch.stack(
        [v.x.clamp(-1, 1), v.x.clamp(min=v.y), v.x.clamp_min(0.5), v.x.clamp_max(v.y), v.x.clamp(2, 1)], -1
    ),
    "whole limits": lambda v: torch.stack([v.i.clamp(-2, 3), v.i.clamp_min(1), v.i.clamp_max(0)], -1),
    "a limit between whole numbers": lambda v: v.i.clamp(min=0.5),
    "three at once": lambda v: torch.stack(
        [
            torch.lerp(v.x, v.y, 0.3),
            torch.addcmul(v.x, v.y, v.y, value=2),
            torch.addcdiv(v.x, v.y, v.u[..., None, :]),
        ],
        -1,
    ),
    "comparisons": lambda v: torch.stack(
        [v.x < v.y, v.x <= v.y, v.x > 0, v.x >= 0.5, v.x == v.x, v.x != v.y, v.i[..., None, :] > v.x], -1
    ),
    "whole comparisons": lambda v: torch.stack(
        [v.i < 2, v.i <= 2, v.i > v.i.flip(-1), v.i >= -2.5, v.i == 3, v.i != 3, v.i + 2**53 == 2**53 + 1], -1
    ),
    "logic": lambda v: torch.stack(
        [
            torch.logical_and(v.b, v.i),
            torch.logical_or(v.b, v.i > 0),
            torch.logical_xor(v.b, v.u > 0.5),
            torch.logical_not(v.i),
            v.b & (v.i > 0),
            v.b | (v.i > 0),
            v.b ^ (v.i > 0),
            ~v.b,
        ],
        -1,
    ),
    "bits": lambda v: torch.stack([v.i & 5, v.i | 8, v.i ^ 3, ~v.i, v.i << 4, v.i >> 1], -1),
    "is": lambda v: torch.stack(
        [(v.x / 0).isnan(), (v.x / 0).isinf(), v.x.isfinite(), v.x.log().isnan(), (v.x / 0).isfinite()], -1
    ),
    "whole is": lambda v: torch.stack([v.i.isnan(), v.i.isinf(), v.i.isfinite()], -1),
    "nan_to_num": lambda v: torch.stack(
        [v.x.log().nan_to_num(), v.x.log().nan_to_num(nan=3.0), (v.x / 0).nan_to_num(0.0, 5.0, -6.0)], -1
    ),
    "choices": lambda v: (
        torch.where(v.b[..., None, :], v.x, 2.0) + torch.where(v.i > 0, v.u, v.i)[..., None, :]
    ),
    "masked_fill": lambda v: v.x.masked_fill(v.b[..., None, :], -7.0) + v.x.masked_fill(v.x > 0, 1.0),
    "copies": lambda v: (
        v.x.clone() + v.x.double().to(v.x.dtype) + v.i[..., None, :].to(v.x.dtype).contiguous()
    ),
    "conversions": lambda v: torch.stack(
        [
            v.x.long().sum(-1),
            v.x.int().sum(-1),
            v.x.bool().sum(-1),
            v.b.long()[..., :2],
            v.i.float().long()[..., :2],
        ],
        -1,
    ),
    "constants": lambda v: (
        torch.zeros_like(v.x) + torch.ones_like(v.x) + torch.full_like(v.x, 3) + v.x.new_full((3,), 2)
    ),
    "new constants": lambda v: (
        v.x.new_zeros(3) + v.x.new_ones(3) + torch.full((3,), 2.0) + v.x * torch.tensor(2.0)
    ),
    "joined": lambda v: (
        torch.cat([v.x, v.y, v.i[..., None, :]], -2)
        + torch.cat([v.x[..., :0, :], v.x, v.y, v.y], -2)[..., :5, :]
    ),
    "stacked": lambda v: torch.stack([v.x, v.y], 3) + torch.stack([v.x, v.y], -3),
    "flipped": lambda v: v.x.flip(-1) + v.y.flip([-1, -2]),
    "rolled": lambda v: v.x.roll(1, -1) + v.y.roll([1, 2], [-2, -1]),
    "repeated": lambda v: (
        v.u.repeat(1, 1, 1, 2).reshape(*v.u.shape[:3], 2, 3) + v.x.expand(*v.x.shape[:3], 2, 3)
    ),
    "matrices of zeros": lambda v: torch.diag_embed(v.u) + (v.x.mT @ v.x).tril() + (v.y.mT @ v.y).triu(1),
    "padded": lambda v: functional.pad(v.x, (1, 2), value=4.0) + functional.pad(v.y, (0, 3)),
    "view of a view": lambda v: (
        v.x.mT.reshape(*v.x.shape[:3], 6).unflatten(-1, (2, 3))[..., 1:, ::2].squeeze(-2)
    ),
    "diagonal": lambda v: (
        (v.x @ v.x.mT).diagonal(dim1=-2, dim2=-1) + torch.stack(v.x.unbind(-2)).sum(0)[..., :2]
    ),
    "split": lambda v: (
        sum(v.x.split([1, 2], -1), torch.zeros(())) + v.x.chunk(3, -1)[1].select(-1, 0)[..., None]
    ),
    "in place": lambda v: in_place(
        v.x,
        lambda z: z.add_(v.y).mul_(2.0).clamp_(-3, 3),
        lambda z: z[..., 0].neg_(),
        lambda z: z[..., 1, :].copy_(v.u),
        lambda z: z.mT[..., 2, :].zero_(),
        lambda z: z[..., 0, 1].fill_(0.25),
    ),
    "comparison in place": lambda v: in_place(v.x, lambda z: z.gt_(0.5), lambda z: z.add_(v.y)).amax(-1),
    "written through a view": lambda v: in_place(
        torch.zeros(*v.x.shape[:3], 6, dtype=v.x.dtype), lambda z: z.view(*v.x.shape)[..., 1, :].copy_(v.u)
    ),
    "slices assigned": lambda v: assigned(
        v.x, ((..., 0), v.s[..., None]), ((..., 1, slice(1, 3)), v.u[..., :2])
    ),
    "mask assigned": lambda v: assigned(
        v.x, (v.x > 1.0, 1.0), (v.x < -1, torch.tensor(-1.0, dtype=v.x.dtype))
    ),
    "mask assigned to rows": lambda v: assigned(v.x, (v.b[..., :2], constant(v.x, 1.0, 2.0, 3.0))),
    "looked up": lambda v: constant(v.x, 3.0, 1.5, -2.0)[v.j] + v.u[..., :2],
    "negative indices": lambda v: (
        constant(v.x, 3.0, 1.5, -2.0)[v.j - 3] + constant(v.x, 3.0, 1.5, -2.0)[-1 - v.j]
    ),
    "two indices": lambda v: (
        torch.arange(9.0).reshape(3, 3)[v.j, v.k[..., None]] + torch.eye(3)[v.k][..., :2]
    ),
    "rows": lambda v: (
        torch.arange(18.0).reshape(3, 2, 3)[v.k] + torch.arange(18.0).reshape(2, 3, 3)[:, v.k].movedim(0, -2)
    ),
    "constant indices": lambda v: (
        v.x[..., torch.tensor([2, 0])] + v.x[..., torch.tensor([True, False, True])]
    ),
    "gather": lambda v: (
        v.u.gather(-1, v.j) + v.x.gather(-1, v.k[..., None, None].expand(*v.x.shape[:3], 2, 1))[..., 0]
    ),
    "take_along_dim": lambda v: torch.take_along_dim(v.i, v.j, -1),
    "index_select": lambda v: v.x.index_select(-1, torch.tensor([2, 2, 0])),
    "embedding": lambda v: functional.embedding(v.j, torch.arange(12.0, dtype=v.x.dtype).reshape(3, 4)),
    "one_hot": lambda v: functional.one_hot(v.j, 4) * 2 + functional.one_hot(v.k, 4)[..., None, :],
    "scatter": lambda v: (
        torch.zeros_like(v.u).scatter(-1, v.j, v.u[..., :2]).scatter(-1, v.k[..., None], 5.0)
    ),
    "scatter_add": lambda v: v.u.scatter_add(-1, v.j, v.x[..., 0, :]),
    "entries assigned": lambda v: assigned(
        v.x, ((..., 1, torch.tensor([0, 2])), v.u[..., :2]), ((..., [0], torch.tensor([-1])), 4.0)
    ),
    "buckets": lambda v: torch.stack(
        [
            torch.bucketize(v.x, constant(v.x, -1.0, 0.0, 1.0)),
            torch.searchsorted(constant(v.x, -1.0, 0.0, 1.0), v.y, right=True),
        ],
        -1,
    ),
    "whole buckets": lambda v: torch.stack(
        [torch.bucketize(v.i, torch.tensor([-1, 0, 4]), right=right) for right in (False, True)], -1
    ),
    "sums": lambda v: v.x.sum(-1) + v.x.sum((-1, -2), keepdim=True)[..., 0] + v.i.sum(-1)[..., None],
    "products": lambda v: v.x.prod(-1) + v.i.prod(-1)[..., None],
    "any and all": lambda v: torch.stack(
        [v.b.any(-1), v.b.all(-1), (v.x > -2).all(-1).any(-1), v.i.all(-1)], -1
    ),
    "largest": lambda v: (
        v.x.amax(-1) + v.x.amin((-1, -2), keepdim=True)[..., 0] + v.x.max(-1).values - v.x.min(-1)[0]
    ),
    "where largest": lambda v: torch.stack(
        [
            v.x.max(-1).indices,
            v.x.argmin(-1),
            v.i.argmax(-1, keepdim=True).expand(*v.i.shape[:3], 2),
            v.x.argmax(-2)[..., :2],
        ],
        -1,
    ),
    "mean and spread": lambda v: torch.stack(
        [
            v.x.mean(-1),
            v.x.var(-1),
            v.x.std(-1, correction=0),
            v.x.var(-1, unbiased=False),
            v.x.mean((-1, -2))[..., None].expand(*v.x.shape[:4]),
        ],
        -1,
    ),
    "cumulative": lambda v: (
        v.x.cumsum(-1) + v.x.cumprod(-2) + v.i.cumsum(-1)[..., None, :] + v.b.cumsum(-1)[..., None, :]
    ),
    "softmax": lambda v: v.x.softmax(-1) + v.x.log_softmax(-2) + v.x.logsumexp((-1, -2))[..., None, None],
    "logsumexp of nothing": lambda v: torch.where(v.b, v.u, -math.inf).logsumexp(-1),
    "norms": lambda v: torch.stack(
        [v.x.norm(dim=-1), torch.linalg.vector_norm(v.x, 1, -1), torch.linalg.vector_norm(v.x, math.inf, -1)],
        -1,
    ),
    "matrix products": lambda v: v.x @ v.y.mT @ v.x + torch.einsum("...ij,...j->...i", v.x, v.u)[..., None],
    "layers": lambda v: functional.linear(
        v.x, torch.arange(12.0, dtype=v.x.dtype).reshape(4, 3), constant(v.x, 1.0, 2, 3, 4)
    ),
    "vector products": lambda v: v.u @ constant(v.x, 1.0, -2.0, 0.5) + torch.linalg.vecdot(v.u, v.u),
    "of whole axes": lambda v: torch.stack(
        [
            torch.baddbmm(
                v.y.flatten(0, 2), v.x.flatten(0, 2), torch.ones(len(v.x.flatten(0, 2)), 3, 3).to(v.x)
            ),
            torch.bmm(v.x.flatten(0, 2), torch.ones(len(v.x.flatten(0, 2)), 3, 3).to(v.x)),
            (v.x.flatten(0, 3) @ torch.arange(9.0).to(v.x).reshape(3, 3)).reshape(-1, 2, 3),
            torch.addmv(v.y.flatten(), v.x.flatten(0, 4)[:, None], constant(v.x, 2.0)).reshape(-1, 2, 3),
        ],
        -1,
    ).reshape(*v.x.shape, 4),
    "shifts": lambda v: torch.bitwise_left_shift(v.i, 3) + torch.bitwise_right_shift(v.i, torch.tensor(2)),
    "room": lambda v: torch.empty_like(v.x).copy_(v.y) + v.x.new_empty(3).fill_(2.0),
    "no bits are lost": lambda v: (v.x.detach() + v.y).square().isfinite() & v.x.square().isfinite(),
    "cholesky": lambda v: torch.linalg.cholesky(two_by_two(v.x)),
    "triangular": lambda v: (
        torch.linalg.solve_triangular(torch.linalg.cholesky(two_by_two(v.x)), v.y, upper=False)
        + torch.linalg.solve_triangular(two_by_two(v.x).triu(), v.y, upper=True, unitriangular=True)
    ),
}


@cache
def everything(dtype: torch.dtype):
    """All cases as one kernel, with the operations that they met."""
    graph, met = Graph(), set()
    known = dict(OPERATIONS)
    some = drawn(dtype, (2, 2, 2), seed=1)
    arguments, first = [], FIRST
    for values in some.values():
        arguments.append(argument(graph, "state", first, values))
        first += arguments[-1].expressions.size
    with pytest.MonkeyPatch.context() as patch:
        for name, function in known.items():
            patch.setitem(OPERATIONS, name, lambda call, f=function: (met.add(call.name), f(call))[1])
        traced = {
            name: trace(
                graph,
                name,
                lambda *v, f=f: [f(SimpleNamespace(**dict(zip(SHAPES, v, strict=True))))],
                arguments,
            )
            for name, f in CASES.items()
        }
    outputs = tuple(e for each in traced.values() for e in each.outputs)
    checks = tuple(check for each in traced.values() for check in each.checks)
    return graph, traced, Compiled(graph, Traced(outputs, (), checks)), met


def columns(given: dict[str, torch.Tensor]) -> dict[int, np.ndarray]:
    """Every number of the inputs, for all particles."""
    flat = [x.reshape(-1, math.prod(SHAPES[name])) for name, x in given.items()]
    return dict(enumerate(each[:, k].numpy() for each in flat for k in range(each.shape[1])))


@cache
def in_c(dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What C makes of all cases, `[N, outputs]`."""
    _, traced, kernel, _ = everything(dtype)
    status, outputs = kernel(columns(drawn(dtype, (1, 1, N), seed=2)))
    assert status == 0
    rest = iter(outputs)
    return {name: np.stack([next(rest) for _ in each.outputs], 1) for name, each in traced.items()}


def by_torch(name: str, dtype: torch.dtype) -> np.ndarray:
    result = CASES[name](SimpleNamespace(**drawn(dtype, (1, 1, N), seed=2)))
    return result.expand(1, 1, N, *result.shape[3:]).reshape(N, -1).numpy()


def assert_same(found: np.ndarray, expected: np.ndarray, dtype: torch.dtype) -> None:
    """Whole numbers are the same; real ones up to rounding, of which a case has some dozen."""
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected.astype(found.dtype))
        return
    tolerance = 300 * torch.finfo(dtype).eps
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.mark.slow
@TYPES
@pytest.mark.parametrize("name", CASES)
def test_c_computes_what_torch_does(name, dtype):
    assert_same(in_c(dtype)[name], by_torch(name, dtype), dtype)


@pytest.mark.slow
@TYPES
@pytest.mark.parametrize("name", CASES)
def test_expressions_come_to_what_torch_computes(name, dtype):
    graph, traced, _, _ = everything(dtype)
    given, wanted = columns(drawn(dtype, (1, 1, N), seed=2)), by_torch(name, dtype)
    outputs = traced[name].outputs
    used = [k - FIRST for _, k in inputs_of(outputs)]
    for particle in range(3):
        inputs = {("state", FIRST + k): given[k][particle] for k in used}
        found = np.array(evaluate(graph, outputs, inputs))
        assert_same(found, wanted[particle], dtype)


TAKEN_APART = {
    *(
        "__and__",
        "__or__",
        "__xor__",
        "alias",
        "arctan2",
        "contiguous",
        "detach",
        "divide",
        "dot",
        "full",
        "isfinite",
    ),
    *(
        "lift_fresh",
        "lift_fresh_copy",
        "linalg_cholesky",
        "matmul",
        "norm",
        "normal_functional",
        "scalar_tensor",
    ),
    *(
        "special_erfinv",
        "special_expm1",
        "special_log1p",
        "special_xlogy",
        "square",
        "to",
        "true_divide",
        "vdot",
    ),
    *("_index_put_impl", "cholesky", "triangular_solve"),  # old names, of which torch warns
    *("_conj", "view_as_complex", "view_as_real"),  # refused
}
"""Names that this version of torch spells otherwise, or takes apart before anyone notes them."""


@pytest.mark.slow
def test_every_operation_is_among_the_cases():
    met = everything(torch.float32)[-1] | DRAWN.keys()
    assert OPERATIONS.keys() - met == TAKEN_APART & OPERATIONS.keys() - met


# ---------------------------------------------------------------------------------------------------------
# Numbers at the edge

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 7.25, 1e30, -1e30, math.inf, -math.inf, math.nan]
AT_EDGES = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "quotient": lambda x, y: x / y,
    "zero": lambda x, y: x + 0.0,
    "no zero": lambda x, y: 0.0 * x,
    "half": lambda x, y: x / 2 - y / 0.25,
    "remainder": lambda x, y: x.clamp(-9, 9) % y.clamp(-9, 9),
    "floor division": lambda x, y: torch.div(x.clamp(-9, 9), y, rounding_mode="floor"),
    "root": lambda x, y: x**0.5,
    "powers": lambda x, y: torch.stack([x**2, x**3, x**-1, x**-2, x**0], -1),
    "rounded": lambda x, y: torch.stack([x.round(), x.floor(), x.ceil(), x.trunc(), x.sign()], -1),
    "limits": lambda x, y: torch.stack([x.clamp(-1, 1), x.clamp(min=y), x.clamp(max=y)], -1) + 0.0,
    "extremes": lambda x, y: torch.stack([torch.maximum(x, y), torch.minimum(x, y)], -1) + 0.0,
    "comparisons": lambda x, y: torch.stack([x < y, x <= y, x == y, x != y, x > y, x >= y, x.bool()], -1),
    "choices": lambda x, y: torch.where(x > 0, x, y),
    "what is": lambda x, y: torch.stack([x.isnan(), x.isinf(), x.isfinite(), (x + y).isnan()], -1),
    "best": lambda x, y: torch.stack([x, y, -x], -1).argmax(-1),
    "worst": lambda x, y: torch.stack([x, y, -x], -1).min(-1).indices,
    "buckets": lambda x, y: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5], dtype=x.dtype)),
    "logsumexp": lambda x, y: torch.stack([x, y], -1).logsumexp(-1),
    "softmax": lambda x, y: torch.stack([x, y, x], -1).log_softmax(-1),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "products with logarithms": lambda x, y: torch.xlogy(x, y),
    "angle": lambda x, y: torch.atan2(x, y),
    "functions": lambda x, y: torch.stack([x.exp(), x.log(), x.sqrt(), x.tanh(), x.sigmoid(), x.log1p()], -1),
    "in place of others": lambda x, y: x.nan_to_num(7.0),
}


@cache
def at_edges(dtype):
    graph = Graph()
    values = torch.tensor(EDGES[:8], dtype=dtype).reshape(2, 2, 2)
    arguments = [argument(graph, "state", FIRST + k, values.roll(k, 0)) for k in range(2)]
    traced = {
        name: trace(graph, name, lambda x, y, f=f: [f(x, y)], arguments) for name, f in AT_EDGES.items()
    }
    kernel = Compiled(graph, Traced(tuple(e for each in traced.values() for e in each.outputs), ()))
    x, y = (each.flatten() for each in torch.meshgrid(*[torch.tensor(EDGES, dtype=dtype)] * 2, indexing="ij"))
    status, outputs = kernel({0: x.numpy(), 1: y.numpy()})
    assert status == 0
    rest = iter(outputs)
    return x, y, {name: np.stack([next(rest) for _ in each.outputs], 1) for name, each in traced.items()}


@pytest.mark.slow
@TYPES
@pytest.mark.parametrize("name", AT_EDGES)
def test_infinities_nan_and_minus_zero_are_as_in_torch(name, dtype):
    x, y, found = at_edges(dtype)
    expected = AT_EDGES[name](x[None, None], y[None, None]).reshape(len(x), -1)
    if not expected.is_floating_point():
        np.testing.assert_array_equal(found[name], expected.numpy().astype(found[name].dtype))
        return
    tolerance = 20 * torch.finfo(dtype).eps
    np.testing.assert_allclose(found[name], expected.numpy(), rtol=tolerance, atol=0)
    known = expected == expected
    signs = torch.signbit(expected)[known].numpy()
    np.testing.assert_array_equal(np.signbit(found[name])[known.numpy()], signs)


# ---------------------------------------------------------------------------------------------------------
# Draws


def like(s, *shape):
    return torch.zeros(*s.shape, *shape, dtype=s.dtype)


DRAWN = {  # by operation: draws, and what they are on average
    "randn": (lambda s: torch.randn(*s.shape, 2, dtype=s.dtype), [0, 0]),
    "randn_like": (lambda s: torch.randn_like(s).square(), [1]),
    "rand": (lambda s: torch.rand(*s.shape, 2, dtype=s.dtype), [0.5, 0.5]),
    "rand_like": (lambda s: torch.rand_like(s).square(), [1 / 3]),
    "normal": (
        lambda s: torch.stack(
            [
                torch.normal(like(s) + 2, like(s) + 3.0),
                torch.normal(like(s) + 2, 3.0).square(),
                torch.normal(4.0, like(s) + 0.5),
                like(s).normal_(1.0, 2.0).square(),
                like(s).normal_(std=2.0).square(),
                torch.normal(1.0, 2.0, s.shape, dtype=s.dtype).square(),
            ],
            -1,
        ),
        [2, 13, 4, 5, 4, 5],
    ),
    "uniform": (
        lambda s: torch.stack([like(s).uniform_(), like(s).uniform_(-1, 3).square()], -1),
        [0.5, 7 / 3],
    ),
    "exponential": (lambda s: torch.stack([like(s).exponential_(), like(s).exponential_(2.0)], -1), [1, 0.5]),
    "cauchy": (
        lambda s: torch.stack([(like(s).cauchy_(1.0, 2.0) < q).to(s) for q in (-1, 1, 3)], -1),
        [0.25, 0.5, 0.75],
    ),
    "log_normal": (lambda s: like(s).log_normal_(0.5, 0.25), [math.exp(0.5 + 0.25**2 / 2)]),
    "bernoulli": (
        lambda s: torch.stack(
            [torch.bernoulli(like(s) + 0.3), like(s).bernoulli_(0.8), like(s).bernoulli_(like(s) + 0.1)], -1
        ),
        [0.3, 0.8, 0.1],
    ),
    "multinomial": (
        lambda s: functional.one_hot(
            torch.multinomial(torch.tensor([[1.0, 0.0, 3.0, 4.0, 0.0]]).expand(s.numel(), 5), 1).reshape(
                s.shape
            ),
            5,
        ),
        [0.125, 0, 0.375, 0.5, 0],
    ),
    "_standard_gamma": (
        lambda s: torch._standard_gamma(like(s, 3) + torch.tensor([0.3, 1.0, 20.0]).to(s)),
        [0.3, 1, 20],
    ),
    "poisson": (lambda s: torch.poisson(like(s, 3) + torch.tensor([0.0, 0.7, 30.0]).to(s)), [0, 0.7, 30]),
    "binomial": (
        lambda s: torch.binomial(
            like(s, 3) + torch.tensor([5.0, 100, 100]).to(s), like(s, 3) + torch.tensor([0.2, 0.9, 0.5]).to(s)
        ),
        [1, 90, 50],
    ),
    "_sample_dirichlet": (
        lambda s: torch._sample_dirichlet(like(s, 3) + torch.tensor([1.0, 2.0, 5.0]).to(s)),
        [1 / 8, 2 / 8, 5 / 8],
    ),
}


@pytest.mark.slow
@TYPES
def test_draws_have_the_right_mean(dtype):
    """20,000 of each: means are within 4.5 of their standard errors."""
    graph, number, generator = Graph(), 20_000, np.random.default_rng(0)
    s = argument(graph, "state", FIRST, torch.linspace(0, 1, 8, dtype=dtype).reshape(2, 2, 2))
    for name, (function, expected) in DRAWN.items():
        traced = trace(graph, name, lambda x, f=function: [f(x)], [s])
        noise = {
            "normal": lambda: generator.standard_normal(number),
            "uniform": lambda: generator.random(number),
            "bits": lambda: generator.integers(-(2**63), 2**63 - 1, number),
        }
        drawn_noise = {k: noise[what]() for k, (what, _) in enumerate(traced.noise)}
        status, outputs = Compiled(graph, traced)({}, drawn_noise, number=number)
        assert status == 0
        for samples, mean in zip(outputs, expected, strict=True):
            error = max(samples.astype(float).std() / number**0.5, 1e-12)
            assert abs(samples.astype(float).mean() - mean) < 4.5 * error, name
