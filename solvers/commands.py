"""Commands of the solvers, for the command line."""

from __future__ import annotations

import math
import os
import shlex
import time
import warnings
from dataclasses import replace
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import INTERRUPTED, OK, USER_ERROR, CommandError, Stopped
from cpomdp_ppl.cli.figures import figure_files, write_figures
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import (
    BESIDE,
    count,
    episodes_option,
    likelihood_option,
    model_arguments,
    non_negative,
    note,
    policy_option,
    positive,
    prior_option,
    probabilities,
    progress_of,
    run_option,
    seed_option,
    warn,
)
from cpomdp_ppl.cli.policies import Budget, Recipe
from cpomdp_ppl.cli.results import Results
from cpomdp_ppl.cli.target import CommandTarget
from cpomdp_ppl.evaluation import Mean
from cpomdp_ppl.experiments.run_files import CHECKPOINT, HISTORY, LIVED, SOLUTION
from cpomdp_ppl.inference.choice import backend_for
from solvers import cids
from solvers.cids.group import ProcessFailedError, joined, process_group
from solvers.cids.objective import OBJECTIVES
from solvers.cids.training import WINDOW

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from matplotlib.figure import Figure

    from cpomdp_ppl.experiments.run_folder import RunFolder
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy
    from solvers.cids.group import SingleProcess
    from solvers.cids.solution import Solution
    from solvers.episodes.record import Run

MOMENT = 0.5  # seconds


def fit(options: Namespace) -> int:
    """Learn a policy, or go on learning it; started by torchrun, together with the other processes."""
    rank = 0
    try:
        with joined(), process_group(torch.device("cpu")) as group:
            rank = group.rank
            return _fit(options, group)
    except (ProcessFailedError, KeyboardInterrupt) as error:
        failed = isinstance(error, ProcessFailedError)
        if rank > 0 or failed:
            time.sleep(MOMENT)  # for the process that it is about to say why, before torchrun ends it
        if rank == 0:
            raise
        return USER_ERROR if failed else INTERRUPTED


def _fit(options: Namespace, group: SingleProcess) -> int:
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and options.run is None:
        raise CommandError("--folder: expected one that restarted processes can go on with, got none")
    spec = ModelSpec.of([options.model, *options.arguments])
    model = spec.build()
    group.barrier()  # all have it, before there is a folder
    results = _results(options, spec) if group.rank == 0 else None
    place: dict[str, Any] = {"seed": None, "checkpoint": None}
    if results is not None:
        place = {"seed": results.seed, "checkpoint": str(results.folder.path / CHECKPOINT)}
    settings = {**_settings(options), **group.broadcast(place)}
    if results is None:
        cids.fit(model, **settings, progress=False)
        return OK
    folder = results.folder
    if not folder.finished and any((folder.path / CHECKPOINT).glob("[!.]*")):
        # It goes on from there, and what was the best when it was stopped will soon not be.
        rmtree(folder.path / SOLUTION, ignore_errors=True)
    note(options, f"run folder: {folder.path}")
    with results.kept():
        try:
            solution = cids.fit(
                model,
                **settings,
                progress=progress_of(options),
                checkpoint_every=options.checkpoint_every,
            )
        except cids.Interrupted as interrupt:
            keep(folder, interrupt.solution)
            raise Stopped(
                f"{interrupt}; the best policy so far is in {folder.path / SOLUTION} (evaluate it with "
                f"--unfinished); to go on from the last checkpoint: {_again(results, group)}"
            ) from None
        keep(folder, solution)
        write_figures(options, folder, {"solution": lambda: solution.plot(likelihood=settings["likelihood"])})
        results.finish()
    print(last(solution))
    then = shlex.join(["cpomdp", "evaluate", str(folder.path)])
    note(options, f"solution: {folder.path / SOLUTION}; next: {then}")
    return OK


def _again(results: Results, group: SingleProcess) -> str:
    """The command line that goes on, with as many processes."""
    if group.size == 1:
        return results.again()
    words = list(results.options.command_line)
    if results.options.run is None:
        words += ["--folder", str(results.folder.path)]
    here = os.environ.get("LOCAL_WORLD_SIZE", group.size)
    return shlex.join(["torchrun", f"--nproc-per-node={here}", "-m", "cpomdp_ppl", "fit", *words])


