"""Commands of the solvers, for the command line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import OK, Interrupted
from cpomdp_ppl.cli.figures import write_figures
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import (
    count,
    likelihood_option,
    model_arguments,
    non_negative,
    note,
    positive,
    prior_option,
    run_option,
    seed_option,
    shows_progress,
)
from cpomdp_ppl.cli.policies import Budget, Recipe
from cpomdp_ppl.cli.target import SOLUTION, Results
from solvers import cids
from solvers.objectives import OBJECTIVES

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy
    from cpomdp_ppl.run_folder import RunFolder
    from solvers.callbacks import Callback
    from solvers.solution import Solution

CHECKPOINT = "checkpoint"
EVERY = 10.0  # seconds between lines that tell of progress, where there is no terminal


def fit(options: Namespace) -> int:
    """Learn a policy, or go on learning it."""
    spec = ModelSpec.of([options.model, *options.arguments])
    model = spec.build()
    settings = {
        "likelihood": None if options.likelihood is None else repr(options.likelihood),
        "objective": options.objective,
        "temperature": options.temperature,
        "prior": options.prior,
        "iterations": options.iterations,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
    }
    results = Results.at(options, "fit", spec, settings, solver="cids")
    folder, progress = results.folder, shows_progress(options)
    note(options, f"run folder: {folder.path}")
    with results.kept():
        solution = cids.fit(
            model,
            likelihood="smc" if options.likelihood is None else options.likelihood,
            objective=options.objective,
            temperature=options.temperature,
            prior=options.prior,
            iterations=options.iterations,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            seed=results.seed,
            progress=progress,
            checkpoint=folder.path / CHECKPOINT,
            checkpoint_every=options.checkpoint_every,
            callbacks=[] if progress or options.quiet else [lines(options)],
        )
        keep(folder, solution)
        if not solution.finished:
            done, asked = len(solution.history["iteration"]), solution.settings["iterations"]
            raise Interrupted(
                f"stopped after {done:,} of {asked:,} iterations; the best policy so far is in "
                f"{folder.path / SOLUTION} (evaluate it with --unfinished); "
                f"to go on from the last checkpoint: {results.again()}"
            )
        write_figures(options, folder, {"solution": solution.plot})
        results.finish()
    print(last(solution))
    note(options, f"solution: {folder.path / SOLUTION}; next: cpomdp evaluate {folder.path}")
    return OK


def keep(folder: RunFolder, solution: Solution) -> None:
    """Write a solution and its history."""
    solution.save(folder.path / SOLUTION)
    history = solution.history
    columns = {str(name): history[name].values.tolist() for name in ("iteration", *history.data_vars)}
    folder.write_table("history.csv", columns)
    folder.write_data("history.nc", history)


def last(solution: Solution) -> str:
    """What was measured at the end, as a mean over the last iterations, in a sentence."""
    end = solution.history.isel(iteration=slice(-cids.WINDOW, None))
    parts = {"return": "return {:.3f}", "entropy": "H(C|Y) {:.3f} bits"}
    words = [text.format(float(end[name].mean())) for name, text in parts.items() if name in end]
    iterations = solution.history.sizes["iteration"]
    return f"{iterations:,} iterations; over the last {end.sizes['iteration']}: {', '.join(words)}"


def lines(options: Namespace) -> Callback:
    """A callback that says now and then how a fit is going."""
    said = time.monotonic()

    def say(iteration: int, measured: Mapping[str, float], policy: Any) -> None:
        nonlocal said
        if time.monotonic() - said < EVERY:
            return
        said = time.monotonic()
        shown = {"return": "return", "entropy": "H bits", "temperature": "τ"}
        words = [f"{label} {measured[name]:.2f}" for name, label in shown.items() if name in measured]
        note(options, f"iteration {iteration:,}: {', '.join(words)}")

    return say


def _options(parser: ArgumentParser) -> None:
    model_arguments(parser)
    likelihood_option(parser, "smc")
    parser.add_argument(
        "--objective", choices=list(OBJECTIVES), default="information", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=non_negative,
        help="what a nat is worth in units of reward (default: falls from 3 to 0.5, or 0.2 if variational)",
    )
    parser.add_argument(
        "--iterations", type=count, help="how many batches to play (default: 800, or 4000 if variational)"
    )
    parser.add_argument("--batch-size", type=count, default=200, help="episodes (default: %(default)s)")
    parser.add_argument("--learning-rate", type=positive, help="(default: chosen by the estimator)")
    parser.add_argument(
        "--checkpoint-every", type=count, default=25, help="iterations apart (default: %(default)s)"
    )
    prior_option(parser)
    seed_option(parser, None)
    run_option(parser)


FIT = Command(
    "Learn a policy by C-IDS; the same command in the same folder goes on from where it was stopped.",
    (
        "cpomdp fit cpomdp_ppl.models:LightDark --seed 1",
        "cpomdp fit cpomdp_ppl.models:LightDark dark_variance=16 --likelihood ekf --seed 1 --run runs/ld16",
        "cpomdp fit my_model.py:Maze horizon=30 --iterations 400 --temperature 1 --prior 0.7,0.3",
    ),
    _options,
    fit,
)


def _cids(model: CPOMDP, budget: Budget) -> Policy:
    iterations = max(1, budget.training_episodes // 200)
    solution = cids.fit(model, iterations=iterations, seed=budget.seed, progress=budget.progress)
    if not solution.finished:
        raise KeyboardInterrupt
    policy: Policy = solution.policy
    return policy


CIDS = Recipe(_cids, learns=True)
