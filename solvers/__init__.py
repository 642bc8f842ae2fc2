"""Solvers: policies learned from a CPOMDP."""

import sys

from solvers import cids
from solvers.cids import estimator, group, objective, policy, priors, schedules, solution, training
from solvers.regret import plots

__all__ = ["cids"]

# The names that these modules had before `solvers.cids` became a package, for imports that users have.
_EARLIER = {
    "callbacks": training,
    "estimators": estimator,
    "objectives": objective,
    "policies": policy,
    "priors": priors,
    "processes": group,
    "regret_plots": plots,
    "schedules": schedules,
    "solution": solution,
}
for _name, _module in _EARLIER.items():
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _module
