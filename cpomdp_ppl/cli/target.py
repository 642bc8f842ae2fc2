"""What a command is about: the solution in a run folder, or a model and a policy by name."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.cli.errors import CommandError, Interrupted
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import progress_of
from cpomdp_ppl.cli.plugins import SOLVERS
from cpomdp_ppl.cli.policies import Budget, Recipe, code_hash, is_own, recipe
from cpomdp_ppl.cli.provenance import spec_of
from cpomdp_ppl.experiments.files import DiskFullError, is_disk_full
from cpomdp_ppl.experiments.fingerprint import file_hash
from cpomdp_ppl.experiments.run_files import CHECKPOINT, SOLUTION
from cpomdp_ppl.experiments.run_folder import RECORD, RunFolder, RunFolderError, next_folder
from cpomdp_ppl.rng import fresh_seed

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping, Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy


@dataclass(frozen=True)
class Target:
    """A model, and who acts in it.

    Attributes:
        spec: Which model.
        model: It.
        actor: Who acts: how it is made, or it itself.
        prior: Over contexts, as `--prior` says; or that a solution was learned for; or None for the model's.
        seed: Of everything random: as it was given, or noted in the folder of `--run`, or fresh.
        folder: Of the run with the solution, if it is one.
        settings: What decides the results of any command about this.
    """

    spec: ModelSpec
    model: CPOMDP
    actor: Recipe | Policy
    prior: Any
    seed: int
    folder: RunFolder | None
    settings: Mapping[str, Any]

    @staticmethod
    def of(options: Namespace) -> Target:
        """From a command's options: RUN, or MODEL with `--policy`.

        Raises:
            CommandError: If they do not go together.
        """
        if options.policy is None:
            return Target._of_run(options)
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
        if is_own(options.policy):
            settings["policy_sha256"] = code_hash(options.policy)
        return Target(spec, model, actor, options.prior, settled_seed(options), None, settings)

    @staticmethod
    def _of_run(options: Namespace) -> Target:
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
        return Target(spec, model, solution.policy, prior, settled_seed(options), folder, settings)

    def policy(self, options: Namespace) -> Policy:
        """Who acts; to make it may take long, so that results should have their place before.

        Raises:
            CommandError: If something is not installed that it needs.
        """
        if not isinstance(self.actor, Recipe):
            return self.actor
        budget = Budget.of(options, self.seed, progress_of(options))
        return self.actor.made(options.policy, self.model, budget)

    @property
    def in_force(self) -> dict[str, Any]:
        """What its settings come to where they were left out."""
        prior = self.model.prior().tolist() if self.prior is None else torch.as_tensor(self.prior).tolist()
        return {"policy": "the solution", "prior": prior}

    def results(
        self, options: Namespace, command: str, settings: Mapping[str, Any], outputs: Sequence[str]
    ) -> Results:
        """Where the results of a command about this go: beside the solution, or to a folder of their own.

        Args:
            options: Of the command.
            command: Its name.
            settings: Its own; those of the target are added.
            outputs: All files that it may write, in the folder.
        """
        settings = {**self.settings, **settings}
        if self.folder is None or options.run is not None:
            return Results.at(options, command, self.spec, settings, outputs, self.seed)
        self.folder.require_writable()
        return Results(self.folder, command, settings, self.seed, options, outputs, beside=True)


def settled_seed(options: Namespace) -> int:
    """The seed that was given; or that of the run that `--run` goes on with; or a fresh one."""
    if options.seed is None and options.run is not None and (Path(options.run) / RECORD).is_file():
        return RunFolder.open(options.run, unfinished=True).seed
    return fresh_seed(options.seed)


@dataclass(frozen=True)
class Results:
    """The folder that a command writes to.

    Attributes:
        folder: It.
        command: The command.
        settings: Of the command.
        seed: Of everything random: as it was given, or noted in the folder, or fresh.
        options: As they were given.
        outputs: Files that the command writes anew every time; none if it goes on where it was stopped.
        beside: Whether they are added to the results of another command.
    """

    folder: RunFolder
    command: str
    settings: Mapping[str, Any]
    seed: int
    options: Namespace
    outputs: Sequence[str] = ()
    beside: bool = False
    _replaced: list[bool] = field(default_factory=list, repr=False)

    @staticmethod
    def at(
        options: Namespace,
        command: str,
        spec: ModelSpec,
        settings: Mapping[str, Any],
        outputs: Sequence[str] = (),
        seed: int | None = None,
        **further: Any,
    ) -> Results:
        """A folder of its own: that of `--run`, or the next that is free."""
        place = next_folder(spec.spec, command) if options.run is None else options.run
        folder = RunFolder.create(
            place,
            command,
            model=spec.spec,
            arguments=spec.words,
            settings=settings,
            seed=options.seed if seed is None else seed,
            source=spec.source(),
            **further,
        )
        folder.require_writable()
        return Results(folder, command, settings, folder.seed, options, outputs)

    def replace(self) -> RunFolder:
        """Remove what the command wrote here before: results of two runs must not lie side by side.

        To be called when the results are at hand, so that a run that fails leaves the former ones.

        Returns:
            The folder, to write to.
        """
        self._replaced.append(True)
        if self.beside:
            self.folder.withdraw(self.command)
        self.folder.remove(self.outputs)
        return self.folder

    def finish(self, **in_force: Any) -> None:
        """Note that all is there, and what settings that were left out came to."""
        if self.beside:
            self.folder.add(self.command, settings=self.settings, seed=self.seed, in_force=in_force)
        else:
            self.folder.finish(in_force)

    def again(self) -> str:
        """The command line that goes on with this, or begins it again."""
        words = list(self.options.command_line)
        if self.options.run is None and not self.beside:
            words += ["--run", str(self.folder.path)]
        return shlex.join(["cpomdp", self.command, *words])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Where Ctrl-C leads to a sentence on what was kept, and an error leaves no empty folder behind."""
        try:
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(self._stopped()) from None
        except Exception as error:
            self.folder.discard()
            if is_disk_full(error) and not isinstance(error, RunFolderError | DiskFullError):
                raise DiskFullError(self.folder.path) from error
            raise

    def _stopped(self) -> str:
        if not self.outputs:
            there = ", ".join(self.folder.contents) or "nothing yet"
            return f"stopped; {self.folder.path} has {there}; to go on: {self.again()}"
        there = ", ".join(name for name in self.outputs if self.folder.has(name)) if self._replaced else ""
        what = f"stopped; {self.folder.path} has {there}" if there else "stopped, before anything was written"
        return f"{what}; to begin again: {self.again()}"


def solution_place(folder: RunFolder) -> Path | None:
    """Where the solution of a folder is, or the best so far in the checkpoint of one that has none yet."""
    places = (folder.path / SOLUTION, folder.path / CHECKPOINT)
    return next((place for place in places if any(place.glob("[!.]*"))), None)  # a hidden file is half of one


def solution_hash(folder: RunFolder) -> str:
    """What tells the solution in a folder from one before or after it."""
    return file_hash(solution_place(folder) or folder.path / SOLUTION)


def load_solution(folder: RunFolder, model: CPOMDP) -> Any:
    """The solution in a folder, which has a `policy` and a `prior`.

    Raises:
        RunFolderError: If it has none.
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
