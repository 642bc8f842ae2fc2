"""Products, factors and triangular systems of small matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpomdp_ppl.native.operations.call import Array, OperationCall, array, operation


def matrix_product(call: OperationCall, a: Any, b: Any) -> Array:
    """`A B` of matrices `[…, n, k]` and `[…, k, m]`."""
    a, b = call.as_kind(a, call.kind), call.as_kind(b, call.kind)
    products = call.pointwise("mul", a[..., :, :, None], b[..., None, :, :])
    return call.fold("add", products, [products.ndim - 2])


@operation("mm", "bmm", "matmul")
def _product(call: OperationCall) -> Array:
    return matrix_product(call, *call.args[:2]).reshape(call.shape)


@operation("mv", "dot", "vdot")
def _vector_product(call: OperationCall) -> Array:
    a, b = call.args[:2]
    return matrix_product(call, a if a.ndim == 2 else a[None], b[:, None]).reshape(call.shape)


@operation("addmm", "baddbmm", "addmv")
def _affine(call: OperationCall) -> Array:
    c, a, b = call.args[:3]
    if call.kwargs.get("beta", 1) != 1 or call.kwargs.get("alpha", 1) != 1:
        raise call.refuse("with factors")
    product = matrix_product(call, a, b if call.name != "addmv" else b[:, None])
    return call.pointwise("add", c, product.reshape(call.shape))


@operation("linalg_cholesky_ex", "linalg_cholesky", "cholesky")
def _cholesky(call: OperationCall) -> Any:
    if call.arg(1, "upper", False):
        raise call.refuse("upper")
    do, A = call.pointwise, call.as_kind(call.args[0], call.kind)
    n = A.shape[-1]
    L = np.broadcast_to(call.as_kind(0, call.kind), A.shape).copy()
    for j in range(n):
        row = L[..., j, :j]
        pivot = A[..., j, j]
        if j:
            pivot = do("sub", pivot, call.fold("add", do("mul", row, row), [row.ndim - 1]))
        root = do("sqrt", np.asarray(pivot, object))
        L[..., j, j] = root if root.ndim else root[()]
        for i in range(j + 1, n):
            rest = A[..., i, j]
            if j:
                both = do("mul", L[..., i, :j], row)
                rest = do("sub", np.asarray(rest, object), call.fold("add", both, [both.ndim - 1]))
            entry = do("div", np.asarray(rest, object), root)
            L[..., i, j] = entry if entry.ndim else entry[()]
    if call.name != "linalg_cholesky_ex":
        return L
    for e in L[..., range(n), range(n)].ravel():  # NaN, if there is no such factor
        positive = call.graph.op("gt", [e, call.graph.const(0, e.kind)], "bool")
        call.program.check(positive, "a matrix is not positive definite")
    return [L, np.broadcast_to(array([call.graph.const(0, "i32")], ()), A.shape[:-2])]


@operation("linalg_solve_triangular", "triangular_solve")
def _triangular(call: OperationCall) -> Any:
    old = call.name == "triangular_solve"  # which takes its arguments the other way round
    A, B = call.args[1::-1] if old else call.args[:2]
    upper = call.kwargs.get("upper", True) if not old else call.arg(2, "upper", True)
    if not call.kwargs.get("left", True) or (old and call.arg(3, "transpose", False)):
        raise call.refuse("from the right")
    unit = bool(call.arg(4, "unitriangular", False))
    do, A, B = call.pointwise, call.as_kind(A, call.kind), call.as_kind(B, call.kind)
    n = A.shape[-1]
    X: dict[int, Array] = {}
    for i in reversed(range(n)) if upper else range(n):
        rest = B[..., i, :]
        for j, x in X.items():
            rest = do("sub", rest, do("mul", A[..., i, j, None], x))
        X[i] = rest if unit else do("div", rest, A[..., i, i, None])
    out = np.stack([X[i] for i in range(n)], -2)
    return [out, A] if old else out
