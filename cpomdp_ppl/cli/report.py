"""`cpomdp report`: a run as one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import OK
from cpomdp_ppl.cli.options import (
    budget_options,
    episodes_option,
    likelihood_option,
    seed_option,
    shows_progress,
)
from cpomdp_ppl.cli.policies import Budget, recipe
from cpomdp_ppl.cli.target import SOLUTION, load_solution, spec_of
from cpomdp_ppl.run_folder import RunFolder

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def report(options: Namespace) -> int:
    """Write the page."""
    from cpomdp_ppl.report import write_report

    folder = RunFolder.open(options.target, unfinished=options.unfinished)
    model = spec_of(folder, options.other).build()
    policy, prior = None, None
    name = options.policy or folder.record["settings"].get("policy")
    if name is not None:
        budget = Budget.of(options, options.seed, shows_progress(options))
        policy = recipe(name).made(name, model, budget)
    elif folder.has(SOLUTION):
        solution = load_solution(folder, model)
        policy, prior = solution.policy, solution.prior
    path = write_report(
        folder.path,
        model=model,
        policy=policy,
        prior=prior,
        num_episodes=options.num_episodes,
        likelihood="smc" if options.likelihood is None else options.likelihood,
        seed=options.seed,
        progress=shows_progress(options),
    )
    print(path)
    return OK


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN", help="a run folder")
    parser.add_argument("--policy", metavar="NAME", help="whose episodes to show, if not the solution's")
    budget_options(parser)
    parser.add_argument("--unfinished", action="store_true", help="also of a run that was stopped")
    parser.add_argument(
        "--model", dest="other", nargs="+", metavar="MODEL", help="the model of RUN, if its file has moved"
    )
    episodes_option(parser, 12)
    likelihood_option(parser, "smc")
    seed_option(parser, 0)


REPORT = Command(
    "Write one HTML page about a run: results, convergence, diagnostics, and episodes to step through.",
    ("cpomdp report runs/LightDark-fit-1",),
    _options,
    report,
)
