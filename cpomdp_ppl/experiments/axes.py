"""The points of a sweep, which are the product of its axes, and outcomes laid out along them."""

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
    from collections.abc import Callable

Value = TypeVar("Value")
Axis: TypeAlias = "Mapping[str, Any] | Iterable[Any]"
"""Numbers or words, or anything by label."""

NUMBERS = "biufc"
"""Kinds of NumPy's dtypes that fit in one array."""

ARRAY_KINDS = NUMBERS + "USmM"
"""Kinds of NumPy's dtypes that are written without pickle."""


@dataclass(frozen=True)
class Product:
    """The product of several axes; the last one varies fastest."""

    values: Mapping[str, Mapping[Any, Any]]  # values by axis and label

    @staticmethod
    def of(axes: Mapping[str, Axis]) -> Product:
        """Check axes, and give every value a label."""
        require(isinstance(axes, Mapping) and len(axes) > 0, "axes", axes, "values by the name of the axis")
        for name in axes:
            require(isinstance(name, str) and name.isidentifier(), "axes", name, "names of arguments")
        return Product({name: _labelled(name, axis) for name, axis in axes.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.values)

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """Labels by axis, of every point."""
        return [
            dict(zip(self.names, labels, strict=True)) for labels in itertools.product(*self.values.values())
        ]

    def each(self, function: Callable[[Any], Value]) -> list[dict[str, Value]]:
        """A function of every value, called once for each, by axis for every point.

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
        return [{name: found[name][label] for name, label in point.items()} for point in self.points]

    def assembled(self, outcomes: Mapping[int, xr.Dataset]) -> xr.Dataset:
        """All outcomes in one, with NaN, or what stands for it, where there are none."""
        coords = {name: xr.Variable((name,), np.array(list(axis))) for name, axis in self.values.items()}
        if not outcomes:
            return xr.Dataset(coords=coords)
        first = outcomes[min(outcomes)]
        shape = tuple(map(len, self.values.values()))
        variables = {}
        for name, variable in first.data_vars.items():
            dtype = np.result_type(*[each[name].dtype for each in outcomes.values()])
            array = _empty((math.prod(shape), *variable.shape), dtype, len(outcomes) < math.prod(shape))
            for k, outcome in outcomes.items():
                array[k] = outcome[name].values
            variables[name] = ((*self.names, *variable.dims), array.reshape(*shape, *variable.shape))
        return xr.Dataset(variables, coords | {name: first[name].variable for name in first.coords})


def in_words(point: Mapping[str, Any]) -> str:
    """A point as `model=grid, seed=0`."""
    return ", ".join(f"{axis}={label}" for axis, label in point.items())


def misfit(one: xr.Dataset, other: xr.Dataset) -> str | None:
    """Name of a variable in which two outcomes differ in form: dimensions, kind of value, or coordinates."""
    first, second = _form(one), _form(other)
    return min((name for name in first.keys() | second if first.get(name) != second.get(name)), default=None)


def _form(outcome: xr.Dataset) -> dict[str, Any]:
    return {
        str(name): (
            *(each.dims, each.shape, "number" if each.dtype.kind in NUMBERS else each.dtype.kind),
            each.values.tobytes() if name in outcome.coords else None,
        )
        for name, each in outcome.variables.items()
    }


def as_dataset(outcome: Any, axes: Iterable[str]) -> xr.Dataset:
    """What a task returned (numbers or arrays by name, a DataArray, a Dataset), as a Dataset in memory.

    Raises:
        ValueError: If it is something else.

    Examples:
        >>> as_dataset({"mean": 0.5, "draws": [1, 2, 3]}, ["seed"])["draws"].dims
        ('draws_dim_0',)
    """
    if isinstance(outcome, xr.DataArray) and outcome.name is not None:
        outcome = outcome.to_dataset()
    if not isinstance(outcome, xr.Dataset):
        proper = isinstance(outcome, Mapping) and all(isinstance(name, str) for name in outcome)
        require(proper, "task", outcome, "a function that returns numbers or arrays by name")
        outcome = xr.Dataset({name: _as_array(name, value) for name, value in outcome.items()})
    for name in axes:
        taken = name in outcome.variables or name in outcome.dims
        require(not taken, "task", name, "outcomes with other names than the axes")
    arrays = {name: (v.dims, _without_objects(v.values)) for name, v in outcome.variables.items()}
    for name, (_, array) in arrays.items():
        expected = "numbers, truth values, words or times"
        require(array.dtype.kind in ARRAY_KINDS, str(name), f"an array of {array.dtype}", expected)
    coords = {name: arrays.pop(name) for name in list(outcome.coords)}
    return xr.Dataset(arrays, coords)


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


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], holes: bool) -> np.ndarray[Any, Any]:
    if not holes:
        return np.empty(shape, dtype)
    if dtype.kind in "mM":
        return np.full(shape, np.array("NaT", dtype))
    if dtype.kind in NUMBERS:
        return np.full(shape, np.nan, dtype if dtype.kind in "fc" else float)
    return np.zeros(shape, dtype)


def _as_array(name: str, value: Any) -> xr.DataArray | xr.Variable:
    if isinstance(value, xr.DataArray | xr.Variable):
        return value
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return xr.Variable([f"{name}_dim_{i}" for i in range(array.ndim)], array)


def _without_objects(values: Any) -> np.ndarray[Any, Any]:
    """Words as an array of words, whatever they came in."""
    array = np.asarray(values)
    words = array.dtype.kind in "OT" and all(isinstance(each, str) for each in array.flat)
    return array.astype(str) if words and array.size else array
