"""`cpomdp fit`: learn a policy by C-IDS, in one process or in several that torchrun starts."""

from __future__ import annotations

import os
import shlex
import time
from shutil import rmtree
from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.cli.command import INTERRUPTED, OK, USER_ERROR, Command, CommandError, Stopped
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import (
    FRESH,
    NEW_FOLDER,
    SUITABLE,
    count,
    model_arguments,
    non_negative,
    note,
    positive,
    probabilities,
    progress_of,
    shared_options,
)
from cpomdp_ppl.cli.results import Results
from cpomdp_ppl.experiments.run_files import CHECKPOINT, HISTORY, SOLUTION
from solvers import cids
from solvers.cids.group import ProcessFailedError, joined, process_group
from solvers.cids.objective import OBJECTIVES
from solvers.cids.training import WINDOW

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from cpomdp_ppl.experiments.run_folder import RunFolder
    from solvers.cids.group import SingleProcess
    from solvers.cids.solution import Solution

SETTINGS = (
    "likelihood",
    "objective",
    "temperature",
    "prior",
    "iterations",
    "batch_size",
    "learning_rate",
)
"""The settings of `cids.fit` that decide what is learned."""

SECONDS_TO_REPORT = 0.5
"""How long a process waits before it exits: the one that failed says why before torchrun ends it."""


def fit(options: Namespace) -> int:
    """Learn a policy, or go on learning it; if torchrun started this, together with the other processes."""
    rank = 0
    try:
        with joined(), process_group(torch.device("cpu")) as group:
            rank = group.rank
            return _fit(options, group)
    except ProcessFailedError:
        time.sleep(SECONDS_TO_REPORT)
        if rank == 0:
            raise
        return USER_ERROR
    except KeyboardInterrupt:
        if rank == 0:
            raise
        time.sleep(SECONDS_TO_REPORT)
        return INTERRUPTED


def _fit(options: Namespace, group: SingleProcess) -> int:
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and options.run is None:
        raise CommandError("--folder: expected one that restarted processes can go on with, got none")
    spec = ModelSpec.of([options.model, *options.arguments])
    model = spec.build()
    group.barrier()  # no folder before all have the model
    settings = {name: getattr(options, name) for name in SETTINGS}
    if group.rank > 0:
        cids.fit(model, **settings, **group.broadcast({"seed": None, "checkpoint": None}), progress=False)
        return OK
    recorded = {**settings, "likelihood": None if options.likelihood is None else repr(options.likelihood)}
    results = Results.at(options, "fit", spec, recorded, solver="cids")
    folder = results.folder
    place = group.broadcast({"seed": results.seed, "checkpoint": str(folder.path / CHECKPOINT)})
    if not folder.finished and any((folder.path / CHECKPOINT).glob("[!.]*")):
        # It goes on from there, and what was the best when it was stopped will soon not be.
        rmtree(folder.path / SOLUTION, ignore_errors=True)
    note(options, f"run folder: {folder.path}")
    with results.kept():
        try:
            progress, every = progress_of(options), options.checkpoint_every
            solution = cids.fit(model, **settings, **place, progress=progress, checkpoint_every=every)
        except cids.Interrupted as interrupt:
            _keep(folder, interrupt.solution)
            raise Stopped(
                f"{interrupt}; the best policy so far is in {folder.path / SOLUTION} (evaluate it with "
                f"--unfinished); to go on from the last checkpoint: {_again(results, group)}"
            ) from None
        _keep(folder, solution)
        results.draw({"solution": lambda: solution.plot(likelihood=options.likelihood)})
        results.finish()
    print(last(solution))
    then = shlex.join(["cpomdp", "evaluate", str(folder.path)])
    note(options, f"solution: {folder.path / SOLUTION}; next: {then}")
    return OK


def _again(results: Results, group: SingleProcess) -> str:
    """The command line that goes on with as many processes."""
    if group.size == 1:
        return results.again()
    here = os.environ.get("LOCAL_WORLD_SIZE", group.size)
    return results.again("torchrun", f"--nproc-per-node={here}", "-m", "cpomdp_ppl", folder="--folder")


def _keep(folder: RunFolder, solution: Solution) -> None:
    solution.save(folder.path / SOLUTION)
    history = solution.history
    columns = {str(name): history[name].values.tolist() for name in ("iteration", *history.data_vars)}
    folder.write_table(HISTORY, columns)
    folder.write_data("history.nc", history)


def last(solution: Solution) -> str:
    """A sentence on what was measured at the end: means over the last iterations."""
    end = solution.history.isel(iteration=slice(-WINDOW, None))
    parts = {"return": "return {:.3f}", "entropy": "H(C|Y) {:.3f} bits"}
    words = [text.format(float(end[name].mean())) for name, text in parts.items() if name in end]
    iterations = solution.history.sizes["iteration"]
    return f"{iterations:,} iterations; over the last {end.sizes['iteration']}: {', '.join(words)}"


def _options(parser: ArgumentParser) -> None:
    model_arguments(parser)
    shared_options(parser, likelihood=SUITABLE, seed=FRESH)
    parser.add_argument(
        "--objective",
        choices=list(OBJECTIVES),
        default="information",
        help="what the policy maximises (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=non_negative,
        help="what a nat is worth in units of reward (default: falls from 3 to 0.5, or 0.2 if variational)",
    )
    parser.add_argument(
        "--iterations",
        type=count,
        help="number of batches (default: 800, or 4000 if variational; 1.5 times as many with dirichlet)",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        default=200,
        help="episodes of a batch (default: %(default)s); N processes need more than 250 (N - 1), and "
        "multiples of 250 N are shared evenly",
    )
    parser.add_argument("--learning-rate", type=positive, help="step size (default: chosen by the estimator)")
    parser.add_argument(
        "--checkpoint-every",
        type=count,
        default=25,
        help="iterations between checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--prior",
        type=prior_or_priors,
        metavar="P,P,…",
        help="prior over contexts, such as 0.5,0.5; or dirichlet, to be ready for any (for cpomdp run)",
    )
    parser.add_argument(
        *("--run", "--folder"),
        metavar="DIR",
        help=f"folder for results (default: {NEW_FOLDER}); say --folder after torchrun --nproc-per-node=N -m "
        "cpomdp_ppl fit …, which takes --run for an option of torchrun",
    )


def prior_or_priors(text: str) -> str | tuple[float, ...]:
    """Probabilities, or `dirichlet` for priors from all over the simplex."""
    return text if text == "dirichlet" else probabilities(text)


FIT = Command(
    "Learn a policy by C-IDS; the same command in the same folder goes on from where it was stopped.",
    (
        "cpomdp fit cpomdp_ppl.models:LightDark --seed 1",
        "cpomdp fit cpomdp_ppl.models:LightDark dark_variance=16 --likelihood ekf --seed 1 --run runs/ld16",
        "cpomdp fit my_model.py:Maze horizon=30 --iterations 400 --temperature 1 --prior 0.7,0.3",
        "cpomdp fit cpomdp_ppl.models:LightDark --prior dirichlet",
    ),
    _options,
    fit,
)
