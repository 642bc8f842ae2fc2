"""What the solvers add to the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.cli.policies import Budget, Recipe
from solvers import cids
from solvers.commands.fit import FIT
from solvers.commands.run import RUN

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy

BATCH_SIZE = 200
"""How many episodes an iteration of C-IDS plays, if it is compared with other policies."""


def _cids(model: CPOMDP, budget: Budget) -> Policy:
    iterations = max(1, budget.training_episodes // BATCH_SIZE)
    solution = cids.fit(
        model, iterations=iterations, batch_size=BATCH_SIZE, seed=budget.seed, progress=budget.progress
    )
    policy: Policy = solution.policy
    return policy


COMMANDS = {"fit": FIT, "run": RUN}
POLICIES = {"cids": Recipe(_cids, learns=True)}
SOLVERS = {"cids": cids.load}
