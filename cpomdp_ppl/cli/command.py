"""What a command is, and all of them by name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from cpomdp_ppl.cli.errors import CommandError
from cpomdp_ppl.cli.registry import Registry

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable


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