def _results(options: Namespace, spec: ModelSpec) -> Results:
    """The folder, with what tells this fit from others."""
    settings = {
        "likelihood": None if options.likelihood is None else repr(options.likelihood),
        "objective": options.objective,
        "temperature": options.temperature,
        "prior": options.prior,
        "iterations": options.iterations,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
    }
    return Results.at(options, "fit", spec, settings, solver="cids")


def _settings(options: Namespace) -> dict[str, Any]:
    """Of `cids.fit`: those that decide what is learned."""
    names = ("objective", "temperature", "prior", "iterations", "batch_size", "learning_rate")
    return {"likelihood": options.likelihood, **{name: getattr(options, name) for name in names}}


def keep(folder: RunFolder, solution: Solution) -> None:
    """Write a solution and its history."""
    solution.save(folder.path / SOLUTION)
    history = solution.history
    columns = {str(name): history[name].values.tolist() for name in ("iteration", *history.data_vars)}
    folder.write_table(HISTORY, columns)
    folder.write_data("history.nc", history)


def last(solution: Solution) -> str:
    """What was measured at the end, as a mean over the last iterations, in a sentence."""
    end = solution.history.isel(iteration=slice(-WINDOW, None))
    parts = {"return": "return {:.3f}", "entropy": "H(C|Y) {:.3f} bits"}
    words = [text.format(float(end[name].mean())) for name, text in parts.items() if name in end]
    iterations = solution.history.sizes["iteration"]
    return f"{iterations:,} iterations; over the last {end.sizes['iteration']}: {', '.join(words)}"


