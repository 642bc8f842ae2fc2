"""Finite models solved exactly: the best policy for return and information, and the value of any policy."""

from solvers.exact.beliefs import TooManyBeliefsError
from solvers.exact.planning import (
    MAX_HISTORIES,
    Assessment,
    Endings,
    Plan,
    TooManyHistoriesError,
    evaluate,
    plan,
)

__all__ = [
    "MAX_HISTORIES",
    "Assessment",
    "Endings",
    "Plan",
    "TooManyBeliefsError",
    "TooManyHistoriesError",
    "evaluate",
    "plan",
]
