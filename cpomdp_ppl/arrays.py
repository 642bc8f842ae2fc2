"""What callers pass (lists, NumPy arrays, tensors) as tensors, or an error that names the argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.errors import invalid, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def as_array(argument: str, values: Any) -> np.ndarray[Any, Any]:
    """A copy of an array of numbers, truth values or strings, whose rows all have the same length."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().resolve_conj().resolve_neg().numpy()
    if np.ma.is_masked(values):  # NumPy would take what is under the mask for data
        raise invalid(argument, "a masked array", "an array without masked entries")
    try:
        array: np.ndarray[Any, Any] = np.array(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, for instance
        raise invalid(argument, values, "an array, rows all of the same length") from error
    if array.dtype.kind == "O" and all(isinstance(entry, str) for entry in array.ravel()):
        array = array.astype(str)
    require(array.dtype.kind in "biufU", argument, values, "an array of real numbers")
    return array


def as_tensor(argument: str, values: Any) -> Tensor:
    """A copy, as a tensor of real numbers or truth values; their type stays."""
    if isinstance(values, Tensor):
        require(not values.is_complex(), argument, values.dtype, "real numbers")
        return values.detach().clone()
    array = as_array(argument, values)
    require(array.dtype.kind in "biuf", argument, values, "an array of real numbers")
    if array.dtype.kind == "u":
        require(array.size == 0 or int(array.max()) < 2**63, argument, values, "numbers below 2**63")
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape))


def as_type(argument: str, tensor: Tensor, dtype: torch.dtype, where: Tensor) -> Tensor:
    """A tensor as another type; an error if that alters it (beyond rounding of reals) where it counts.

    `where` has the leading axes of the tensor.
    """
    cast = tensor.to(dtype)
    if dtype.is_floating_point:
        bad = torch.isfinite(tensor) & ~torch.isfinite(cast)
    else:
        bad = cast.to(tensor.dtype) != tensor
    bad = bad & on_the_right(where, tensor)
    if bool(bad.any()):
        kind = "truth values" if dtype == torch.bool else f"values of {dtype}"
        raise invalid(argument, f"{tensor[bad][0].item()} at {place_of(bad)}", kind)
    return cast


def as_indices(argument: str, values: Any, names: Sequence[str]) -> Tensor:
    """Indices, given as numbers or as names."""
    array = as_array(argument, values)
    if array.dtype.kind == "U":
        numbers = {name: i for i, name in enumerate(names)}
        unknown = sorted({str(v) for v in array.ravel()} - set(numbers))
        require(not unknown, argument, unknown, f"names out of {list(names)}")
        array = np.array([numbers[str(v)] for v in array.ravel()], np.int64).reshape(array.shape)
    if array.dtype.kind == "f":
        array = np.where(np.isfinite(array), array, -1)  # NaN past the end of an episode, say
    integers = array.dtype.kind in "iu" or (array.dtype.kind == "f" and (array == np.round(array)).all())
    require(bool(integers), argument, f"{array.dtype}", "integer indices or names")
    return torch.from_numpy(array.astype(np.int64))


def are_probabilities(p: Tensor) -> bool:
    """Whether `[…, K]` is non-negative and sums to 1."""
    p = p.detach()
    return bool(p.numel()) and float(p.min()) >= 0 and float((p.sum(-1) - 1).abs().max()) <= 2e-5


def how_many_fit(budget: int, each: int) -> int:
    """How many things of a size, in bytes or numbers, are handled at once within a budget: at least one.

    Examples:
        >>> how_many_fit(2**20, 1000), how_many_fit(10, 1000)
        (1048, 1)
    """
    return max(1, budget // max(each, 1))


def pieces(total: int, size: int) -> Iterator[slice]:
    """The slices of a range that are handled one after the other.

    Examples:
        >>> list(pieces(5, 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def on_the_right(flags: Tensor, like: Tensor) -> Tensor:
    """Add axes on the right, so that flags `[B, T]` broadcast with `[B, T, …]`."""
    if flags.dim() == like.dim():
        return flags
    return flags.reshape(flags.shape + (1,) * (like.dim() - flags.dim()))


def place_of(bad: Tensor) -> str:
    """The first place where something is wrong, in words."""
    place = bad.nonzero()[0].tolist()
    return ", ".join(f"{axis} {i}" for axis, i in zip(("episode", "step"), place, strict=False))


def filled(values: Tensor, known: Tensor) -> Tensor:
    """Zero where not known: filled values cannot leak, nor turn a gradient into NaN."""
    return torch.where(on_the_right(known, values), values, values.new_zeros(()))


def require_finite(argument: str, tensor: Tensor, where: Tensor) -> None:
    """Raise unless a tensor is finite where it counts; `where` has its leading axes."""
    if tensor.is_floating_point():
        bad = ~torch.isfinite(tensor) & on_the_right(where, tensor)
        if bool(bad.any()):
            found = f"{tensor[bad][0].item()} at {place_of(bad)}"
            raise invalid(argument, found, "finite values where observed")


def without_unit_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its axes of size 1."""
    return tuple(size for size in shape if size != 1)
