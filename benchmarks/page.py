"""The page with all benchmarks: a section for each script, between marks, so that one can be made anew."""

from __future__ import annotations

import ast
import os
import platform
import re
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HEAD = """# Benchmarks

Written by `make bench`: every number below was printed by the script named above it.
`python -m benchmarks scale fit` makes those sections anew, and leaves the others as they are: sections may be
of different machines.
"""


def sections(page: str) -> dict[str, str]:
    """The sections of a page, by the names of their scripts, without their marks.

    Example:
        >>> sections(render({"fit": "## Fit"}, ["fit"]))
        {'fit': '## Fit'}
    """
    pattern = re.compile(r"^<!-- begin (\w+) -->\n(.*?)\n<!-- end \1 -->$", re.DOTALL | re.MULTILINE)
    return {name: text.strip("\n") for name, text in pattern.findall(page)}


def render(parts: Mapping[str, str], order: Sequence[str]) -> str:
    """The whole page, of those sections that there are."""
    marked = [
        f"<!-- begin {name} -->\n{parts[name]}\n<!-- end {name} -->\n" for name in order if name in parts
    ]
    return "\n".join([HEAD, *marked])


def section(script: Path, output: str, seconds: float) -> str:
    """The section of a script: what it shows, how to run it, where it ran, and what it printed.

    Args:
        script: Its file, which begins with a docstring; the first line of that says what it shows.
        output: What it printed, Markdown.
        seconds: How long it took.
    """
    shows = first_line(script)
    command = f"```\npython benchmarks/{script.name}\n```"
    where = f"{machine()}; {duration(seconds)}."
    return "\n\n".join([f"## {script.stem.capitalize()}", shows, command, where, output.strip("\n")])


def first_line(script: Path) -> str:
    """Of a script's docstring, which is read without running it.

    Raises:
        ValueError: If there is none.
    """
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{script.name}: expected a docstring whose first line says what it shows, got none")
    return docstring.splitlines()[0]


def machine() -> str:
    """Processor, number of cores and version of torch; nothing that tells whose machine it is."""
    cores = os.cpu_count()
    return f"{processor()}, {cores} core{'' if cores == 1 else 's'}, torch {version('torch')}"


def processor() -> str:
    """The processor's name for itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(named, platform.machine())
    except OSError:  # not Linux
        return platform.processor() or platform.machine()


def duration(seconds: float) -> str:
    """In words.

    Example:
        >>> duration(42.3), duration(127)
        ('42 seconds', '2.1 minutes')
    """
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
