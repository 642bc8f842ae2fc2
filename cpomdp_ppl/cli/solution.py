"""The solution in a run folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.registry import Registry
from cpomdp_ppl.experiments.fingerprint import file_hash
from cpomdp_ppl.experiments.run_files import CHECKPOINT, SOLUTION
from cpomdp_ppl.experiments.run_folder import RunFolderError

if TYPE_CHECKING:
    from pathlib import Path

    from cpomdp_ppl.experiments.run_folder import RunFolder
    from cpomdp_ppl.model import CPOMDP

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
