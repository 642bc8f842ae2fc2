"""`cpomdp run`: Algorithm 1, episode after episode in the same unknown context."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import OK, Command, CommandError, Stopped
from cpomdp_ppl.cli.options import SUITABLE, count, note, positive, progress_of, target_options, warn
from cpomdp_ppl.cli.results import figure_files
from cpomdp_ppl.cli.target import CommandTarget
from cpomdp_ppl.evaluation import Mean
from cpomdp_ppl.experiments.run_files import ALGORITHM1
from cpomdp_ppl.inference.choice import backend_for
from solvers import cids

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from matplotlib.figure import Figure

    from cpomdp_ppl.cli.results import Results
    from solvers.episodes.record import Run


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
            warn(
                "the policy was learned for one prior, and acts alike whatever is found out; "
                "one that was fitted with --prior dirichlet does not",
            )
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
            _keep(results, interrupt.run)
            raise Stopped(
                f"stopped after {interrupt.run.num_episodes:,} of {options.num_episodes:,} episodes, which "
                f"are in {place}.csv; to begin again: {results.again()}"
            ) from None
        _keep(results, done)
        results.draw({ALGORITHM1: lambda: picture(done)})
        results.finish(**target.in_force, context="in proportion to the prior", stop_at="never")
    print(table(done))
    note(options, f"episodes: {place}.csv and .nc")
    return OK


def _keep(results: Results, done: Run) -> None:
    folder = results.replace()
    folder.write_table(f"{ALGORITHM1}.csv", episode_columns(done))
    folder.write_data(f"{ALGORITHM1}.nc", done.to_inference_data(seed=results.seed))


def episode_columns(done: Run) -> dict[str, list[Any]]:
    """Columns with a row for each episode of each run: what was believed after it, and what it earned."""
    R, K = done.returns.shape
    names = done.model.context_names
    true = [None] * R if done.contexts is None else [names[c] for c in done.contexts.tolist()]
    after = done.posteriors[:, 1:]  # [R, K, C]
    optima = done.model.context_known_return()
    columns: dict[str, list[Any]] = {
        "run": [r for r in range(R) for _ in range(K)],
        "true_context": [true[r] for r in range(R) for _ in range(K)],
        "episode": [*range(1, K + 1)] * R,
        "played": done.played.flatten().tolist(),
        "return": done.returns.flatten().tolist(),
        "information_nats": done.information.flatten().tolist(),
        "entropy_nats": done.entropy[:, 1:].flatten().tolist(),
    }
    if done.contexts is not None and optima is not None:
        columns["regret"] = done.regret(optima).flatten().tolist()
    return columns | {f"P({name})": after[..., c].flatten().tolist() for c, name in enumerate(names)}


def picture(done: Run) -> Figure:
    """A figure of regret if it is known in closed form, and else of returns: to compute it may take long."""
    optima = done.model.context_known_return()
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


def _options(parser: ArgumentParser) -> None:
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
    _options,
    run,
)
