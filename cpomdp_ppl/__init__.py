"""Probabilistic programming for contextual POMDPs."""

from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import EpisodesFileError, ModelError
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.policy import FunctionPolicy, History, Percept, Policy, RandomPolicy
from cpomdp_ppl.simulate import simulate

__all__ = [
    "CPOMDP",
    "Episodes",
    "EpisodesFileError",
    "FunctionPolicy",
    "History",
    "ModelError",
    "Percept",
    "Policy",
    "RandomPolicy",
    "simulate",
]
