"""`cpomdp COMMAND …`: finds the command, runs it, and turns errors into sentences and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NoReturn

import torch

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import FAULT, INTERRUPTED, OK, USER_ERROR, CommandError, is_user_error
from cpomdp_ppl.cli.plugins import COMMANDS
from cpomdp_ppl.experiments.files import DiskFullError, is_disk_full

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """usage: cpomdp COMMAND … [--quiet] [--traceback]

Contextual POMDPs as Pyro programs: check, simulate, solve, compare, diagnose.

commands:
{commands}

Say cpomdp COMMAND --help for its options, with examples. A model is module:Class or path/to/file.py:Class,
followed by arguments of its constructor as key=value. Results go to a run folder: --run DIR.

exit codes: 0 all well, 1 a check or a calibration failed, 2 something that you can put right, 70 a fault in a
program, 130 interrupted"""


def entry() -> NoReturn:
    """What the installed script runs."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # tensors are small here: threads would mostly wait for each other
    # The line of ours that warned says nothing to whoever runs a command.
    warnings.showwarning = lambda message, *_, **__: print(f"cpomdp: warning: {message}", file=sys.stderr)
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Its name and arguments; those of this process if left out.

    Returns:
        The exit code: 0 if all is well; 1 if a check or a calibration failed; 2 for what the user can put
        right, in one sentence on stderr; 70 for a fault in a program, with its traceback; 130 on Ctrl-C.

    Example:
        >>> main(["check", "cpomdp_ppl.models:LightDark", "horizon=10"])
        LightDark: no faults in 2 contexts, 3 actions, 10 steps
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
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return OK if words else USER_ERROR
    if words[0] == "--version":
        print(_version())
        return OK
    name, *rest = words
    if name.startswith("-"):
        raise CommandError(f"expected a command before {name}; see cpomdp --help")
    command = _command(name)
    parser = command.parser(name)
    try:
        options = parser.parse_intermixed_args(rest)
    except SystemExit as done:  # of --help
        return int(done.code or OK)
    options.command_line = rest
    return command.run(options)


def _command(name: str) -> Command:
    found = COMMANDS.find(name)
    if not isinstance(found, Command):
        raise CommandError(f"the command '{name}' is a {type(found).__name__}, but expected a Command")
    return found


def _usage() -> str:
    lines = []
    for name in COMMANDS.places():
        try:
            summary = _command(name).summary
        except CommandError as error:  # of another package, perhaps; the others are there all the same
            summary = f"({error})"
        lines.append(f"  {name:<10} {summary}")
    return USAGE.format(commands="\n".join(lines))


def _version() -> str:
    try:
        return f"cpomdp-ppl {version('cpomdp-ppl')}"
    except PackageNotFoundError:
        return "cpomdp-ppl, not installed"
