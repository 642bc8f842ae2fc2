"""`cpomdp COMMAND …`: runs a command, and turns errors into sentences and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.cli.command import (
    COMMANDS,
    FAULT,
    INTERRUPTED,
    OK,
    USER_ERROR,
    CommandError,
    Parser,
    is_user_error,
)
from cpomdp_ppl.experiments.files import DiskFullError, is_disk_full

if TYPE_CHECKING:
    from collections.abc import Sequence

EPILOG = """Say cpomdp COMMAND --help for its options, with examples. A model is module:Class or
path/to/file.py:Class, followed by arguments of its constructor as key=value. Results go to a run folder:
--run DIR.

exit codes: 0 success, 1 a check or a calibration failed, 2 something that you can put right, 70 a fault in a
program, 130 interrupted"""


def prepare_process() -> None:
    """Set up a process that runs a single command: its threads, and how it shows warnings."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # tensors are small here: threads would mostly wait for each other
    # The line of our code that warned says nothing to whoever runs a command.
    warnings.showwarning = lambda message, *_, **__: print(f"cpomdp: warning: {message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: one of this package, or one that was added to `COMMANDS`.

    Args:
        argv: Its name and arguments; those of this process if left out.

    Returns:
        The exit code: 0 on success; 1 if a check or a calibration failed; 2 for what the user can put
        right, in one sentence on stderr; 70 for a fault in a program, with its traceback; 130 on Ctrl-C.

    Examples:
        >>> main(["check", "cpomdp_ppl.models:LightDark", "horizon=10"])
        LightDark: no faults in 2 contexts, 3 actions, 10 steps
        engine: native; the particle filter runs these programs compiled
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt as interrupt:
        print(f"cpomdp: {str(interrupt) or 'stopped, before anything was written'}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if "--traceback" in words:
            traceback.print_exc()
        if is_disk_full(error) and not is_user_error(error):
            error = DiskFullError(getattr(error, "filename", None) or "a file")
        if isinstance(error, OSError) and error.filename is not None:
            error = CommandError(f"{error.filename}: {error.strerror}")
        if is_user_error(error):
            print(f"cpomdp: {error}", file=sys.stderr)
            return USER_ERROR
        if "--traceback" not in words:
            traceback.print_exc()
        return FAULT


def _run(words: list[str]) -> int:
    name, *rest = words or [""]
    known = COMMANDS.names()
    # A command of another package is imported only if it is the one to run, or if all are listed.
    parser, parsers = _parsers([name] if name in known else known)
    if name in ("", "help"):
        parser.print_help()
        return OK if name else USER_ERROR
    try:
        if name not in known:
            parser.parse_args(words)
        options = parsers[name].parse_intermixed_args(rest)
    except SystemExit as done:  # of --help and --version
        return int(done.code or OK)
    options.command_line = rest
    return COMMANDS.find(name).run(options)


def _parsers(names: Sequence[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the script, and those of some of its commands by name."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="cpomdp",
        description="Contextual POMDPs as Pyro programs: check, simulate, solve, compare, diagnose.",
        epilog=EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        try:
            command = COMMANDS.find(name)
        except CommandError as error:  # that of another package may be broken; the others still work
            if len(names) == 1:
                raise
            commands.add_parser(name, help=f"({error})".replace("%", "%%"))
            continue
        one = commands.add_parser(
            name,
            help=command.summary.replace("%", "%%"),
            description=command.summary,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in command.examples),
            formatter_class=raw,
            allow_abbrev=False,
        )
        command.options(one)
        one.add_argument("--quiet", action="store_true", help="print results only: no progress, no notes")
        one.add_argument("--traceback", action="store_true", help="show where an error comes from, in full")
    return parser, commands.choices


def _version() -> str:
    try:
        return f"cpomdp-ppl {version('cpomdp-ppl')}"
    except PackageNotFoundError:
        return "cpomdp-ppl, not installed"
