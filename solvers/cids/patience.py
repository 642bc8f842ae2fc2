"""Signals that wait while this process talks to others."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


class Patience:
    """What becomes of signals where other processes count on this one.

    A process that left in the middle of an exchange would leave the others in it. So Ctrl-C is noted, and
    waits for the next moment at which the processes talk; and a handler of the user's own, which may raise,
    is called once they have talked, if its signal comes in the meantime.

    Attributes:
        pressed: Whether Ctrl-C has come.
        granted: Whether all have heard of it, or it is too late for it; once is enough.

    Example:
        >>> patience = Patience()
        >>> with patience.kept():
        ...     signal.raise_signal(signal.SIGINT)
        ...     patience.pressed, patience.granted
        ...     patience.granted = True
        (True, False)
    """

    def __init__(self) -> None:
        self.pressed = False
        self.granted = False
        self._kept = False
        self._talking = 0
        self._owed: list[Callable[[], Any]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Where signals wait, if this is the main thread, which is the one that handles them."""
        if self._kept or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.pressed = self.granted = False  # of a fit in another thread
        with ExitStack() as stack:
            stack.callback(vars(self).update, _kept=False, pressed=False, granted=False)
            self._kept = True
            for number in signal.valid_signals():
                before = signal.getsignal(number)
                if callable(before):
                    usual = before is signal.default_int_handler
                    ours = self._press if usual else partial(self._meet, before)
                    stack.callback(self._restore, number, ours, before)
                    signal.signal(number, ours)
            yield
            owed = self.pressed and not self.granted
        if owed:  # since they talked for the last time
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def talking(self) -> Iterator[None]:
        """An exchange with others, from its first message to its last."""
        self._talking += 1
        try:
            yield
        finally:
            self._talking -= 1
            while self._owed and not self._talking:
                self._owed.pop(0)()

    def _press(self, *_: object) -> None:
        self.pressed = True

    def _meet(self, handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        if self._talking:
            self._owed.append(partial(handler, number, frame))
        else:
            handler(number, frame)

    def _restore(self, number: int, ours: Any, before: Any) -> None:
        if signal.getsignal(number) == ours:  # and not what somebody has put there since
            signal.signal(number, before)


PATIENCE = Patience()
"""Of this process: signals are the process's, whatever it is doing at the time."""
