"""The script `cpomdp`: the command line of `cpomdp_ppl`, with what solvers and baselines add to it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; see `cpomdp_ppl.cli.main`.

    Args:
        argv: Its name and arguments; those of this process if left out.

    Returns:
        The exit code.
    """
    from baselines import commands as baselines
    from cpomdp_ppl import cli
    from solvers import commands as solvers

    cli.COMMANDS.add(solvers.COMMANDS)
    cli.POLICIES.add(baselines.POLICIES)
    cli.POLICIES.add(solvers.POLICIES)
    cli.SOLVERS.add(solvers.SOLVERS)
    return cli.main(argv)


def entry() -> NoReturn:
    """Run a command, and exit with its code."""
    try:  # imports take seconds, and Ctrl-C may come during them
        from cpomdp_ppl.cli.main import prepare_process

        prepare_process()
        sys.exit(main())
    except KeyboardInterrupt:
        print("cpomdp: stopped, before anything was written", file=sys.stderr)
        sys.exit(130)
