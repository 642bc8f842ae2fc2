"""The faults of a model, as they are found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Faults:
    """The faults found so far, at most one of a kind for each program."""

    found: dict[tuple[str, str], str] = field(default_factory=dict)

    def report(self, program: str, kind: str, sentence: str) -> None:
        """Add a fault, unless one of this kind is known already."""
        self.found.setdefault((program, kind), f"{program}: {sentence}")

    def has(self, program: str) -> bool:
        """Whether anything is wrong with a program."""
        return any(name == program for name, _ in self.found)


def first_line(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
