"""`cpomdp compare`: several policies on the same episodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import OK, CommandError
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import (
    budget_options,
    count,
    episodes_option,
    likelihood_option,
    model_arguments,
    names,
    note,
    prior_option,
    progress_of,
    run_option,
    seed_option,
)
from cpomdp_ppl.cli.policies import POLICIES, Budget, code_hash, recipe
from cpomdp_ppl.cli.results import Results
from cpomdp_ppl.cli.solution import load_solution, solution_hash
from cpomdp_ppl.evaluation import Comparison, Evaluation, evaluate
from cpomdp_ppl.experiments.run_files import COMPARISON
from cpomdp_ppl.experiments.run_folder import RunFolder

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

MEASURED = "comparison.json"


def compare(options: Namespace) -> int:
    """Make policies and let them play, one after the other; what is measured is not measured again."""
    spec = ModelSpec.of([options.model, *options.arguments])
    recipes = {name: recipe(name) for name in options.policies or ()}
    folders = {Path(each).name: each for each in options.solution or ()}
    if not recipes and not folders:
        raise CommandError("whom to compare? say --policies random,qmdp, or --solution RUN, or both")
    if len(folders) < len(options.solution or ()) or recipes.keys() & folders.keys():
        raise CommandError(
            "--solution: expected folders whose names differ from each other and from policies"
        )
    model = spec.build()
    opened = {name: RunFolder.open(place, unfinished=options.unfinished) for name, place in folders.items()}
    solutions = {name: load_solution(folder, model) for name, folder in opened.items()}
    hashes = {name: solution_hash(folder) for name, folder in opened.items()}
    hashes |= {name: code for name in recipes if (code := code_hash(name)) is not None}
    prior = common_prior(solutions) if options.prior is None else options.prior
    settings = {
        "policies": list(recipes),
        "solutions": [str(place) for place in folders.values()],
        "num_episodes": options.num_episodes,
        "planned_episodes": options.planned_episodes,
        "simulations": options.simulations,
        "training_episodes": options.training_episodes,
        "likelihood": None if options.likelihood is None else repr(options.likelihood),
        "prior": None if prior is None else list(prior),
        "unfinished": [name for name, folder in opened.items() if not folder.finished],
    }
    results = Results.at(options, "compare", spec, settings)
    folder = results.folder
    measured: dict[str, Any] = folder.read_json(MEASURED) if folder.has(MEASURED) else {}
    with results.kept():
        for name in [*recipes, *solutions]:
            if name in measured and measured[name].get("solution_sha256") == hashes.get(name):
                note(options, f"{name}: measured before")
                continue
            if name in measured:
                what = "its code" if name in recipes else "the solution"
                note(options, f"{name}: {what} has changed, and is measured again")
            seconds, num_episodes = None, options.num_episodes
            progress = progress_of(options, f"{name}: ")
            if name in recipes:
                note(options, f"{name}: {'learning' if recipes[name].learns else 'playing'} …")
                began = time.perf_counter()
                policy = recipes[name].made(name, model, Budget.of(options, results.seed, progress))
                if recipes[name].learns:
                    seconds = time.perf_counter() - began
                if recipes[name].plans:
                    num_episodes = options.planned_episodes
            else:
                policy = solutions[name].policy
            result = evaluate(
                model,
                policy,
                num_episodes,
                likelihood=options.likelihood,
                prior=prior,
                progress=progress,
                seed=results.seed,
            )
            measured[name] = {
                "evaluation": result.as_dict(),
                "training_seconds": seconds,
                "solution_sha256": hashes.get(name),
            }
            folder.write_json(MEASURED, measured)
            note(options, f"{name}: return {result.returns}")
        evaluations = {name: Evaluation.from_dict(each["evaluation"]) for name, each in measured.items()}
        seconds_by_name = {
            name: each["training_seconds"]
            for name, each in measured.items()
            if each["training_seconds"] is not None
        }
        folder.write_table(COMPARISON, columns(evaluations, seconds_by_name))
        likelihoods = ", ".join(sorted({evaluation.likelihood for evaluation in evaluations.values()}))
        results.finish(likelihood=likelihoods, prior=model.prior().tolist())
    print(Comparison(evaluations, seconds_by_name))
    note(options, f"table: {folder.path / COMPARISON}")
    return OK


def common_prior(solutions: Mapping[str, Any]) -> tuple[float, ...] | None:
    """What solutions were learned for, so that all who are compared meet the same; None for the model's.

    Raises:
        CommandError: If they were learned for different priors.
    """
    priors = {name: tuple(solution.prior.tolist()) for name, solution in solutions.items()}
    if not priors:
        return None
    (first, one), *others = priors.items()
    for name, other in others:
        if other != one:
            raise CommandError(
                f"{first} was learned for the prior {one}, and {name} for {other}: say which with --prior"
            )
    return one


def columns(evaluations: Mapping[str, Evaluation], training: Mapping[str, float]) -> dict[str, list[Any]]:
    """The table as columns: a row for each policy."""
    rows = [
        {
            "policy": name,
            "episodes": e.returns.num_episodes,
            "return": e.returns.mean,
            "return_standard_error": e.returns.standard_error,
            "return_deviation": e.returns.deviation,
            "entropy_bits": e.entropy.mean,
            "entropy_standard_error": e.entropy.standard_error,
            "identified": e.identified,
            "identified_standard_error": e.identified_error,
            "regret": None if e.regret is None else e.regret.mean,
            "regret_standard_error": None if e.regret is None else e.regret.standard_error,
            "regret_at_most": None if e.regret_at_most is None else e.regret_at_most.mean,
            "informed_return": e.informed_return,
            "seconds_per_decision": e.seconds_per_decision,
            "training_seconds": training.get(name),
            "likelihood": e.likelihood,
        }
        for name, e in evaluations.items()
    ]
    return {title: [row[title] for row in rows] for title in rows[0]}


def _options(parser: ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument(
        "--policies",
        type=names,
        metavar="NAME,…",
        help=f"out of {', '.join(POLICIES.names())}; or your own, path/to/file.py:name or module:name",
    )
    parser.add_argument(
        "--solution", action="append", metavar="RUN", help="the run folder of a fit; may be given repeatedly"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="take the solution of a fit that was stopped"
    )
    episodes_option(parser, 4000)
    parser.add_argument(
        "--planned-episodes",
        type=count,
        default=100,
        help="of planners, in place of --num-episodes (default: %(default)s)",
    )
    budget_options(parser)
    likelihood_option(parser, "the most exact that serves the model")
    prior_option(parser)
    seed_option(parser, 0)
    run_option(parser)


COMPARE = Command(
    "Let several policies play the same episodes, and put them in one table.",
    (
        "cpomdp compare cpomdp_ppl.models:LightDark --policies random,likeliest,qmdp",
        "cpomdp compare cpomdp_ppl.models:LightDark --policies pft,rdpg --solution runs/LightDark-fit-1",
        "cpomdp compare my_model.py:Maze horizon=30 --policies my_model.py:rule,pouct --simulations 500",
    ),
    _options,
    compare,
)
