"""What the solvers add to the command line: `cpomdp fit` and `cpomdp run`."""

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
    target_options,
    warn,
)
from cpomdp_ppl.cli.policies import Budget, Recipe, code_hash, recipe
from cpomdp_ppl.cli.results import Results, figure_files
from cpomdp_ppl.cli.target import CommandTarget
from cpomdp_ppl.evaluation import SAME_POLICY, Mean
from cpomdp_ppl.experiments.run_files import ALGORITHM1, CHECKPOINT, HISTORY, SOLUTION
from cpomdp_ppl.inference.choice import backend_for
from solvers import cids
from solvers.cids.group import ProcessFailedError, joined, process_group
from solvers.cids.objective import OBJECTIVES
from solvers.cids.training import WINDOW
from solvers.cids.verdict import NotSolvedWarning

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from matplotlib.figure import Figure

    from cpomdp_ppl.experiments.run_folder import RunFolder
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy
    from solvers.cids.group import SingleProcess
    from solvers.cids.solution import Solution
    from solvers.episodes.record import Run

SETTINGS = ("likelihood", "objective", "temperature", "prior", "iterations", "batch_size", "learning_rate")
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
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings["policy"] = options.policy or ("lstm" if options.objective == "variational" else "belief")
    if options.start is not None and settings["policy"] != "belief":
        raise CommandError("--start: only a belief policy imitates a rule: say --policy belief")
    spec = ModelSpec.of([options.model, *options.arguments])
    model, rule = spec.build(), None if options.start is None else recipe(options.start)
    group.barrier()  # no folder before all have the model
    if group.rank > 0:
        place = group.broadcast({"seed": None, "checkpoint": None})
        cids.fit(model, **settings, **place, **_start(options, model, rule, place["seed"]), progress=False)
        return OK
    recorded = {**settings, "likelihood": None if options.likelihood is None else repr(options.likelihood)}
    if rule is not None:
        recorded |= {"start": options.start, "start_sha256": code_hash(options.start)}
    results = Results.at(options, "fit", spec, recorded, solver="cids")
    folder = results.folder
    place = group.broadcast({"seed": results.seed, "checkpoint": str(folder.path / CHECKPOINT)})
    settings |= _start(options, model, rule, results.seed)
    if not folder.finished and any((folder.path / CHECKPOINT).glob("[!.]*")):
        # It goes on from there, and what was the best when it was stopped will soon not be.
        rmtree(folder.path / SOLUTION, ignore_errors=True)
    note(options, f"run folder: {folder.path}")
    with results.kept():
        try:
            progress, every = progress_of(options), options.checkpoint_every
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotSolvedWarning)  # it is among the results
                solution = cids.fit(model, **settings, **place, progress=progress, checkpoint_every=every)
        except cids.Interrupted as interrupt:
            _keep_fit(folder, interrupt.solution)
            raise Stopped(
                f"{interrupt}; the best policy so far is in {folder.path / SOLUTION} (evaluate it with "
                f"--unfinished); to go on from the last checkpoint: {_again(results, group)}"
            ) from None
        _keep_fit(folder, solution)
        results.draw({"solution": lambda: solution.plot(likelihood=options.likelihood)})
        results.finish()
    print(last(solution))
    if solution.verdict is not None:
        print(solution.verdict)
    then = shlex.join(["cpomdp", "evaluate", str(folder.path)])
    note(options, f"solution: {folder.path / SOLUTION}; next: {then}")
    return OK


def _start(options: Namespace, model: CPOMDP, rule: Recipe | None, seed: int) -> dict[str, Any]:
    """The rule to start from, if there is one."""
    if rule is None:
        return {}
    return {"start": rule.made(options.start, model, Budget(seed=seed, progress=progress_of(options)))}


def _again(results: Results, group: SingleProcess) -> str:
    """The command line that goes on with as many processes."""
    if group.size == 1:
        return results.again()
    here = os.environ.get("LOCAL_WORLD_SIZE", group.size)
    return results.again("torchrun", f"--nproc-per-node={here}", "-m", "cpomdp_ppl", folder="--folder")


def _keep_fit(folder: RunFolder, solution: Solution) -> None:
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


def _fit_options(parser: ArgumentParser) -> None:
    model_arguments(parser)
    shared_options(parser, likelihood=SUITABLE, seed=FRESH)
    parser.add_argument(
        "--objective",
        choices=list(OBJECTIVES),
        default="information",
        help="what the policy maximises (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=["belief", "lstm"],
        help="what is learned: belief reads what the filter believes, lstm, the paper's, what was seen "
        "(default: belief, or lstm if variational)",
    )
    parser.add_argument(
        "--start",
        metavar="NAME",
        help="a rule to start from, which a belief policy learns to imitate first: path/to/file.py:name, or "
        "a policy by name (see compare)",
    )
    parser.add_argument(
        "--temperature",
        type=non_negative,
        help="what a nat is worth in units of reward (default: found from the model, and falling; with lstm "
        "it falls from 3 to 0.5, or is 0.2 if variational)",
    )
    parser.add_argument(
        "--iterations",
        type=count,
        help="number of batches, at most: a fit of a belief policy ends when it has settled (default: 600, "
        "or 800 with lstm, or 4000 if variational; 1.5 times as many with dirichlet)",
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
        "cpomdp fit my_model.py:Maze horizon=30 --start my_model.py:rule",
        "cpomdp fit cpomdp_ppl.models:LightDark --policy lstm",
        "cpomdp fit cpomdp_ppl.models:LightDark --prior dirichlet",
    ),
    _fit_options,
    fit,
)


