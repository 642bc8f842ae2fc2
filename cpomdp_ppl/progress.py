"""How far something long has got, and how much longer it will take: by a bar, or a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tqdm import tqdm

from cpomdp_ppl.errors import require

if TYPE_CHECKING:
    from typing import Self

Progress: TypeAlias = bool | Callable[[str], None]
"""Whether to show a bar, by tqdm on stderr; or a function that is told a line now and then."""

FIRST, EVERY = 1.0, 10.0
"""Seconds until the first line, which tells what to expect, and between those that follow."""


class Lines:
    """What a progress bar tells, in lines: where there is no terminal to draw on.

    Args:
        tell: Is given the lines.
        total: How many steps there are.
        what: They are about.
        unit: What the steps are, in the plural.
        initial: How many are done already.
    """

    def __init__(
        self, tell: Callable[[str], None], total: int, what: str, unit: str, initial: int = 0
    ) -> None:
        self.tell, self.total, self.what, self.unit = tell, total, what, unit
        self.n = self.initial = initial
        self.postfix = ""
        self.began = time.monotonic()
        self.due = self.began + FIRST

    def update(self, n: int = 1) -> None:
        """So many more steps are done."""
        self.n += n
        if time.monotonic() >= self.due:
            self.say()

    def say(self) -> None:
        """Tell a line, and how long the rest takes if it takes as long as what is done."""
        now = time.monotonic()
        self.due = now + EVERY
        left = (self.total - self.n) * (now - self.began) / max(1, self.n - self.initial)
        words = ", ".join([f"{self.n:,} of {self.total:,} {self.unit}", *filter(None, [self.postfix])])
        self.tell(f"{self.what}: {words}; {roughly(left)} left")

    def set_postfix_str(self, postfix: str, refresh: bool = True) -> None:
        """What else to say: with the next line, which may be due now."""
        self.postfix = postfix
        if refresh:
            self.update(0)

    def write(self, text: str) -> None:
        """Say something by the way."""
        self.tell(text)

    def close(self) -> None:
        """There is nothing more to tell."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Bar: TypeAlias = "tqdm[Any] | Lines"


def bar(progress: Progress, total: int, what: str, unit: str, initial: int = 0) -> Bar:
    """Whatever shows how far something has got: a bar, lines, or nothing.

    Args:
        progress: Which.
        total: How many steps there are.
        what: They are about.
        unit: What the steps are, in the plural.
        initial: How many are done already.
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

    Example:
        >>> roughly(0.2), roughly(42), roughly(200), roughly(10_000)
        ('a second', '42 s', '3 min', '2.8 h')
    """
    if seconds < 100:
        return "a second" if seconds <= 1 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
