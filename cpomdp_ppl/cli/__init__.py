"""The command line, `cpomdp`: everything from checking a model to a report, with results in run folders."""

from cpomdp_ppl.cli.cache import CACHE
from cpomdp_ppl.cli.check import CHECK
from cpomdp_ppl.cli.command import COMMANDS, Command, CommandError
from cpomdp_ppl.cli.compare import COMPARE
from cpomdp_ppl.cli.diagnose import DIAGNOSE
from cpomdp_ppl.cli.evaluate import EVALUATE
from cpomdp_ppl.cli.main import main
from cpomdp_ppl.cli.policies import POLICIES, RANDOM, Budget, Recipe
from cpomdp_ppl.cli.report import REPORT
from cpomdp_ppl.cli.simulate import SIMULATE
from cpomdp_ppl.cli.target import SOLVERS

COMMANDS.add(
    {
        "check": CHECK,
        "simulate": SIMULATE,
        "evaluate": EVALUATE,
        "compare": COMPARE,
        "diagnose": DIAGNOSE,
        "report": REPORT,
        "cache": CACHE,
    }
)
POLICIES.add({"random": RANDOM})

__all__ = [
    "COMMANDS",
    "POLICIES",
    "SOLVERS",
    "Budget",
    "Command",
    "CommandError",
    "Recipe",
    "main",
]
