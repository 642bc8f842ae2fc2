"""Numbers that change over a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cpomdp_ppl.errors import invalid, require

Schedule: TypeAlias = Callable[[float], float]
"""A number as a function of how far the fit is, from 0 to 1."""


@dataclass(frozen=True)
class Constant:
    """Always the same number."""

    value: float

    def __call__(self, progress: float) -> float:
        """The value, at any time."""
        return self.value


@dataclass(frozen=True)
class Linear:
    """From `start` to `end` along a line, and `end` from there on.

    Args:
        start: Value at progress 0.
        end: Value at progress `until` and later.
        until: Progress at which `end` is reached.

    Examples:
        >>> Linear(1.0, 0.0, until=0.5)(0.25)
        0.5
    """

    start: float
    end: float
    until: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.until <= 1, "until", self.until, "more than 0, and at most 1")

    def __call__(self, progress: float) -> float:
        """The value at some progress."""
        return self.start + (self.end - self.start) * min(progress / self.until, 1.0)


@dataclass(frozen=True)
class Geometric:
    """From `start` to `end` by equal factors in equal times, and `end` from there on.

    Args:
        start: Value at progress 0; positive.
        end: Value at progress `until` and later; positive.
        until: Progress at which `end` is reached.

    Examples:
        >>> Geometric(4.0, 1.0)(0.5)
        2.0
    """

    start: float
    end: float
    until: float = 1.0

    def __post_init__(self) -> None:
        require(self.start > 0, "start", self.start, "a positive number")
        require(self.end > 0, "end", self.end, "a positive number")
        require(0 < self.until <= 1, "until", self.until, "more than 0, and at most 1")

    def __call__(self, progress: float) -> float:
        """The value at some progress."""
        return float(self.start * (self.end / self.start) ** min(progress / self.until, 1.0))


def as_schedule(argument: str, value: float | Schedule, *, positive: bool = False) -> Schedule:
    """Return a schedule as it is, and a number as a constant one; if `positive`, zero is too little."""
    expected = f"a {'positive' if positive else 'non-negative'} number, or a function of the progress"
    if callable(value):
        schedule: Schedule = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        schedule = Constant(float(value))
    else:
        raise invalid(argument, value, expected)
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        try:
            at = schedule(progress)
        except TypeError as error:
            raise invalid(argument, value, expected) from error
        proper = isinstance(at, int | float) and (at > 0 or (at == 0 and not positive)) and at < float("inf")
        if not proper:
            what = value if isinstance(schedule, Constant) else f"{at!r} at progress {progress}"
            raise invalid(argument, what, expected)
    return schedule
