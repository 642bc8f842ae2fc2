"""`cpomdp diagnose`: whether inference can be trusted."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cpomdp_ppl.cli.command import FAILED, OK, Command
from cpomdp_ppl.cli.options import SUITABLE, count, note, shows_progress, target_options
from cpomdp_ppl.cli.results import figure_files
from cpomdp_ppl.cli.target import CommandTarget
from cpomdp_ppl.diagnostics import (
    calibrate,
    plot_contexts,
    plot_filter,
    plot_states,
    summary,
    to_inference_data,
)
from cpomdp_ppl.diagnostics.inference_data import state_variables
from cpomdp_ppl.experiments.run_files import CALIBRATION, GOOD_RHAT, RHAT
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from arviz import InferenceData
    from matplotlib.figure import Figure
    from xarray import DataTree

    from cpomdp_ppl.cli.results import Results
    from cpomdp_ppl.diagnostics import Calibration

DATA = "episodes.nc"
FIGURES = ("contexts", "states", "filter", "calibration")
OUTPUTS = (DATA, RHAT, CALIBRATION, *figure_files(FIGURES))

PLAYED, INFERRED, CALIBRATED = range(3)
"""Purposes of random numbers, which are drawn from a seed each."""


def diagnose(options: Namespace) -> int:
    """Play episodes, infer what is hidden in them several times, and find out whether that can be trusted."""
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
        table = summary_columns(data)
        _write(results, data, table, calibration)
        results.finish(**target.in_force, calibrate="not asked for")
    print(r_hat_sentence(table))
    if calibration is not None:
        print(f"\n{calibration}")
    note(options, f"data, summary and figures: {results.folder.path}/")
    return OK if calibration is None or calibration.calibrated else FAILED


def _write(
    results: Results,
    data: InferenceData | DataTree,
    table: dict[str, list[Any]],
    calibration: Calibration | None,
) -> None:
    folder = results.replace()
    folder.write_data(DATA, data)
    folder.write_table(RHAT, table)
    figures: dict[str, Callable[[], Figure]] = {
        "contexts": partial(plot_contexts, data),
        "states": partial(plot_states, data),
        "filter": partial(plot_filter, data),
    }
    if calibration is not None:
        folder.write_json(CALIBRATION, calibration_content(calibration))
        figures["calibration"] = calibration.plot
    results.draw(figures)


def summary_columns(data: InferenceData | DataTree) -> dict[str, list[Any]]:
    """ArviZ's summary of contexts and states as columns; the first has the names of the quantities.

    Without states past the end of their episode, each of which is the last once more.
    """
    table = summary(data, ["is_context", "state"], round_to=5)
    table = table[[not over for over in _past_the_end(data, [str(name) for name in table.index])]]
    return {"quantity": [str(name) for name in table.index], **table.to_dict("list")}


def _past_the_end(data: InferenceData | DataTree, quantities: list[str]) -> list[bool]:
    """Which quantities are of a state, `state[episode, time…]`, at a time past the length of its episode."""
    lengths = np.asarray(data["constant_data"]["length"])
    names = "|".join(map(re.escape, state_variables(data["posterior"])))
    places = [re.match(rf"(?:{names})\[(\d+), (\d+)", quantity) for quantity in quantities]
    return [place is not None and int(place[2]) > lengths[int(place[1])] for place in places]


def r_hat_sentence(table: dict[str, list[Any]]) -> str:
    """A sentence on the worst R-hat, which quantity has it, and how many are too large."""
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


def calibration_content(calibration: Calibration) -> dict[str, Any]:
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
    target_options(parser, num_episodes=30, likelihood=SUITABLE, seed=0)
    parser.add_argument(
        "--chains", type=count, default=4, help="how often the filter is run (default: %(default)s)"
    )
    parser.add_argument(
        "--draws", type=count, default=250, help="draws from each run of the filter (default: %(default)s)"
    )
    parser.add_argument(
        "--calibrate",
        type=count,
        metavar="N",
        help="also test on N episodes whether the truth looks like a draw from the posteriors",
    )


DIAGNOSE = Command(
    "Find out whether inference can be trusted: R-hat, figures, calibration (exit code 1 if that fails).",
    (
        "cpomdp diagnose runs/LightDark-fit-1 --calibrate 2000",
        "cpomdp diagnose cpomdp_ppl.models:LightDark --policy random --likelihood smc,num_particles=64",
    ),
    _options,
    diagnose,
)
