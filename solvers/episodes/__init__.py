"""Algorithm 1: episode after episode in the same unknown context."""

from solvers.episodes.algorithm1 import run
from solvers.episodes.record import Run, RunInterrupted

__all__ = ["Run", "RunInterrupted", "run"]
