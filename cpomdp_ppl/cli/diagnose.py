"""`cpomdp diagnose`: whether inference can be believed."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.command import Command
from cpomdp_ppl.cli.errors import FAILED, OK
from cpomdp_ppl.cli.figures import figure_files, write_figures
from cpomdp_ppl.cli.options import (
    BESIDE,
    count,
    episodes_option,
    likelihood_option,
    model_arguments,
    note,
    policy_option,
    prior_option,
    run_option,
    seed_option,
    shows_progress,
)
from cpomdp_ppl.cli.target import CommandTarget
from cpomdp_ppl.diagnostics import (
    calibrate,
    plot_contexts,
    plot_filter,
    plot_states,
    summary,
    to_inference_data,
)
from cpomdp_ppl.experiments.run_files import CALIBRATION, GOOD_RHAT, RHAT
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from matplotlib.figure import Figure

    from cpomdp_ppl.diagnostics import Calibration

DATA = "episodes.nc"
DRAWN = ("contexts", "states", "filter", "calibration")
OUTPUTS = (DATA, RHAT, CALIBRATION, *figure_files(DRAWN))

PLAYED, INFERRED, CALIBRATED = range(3)
"""What random numbers are for."""


def diagnose(options: Namespace) -> int:
    """Play episodes, infer what is hidden in them several times over, and ask if it can be believed."""
    target = CommandTarget.of(options)
    backend = backend_for(target.model, options.likelihood)
    settings = {
        "num_episodes": options.num_episodes,
        "likelihood": repr(backend),
        "chains": options.chains,
        "draws": options.draws,
        "calibrate": options.calibrate,
    }
    results = target.results(options, "diagnose", settings, OUTPUTS)
    progress = shows_progress(options)
    with results.kept():
        policy = target.policy(options)
        episodes = simulate(
            target.model,
            policy,
            options.num_episodes,
            prior=target.prior,
            seed=seed_for(results.seed, PLAYED),
        )
        data = to_inference_data(
            target.model,
            episodes,
            backend,
            chains=options.chains,
            draws=options.draws,
            prior=target.prior,
            seed=seed_for(results.seed, INFERRED),
            progress=progress,
        )
        table = as_columns(data)
        figures: dict[str, Callable[[], Figure]] = {
            "contexts": partial(plot_contexts, data),
            "states": partial(plot_states, data),
            "filter": partial(plot_filter, data),
        }
        calibration = None
        if options.calibrate is not None:
            calibration = calibrate(
                target.model,
                policy,
                backend,
                options.calibrate,
                prior=target.prior,
                seed=seed_for(results.seed, CALIBRATED),
                progress=progress,
            )
            figures["calibration"] = calibration.plot
        folder = results.replace()
        folder.write_data(DATA, data)
        folder.write_table(RHAT, table)
        if calibration is not None:
            folder.write_json(CALIBRATION, as_content(calibration))
        write_figures(options, folder, figures)
        results.finish(**target.in_force, calibrate="not asked for")
    print(r_hat_sentence(table))
    if calibration is not None:
        print(f"\n{calibration}")
    note(options, f"data, summary and figures: {folder.path}/")
    return OK if calibration is None or calibration.calibrated else FAILED


def as_columns(data: Any) -> dict[str, list[Any]]:
    """ArviZ's summary of contexts and states as columns, first the quantity's name."""
    table = summary(data, ["is_context", "state"], round_to=5)
    return {"quantity": [str(name) for name in table.index], **table.to_dict("list")}


def r_hat_sentence(table: dict[str, list[Any]]) -> str:
    """The worst R-hat, whose it is, and how many are too large."""
    known = {
        name: float(value)
        for name, value in zip(table["quantity"], table["r_hat"], strict=True)
        if not math.isnan(float(value))
    }
    if not known:
        return "R-hat: there is none, because it takes two chains of four draws at least"
    worst = max(known, key=known.__getitem__)
    above = sum(value > GOOD_RHAT for value in known.values())
    return (
        f"R-hat: at worst {known[worst]:.3f}, of {worst}; above {GOOD_RHAT} for {above:,} of {len(known):,} "
        "quantities"
    )


def as_content(calibration: Calibration) -> dict[str, Any]:
    """A calibration in numbers and words."""
    return {
        "likelihood": calibration.likelihood,
        "calibrated": calibration.calibrated,
        "verdict": calibration.verdict,
        "p_values": calibration.p_values,
        "num_episodes": {name: each.num_episodes for name, each in calibration.quantities.items()},
        "hints": {name: each.hint for name, each in calibration.quantities.items()},
        "brier": calibration.contexts.brier,
        "expected_brier": calibration.contexts.expected_brier,
        "ece": calibration.contexts.ece,
    }


def _options(parser: ArgumentParser) -> None:
    model_arguments(parser, "target", several="the run folder of a fit, or a model")
    policy_option(parser)
    episodes_option(parser, 30)
    likelihood_option(parser)
    parser.add_argument("--chains", type=count, default=4, help="runs of the filter (default: %(default)s)")
    parser.add_argument("--draws", type=count, default=250, help="from each run (default: %(default)s)")
    parser.add_argument(
        "--calibrate",
        type=count,
        metavar="N",
        help="also test on N episodes whether the truth looks like a draw from the posteriors",
    )
    prior_option(parser)
    seed_option(parser, 0)
    run_option(parser, BESIDE)


DIAGNOSE = Command(
    "Find out whether inference can be believed: R-hat, figures, calibration (exit code 1 if that fails).",
    (
        "cpomdp diagnose runs/LightDark-fit-1 --calibrate 2000",
        "cpomdp diagnose cpomdp_ppl.models:LightDark --policy random --likelihood smc,num_particles=64",
    ),
    _options,
    diagnose,
)
