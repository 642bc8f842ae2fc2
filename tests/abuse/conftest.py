from __future__ import annotations

from tests.abuse.effort import FACTOR, LARGEST, TRIED


def pytest_terminal_summary(terminalreporter):
    """After a long run: what was tried."""
    if FACTOR > 1 and TRIED:
        terminalreporter.section("abuse")
        for what, count in sorted(TRIED.items()):
            terminalreporter.line(f"{count:8d}  {what}")
        for what, size in sorted(LARGEST.items()):
            terminalreporter.line(f"{size:8.2g}  {what}, at most")
