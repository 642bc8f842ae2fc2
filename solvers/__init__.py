"""Solvers: policies learned from a CPOMDP."""

from solvers import cids

__all__ = ["cids"]
