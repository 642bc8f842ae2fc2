"""How good a policy is: what it earns, and what it finds out."""

from cpomdp_ppl.evaluation.mean import Mean
from cpomdp_ppl.evaluation.outcome import Comparison, Evaluation, PerEpisode
from cpomdp_ppl.evaluation.playing import PolicyLike, TimedPolicy, compare, evaluate

__all__ = [
    "Comparison",
    "Evaluation",
    "Mean",
    "PerEpisode",
    "PolicyLike",
    "TimedPolicy",
    "compare",
    "evaluate",
]
