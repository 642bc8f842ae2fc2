"""Finite models solved exactly: the best policy for return and information, and the value of any policy.

A finite model with a horizon has finitely many histories, and far fewer beliefs: histories in another order,
or with as much evidence for as against, lead to the same one. `plan` goes through all beliefs `P(c, s | h)`
that can be reached from a prior, and finds the best action in each by dynamic programming; `evaluate` goes
through all histories that a given policy can meet, if it draws no random numbers itself. Both are for small
models, and say so of larger ones.
"""

from solvers.exact.beliefs import Endings, TooManyBeliefsError
from solvers.exact.evaluation import MAX_HISTORIES, Assessment, TooManyHistoriesError, evaluate
from solvers.exact.planning import Plan, plan

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