def _options(parser: ArgumentParser) -> None:
    model_arguments(parser)
    likelihood_option(parser)
    parser.add_argument(
        "--objective", choices=list(OBJECTIVES), default="information", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=non_negative,
        help="what a nat is worth in units of reward (default: falls from 3 to 0.5, or 0.2 if variational)",
    )
    parser.add_argument(
        "--iterations",
        type=count,
        help="batches (default: 800, or 4000 if variational; half as many again with --prior dirichlet)",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        default=200,
        help="episodes (default: %(default)s); N processes need more than 250 (N - 1), and multiples of "
        "250 N are shared evenly",
    )
    parser.add_argument("--learning-rate", type=positive, help="(default: chosen by the estimator)")
    parser.add_argument(
        "--checkpoint-every", type=count, default=25, help="iterations apart (default: %(default)s)"
    )
    parser.add_argument(
        "--prior",
        type=prior_or_priors,
        metavar="P,P,…",
        help="over contexts, such as 0.5,0.5; or dirichlet, to be ready for any (for cpomdp run)",
    )
    seed_option(parser, None)
    run_option(parser)
    parser.add_argument(
        "--folder",
        dest="run",
        metavar="DIR",
        help="the same as --run, for torchrun --nproc-per-node=N -m cpomdp_ppl fit …, which takes --run for "
        "an option of its own",
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


def run(options: Namespace) -> int:
    """Meet the same unknown context episode after episode."""
    target = CommandTarget.of(options)
    names = target.model.context_names
    if options.context is not None and options.context not in names:
        raise CommandError(f"--context: expected one of {', '.join(names)}, got {options.context}")
    backend = backend_for(target.model, options.likelihood)
    settings = {
        "context": options.context,
        "num_episodes": options.num_episodes,
        "num_runs": options.num_runs,
        "likelihood": repr(backend),
        "stop_at": options.stop_at,
    }
    outputs = (f"{LIVED}.csv", f"{LIVED}.nc", *figure_files([LIVED]))
    results = target.results(options, "run", settings, outputs)
    with results.kept(), warnings.catch_warnings():
        policy = target.policy(options)
        if options.num_episodes > 1 and not getattr(policy, "amortised", True):
            warnings.filterwarnings("ignore", "solution: its policy acts alike")  # said here in other words
            warn(
                "the policy was learned for one prior, and acts alike whatever is found out; "
                "one that was fitted with --prior dirichlet does not",
            )
        interrupted = False
        try:
            lived = cids.run(
                target.model,
                options.context,
                options.num_episodes,
                solution=policy,
                prior=target.prior,
                num_runs=options.num_runs,
                likelihood=backend,
                stop_at=options.stop_at,
                seed=results.seed,
                progress=progress_of(options),
            )
        except cids.RunInterrupted as stop:
            if not stop.run.num_episodes:
                raise
            lived, interrupted = stop.run, True
        folder = results.replace()
        folder.write_table(f"{LIVED}.csv", episode_columns(lived))
        folder.write_data(f"{LIVED}.nc", lived.to_inference_data(seed=results.seed))
        if interrupted:
            raise Stopped(
                f"stopped after {lived.num_episodes:,} of {options.num_episodes:,} episodes, which are in "
                f"{folder.path / LIVED}.csv; to begin again: {results.again()}"
            )
        write_figures(options, folder, {LIVED: lambda: picture(lived)})
        results.finish(**target.in_force, context="in proportion to the prior", stop_at="never")
    print(table(lived))
    note(options, f"episodes: {folder.path / LIVED}.csv and .nc")
    return OK


def episode_columns(lived: Run) -> dict[str, list[Any]]:
    """A row for each episode of each run: what was believed after it, and what it earned."""
    R, K = lived.returns.shape
    names = lived.model.context_names
    true = [None] * R if lived.contexts is None else [names[c] for c in lived.contexts.tolist()]
    after = lived.posteriors[:, 1:]  # [R, K, C]
    optima = lived.model.context_known_return()
    columns: dict[str, list[Any]] = {
        "run": [r for r in range(R) for _ in range(K)],
        "true_context": [true[r] for r in range(R) for _ in range(K)],
        "episode": [*range(1, K + 1)] * R,
        "played": lived.played.flatten().tolist(),
        "return": lived.returns.flatten().tolist(),
        "information_nats": lived.information.flatten().tolist(),
        "entropy_nats": lived.entropy[:, 1:].flatten().tolist(),
    }
    if lived.contexts is not None and optima is not None:
        columns["regret"] = lived.regret(optima).flatten().tolist()
    return columns | {f"P({name})": after[..., c].flatten().tolist() for c, name in enumerate(names)}


def picture(lived: Run) -> Figure:
    """Regret where it is known in closed form, or else returns; to find it otherwise may take long."""
    optima = lived.model.context_known_return()
    return replace(lived, contexts=None).plot() if optima is None else lived.plot(optima)


def table(lived: Run) -> str:
    """Episode by episode, means over the runs that played."""
    lines = [f"{'episode':>7}  {'runs':>5}  {'return':>20}  {'H(C|H) in bits':>14}"]
    for k in range(lived.num_episodes):
        returns = lived.returns[lived.played[:, k], k]
        bits = float(lived.entropy[:, k + 1].mean()) / math.log(2)
        earned = Mean.of(returns).with_error()
        lines.append(f"{k + 1:>7}  {len(returns):>5,}  {earned:>20}  {bits:>14.4f}")
    return "\n".join(lines)


def _run_options(parser: ArgumentParser) -> None:
    model_arguments(parser, "target", explanation="the run folder of a fit, or a model")
    policy_option(parser)
    parser.add_argument(
        "--context", metavar="NAME", help="the true context (default: in proportion to the prior)"
    )
    episodes_option(parser, 10)
    parser.add_argument(
        "--num-runs", type=count, default=1, help="number of runs side by side (default: %(default)s)"
    )
    likelihood_option(parser)
    parser.add_argument(
        "--stop-at",
        "--settled",
        type=positive,
        metavar="P",
        help="stop a run when a context is more likely than this (--settled is the former name)",
    )
    prior_option(parser)
    seed_option(parser, 0)
    run_option(parser, BESIDE)


RUN = Command(
    "Meet the same unknown context episode after episode, and carry the posterior on (Algorithm 1).",
    (
        "cpomdp run runs/LightDark-fit-1 --num-episodes 20 --num-runs 100",
        "cpomdp run cpomdp_ppl.models:LineGrid --policy likeliest --context 'detector left' --stop-at 0.99",
    ),
    _run_options,
    run,
)


def _cids(model: CPOMDP, budget: Budget) -> Policy:
    iterations = max(1, budget.training_episodes // 200)
    solution = cids.fit(model, iterations=iterations, seed=budget.seed, progress=budget.progress)
    policy: Policy = solution.policy
    return policy


COMMANDS = {"fit": FIT, "run": RUN}
POLICIES = {"cids": Recipe(_cids, learns=True)}
SOLVERS = {"cids": cids.load}
