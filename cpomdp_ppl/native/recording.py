"""Running a program on tensors and, beside them, on expressions."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map

from cpomdp_ppl.dataflow import COPIES, EXITS
from cpomdp_ppl.native.expressions import Untraceable
from cpomdp_ppl.native.operations import OPERATIONS, RANDOM, OperationCall, array, kind_of, tensors_in
from cpomdp_ppl.native.operations.call import each
from cpomdp_ppl.native.operations.shapes import within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpomdp_ppl.native.operations import Array, Program

LOOKS = frozenset(
    [
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "nonzero",
        "_is_all_true",
        "_is_any_true",
        "_unique2",
        "unique_dim",
        "masked_select",
        "allclose",
        "bincount",
        "_linalg_check_errors",
    ]
)
"""Operations by which values decide what happens next."""


class Recorder(TorchDispatchMode):
    """Note what every number that is computed from inputs is, as an expression.

    Expressions are kept by storage, so that views and writes in place need no rules of their own: a tensor's
    are those of its storage, seen through its strides. What depends on no input stays a constant.

    Args:
        program: Where to make expressions, and to note noise and checks.

    Attributes:
        drawn: What torch drew, and as which expressions.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = program
        self.drawn: list[tuple[Array, Tensor]] = []
        self._known: dict[int, _Storage] = {}  # by storage: an expression for each of its elements
        self._made: set[int] = set()  # storages that the program made
        self._kept: list[Tensor] = []  # an address must not be used twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports all of dynamo, which takes seconds

    def give(self, tensor: Tensor, expressions: Array) -> None:
        """Say what an input holds."""
        self._begin(tensor)
        self._write(tensor, expressions)

    def of(self, tensor: Tensor) -> Array:
        """The expressions of a tensor."""
        known = self._known.get(_address(tensor))
        if known is not None:
            return known.seen_through(tensor).copy()
        kind = kind_of(tensor)
        flat = [self.program.graph.const(value, kind) for value in tensor.detach().reshape(-1).tolist()]
        return array(flat, tuple(tensor.shape))

    def depends(self, values: Any) -> bool:
        """Whether any of the tensors in a structure is computed from inputs."""
        return any(
            e.op != "const"
            for tensor in tensors_in(values)
            if _address(tensor) in self._known
            for e in self.of(tensor).ravel()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwatched():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and note what it computes."""
        name = func.overloadpacket.__name__
        name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        given = {_address(tensor) for tensor in tensors_in((args, kwargs))}
        written = _written(func, args, kwargs)
        if any(tensor.numel() and _address(tensor) not in self._made for tensor in written):
            raise Untraceable("a tensor is written to that the program did not make")
        if kwargs.get("generator") is not None:
            raise Untraceable("random numbers are drawn from a generator of its own")
        if name in LOOKS and self.depends((args, kwargs)):
            raise Untraceable(f"it looks at a value that depends on its inputs ('{name}')")
        if name not in LOOKS and (name in RANDOM or not given.isdisjoint(self._known)):
            return self._interpret(func, name, args, kwargs, written)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if _address(tensor) not in given or name == "lift_fresh":
                self._keep(tensor)
        return result

    def _interpret(self, func: Any, name: str, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Run an operation on tensors and on their expressions."""
        lifted, named = tree_map(
            lambda x: self.of(x) if isinstance(x, Tensor) else x, (list(args), dict(kwargs))
        )
        for tensor in written:  # before it is overwritten
            if _address(tensor) not in self._known:
                self._begin(tensor, constants=True)
        result = func(*args, **kwargs)
        outputs = list(result) if isinstance(result, list | tuple) else [result]
        tensors = all(isinstance(out, Tensor) for out in outputs)
        if tensors and not written and all(_address(out) in self._known for out in outputs):
            if any(out.dtype != tensor.dtype for out in outputs for tensor in tensors_in(args)[:1]):
                raise Untraceable("the bits of a number are taken for another number")
            return result  # views of what is known
        if not tensors or name not in OPERATIONS:
            raise Untraceable(f"operation '{name}' is not known")
        found = OPERATIONS[name](OperationCall(self.program, name, lifted, named, tuple(args), result, func))
        for out, expressions in zip(outputs, found if isinstance(found, list) else [found], strict=True):
            if _address(out) not in self._known:
                self._begin(out)
                self._keep(out)
            kind = kind_of(out)
            self._write(
                out, each(lambda e, kind=kind: self.program.graph.cast(e, kind), np.asarray(expressions))
            )
            if name in RANDOM:
                self.drawn.append((self.of(out), out.clone()))
        return result

    def _keep(self, tensor: Tensor) -> None:
        self._made.add(_address(tensor))
        self._kept.append(tensor)

    def _begin(self, tensor: Tensor, constants: bool = False) -> None:
        """Make room for a storage's expressions; what a tensor does not write keeps its constants."""
        storage = tensor.untyped_storage()
        elements = np.empty(storage.nbytes() // tensor.element_size(), object)
        if constants:
            kind = kind_of(tensor)
            everything = torch.empty(0, dtype=tensor.dtype).set_(storage)
            elements[:] = [self.program.graph.const(value, kind) for value in everything.tolist()]
        self._known[_address(tensor)] = _Storage(elements, tensor.dtype)
        self._kept.append(tensor)

    def _write(self, tensor: Tensor, expressions: Any) -> None:
        self._known[_address(tensor)].seen_through(tensor)[...] = expressions


class _Storage(NamedTuple):
    """A storage's expressions, one for each of its elements, and the type of these."""

    elements: Array
    dtype: torch.dtype

    def seen_through(self, tensor: Tensor) -> Array:
        """The elements that a tensor shows, in its shape."""
        if tensor.dtype != self.dtype:
            raise Untraceable(f"the bits of {self.dtype} are taken for {tensor.dtype}")
        size = self.elements.itemsize
        shown: Array = np.lib.stride_tricks.as_strided(
            self.elements[tensor.storage_offset() :],
            tuple(tensor.shape),
            [step * size for step in tensor.stride()],
        )
        return shown


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, no profiler looks on: no user code runs here, and looking takes longer than the code."""
    profiler = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profiler)


def is_traced() -> bool:
    """Whether a program is being traced, so that its values are not to be looked at."""
    return isinstance(_get_current_dispatch_mode(), Recorder)


def certain(condition: Tensor) -> bool:
    """Whether a condition holds everywhere; of one that depends on what is traced, nobody knows."""
    recorder = _get_current_dispatch_mode()
    if isinstance(recorder, Recorder) and recorder.depends(condition):
        return False
    return bool(condition.all())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(by_name.get(argument.name))
    ]


class ExitsRefused(TorchFunctionMode):
    """Refuse to let values that depend on inputs leave torch, where no operation could follow them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in EXITS and self.recorder.depends(args):
            raise Untraceable(f"a value that depends on its inputs leaves torch ('{name}')")
        if name == "one_hot":
            return self._one_hot(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in COPIES and self.recorder.depends(args) and not self.recorder.depends(result):
            raise Untraceable(f"a value that depends on its inputs is copied out of torch ('{name}')")
        return result

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """As torch's, which looks at values first."""
        if num_classes < 0:
            raise Untraceable("'one_hot' without a number of classes looks at values")
        for e in self.recorder.of(tensor).ravel():
            within(self.recorder.program, e, num_classes)
        return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()