def run(options: Namespace) -> int:
    """Meet the same unknown context episode after episode, and write down what was learned about it."""
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
    outputs = (f"{ALGORITHM1}.csv", f"{ALGORITHM1}.nc", *figure_files([ALGORITHM1]))
    results = target.results(options, "run", settings, outputs)
    place = results.folder.path / ALGORITHM1
    with results.kept(), warnings.catch_warnings():
        policy = target.policy(options)
        if options.num_episodes > 1 and not getattr(policy, "amortised", True):
            warnings.filterwarnings("ignore", "solution: its policy acts alike")  # said here in other words
            deaf = "the policy was learned for one prior, and acts alike whatever is found out"
            warn(f"{deaf}; one that was fitted with --prior dirichlet does not")
        try:
            done = cids.run(
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
        except cids.RunInterrupted as interrupt:
            if not interrupt.run.num_episodes:
                raise
            _keep_run(results, replace(interrupt.run, reference=None))  # which would play for a while
            raise Stopped(
                f"stopped after {interrupt.run.num_episodes:,} of {options.num_episodes:,} episodes, which "
                f"are in {place}.csv; to begin again: {results.again()}"
            ) from None
        _keep_run(results, done)
        results.draw({ALGORITHM1: lambda: picture(done)})
        results.finish(**target.in_force, context="in proportion to the prior", stop_at="never")
    print(table(done))
    known = done.context_known
    if known is not None and known.source == "policy":
        pairs = zip(names, known.values.tolist(), known.standard_errors.tolist(), strict=True)
        earned = ", ".join(f"{name} {value:.2f} ± {error:.2f}" for name, value, error in pairs)
        note(options, f"regret is against {SAME_POLICY}: {earned}")
    note(options, f"episodes: {place}.csv and .nc")
    return OK


def _keep_run(results: Results, done: Run) -> None:
    folder = results.replace()
    folder.write_table(f"{ALGORITHM1}.csv", episode_columns(done))
    folder.write_data(f"{ALGORITHM1}.nc", done.to_inference_data(seed=results.seed))


def episode_columns(done: Run) -> dict[str, list[Any]]:
    """Columns with a row for each episode of each run: what was believed after it, and what it earned."""
    R, K = done.returns.shape
    names = done.model.context_names
    true = [None] * R if done.contexts is None else [names[c] for c in done.contexts.tolist()]
    after = done.posteriors[:, 1:]  # [R, K, C]
    columns: dict[str, list[Any]] = {
        "run": [r for r in range(R) for _ in range(K)],
        "true_context": [true[r] for r in range(R) for _ in range(K)],
        "episode": [*range(1, K + 1)] * R,
        "played": done.played.flatten().tolist(),
        "return": done.returns.flatten().tolist(),
        "information_nats": done.information.flatten().tolist(),
        "entropy_nats": done.entropy[:, 1:].flatten().tolist(),
    }
    if done.contexts is not None and (optima := done.context_known) is not None:
        columns["regret"] = done.regret(optima).flatten().tolist()
        errors = optima.standard_errors[done.contexts.cpu()].tolist()
        columns["context_known_standard_error"] = [error for error in errors for _ in range(K)]
    return columns | {f"P({name})": after[..., c].flatten().tolist() for c, name in enumerate(names)}


def picture(done: Run) -> Figure:
    """A figure of regret if that takes no planning, and else of returns."""
    optima = None if done.contexts is None else done.context_known
    return replace(done, contexts=None).plot() if optima is None else done.plot(optima)


def table(done: Run) -> str:
    """Episode by episode, means over the runs that done."""
    lines = [f"{'episode':>7}  {'runs':>5}  {'return':>20}  {'H(C|H) in bits':>14}"]
    for k in range(done.num_episodes):
        returns = done.returns[done.played[:, k], k]
        bits = float(done.entropy[:, k + 1].mean()) / math.log(2)
        earned = Mean.of(returns).with_error()
        lines.append(f"{k + 1:>7}  {len(returns):>5,}  {earned:>20}  {bits:>14.4f}")
    return "\n".join(lines)


def _run_options(parser: ArgumentParser) -> None:
    target_options(parser, num_episodes=10, likelihood=SUITABLE, seed=0)
    parser.add_argument(
        "--context", metavar="NAME", help="the true context (default: in proportion to the prior)"
    )
    parser.add_argument(
        "--num-runs", type=count, default=1, help="number of runs side by side (default: %(default)s)"
    )
    parser.add_argument(
        "--stop-at",
        "--settled",
        type=positive,
        metavar="P",
        help="stop a run when a context is more likely than this (--settled is the former name)",
    )


RUN = Command(
    "Meet the same unknown context episode after episode, and carry the posterior on (Algorithm 1).",
    (
        "cpomdp run runs/LightDark-fit-1 --num-episodes 20 --num-runs 100",
        "cpomdp run cpomdp_ppl.models:LineGrid --policy likeliest --context 'detector left' --stop-at 0.99",
    ),
    _run_options,
    run,
)


BATCH_SIZE = 200
"""How many episodes an iteration of C-IDS plays, if it is compared with other policies."""


def _cids(model: CPOMDP, budget: Budget) -> Policy:
    iterations = max(1, budget.training_episodes // BATCH_SIZE)
    solution = cids.fit(
        model, iterations=iterations, batch_size=BATCH_SIZE, seed=budget.seed, progress=budget.progress
    )
    policy: Policy = solution.policy
    return policy


COMMANDS = {"fit": FIT, "run": RUN}
POLICIES = {"cids": Recipe(_cids, learns=True)}
SOLVERS = {"cids": cids.load}
