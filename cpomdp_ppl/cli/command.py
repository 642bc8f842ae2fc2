"""What a command is."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from cpomdp_ppl.cli.errors import CommandError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable


@dataclass(frozen=True)
class Command:
    """A command of `cpomdp`; other packages add theirs by the entry-point group `cpomdp_ppl.commands`.

    Attributes:
        summary: What it does, in one sentence.
        examples: Whole command lines.
        options: Adds its arguments to a parser; `--quiet` and `--traceback` are there already.
        run: Carries it out and returns the exit code. The options also have `command_line`, as it was given.
    """

    summary: str
    examples: tuple[str, ...]
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Namespace], int]

    def parser(self, name: str) -> argparse.ArgumentParser:
        """The parser of its arguments."""
        parser = Parser(
            prog=f"cpomdp {name}",
            description=self.summary,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in self.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.options(parser)
        parser.add_argument("--quiet", action="store_true", help="no progress, and no notes; results only")
        parser.add_argument("--traceback", action="store_true", help="where an error comes from, in full")
        return parser


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are sentences."""

    def error(self, message: str) -> NoReturn:
        """Raise, where argparse would print its usage and leave."""
        raise CommandError(f"{message}; see {self.prog} --help")
