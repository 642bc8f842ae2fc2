"""`cpomdp report`: a run as one page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import OK
from cpomdp_ppl.cli.options import (
    count,
    episodes_option,
    likelihood_option,
    other_model_options,
    seed_option,
    shows_progress,
)
from cpomdp_ppl.cli.policies import Budget, recipe
from cpomdp_ppl.cli.recorded import spec_of
from cpomdp_ppl.cli.target import SOLUTION, load_solution
from cpomdp_ppl.run_folder import RunFolder

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def report(options: Namespace) -> int:
    """Write the page."""
    from cpomdp_ppl.report import write_report

    folder = RunFolder.open(options.target, unfinished=options.unfinished)
    model = spec_of(folder, options).build()
    folder.require_writable()
    policy, prior = None, None
    name = options.policy or folder.record["settings"].get("policy")
    if name is not None:
        policy = recipe(name).made(name, model, budget_of(folder, options))
        prior = folder.record["settings"].get("prior")
    elif folder.has(SOLUTION):
        solution = load_solution(folder, model)
        policy, prior, name = solution.policy, solution.prior, "the solution"
    path = write_report(
        folder.path,
        model=model,
        policy=policy,
        policy_name=name,
        prior=prior,
        num_episodes=options.num_episodes,
        likelihood="smc" if options.likelihood is None else options.likelihood,
        seed=options.seed,
        progress=shows_progress(options),
    )
    print(path)
    return OK


def budget_of(folder: RunFolder, options: Namespace) -> Budget:
    """What the policy to be shown may spend: as in the run, if it acted there, where nothing else is said."""
    usual = Budget(seed=options.seed, progress=shows_progress(options))
    settings: dict[str, Any] = folder.record["settings"]
    if options.policy in (None, settings.get("policy")):
        known = {name: settings[name] for name in ("simulations", "training_episodes") if name in settings}
        usual = replace(usual, seed=folder.seed, **known)
    asked = {"simulations": options.simulations, "training_episodes": options.training_episodes}
    return replace(usual, **{name: value for name, value in asked.items() if value is not None})


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN", help="a run folder")
    parser.add_argument("--policy", metavar="NAME", help="whose episodes to show, if not the solution's")
    parser.add_argument(
        "--simulations", type=count, help="of planners, for a decision (default: as in the run, or 100)"
    )
    parser.add_argument(
        "--training-episodes", type=count, help="of learners (default: as in the run, or 10000)"
    )
    parser.add_argument("--unfinished", action="store_true", help="also of a run that was stopped")
    other_model_options(parser)
    episodes_option(parser, 12)
    likelihood_option(parser, "smc")
    seed_option(parser, 0)


REPORT = Command(
    "Write one HTML page about a run: results, convergence, diagnostics, and episodes to step through.",
    ("cpomdp report runs/LightDark-fit-1",),
    _options,
    report,
)
