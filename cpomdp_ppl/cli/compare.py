"""`cpomdp compare`: several policies on the same episodes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.cli.command import OK, Command, CommandError
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import (
    BUDGET,
    MOST_EXACT,
    NEW_FOLDER,
    count,
    model_arguments,
    names,
    note,
    progress_of,
    shared_options,
)
from cpomdp_ppl.cli.policies import POLICIES, Budget, Recipe, code_hash, is_users_own, recipe
from cpomdp_ppl.cli.results import Results
from cpomdp_ppl.cli.target import load_solution, solution_hash
from cpomdp_ppl.evaluation import TOLD, Comparison, Evaluation, PerEpisode, evaluate, with_regret
from cpomdp_ppl.experiments.run_files import COMPARISON
from cpomdp_ppl.experiments.run_folder import RunFolder

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping, Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy

MEASURED = "comparison.json"
"""The file with everything that was measured, which a comparison that was stopped goes on with."""


def compare(options: Namespace) -> int:
    """Let policies play, one after the other; what was measured before is not measured again."""
    _require_commas(options)
    spec = ModelSpec.of([options.model, *options.arguments])
    recipes = {name: recipe(name) for name in options.policies or ()}
    places = {Path(each).name: each for each in options.solution or ()}
    if not recipes and not places:
        raise CommandError("whom to compare? say --policies random,qmdp, or --solution RUN, or both")
    if len(places) < len(options.solution or ()) or recipes.keys() & places.keys():
        raise CommandError(
            "--solution: expected folders whose names differ from each other and from policies"
        )
    model = spec.build()
    folders = {name: RunFolder.open(place, unfinished=options.unfinished) for name, place in places.items()}
    solutions = {name: load_solution(folder, model) for name, folder in folders.items()}
    contestants = recipes | {name: Recipe.of(solution.policy) for name, solution in solutions.items()}
    hashes = {name: code_hash(name) for name in recipes}
    hashes |= {name: solution_hash(folder) for name, folder in folders.items()}
    prior = common_prior(solutions) if options.prior is None else options.prior
    settings = {
        "policies": list(recipes),
        "solutions": [str(place) for place in places.values()],
        "num_episodes": options.num_episodes,
        "planned_episodes": options.planned_episodes,
        "simulations": options.simulations,
        "training_episodes": options.training_episodes,
        "likelihood": None if options.likelihood is None else repr(options.likelihood),
        "prior": None if prior is None else list(prior),
        "unfinished": [name for name, folder in folders.items() if not folder.finished],
    }
    results = Results.at(options, "compare", spec, settings)
    with results.kept():
        comparison = _measure(options, results, model, contestants, hashes, prior)
        results.folder.write_table(COMPARISON, columns(comparison))
        likelihoods = {evaluation.likelihood for evaluation in comparison.evaluations.values()}
        results.finish(likelihood="; ".join(sorted(likelihoods)), prior=model.prior().tolist())
    print(comparison)
    note(options, f"table: {results.folder.path / COMPARISON}")
    return OK


def _require_commas(options: Namespace) -> None:
    """Refuse names of policies after a space, which would be taken for arguments of the model."""
    words = [word for word in options.arguments if "=" not in word]
    apart = [word for word in words if word in POLICIES.names() or is_users_own(word)]
    if options.policies and apart:
        joined = ",".join([*options.policies, *apart])
        raise CommandError(f"--policies: expected names joined by commas, without spaces: {joined}")


def _measure(
    options: Namespace,
    results: Results,
    model: CPOMDP,
    contestants: Mapping[str, Recipe],
    hashes: Mapping[str, str | None],
    prior: Sequence[float] | None,
) -> Comparison:
    """Evaluate all who were not evaluated before or have changed since, and note each when it is done."""
    folder = results.folder
    measured: dict[str, Any] = folder.read_json(MEASURED) if folder.has(MEASURED) else {}
    plans = {contestant.plans for contestant in contestants.values()}
    sizes = {options.planned_episodes if plan else options.num_episodes for plan in plans}
    for name, contestant in contestants.items():
        if name in measured:
            if measured[name].get("solution_sha256") == hashes[name]:
                note(options, f"{name}: measured before")
                continue
            what = "its code" if is_users_own(name) else "the solution"
            note(options, f"{name}: {what} has changed, and is measured again")
        note(options, f"{name}: {'learning' if contestant.learns else 'playing'} …")
        progress = progress_of(options, f"{name}: ")
        began = time.perf_counter()
        policy = contestant.made(name, model, Budget.of(options, results.seed, progress))
        seconds = time.perf_counter() - began if contestant.learns else None
        settings: dict[str, Any] = {
            "likelihood": options.likelihood,
            "prior": prior,
            "progress": progress,
            "seed": results.seed,
        }
        number = options.planned_episodes if contestant.plans else options.num_episodes
        evaluation = evaluate(model, policy, number, **settings)
        measured[name] = {
            "evaluation": evaluation.as_dict(),
            "training_seconds": seconds,
            "solution_sha256": hashes[name],
        }
        if model.context_known_return() is None:
            assert evaluation.per_episode is not None
            measured[name]["per_episode"] = evaluation.per_episode.as_dict()
            if getattr(policy, "amortised", False) and not contestant.plans:
                measured[name]["told"] = _told(model, policy, evaluation, sizes, settings)
        folder.write_json(MEASURED, measured)
        note(options, f"{name}: return {evaluation.returns}")
    training = {name: each["training_seconds"] for name, each in measured.items()}
    known = {name: each for name, each in training.items() if each is not None}
    return Comparison(_with_regret(measured), known)


def _told(
    model: CPOMDP, policy: Policy, evaluation: Evaluation, sizes: set[int], settings: Mapping[str, Any]
) -> dict[str, list[float]]:
    """What a policy earns told the context, by the number of episodes: those that any contestant plays."""
    told = {}
    for number in sizes:
        if number == evaluation.returns.num_episodes:
            each = evaluation.per_episode
        else:
            each = evaluate(model, policy, number, reveal_context=True, **settings).per_episode
        assert each is not None
        assert each.reference_returns is not None
        told[str(number)] = each.reference_returns.tolist()
    return told


def _with_regret(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Evaluation]:
    """Everybody's evaluation, with regret against the same policy if the model has no closed form."""
    evaluations = {name: Evaluation.from_dict(each["evaluation"]) for name, each in measured.items()}
    for name, each in measured.items():
        if "per_episode" in each:
            single = PerEpisode.from_dict(each["per_episode"])
            evaluations[name] = replace(evaluations[name], per_episode=single)
    told = {
        TOLD.format(name): {
            int(B): torch.tensor(earned, dtype=torch.float64) for B, earned in each["told"].items()
        }
        for name, each in measured.items()
        if "told" in each
    }
    return with_regret(evaluations, told)


