"""What the script `cpomdp` runs: imports take seconds, and Ctrl-C may come during them."""

from __future__ import annotations

import sys
from typing import NoReturn


def entry() -> NoReturn:
    """Run a command of `cpomdp_ppl.cli`, and leave with its exit code."""
    try:
        from cpomdp_ppl.cli import entry as begin

        begin()
    except KeyboardInterrupt:
        print("cpomdp: stopped, before anything was written", file=sys.stderr)
        sys.exit(130)
