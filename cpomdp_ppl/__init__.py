"""Probabilistic programming for contextual POMDPs."""

from cpomdp_ppl.actions import Box
from cpomdp_ppl.agent import Agent
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import EpisodesFileError, ModelError
from cpomdp_ppl.evaluation import compare, evaluate
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.policy import FunctionPolicy, Greedy, History, Percept, Policy, RandomPolicy
from cpomdp_ppl.rollout import simulate

__all__ = [
    "CPOMDP",
    "Agent",
    "Box",
    "Episodes",
    "EpisodesFileError",
    "FunctionPolicy",
    "Greedy",
    "History",
    "ModelError",
    "Percept",
    "Policy",
    "RandomPolicy",
    "compare",
    "evaluate",
    "simulate",
]
