"""Baselines: other ways to plan in a CPOMDP, on the very same model."""
