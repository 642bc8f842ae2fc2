"""`cpomdp evaluate`: what a policy earns and finds out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import OK, Command
from cpomdp_ppl.cli.options import MOST_EXACT, note, progress_of, target_options
from cpomdp_ppl.cli.target import CommandTarget
from cpomdp_ppl.evaluation import evaluate as take_stock
from cpomdp_ppl.experiments.run_files import EVALUATION

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def evaluate(options: Namespace) -> int:
    """Play a policy, and take stock."""
    target = CommandTarget.of(options)
    settings = {
        "num_episodes": options.num_episodes,
        "likelihood": None if options.likelihood is None else repr(options.likelihood),
    }
    results = target.results(options, "evaluate", settings, (EVALUATION,))
    with results.kept():
        evaluation = take_stock(
            target.model,
            target.policy(options),
            options.num_episodes,
            likelihood=options.likelihood,
            prior=target.prior,
            progress=progress_of(options),
            seed=results.seed,
        )
        results.replace().write_json(EVALUATION, evaluation.as_dict())
        results.finish(**target.in_force, likelihood=evaluation.likelihood)
    print(evaluation)
    note(options, f"evaluation: {results.folder.path / EVALUATION}")
    return OK


def _options(parser: ArgumentParser) -> None:
    target_options(parser, num_episodes=4000, likelihood=MOST_EXACT, seed=0)


EVALUATE = Command(
    "Find out what the policy of a fit, or one by name, earns and finds out.",
    (
        "cpomdp evaluate runs/LightDark-fit-1",
        "cpomdp evaluate runs/LightDark-fit-1 --num-episodes 20000 --prior 0.9,0.1",
        "cpomdp evaluate cpomdp_ppl.models:LineGrid --policy qmdp --likelihood exact",
        "cpomdp evaluate my_model.py:Maze horizon=30 --policy my_model.py:rule",
    ),
    _options,
    evaluate,
)
