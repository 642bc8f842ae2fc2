"""Can the filters be believed? What ArviZ, calibration and pictures say about Light–Dark.

python examples/diagnose.py
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import torch

from baselines.simple import ApproachObserveCommit
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.diagnostics import (
    calibrate,
    plot_agreement,
    plot_contexts,
    plot_filter,
    plot_states,
    summary,
    to_inference_data,
)
from cpomdp_ppl.inference import GridFilter, ParticleFilter
from cpomdp_ppl.models import LightDark

RUNS = Path("runs/diagnose")


def main() -> None:
    """Play, infer, and ask."""
    torch.set_num_threads(1)  # tensors are small here: threads would mostly wait for each other
    RUNS.mkdir(parents=True, exist_ok=True)
    model = LightDark()
    rule = ApproachObserveCommit(model, "right", 1, "observe", ("right", "left"), 0.9, "ekf")
    episodes = simulate(model, rule, 30, seed=0)
    backends: dict[str, Any] = {
        "smc": ParticleFilter(2000),
        "smc, 8 particles": ParticleFilter(8),
        "ekf": "ekf",
        "grid": GridFilter(400),
    }
    data: dict[str, Any] = {
        name: to_inference_data(model, episodes, backend, seed=0) for name, backend in backends.items()
    }

    # Chains are runs of the filter with other random numbers: with too few particles, they disagree.
    for name in ("smc", "smc, 8 particles"):
        table = summary(data[name], "is_context", round_to=3)
        print(f"\n{name}: worst R-hat {table['r_hat'].max():.3f}; the first episodes:\n")
        print(table[["mean", "sd", "ess_bulk", "r_hat"]].head(6))

    # Draws cannot tell of a context that is too unlikely to be drawn: hence ArviZ's warnings, and the sum.
    print("\nHow well each predicts a step, knowing the context from all others:\n")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the table repeats them
        compared = az.compare({name: data[name] for name in ("smc", "ekf", "grid")})
    compared["exact_loo"] = [exact_loo(data[name]) for name in compared.index]
    print(compared[["elpd_loo", "exact_loo", "p_loo", "elpd_diff", "dse", "warning"]].round(2))

    for name in ("smc", "ekf"):
        calibration = calibrate(model, RandomPolicy(model.num_actions), backends[name], 2000)
        print(f"\nWhether the truth looks like a draw from the posteriors of '{name}':\n\n{calibration}")
        calibration.plot().savefig(RUNS / f"calibration_{name}.png", dpi=120)

    plot_contexts(data["smc, 8 particles"]).savefig(RUNS / "contexts.png", dpi=120)
    plot_states(data["smc"], episode=1).savefig(RUNS / "states.png", dpi=120)
    plot_filter(data["smc, 8 particles"]).savefig(RUNS / "filter.png", dpi=120)
    plot_agreement(data).savefig(RUNS / "agreement.png", dpi=120)
    print(f"\nfigures: {RUNS}/")


def exact_loo(data: Any) -> float:
    """What `az.loo` estimates, as a sum over contexts: `−log Σ_c P(c | y) / p(o_{t+1} | h_t, a_t, c)`."""
    stats, steps = data.sample_stats.mean("chain"), data.log_likelihood
    where = {"episode": steps["step_episode"], "time": steps["step_time"]}
    final = stats["context_probability"].isel(time=-1).sel(episode=steps["step_episode"])
    return -float(np.log((final / np.exp(stats["increment"].sel(where))).sum("context")).sum())


if __name__ == "__main__":
    main()
