"""What commands are made of: exit codes, errors, and commands, policies and solvers by name.

This package imports neither solvers nor baselines: the script, `cpomdp_command`, adds their commands. Other
packages add theirs by entry points.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping

T = TypeVar("T")

OK, FAILED, USER_ERROR, FAULT, INTERRUPTED = 0, 1, 2, 70, 130
"""Success; a failed check or calibration; what the user can put right; a fault in a program; Ctrl-C."""

OURS = ("cpomdp_ppl", "solvers", "baselines")


class CommandError(ValueError):
    """A command cannot be carried out as it was given; the message says why in one sentence."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a sentence on what was kept and how to go on."""


def is_user_error(error: Exception) -> bool:
    """Whether the message alone says what is wrong, so that a traceback would only be in its way.

    That is so for exceptions of our packages, and for those of `cpomdp_ppl.errors.invalid`; other errors
    are faults in our code or in the model's programs, and the traceback says where.
    """
    ours = type(error).__module__.partition(".")[0] in OURS
    return ours or (
        type(error) is ValueError and re.match(r"\w+: expected .+, got ", str(error), re.DOTALL) is not None
    )


class Registry(Generic[T]):
    """Things by name: those that were added, and those of entry points, which cannot replace them.

    Args:
        kind: What each of them is, for messages.
        expected: The type that each must have.
        group: The group of entry points by which other packages add theirs.
    """

    def __init__(self, kind: str, expected: type[T], group: str) -> None:
        self.kind, self.expected, self.group = kind, expected, group
        self._added: dict[str, T] = {}

    def add(self, things: Mapping[str, T]) -> None:
        """Add things by name."""
        self._added.update(things)

    def names(self) -> list[str]:
        """All names, those that were added first."""
        return list(dict.fromkeys([*self._added, *self._entry_points()]))

    def find(self, name: str) -> T:
        """What has this name; if it belongs to another package, that is imported.

        Raises:
            CommandError: If nothing has this name, or its package is broken or is not installed.
        """
        if name in self._added:
            return self._added[name]
        found = self._entry_points().get(name)
        if found is None:
            raise CommandError(f"there is no {self.kind} '{name}'; there are {', '.join(self.names())}")
        try:
            thing = found.load()
        except (ImportError, AttributeError) as error:
            raise CommandError(
                f"the {self.kind} '{name}' is not available: {found.module} cannot be imported ({error})"
            ) from error
        if not isinstance(thing, self.expected):
            what, expected = type(thing).__name__, self.expected.__name__
            raise CommandError(f"the {self.kind} '{name}' is a {what}, but expected a {expected}")
        return thing

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {each.name: each for each in entry_points(group=self.group)}


@dataclass(frozen=True)
class Command:
    """A command of `cpomdp`; other packages add theirs by the entry-point group `cpomdp_ppl.commands`.

    Attributes:
        summary: What it does, in one sentence.
        examples: Complete command lines.
        options: Adds its arguments to a parser; `--quiet` and `--traceback` are added to all commands.
        run: Carries it out and returns the exit code. The options also have `command_line`, as it was given.
    """

    summary: str
    examples: tuple[str, ...]
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Namespace], int]


COMMANDS = Registry("command", Command, "cpomdp_ppl.commands")


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are sentences."""

    def error(self, message: str) -> NoReturn:
        """Raise, where argparse would print its usage and exit."""
        raise CommandError(f"{message}; see {self.prog} --help")
