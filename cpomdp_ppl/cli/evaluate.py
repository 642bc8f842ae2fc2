"""`cpomdp evaluate`: what a policy earns and finds out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import OK
from cpomdp_ppl.cli.options import (
    BESIDE,
    episodes_option,
    likelihood_option,
    model_arguments,
    note,
    policy_option,
    prior_option,
    progress_of,
    run_option,
    seed_option,
)
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
    model_arguments(parser, "target", explanation="the run folder of a fit, or a model")
    policy_option(parser)
    episodes_option(parser, 4000)
    likelihood_option(parser, "the most exact that serves the model")
    prior_option(parser)
    seed_option(parser, 0)
    run_option(parser, BESIDE)


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
