"""The points of a sweep: the product of its axes, and outcomes laid out along them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import xarray as xr
from torch import Tensor

from cpomdp_ppl.errors import invalid, require

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

Value = TypeVar("Value")
Axis: TypeAlias = "Mapping[str, Any] | Iterable[Any]"
"""Numbers or words, or anything by label."""

NUMBERS = "biufc"  # kinds of NumPy's dtypes that can be told in one


@dataclass(frozen=True)
class Grid:
    """The product of several axes; the last one varies fastest.

    Attributes:
        values: By axis and label.
    """

    values: Mapping[str, Mapping[Any, Any]]

    @staticmethod
    def of(axes: Mapping[str, Axis]) -> Grid:
        """Check axes, and give every value a label."""
        require(isinstance(axes, Mapping) and len(axes) > 0, "axes", axes, "values by the name of the axis")
        for name in axes:
            require(isinstance(name, str) and name.isidentifier(), "axes", name, "names of arguments")
        return Grid({name: _labelled(name, axis) for name, axis in axes.items()})

    def __len__(self) -> int:
        return math.prod(map(len, self.values.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return tuple(self.values)

    @cached_property
    def _labels(self) -> list[tuple[Any, ...]]:
        return list(itertools.product(*self.values.values()))

    def labels(self, k: int) -> tuple[Any, ...]:
        """Of the k-th point."""
        return self._labels[k]

    def labels_by_axis(self, k: int) -> dict[str, Any]:
        """Of the k-th point."""
        return dict(zip(self.names, self._labels[k], strict=True))

    def each(self, function: Callable[[Any], Value]) -> list[dict[str, Value]]:
        """A function of every value, once for each, by axis for every point.

        Raises:
            ValueError: If the function raises, naming axis and label.
        """
        found: dict[str, dict[Any, Value]] = {name: {} for name in self.names}
        for name, axis in self.values.items():
            for label, value in axis.items():
                try:
                    found[name][label] = function(value)
                except Exception as error:
                    raise ValueError(f"{name}={label}: {error}") from error
        return [
            {name: found[name][label] for name, label in self.labels_by_axis(k).items()}
            for k in range(len(self))
        ]

    def misfit(self, outcomes: Mapping[int, xr.Dataset], k: int, outcome: xr.Dataset) -> str | None:
        """In which way the k-th outcome is unlike those that there are, of which one stands for all."""
        if not outcomes:
            return None
        first = next(iter(outcomes))
        unlike = _unlike(outcomes[first], outcome)
        if unlike is None:
            return None
        one, two = (named(self.names, self.labels(each)) for each in sorted((first, k)))
        return f"outcomes do not fit together: {unlike} is not the same at {one} and {two}"

    def assembled(self, outcomes: dict[int, xr.Dataset]) -> xr.Dataset:
        """All outcomes in one, with NaN, or what stands for it, where there are none.

        Args:
            outcomes: Alike, as `misfit` has it, by number of the point. They are used up, not to be there
                twice.
        """
        coords = {name: _coordinate(name, axis) for name, axis in self.values.items()}
        if not outcomes:
            return xr.Dataset(coords=coords)
        holes = len(outcomes) < len(self)
        like = outcomes[min(outcomes)]
        full = {}
        for name, variable in like.data_vars.items():
            dtype = np.result_type(*[each[name].dtype for each in outcomes.values()])
            full[name] = _empty((len(self), *variable.shape), dtype, holes)
        while outcomes:
            k, outcome = outcomes.popitem()
            for name, array in full.items():
                array[k] = outcome[name].values
        shape = tuple(map(len, self.values.values()))
        variables = {
            name: ((*self.names, *like[name].dims), array.reshape(*shape, *like[name].shape))
            for name, array in full.items()
        }
        return xr.Dataset(variables, coords | {name: like[name].variable for name in like.coords})


def _labelled(name: str, axis: Axis) -> dict[Any, Any]:
    if isinstance(axis, Mapping):
        for label in axis:
            require(isinstance(label, str), name, label, "labels that are words")
        pairs = list(axis.items())
    else:
        proper = isinstance(axis, Iterable) and not isinstance(axis, str | bytes | set | frozenset)
        single = isinstance(axis, np.ndarray | Tensor) and axis.ndim == 0
        require(proper and not single, name, axis, "a sequence of values, or values by label")
        values = [_plain(each) for each in axis]
        for each in values:
            if each is not None and not isinstance(each, bool | int | float | str):
                raise invalid(name, each, "numbers or words; to anything else give a label: {label: value}")
        # Words and numbers, or truth values and numbers, have no coordinate in common.
        alike = len({_kind(each) for each in values}) == 1 and values[0] is not None
        pairs = [(each if alike else str(each), each) for each in values]
    require(len(pairs) > 0, name, axis, "at least one value")
    labels = [label for label, _ in pairs]
    # As coordinates, too: arrays cut words at a final NUL, and numbers to the precision of all.
    differ = len(set(labels)) == len(np.unique(np.array(labels))) == len(labels)
    require(differ, name, labels, "values that differ")
    return dict(pairs)


def _plain(value: Any) -> Any:
    scalar = isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0
    return value.item() if scalar else value


def _kind(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


def _coordinate(name: str, axis: Iterable[Any]) -> xr.Variable:
    return xr.Variable((name,), np.array(list(axis)))


def _unlike(one: xr.Dataset, other: xr.Dataset) -> Hashable | None:
    """The first variable in which two outcomes differ in kind: name, shape, or coordinates."""
    for missing in sorted(map(str, one.variables.keys() ^ other.variables.keys())):
        return missing
    for name, variable in one.variables.items():
        theirs = other.variables[name]
        if (variable.dims, variable.shape) != (theirs.dims, theirs.shape):
            return name
        kinds = {variable.dtype.kind, theirs.dtype.kind}
        if len(kinds) > 1 and not kinds <= set(NUMBERS):
            return name
        maybe = kinds <= set("fcmM")  # not a number, or not a time
        if name in one.coords and not np.array_equal(variable.values, theirs.values, equal_nan=maybe):
            return name
    return None


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], holes: bool) -> np.ndarray[Any, Any]:
    if not holes:
        return np.empty(shape, dtype)
    if dtype.kind in "biu":
        dtype = np.dtype(float)
    if dtype.kind in "mM":
        return np.full(shape, np.array("NaT", dtype))
    return np.full(shape, np.nan, dtype) if dtype.kind in "fc" else np.zeros(shape, dtype)


def named(axes: Sequence[str], labels: Sequence[Any]) -> str:
    """A point in words: `model=grid, seed=0`."""
    return ", ".join(f"{axis}={label}" for axis, label in zip(axes, labels, strict=True))
