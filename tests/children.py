"""Other processes for tests: started with the repository on their path, waited for, and looked after."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable


def environment(**variables: str) -> dict[str, str]:
    """The variables of a child process: ours, the path to import from, and more."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def python(*words: str) -> list[str]:
    """A command for this very Python: a script (one word, which may be indented), or `-m` and its words."""
    return [sys.executable, *words] if len(words) > 1 else [sys.executable, "-c", textwrap.dedent(*words)]


def run_python(*words: str, **settings: Any) -> str:
    """Run a script or module to its end, which must be a good one, and return what it printed."""
    settings = {"env": environment(), "capture_output": True, "text": True, "timeout": 120, **settings}
    done = subprocess.run(python(*words), check=False, **settings)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def start_python(*words: str, **settings: Any) -> subprocess.Popen[str]:
    """Start a script or module, and return without waiting for it."""
    settings = {"env": environment(), "stdout": subprocess.PIPE, "text": True, **settings}
    return subprocess.Popen(python(*words), **settings)


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = 60.0
) -> None:
    """Wait until a condition holds; that time runs out, or the process ends before, is a failure."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "the process ended too early"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_running(process: int | str) -> bool:
    """Whether there is a process of this number that has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
