"""`cpomdp report`: a run as one page."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import OK, Command
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import other_model_options, progress_of, shared_options, shows_progress
from cpomdp_ppl.cli.policies import Budget, is_users_own, recipe
from cpomdp_ppl.cli.provenance import spec_of
from cpomdp_ppl.cli.target import load_solution, solution_place
from cpomdp_ppl.experiments.run_folder import RunFolder, RunFolderError
from cpomdp_ppl.inference import BACKENDS, as_backend
from cpomdp_ppl.inference.choice import backend_from_data

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from cpomdp_ppl.inference.backend import Backend


def report(options: Namespace) -> int:
    """Write the page."""
    from cpomdp_ppl.report import write_report

    folder = RunFolder.open(options.target, unfinished=options.unfinished)
    spec = spec_of(folder, options)
    model = spec.build()
    folder.require_writable()
    policy, prior = None, None
    in_force: Mapping[str, Any] = {}
    is_fit = folder.record.get("solver") is not None  # whose `policy` is a kind of network
    name = options.policy or (None if is_fit else recorded_policy(folder, spec))
    if name is not None:
        policy = recipe(name).made(name, model, budget_of(folder, options))
        prior = folder.record["settings"].get("prior")
    elif solution_place(folder) is not None:
        solution = load_solution(folder, model)
        policy, prior, name = solution.policy, solution.prior, "the solution"
        in_force = getattr(solution, "settings", {})  # of a fit, what its settings came to
    path = write_report(
        folder.path,
        model=model,
        policy=policy,
        policy_name=name,
        prior=prior,
        num_episodes=options.num_episodes,
        likelihood=options.likelihood or likelihood_of(folder, in_force),
        seed=options.seed,
        progress=shows_progress(options),
        in_force=in_force,
    )
    print(path)
    return OK


def recorded_policy(folder: RunFolder, spec: ModelSpec) -> str | None:
    """The policy that the record of a run names; one that a user has written must be in the model's file.

    Raises:
        RunFolderError: If it is elsewhere, because nobody has said that this code may be run.
    """
    name: str | None = folder.record["settings"].get("policy")
    if name is None or not is_users_own(name):
        return name
    place, _, function = name.rpartition(":")
    if place != ModelSpec.of([folder.record["model"]]).place:
        raise RunFolderError(
            f"{folder.path} is of the policy {name}, and no code is run because a record says so: if you "
            f"trust it, say --policy {shlex.quote(name)}"
        )
    return f"{spec.place}:{function}"


def likelihood_of(folder: RunFolder, in_force: Mapping[str, Any]) -> Backend | None:
    """The backend of a run, if its record describes it completely, as it cannot if a user wrote its guide."""
    found = folder.record["settings"].get("likelihood") or in_force.get("likelihood")
    with suppress(SyntaxError, TypeError, ValueError, AttributeError, KeyError):
        found = found or folder.record.get("in_force", {}).get("likelihood")
        if isinstance(found, str) and found in BACKENDS:
            return as_backend(found)
        if isinstance(found, Mapping):  # as the settings of a solution have it
            return backend_from_data(found)
        # As Python writes it: ParticleFilter(num_particles=256, …)
        call: Any = ast.parse(found, mode="eval").body
        settings = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return backend_from_data({"": call.func.id, **settings})
    return None


def budget_of(folder: RunFolder, options: Namespace) -> Budget:
    """What the policy may spend: what the options say, or else what it spent in the run if it acted there."""
    usual = Budget(seed=options.seed, progress=progress_of(options))
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
        "--unfinished", action="store_true", help="report on a run that was stopped or killed"
    )
    other_model_options(parser)
    shared_options(
        parser,
        simulations="as in the run, or 100",
        training_episodes="as in the run, or 10000",
        num_episodes=12,
        likelihood="that of the run, or what suits the model",
        seed=0,
    )


REPORT = Command(
    "Write one HTML page about a run: results, convergence, diagnostics, and episodes to step through.",
    ("cpomdp report runs/LightDark-fit-1",),
    _options,
    report,
)
