"""The operations of torch on arrays of expressions: everything is written out, number by number."""

from cpomdp_ppl.native.operations import draws, matrices, pointwise, reductions, shapes
from cpomdp_ppl.native.operations.call import (
    OPERATIONS,
    Array,
    OperationCall,
    Program,
    array,
    kind_of,
    tensors_in,
)
from cpomdp_ppl.native.operations.draws import RANDOM

__all__ = [
    "OPERATIONS",
    "RANDOM",
    "Array",
    "OperationCall",
    "Program",
    "array",
    "draws",
    "kind_of",
    "matrices",
    "pointwise",
    "reductions",
    "shapes",
    "tensors_in",
]
