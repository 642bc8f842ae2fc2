"""C-IDS: learn a policy that earns reward and finds out the context."""

from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.box_distributions import ScaledBeta, SquashedGaussian
from solvers.cids.estimator import ActorCritic, Reinforce
from solvers.cids.objective import Information, Objective, Variational
from solvers.cids.policy import LSTMPolicy
from solvers.cids.priors import DirichletPriors
from solvers.cids.schedules import Constant, Geometric, Linear
from solvers.cids.searching import Searching
from solvers.cids.solution import Solution, load
from solvers.cids.training import Interrupted, TensorBoard, fit
from solvers.cids.verdict import NotSolvedWarning, Verdict
from solvers.episodes.algorithm1 import run
from solvers.episodes.record import RunInterrupted

__all__ = [
    "ActorCritic",
    "BeliefPolicy",
    "Constant",
    "DirichletPriors",
    "Geometric",
    "Information",
    "Interrupted",
    "LSTMPolicy",
    "Linear",
    "NotSolvedWarning",
    "Objective",
    "Reinforce",
    "RunInterrupted",
    "ScaledBeta",
    "Searching",
    "Solution",
    "SquashedGaussian",
    "TensorBoard",
    "Variational",
    "Verdict",
    "fit",
    "load",
    "run",
]
