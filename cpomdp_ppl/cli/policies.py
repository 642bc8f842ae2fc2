"""Policies by name: how each is made for a model, without anything that only its author knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpomdp_ppl.cli.errors import CommandError
from cpomdp_ppl.cli.plugins import POLICIES, is_absence
from cpomdp_ppl.policy import RandomPolicy

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy
    from cpomdp_ppl.progress import Progress


@dataclass(frozen=True)
class Budget:
    """What making a policy, and its decisions, may cost.

    Attributes:
        simulations: Of a planner, for every decision.
        training_episodes: That a learner may play.
        seed: Of everything random.
        progress: Whether to show progress bars; or a function that is told now and then how far it has got.
    """

    simulations: int = 100
    training_episodes: int = 10_000
    seed: int = 0
    progress: Progress = False

    @staticmethod
    def of(options: Namespace, seed: int, progress: Progress) -> Budget:
        """From the options of a command."""
        return Budget(options.simulations, options.training_episodes, seed, progress)


@dataclass(frozen=True)
class Recipe:
    """How a policy is made; other packages add theirs by the entry-point group `cpomdp_ppl.policies`.

    Attributes:
        build: Makes it.
        learns: Whether that means learning, whose time is reported.
        plans: Whether it takes its time for every decision, and so plays fewer episodes.
        extra: Of this distribution, that has what it needs.
    """

    build: Callable[[CPOMDP, Budget], Policy]
    learns: bool = False
    plans: bool = False
    extra: str | None = None

    def made(self, name: str, model: CPOMDP, budget: Budget) -> Policy:
        """Make it.

        Raises:
            CommandError: If something is not installed that it needs.
        """
        try:
            return self.build(model, budget)
        except ImportError as error:
            if not is_absence(error):
                raise
            need = f"; install cpomdp-ppl[{self.extra}]" if self.extra else ""
            raise CommandError(f"the policy '{name}' cannot be made: {error}{need}") from error


def recipe(name: str) -> Recipe:
    """A recipe by its name.

    Raises:
        CommandError: If there is none.
    """
    found = POLICIES.find(name)
    if not isinstance(found, Recipe):
        raise CommandError(f"the policy '{name}' is a {type(found).__name__}, but expected a Recipe")
    return found


RANDOM = Recipe(lambda model, budget: RandomPolicy(model.num_actions))
