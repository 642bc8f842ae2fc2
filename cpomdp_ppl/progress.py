"""How far a long task has got, and how much longer it will take: a bar, or a line of text now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tqdm import tqdm

from cpomdp_ppl.errors import require

if TYPE_CHECKING:
    from typing import Self

Progress: TypeAlias = bool | Callable[[str], None]
"""Whether to show a bar, by tqdm on stderr; or a function that is given a line of text now and then."""

SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 1.0, 10.0
"""When a line of text is due."""


class Lines:
    """A progress bar in lines of text, where there is no terminal to draw on; arguments as in `bar`."""

    def __init__(
        self, tell: Callable[[str], None], total: int, what: str, unit: str, initial: int = 0
    ) -> None:
        self.tell, self.total, self.what, self.unit = tell, total, what, unit
        self.n = self.initial = initial
        self.postfix = ""
        self.began = time.monotonic()
        self.due = self.began + SECONDS_TO_FIRST_LINE

    def update(self, n: int = 1) -> None:
        """Count n more steps as done."""
        self.n += n
        if time.monotonic() >= self.due:
            self.say()

    def say(self) -> None:
        """Give a line, with how long the rest takes if it goes on as it went so far."""
        now = time.monotonic()
        self.due = now + SECONDS_BETWEEN_LINES
        left = (self.total - self.n) * (now - self.began) / max(1, self.n - self.initial)
        words = ", ".join([f"{self.n:,} of {self.total:,} {self.unit}", *filter(None, [self.postfix])])
        self.tell(f"{self.what}: {words}; {roughly(left)} left")

    def set_postfix_str(self, postfix: str, refresh: bool = True) -> None:
        """Add something to the next line, which may be due now."""
        self.postfix = postfix
        if refresh:
            self.update(0)

    def write(self, text: str) -> None:
        """Give a line of other text."""
        self.tell(text)

    def close(self) -> None:
        """Lines need no end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Bar: TypeAlias = "tqdm[Any] | Lines"


def bar(progress: Progress, total: int, what: str, unit: str, initial: int = 0) -> Bar:
    """A bar, lines of text, or nothing, which shows how far a task has got.

    Args:
        progress: Whether to show a bar, or the function that is given lines.
        total: Number of steps.
        what: What the task is.
        unit: What its steps are, in the plural.
        initial: Number of steps that are done already.
    """
    known = isinstance(progress, bool) or callable(progress)
    require(known, "progress", progress, "True, False, or a function of a line")
    if callable(progress):
        return Lines(progress, total, what, unit, initial)
    return tqdm(
        total=total, initial=initial, disable=not progress, desc=what, unit=f" {unit}", mininterval=0.5
    )


def roughly(seconds: float) -> str:
    """A time as one would say it.

    Examples:
        >>> roughly(0.2), roughly(42), roughly(200), roughly(10_000)
        ('a second', '42 s', '3 min', '2.8 h')
    """
    if seconds < 100:
        return "a second" if seconds <= 1 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
