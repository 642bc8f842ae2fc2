"""Learn Light–Dark's noise from episodes whose contexts nobody wrote down, and plan with what was learned.

python examples/learn.py
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import arviz as az
import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import RandomPolicy, evaluate, simulate
from cpomdp_ppl.inference import GridFilter
from cpomdp_ppl.learning import (
    Estimate,
    maximum_likelihood,
    particle_marginal_metropolis_hastings,
    with_parameters,
)
from cpomdp_ppl.models import LightDark
from solvers import cids

if TYPE_CHECKING:
    from collections.abc import Sequence

GUESSES = {"process_variance": 0.3, "light_variance": 3.0, "dark_variance": 4.0}
"""Where learning starts: wrong by factors of two and three."""

SYMBOLS = {
    "process_variance": r"of a move, $\sigma_p^2$",
    "light_variance": r"of a look in the light, $\sigma_L^2$",
    "dark_variance": r"of a look in the dark, $\sigma_D^2$",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, learn twice, draw, plan twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=500, help="how many to learn from")
    parser.add_argument("--draws", type=int, default=250, help="of each of the four chains")
    parser.add_argument("--warm-up", type=int, default=50, help="steps of each chain before those")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    parser.add_argument("--iterations", type=int, default=None, help="of each fit, instead of the default")
    parser.add_argument("--evaluation", type=int, default=4000, help="episodes to compare the policies on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/learning.png"), help="for the figure")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # tensors are small here: threads would mostly wait for each other
    truth = LightDark()
    played = simulate(truth, RandomPolicy(truth.num_actions), options.episodes, seed=options.seed)
    recorded = replace(played, contexts=None, states=None, rewards=None, returns=None)
    guess = LightDark(
        **{name: PyroParam(torch.tensor(value), constraints.positive) for name, value in GUESSES.items()}
    )

    # The Kalman filters look at a single point, and take the edge of the light for what is there: the grid.
    estimate = maximum_likelihood(guess, recorded, GridFilter(200))
    print(f"\nMaximum likelihood, from {options.episodes} episodes:\n\n{estimate}\n")

    data: Any = particle_marginal_metropolis_hastings(
        guess,
        recorded,
        {name: dist.LogNormal(0.0, 2.0) for name in GUESSES},
        draws=options.draws,
        warm_up=options.warm_up,
        initial=estimate.values,
        covariance=estimate.covariance,
        jumps=0.9,
        workers=options.workers,
        seed=options.seed,
    )
    table = az.summary(data, round_to=4)
    table.insert(0, "truth", [getattr(truth, name) for name in table.index])
    table["sds_away"] = ((table["truth"] - table["mean"]) / table["sd"]).abs().round(2)
    attributes = data.posterior.attrs
    print(f"\nParticle marginal Metropolis–Hastings; {attributes['advice']}:\n")
    columns = ["truth", "mean", "sd", "sds_away", "mcse_mean", "ess_bulk", "ess_tail", "r_hat"]
    print(table[columns].to_string())
    shares = [f"{np.mean(attributes[name]):.0%}" for name in ("acceptance", "renewal")]
    print(
        f"\naccepted: {shares[0]} of parameters, {shares[1]} of random numbers; the log-likelihood of all "
        f"episodes has a standard deviation of {attributes['log_likelihood_sd']:.2f}"
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    plot(data.posterior, estimate, truth).savefig(options.output, dpi=130)
    print(f"figure: {options.output}")

    means = {name: float(data.posterior[name].mean()) for name in GUESSES}
    learned = with_parameters(guess, means)
    policies = {
        name: cids.fit(model, seed=options.seed, iterations=options.iterations).policy
        for name, model in {"planned on what was learned": learned, "planned on the truth": truth}.items()
    }
    compared = evaluate(truth, policies, options.evaluation, seed=options.seed)
    print(f"\nC-IDS, played in the true Light–Dark:\n\n{compared}")


def plot(posterior: Any, estimate: Estimate, truth: LightDark) -> Figure:
    """What is known of each variance: draws, the normal about the maximum of the likelihood, the truth."""
    figure = Figure(figsize=(10.5, 3.1), layout="constrained")
    for axis, (name, symbol) in zip(figure.subplots(1, 3), SYMBOLS.items(), strict=True):
        drawn = posterior[name].values.ravel()
        best, error = float(estimate.values[name]), float(estimate.standard_errors[name])
        true = getattr(truth, name)
        bins = np.linspace(drawn.min(), drawn.max(), 26)
        axis.hist(drawn, bins, density=True, color="#9ecae1", label="PMMH, particle filter")
        # Normal on the scale of logarithms, on which it was found.
        spread = error / best
        x = np.linspace(min(drawn.min(), true), max(drawn.max(), true), 300)
        density = np.exp(-0.5 * (np.log(x / best) / spread) ** 2) / (x * spread * np.sqrt(2 * np.pi))
        axis.plot(x, density, color="#08519c", label="maximum likelihood, grid")
        axis.axvline(true, color="#d95f0e", linewidth=2, label="truth")
        axis.set_xlabel(f"variance {symbol}")
        axis.set_yticks([])
        axis.spines[["left", "right", "top"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main()
