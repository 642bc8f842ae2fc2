"""How fast the schedules of a fit go by: slowly while something is learned, or nothing has been found yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

WINDOW = 25
"""Iterations that are averaged before they are compared with as many before them."""
ROUNDING = 1e-9
"""A progress so close to 1 is 1."""
HURRY = 8.0
"""How much faster it goes when nothing improves any more."""
LESS_HURRY = 2.0
"""The same where actions are continuous: they are found the better, the slower exploration fades."""


@dataclass
class Pace:
    """Follows what a fit earns, and decides how far each iteration takes it.

    Iterations are a ceiling: if none hurries, the fit ends after as many. One hurries if neither what is
    earned and found out nor what is earned when told the context has improved beyond doubt for a while,
    provided that more is earned than by doing the same thing all the time.

    Attributes:
        iterations: The ceiling.
        trivial: What doing the same thing all the time earns.
        hurry: How much faster it goes when nothing improves any more.
        progress: How far the fit is, from 0 to 1.
        recent: For each of the last iterations, the return, return and information together, and the
            return of those who were told the context; NaN where nobody was.
    """

    iterations: int
    trivial: float
    hurry: float = HURRY
    progress: float = 0.0
    recent: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether an iteration has been played at the end of all schedules."""
        return self.progress > 1.0

    def advance(self, earned: float, worth: float, told: float) -> None:
        """Take note of an iteration."""
        self.recent = [*self.recent[1 - 2 * WINDOW :], (earned, worth, told)]
        step = (self.hurry if self._is_settled() else 1.0) / max(self.iterations - 1, 1)
        last = self.progress > 1.0 - ROUNDING
        self.progress = self.progress + step if last else min(self.progress + step, 1.0)

    def _is_settled(self) -> bool:
        if len(self.recent) < 2 * WINDOW:
            return False
        now, error = _mean([earned for earned, _, _ in self.recent[WINDOW:]])
        return now > self.trivial + 2 * error and not any(
            _improved([each[k] for each in self.recent]) for k in (1, 2)
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as plain numbers."""
        return {"progress": self.progress, "recent": [list(each) for each in self.recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.progress = state["progress"]
        self.recent = [(earned, worth, told) for earned, worth, told in state["recent"]]


def _improved(series: list[float]) -> bool:
    """Whether the later half is better than the earlier one, beyond the error of their difference."""
    before, after = ([x for x in half if x == x] for half in (series[:WINDOW], series[WINDOW:]))
    if len(before) < 2 or len(after) < 2:
        return False
    (old, error), (new, other) = _mean(before), _mean(after)
    return new - old > math.hypot(error, other)


def _mean(numbers: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    n = len(numbers)
    mean = sum(numbers) / n
    return mean, math.sqrt(sum((x - mean) ** 2 for x in numbers) / (n - 1) / n)
