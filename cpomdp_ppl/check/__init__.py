"""Finding what is wrong with a model before anything long runs."""

from cpomdp_ppl.check.definition import definition_faults, reward_arguments
from cpomdp_ppl.check.programs import program_faults

__all__ = ["definition_faults", "program_faults", "reward_arguments"]
