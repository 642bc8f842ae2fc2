"""Run benchmarks, one after the other, and write what they print to benchmarks/README.md.

    python -m benchmarks            # all of them
    python -m benchmarks scale fit  # these sections anew, the others as they are

A script that fails leaves its section as it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.page import first_line, render, section, sections
from cpomdp_ppl.experiments.files import write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).resolve().parent
SCRIPTS = ("simulate", "likelihood", "scale", "fit", "distributed", "baselines")
"""In the order of the page, which is that of running."""


class FailedError(Exception):
    """A script ended badly, or with nothing to show."""


def regenerate(names: Sequence[str], folder: Path = FOLDER, order: Sequence[str] = SCRIPTS) -> list[str]:
    """Run scripts, each in a process of its own, and write the page after each.

    Args:
        names: Of the scripts to run.
        folder: Where they are, and README.md.
        order: All scripts that have a section, in order.

    Returns:
        The names of those that failed; their sections, if there were any, are as they were.
    """
    page = folder / "README.md"
    failed = []
    for name in order:
        if name not in names:
            continue
        script = folder / f"{name}.py"
        print(f"\n=== {name}", file=sys.stderr)
        began = time.perf_counter()
        try:
            first_line(script)  # rather than to find out in the end that it has none
            output = echoed(script)
        except (FailedError, SyntaxError, ValueError) as failure:
            print(f"{name}: {failure}; its section stays as it was", file=sys.stderr)
            failed.append(name)
            continue
        new = section(script, output, time.perf_counter() - began)
        old = sections(page.read_text(encoding="utf-8")) if page.exists() else {}
        write_text_atomic(page, render({**old, name: new}, order))
    return failed


def echoed(script: Path) -> str:
    """Run a script, and print what it prints as it comes. Returns all of that.

    Raises:
        FailedError: If it ends with an error, or prints nothing.
    """
    lines = []
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=script.parent.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise FailedError(f"failed with exit code {process.returncode}")
    output = "".join(lines)
    if not output.strip():
        raise FailedError("printed nothing")
    return output


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if any script failed."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(SCRIPTS)}; all if none")
    names = parser.parse_args(arguments).names
    for name in names:
        if name not in SCRIPTS:
            parser.error(f"there is no benchmark {name!r}; expected any of {', '.join(SCRIPTS)}")
    failed = regenerate(names or SCRIPTS)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
