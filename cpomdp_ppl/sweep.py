"""Where sweeps were before `cpomdp_ppl.experiments.sweep`: an import that users have."""

from cpomdp_ppl.experiments.sweep import SweepError, sweep

__all__ = ["SweepError", "sweep"]