def common_prior(solutions: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The prior that solutions were learned for, so that all meet the same contexts; None for the model's.

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


def columns(comparison: Comparison) -> dict[str, list[Any]]:
    """The table as columns, with a row for each policy."""
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
            "regret_against": e.regret_against,
            "regret_at_most": None if e.regret_at_most is None else e.regret_at_most.mean,
            "informed_return": e.informed_return,
            "seconds_per_decision": e.seconds_per_decision,
            "training_seconds": comparison.training_seconds.get(name),
            "likelihood": e.likelihood,
        }
        for name, e in comparison.evaluations.items()
    ]
    if any(e.ended is not None for e in comparison.evaluations.values()):
        for row, e in zip(rows, comparison.evaluations.values(), strict=True):
            row["ended"] = None if e.ended is None else e.ended.mean
            row["ended_standard_error"] = None if e.ended is None else e.ended.standard_error
            row["end_time"] = None if e.end_time is None else e.end_time.mean
    return {title: [row[title] for row in rows] for title in rows[0]}


def _options(parser: ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument(
        "--policies",
        type=names,
        metavar="NAME,…",
        help=f"names joined by commas, out of {', '.join(POLICIES.names())}; or policies of yours, "
        "path/to/file.py:name or module:name",
    )
    parser.add_argument(
        "--solution", action="append", metavar="RUN", help="the run folder of a fit; may be given repeatedly"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="take the solution of a fit that was stopped"
    )
    parser.add_argument(
        "--planned-episodes",
        type=count,
        default=100,
        help="episodes that planners play, in place of --num-episodes (default: %(default)s)",
    )
    prior = "that of the solutions, or else of the model"
    shared_options(
        parser, num_episodes=4000, **BUDGET, likelihood=MOST_EXACT, prior=prior, seed=0, run=NEW_FOLDER
    )


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
