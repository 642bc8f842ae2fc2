"""What a command is about: the solution in a run folder, or a model and a policy by name."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.errors import CommandError, Interrupted
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import shows_progress
from cpomdp_ppl.cli.plugins import SOLVERS
from cpomdp_ppl.cli.policies import Budget, recipe
from cpomdp_ppl.files import DiskFullError, is_disk_full
from cpomdp_ppl.isolation import fresh_seed
from cpomdp_ppl.run_folder import RunFolder, RunFolderError, next_folder

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy

SOLUTION = "solution"


@dataclass(frozen=True)
class Target:
    """A model, and who acts in it.

    Attributes:
        spec: Which model.
        model: It.
        policy: Who acts.
        prior: Over contexts, that a solution was learned for; None for the model's.
        folder: Of the run with the solution, if it is one.
    """

    spec: ModelSpec
    model: CPOMDP
    policy: Policy
    prior: Any
    folder: RunFolder | None

    @staticmethod
    def of(options: Namespace) -> Target:
        """From a command's options: RUN, or MODEL with `--policy`.

        Raises:
            CommandError: If they do not go together.
        """
        if options.policy is None:
            return Target._of_run(options)
        if options.other is not None:
            raise CommandError("--model is for the solution of a run, and does not go with --policy")
        spec = ModelSpec.of([options.target, *options.arguments])
        model = spec.build()
        made = recipe(options.policy).made(
            options.policy, model, Budget.of(options, options.seed or 0, shows_progress(options))
        )
        return Target(spec, model, made, None, None)

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
        spec = spec_of(folder, options.other)
        model = spec.build()
        solution = load_solution(folder, model)
        return Target(spec, model, solution.policy, solution.prior, folder)

    def results(self, options: Namespace, command: str, settings: Mapping[str, Any]) -> Results:
        """Where the results of a command about this go: beside the solution, or to a folder of their own."""
        if self.folder is not None and options.run is None:
            seed = fresh_seed(options.seed)
            return Results(self.folder, command, settings, seed, options, beside=True)
        if self.folder is not None:
            settings = {**settings, "solution": str(self.folder.path)}
        return Results.at(options, command, self.spec, settings)


@dataclass(frozen=True)
class Results:
    """The folder that a command writes to.

    Attributes:
        folder: It.
        command: The command.
        settings: Of the command.
        seed: Of everything random: as it was given, or noted in the folder, or fresh.
        options: As they were given.
        beside: Whether they are added to the results of another command.
    """

    folder: RunFolder
    command: str
    settings: Mapping[str, Any]
    seed: int
    options: Namespace
    beside: bool = False

    @staticmethod
    def at(
        options: Namespace, command: str, spec: ModelSpec, settings: Mapping[str, Any], **further: Any
    ) -> Results:
        """A folder of its own: that of `--run`, or the next that is free."""
        place = next_folder(spec.spec, command) if options.run is None else options.run
        folder = RunFolder.create(
            place,
            command,
            model=spec.spec,
            arguments=spec.arguments,
            settings=settings,
            seed=options.seed,
            **further,
        )
        return Results(folder, command, settings, folder.seed, options)

    def finish(self) -> None:
        """Note that all is there."""
        if self.beside:
            self.folder.add(self.command, settings=self.settings, seed=self.seed)
        else:
            self.folder.finish()

    def again(self) -> str:
        """The command line that goes on with this."""
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
            there = ", ".join(self.folder.contents) or "nothing yet"
            raise Interrupted(f"stopped; {self.folder.path} has {there}; to go on: {self.again()}") from None
        except Exception as error:
            self.folder.discard()
            if is_disk_full(error) and not isinstance(error, RunFolderError | DiskFullError):
                raise DiskFullError(self.folder.path) from error
            raise


def spec_of(folder: RunFolder, other: list[str] | None = None) -> ModelSpec:
    """The model of a run; or another that is given, with the run's arguments unless it has its own.

    Raises:
        RunFolderError: If the run says that its model is in the run folder itself: a folder may come from
            anywhere, and what is in it is data, never run.
    """
    if other is None:
        spec = replace(ModelSpec.of([folder.record["model"]]), arguments=folder.record["arguments"])
        if spec.path.resolve().is_relative_to(folder.path.resolve()):
            raise RunFolderError(
                f"{folder.path} has its model in itself, {spec.spec}, and no code is run from there: "
                "if you trust it, say which it is with --model"
            )
        return spec
    spec = ModelSpec.of(other)
    return spec if spec.arguments else ModelSpec(spec.spec, folder.record["arguments"])


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
    if not folder.has(SOLUTION):
        raise RunFolderError(f"{folder.path} has no solution yet: repeat its command to go on with it")
    return SOLVERS.find(name)(folder.path / SOLUTION, model)
