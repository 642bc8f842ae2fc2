"""The numbers that the paper prints, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A number out of the paper."""

    policy: str  # whose
    quantity: str  # `"return"`, or `"entropy"` of the context posterior at the end, in bits
    value: float
    # what follows its ±, which the paper does not say the meaning of; None where nothing does
    spread: float | None
    place: str  # where it is printed


TABLE = "Table 1"
TEXT = "Section 4, “Implementation”: “approximately”, upon convergence"

PUBLISHED = (
    Published("C-IDS", "return", 10.572, 1.345, TABLE),
    Published("C-IDS", "entropy", 0.020, 0.015, TABLE),
    Published("RDPG-RNN", "return", -3.565, 3.045, TABLE),
    Published("RDPG-RNN", "entropy", 0.164, 0.002, TABLE),
    Published("POMCP", "return", -6.504, 2.023, TABLE),
    Published("POMCP", "entropy", 1.000, 0.000, TABLE),
)

CONVERGED = (
    Published("C-IDS", "return", 10.0, None, TEXT),
    Published("C-IDS", "entropy", 0.03, None, TEXT),
)


def published(
    policy: str | None, quantity: str, numbers: tuple[Published, ...] = PUBLISHED
) -> Published | None:
    """A policy's number, if the paper has it."""
    matching = [each for each in numbers if (each.policy, each.quantity) == (policy, quantity)]
    return matching[0] if matching else None
