"""The command line, `cpomdp`: everything from checking a model to a report, with results in run folders."""

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import CommandError
from cpomdp_ppl.cli.main import entry, main
from cpomdp_ppl.cli.policies import Budget, Recipe

__all__ = ["Budget", "Command", "CommandError", "Recipe", "entry", "main"]
