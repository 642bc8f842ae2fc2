"""Measurements against peers, as ratios within one run; `python -m benchmarks` writes the page of all."""
