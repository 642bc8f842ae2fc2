"""How much abuse: CPOMDP_ABUSE=N multiplies the counts, and what was tried is counted."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("CPOMDP_ABUSE", "1"))

TRIED: Counter[str] = Counter()
"""What was tried, and how it ended."""

LARGEST: dict[str, float] = {}
"""The largest discrepancies that were met."""


def times(count: int) -> int:
    """So many, or in a long run a multiple."""
    return count * FACTOR


def examples(count: int) -> settings:
    """Always the same examples, so many of them."""
    return settings(
        max_examples=times(count),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
