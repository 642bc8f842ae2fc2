"""Policies by name: how each is made for a model, without anything that only its author knows.

A policy of the user's own is named as a model is: `module:name` or `path/to/file.py:name`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpomdp_ppl.cli.errors import CommandError
from cpomdp_ppl.cli.model import is_path, load
from cpomdp_ppl.cli.plugins import POLICIES, is_absence
from cpomdp_ppl.experiments.fingerprint import file_hash
from cpomdp_ppl.policy import RandomPolicy, as_policy

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
    """A recipe by its name; or for a policy of the user's own, by where it is.

    Raises:
        CommandError: If there is none.
    """
    if is_own(name):
        return _own(name)
    found = POLICIES.find(name)
    if not isinstance(found, Recipe):
        raise CommandError(f"the policy '{name}' is a {type(found).__name__}, but expected a Recipe")
    return found


def is_own(name: str) -> bool:
    """Whether a name says where a policy of the user's own is."""
    return ":" in name


def code_hash(name: str) -> str | None:
    """What tells the code of a policy of the user's own from what it was before; None for the others."""
    if not is_own(name):
        return None
    place = name.rpartition(":")[0]
    return file_hash(Path(place if is_path(place) else inspect.getfile(load(place))))


def _own(spec: str) -> Recipe:
    """From `module:name` or `file.py:name`: a function of a history, a policy, or a recipe."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise CommandError(f"policy: expected a name, module:name or path/to/file.py:name, got {spec}")
    module = load(place)
    found = getattr(module, name, None)
    if found is None:
        there = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not each.startswith("_")
        ]
        known = f"its functions are {', '.join(there)}" if there else "it has no function at all"
        raise CommandError(f"{place} has no policy '{name}'; {known}")
    if isinstance(found, Recipe):
        return found
    try:
        policy = as_policy(found)
    except ValueError as error:
        what = f"the class {name}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise CommandError(
            f"{spec} is {what}, but expected a function of a History, an object with `start` and `act`, or "
            "a Recipe"
        ) from error
    return Recipe(lambda model, budget: policy)


RANDOM = Recipe(lambda model, budget: RandomPolicy(model.num_actions))
