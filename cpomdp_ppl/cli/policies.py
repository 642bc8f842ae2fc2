"""Policies by name: how each is made for a model, without anything that only its author knows.

A policy that a user has written is named as a model is: `module:name` or `path/to/file.py:name`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import OURS, CommandError, Registry
from cpomdp_ppl.cli.model import import_code, is_path
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
        simulations: How many simulations a planner may run for each decision.
        training_episodes: How many episodes a learner may play.
        seed: Seed of all random numbers.
        progress: Whether to show progress bars; or a function that is called with lines on the progress.
    """

    simulations: int = 100
    training_episodes: int = 10_000
    seed: int = 0
    progress: Progress = False

    @staticmethod
    def of(options: Namespace, seed: int, progress: Progress) -> Budget:
        """The budget that the options of a command set."""
        return Budget(options.simulations, options.training_episodes, seed, progress)


@dataclass(frozen=True)
class Recipe:
    """How a policy is made; other packages add theirs by the entry-point group `cpomdp_ppl.policies`.

    Attributes:
        build: Makes the policy.
        learns: Whether the policy is learned, which takes time that is reported.
        plans: Whether it takes its time for each decision, and so plays fewer episodes.
        extra: The extra of this distribution that installs what it needs.
    """

    build: Callable[[CPOMDP, Budget], Policy]
    learns: bool = False
    plans: bool = False
    extra: str | None = None

    @staticmethod
    def of(policy: Policy) -> Recipe:
        """A recipe for a policy that is there already."""
        return Recipe(lambda model, budget: policy)

    def made(self, name: str, model: CPOMDP, budget: Budget) -> Policy:
        """Make the policy.

        Raises:
            CommandError: If something that it needs is not installed.
        """
        try:
            return self.build(model, budget)
        except ImportError as error:
            package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
            if not package or package in OURS:
                raise  # a fault of ours, and nothing that the user can put right
            need = f"; install cpomdp-ppl[{self.extra}]" if self.extra else ""
            raise CommandError(f"the policy '{name}' cannot be made: {error}{need}") from error


POLICIES = Registry("policy", Recipe, "cpomdp_ppl.policies")


def recipe(name: str) -> Recipe:
    """A recipe by its name; or for a policy that the user has written, by where it is.

    Raises:
        CommandError: If there is none.
    """
    return _users_own(name) if is_users_own(name) else POLICIES.find(name)


def is_users_own(name: str) -> bool:
    """Whether a name says where a policy is that the user has written."""
    return ":" in name


def code_hash(name: str) -> str | None:
    """The hash of the file with a policy that the user has written; None for the other policies."""
    if not is_users_own(name):
        return None
    place = name.rpartition(":")[0]
    return file_hash(Path(place if is_path(place) else inspect.getfile(import_code(place))))


def _users_own(spec: str) -> Recipe:
    """The recipe of `module:name` or `file.py:name`: a function of a history, a policy, or a recipe."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise CommandError(f"policy: expected a name, module:name or path/to/file.py:name, got {spec}")
    module = import_code(place)
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
        return Recipe.of(as_policy(found))
    except ValueError as error:
        what = f"the class {name}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise CommandError(
            f"{spec} is {what}, but expected a function of a History, an object with `start` and `act`, or "
            "a Recipe"
        ) from error


RANDOM = Recipe(lambda model, budget: RandomPolicy(model.actions))
