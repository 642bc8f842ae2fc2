"""A CPOMDP as a Gymnasium environment (the extra `gym`)."""

from cpomdp_ppl.gym.encoding import SpaceEncoding
from cpomdp_ppl.gym.environments import CPOMDPEnv, CPOMDPVectorEnv

__all__ = ["CPOMDPEnv", "CPOMDPVectorEnv", "SpaceEncoding"]
