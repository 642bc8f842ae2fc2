"""Learning the constants of a model, given as `PyroParam`s, from recorded episodes."""

from cpomdp_ppl.learning.likelihood import log_likelihood
from cpomdp_ppl.learning.maximum_likelihood import Estimate, maximum_likelihood
from cpomdp_ppl.learning.parameters import with_parameters
from cpomdp_ppl.learning.particle_mcmc import SamplingInterrupted, particle_marginal_metropolis_hastings

__all__ = [
    "Estimate",
    "SamplingInterrupted",
    "log_likelihood",
    "maximum_likelihood",
    "particle_marginal_metropolis_hastings",
    "with_parameters",
]
