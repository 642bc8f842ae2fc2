"""Traced functions as C, run on arrays: one number of every particle each."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cpomdp_ppl.native.c_code import c_type
from cpomdp_ppl.native.compiler import compiled
from cpomdp_ppl.native.expressions import in_order
from cpomdp_ppl.native.kernel import Source
from cpomdp_ppl.native.prelude import prelude, program_declarations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.native.expressions import Graph
    from cpomdp_ppl.native.tracing import Traced

ARRAYS = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}

FIRST = 10_000
"""Where inputs of particles begin: an output that is the input of the same number would not be written."""

CALL = """
int call(const f64 *K, const f64 *P, const void *const *tables, const f64 *val, const u8 *flag,
         void *const *xs, void *const *es, void *const *ys, int N)
{
    const Variant *v = programs.move.variants;
    return v->function(0, 0, NULL, K + v->constants, P, tables, val, flag, xs, es, ys, N);
}
"""


class Compiled:
    """A function of numbers of particles, `("state", FIRST + k)`, and of noise.

    Args:
        graph: Where its expressions are.
        traced: The function.
    """

    def __init__(self, graph: Graph, traced: Traced) -> None:
        self.outputs, self.noise = traced.outputs, traced.noise
        self.types = [c_type(e) for e in traced.outputs]
        source = Source(graph, 1, 1, len(traced.noise), self.types)
        source.add("move", traced)
        text = source.text(C=1, A=1, D=len(self.outputs), E=len(traced.noise))
        self.text = "\n".join([prelude(), program_declarations(), text, CALL])
        self.library = compiled(self.text)
        self.constants = np.array([*source.constants, 0.0])
        self.tables = [np.ascontiguousarray(table) for table in graph.tables]
        every = in_order([*self.outputs, *(check for check, _ in traced.checks)])
        self.inputs = {e.value: ARRAYS[c_type(e)] for e in every if e.op == "input"}

    def __call__(
        self,
        given: Mapping[int, Any],
        noise: Mapping[int, Any] | None = None,
        number: int | None = None,
        values: Any = None,
        flags: Any = None,
        params: Any = None,
    ) -> tuple[int, list[np.ndarray]]:
        """Status and outputs, given numbers of particles by `k`, noise, and what is the same for all."""
        numbers = {("state", FIRST + k): x for k, x in given.items()}
        numbers |= {("noise", k): x for k, x in (noise or {}).items()}
        held = {
            name: np.ascontiguousarray(x, self.inputs.get(name, np.float64)) for name, x in numbers.items()
        }
        N = number if number is not None else len(next(iter(held.values())))
        outputs = [np.zeros(N, ARRAYS[kind]) for kind in self.types]
        rows = [None if row is None else np.ascontiguousarray(row) for row in (params, values, flags)]
        P, val, flag = (ctypes.c_void_p(None if row is None else row.ctypes.data) for row in rows)
        status = self.library.call(
            ctypes.c_void_p(self.constants.ctypes.data),
            P,
            _places(dict(enumerate(self.tables))),
            val,
            flag,
            _places({k: x for (what, k), x in held.items() if what == "state"}),
            _places({k: x for (what, k), x in held.items() if what == "noise"}),
            _places(dict(enumerate(outputs))),
            N,
        )
        return status, outputs


def _places(arrays: dict[int, np.ndarray]) -> Any:
    places = (ctypes.c_void_p * (max(arrays, default=0) + 1))()
    for k, x in arrays.items():
        places[k] = x.ctypes.data
    return places
