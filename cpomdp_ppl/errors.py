"""Errors that name the argument, the value and what was expected."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class ModelError(ValueError):
    """A CPOMDP program is broken.

    Attributes:
        model: Its name.
        faults: One sentence for each fault.
    """

    def __init__(self, model: str, faults: Sequence[str]) -> None:
        self.model, self.faults = model, tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(f"{model} has {count}:\n" + "\n".join(f"  - {fault}" for fault in self.faults))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model, self.faults)


class EpisodesFileError(ValueError):
    """A file does not hold readable episodes."""


class UnsupportedModelError(ValueError):
    """A likelihood backend cannot serve a model; the message says why, and names the site."""


class ObservationError(ValueError):
    """Episodes hold an observation that the model's programs do not make."""


class DensityError(ArithmeticError):
    """A program left the reals, or has a density that is not a number, in the middle of inference."""


class ResolutionError(DensityError):
    """A grid is too coarse for what is computed on it.

    Attributes:
        num_points: About how many points it would take.
    """

    def __init__(self, message: str, num_points: int) -> None:
        self.num_points = num_points
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.num_points)


class CompilerError(RuntimeError):
    """The C compiler is missing, or failed; the message says which."""


class DegenerateWeightsError(ArithmeticError):
    """No context at all can have produced an episode."""


def invalid(argument: str, value: Any, expected: str) -> ValueError:
    """The error that says which argument is wrong, what it was and what it should be.

    Examples:
        >>> raise invalid("num_episodes", 0, "a positive integer")
        Traceback (most recent call last):
        ...
        ValueError: num_episodes: expected a positive integer, got 0
    """
    shown = value if isinstance(value, str) else repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return ValueError(f"{argument}: expected {expected}, got {shown}")


def require(condition: bool, argument: str, value: Any, expected: str) -> None:
    """Raise `invalid(argument, value, expected)` unless the condition holds."""
    if not condition:
        raise invalid(argument, value, expected)


def as_integer(value: Any) -> int | None:
    """An integer of any type (NumPy's, for instance) as an `int`; None for a `bool`, and for all else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def require_count(argument: str, value: Any) -> int:
    """Raise unless `value` is a positive integer (a `bool` is not one); return it as an `int`."""
    number = as_integer(value)
    if number is None or number < 1:
        raise invalid(argument, value, "a positive integer")
    return number


def require_number(argument: str, value: Any, expected: str, above: float | None = None) -> None:
    """Raise unless `value` is a finite number, not negative, or larger than `above`."""
    proper = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    require(proper and (value >= 0 if above is None else value > above), argument, value, expected)


def require_model(model: Any) -> None:
    """Raise unless `model` is a complete CPOMDP, not a class or something else."""
    proper = not isinstance(model, type) and hasattr(model, "require_definition")
    require(proper, "model", model, "an instance of a CPOMDP")
    model.require_definition()
