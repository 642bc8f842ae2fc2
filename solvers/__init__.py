"""Solvers: policies learned from a CPOMDP."""
