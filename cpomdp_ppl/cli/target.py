"""What a command is about: the solution in a run folder, or a model and a policy by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.cli.command import CommandError, Registry
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import progress_of
from cpomdp_ppl.cli.policies import Budget, Recipe, code_hash, is_users_own, recipe
from cpomdp_ppl.cli.provenance import spec_of
from cpomdp_ppl.cli.results import Results
from cpomdp_ppl.experiments.fingerprint import file_hash
from cpomdp_ppl.experiments.run_files import CHECKPOINT, SOLUTION
from cpomdp_ppl.experiments.run_folder import RECORD, RunFolder, RunFolderError
from cpomdp_ppl.rng import fresh_seed

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy


SOLVERS: Registry[Callable[[Path, CPOMDP], Any]] = Registry("solver", Callable, "cpomdp_ppl.solvers")  # type: ignore[arg-type]
"""Each loads a solution, which has a `policy` and a `prior`, from a folder and for a model."""


def solution_place(folder: RunFolder) -> Path | None:
    """Where the solution is; for a run that was killed, the checkpoint with the best so far."""
    places = (folder.path / SOLUTION, folder.path / CHECKPOINT)
    return next((place for place in places if any(place.glob("[!.]*"))), None)  # hidden files are unfinished


def solution_hash(folder: RunFolder) -> str:
    """The hash of the solution's files, which tells it from an earlier or later one."""
    return file_hash(solution_place(folder) or folder.path / SOLUTION)


def load_solution(folder: RunFolder, model: CPOMDP) -> Any:
    """The solution in a folder, which has a `policy` and a `prior`.

    Raises:
        RunFolderError: If there is none.
    """
    name = folder.record.get("solver")
    if not isinstance(name, str):
        raise RunFolderError(
            f"{folder.path} has no solution: it is of the command '{folder.record['command']}', not of a fit"
        )
    place = solution_place(folder)
    if place is None:
        raise RunFolderError(f"{folder.path} has no solution yet: repeat its command to go on with it")
    return SOLVERS.find(name)(place, model)


@dataclass(frozen=True)
class CommandTarget:
    """A model, and who acts in it."""

    spec: ModelSpec  # names the model
    model: CPOMDP
    actor: Recipe | Policy  # who acts: a policy, or how it is made
    # the prior over contexts of `--prior`, or that the solution was learned for; None for the model's
    prior: Any
    seed: int  # seed of all random numbers: as it was given, or noted in the folder of `--run`, or fresh
    folder: RunFolder | None  # the run folder with the solution; None if the policy was named
    settings: Mapping[str, Any]  # what decides the results of any command about this target

    @staticmethod
    def of(options: Namespace) -> CommandTarget:
        """The target that options of a command name: RUN, or MODEL with `--policy`.

        Raises:
            CommandError: If they do not go together.
        """
        if options.policy is None:
            return CommandTarget._of_run(options)
        if options.other is not None or options.other_arguments:
            raise CommandError("--model is for the solution of a run, and does not go with --policy")
        if (Path(options.target) / RECORD).is_file():
            raise CommandError(
                f"{options.target} is a run folder, where its solution acts: for --policy, name the model"
            )
        spec = ModelSpec.of([options.target, *options.arguments])
        settings = {
            "policy": options.policy,
            "simulations": options.simulations,
            "training_episodes": options.training_episodes,
            "prior": options.prior,
        }
        actor, model = recipe(options.policy), spec.build()
        if is_users_own(options.policy):
            settings["policy_sha256"] = code_hash(options.policy)
        return CommandTarget(spec, model, actor, options.prior, chosen_seed(options), None, settings)

    @staticmethod
    def _of_run(options: Namespace) -> CommandTarget:
        if ":" in options.target and not Path(options.target).exists():
            raise CommandError(
                f"{options.target} is a model, so say who acts in it: --policy random, for instance"
            )
        if options.arguments:
            raise CommandError(
                f"arguments: expected none after a run folder, got {' '.join(options.arguments)}"
            )
        folder = RunFolder.open(options.target, unfinished=options.unfinished)
        spec = spec_of(folder, options)
        model = spec.build()
        solution = load_solution(folder, model)
        settings = {
            "policy": None,
            "unfinished": not folder.finished,
            "solution": str(folder.path),
            "solution_sha256": solution_hash(folder),
            "prior": options.prior,
        }
        prior = solution.prior if options.prior is None else options.prior
        return CommandTarget(spec, model, solution.policy, prior, chosen_seed(options), folder, settings)

    def policy(self, options: Namespace) -> Policy:
        """Who acts. Making it may take long, so have a place for the results before.

        Raises:
            CommandError: If something that it needs is not installed.
        """
        if not isinstance(self.actor, Recipe):
            return self.actor
        budget = Budget.of(options, self.seed, progress_of(options))
        return self.actor.made(options.policy, self.model, budget)

    @property
    def in_force(self) -> dict[str, Any]:
        """What settings come to that were left out."""
        prior = self.model.prior().tolist() if self.prior is None else torch.as_tensor(self.prior).tolist()
        return {"policy": "the solution", "prior": prior}

    def results(
        self, options: Namespace, command: str, settings: Mapping[str, Any], outputs: Sequence[str]
    ) -> Results:
        """Where the results of a command about this target go: beside the solution, or to another folder."""
        settings = {**self.settings, **settings}
        if self.folder is None or options.run is not None:
            return Results.at(options, command, self.spec, settings, outputs, self.seed)
        self.folder.require_writable()
        return Results(self.folder, command, settings, self.seed, options, outputs, beside=True)


def chosen_seed(options: Namespace) -> int:
    """The seed that was given; or that of the run that `--run` goes on with; or a fresh one."""
    if options.seed is None and options.run is not None and (Path(options.run) / RECORD).is_file():
        return RunFolder.open(options.run, unfinished=True).seed
    return fresh_seed(options.seed)
