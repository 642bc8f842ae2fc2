"""Section 3 of the paper as something to run: what regret is made of, how large it is, and its bounds."""

from solvers.regret.bound import XI, Bound, estimate_eta, reward_bound, smallest_xi
from solvers.regret.decomposition import Decomposition, decompose
from solvers.regret.exact import ExactRegret, TooManyPosteriorsError, exact_regret
from solvers.regret.invariance import Gaps, Merge, merge_invariant_contexts, policy_gaps
from solvers.regret.values import Optima, PolicyValues, context_known_values, policy_values

__all__ = [
    "XI",
    "Bound",
    "Decomposition",
    "ExactRegret",
    "Gaps",
    "Merge",
    "Optima",
    "PolicyValues",
    "TooManyPosteriorsError",
    "context_known_values",
    "decompose",
    "estimate_eta",
    "exact_regret",
    "merge_invariant_contexts",
    "policy_gaps",
    "policy_values",
    "reward_bound",
    "smallest_xi",
]
