"""Per-context likelihoods of LightDark: ours beside its peers, its growth, and accuracy against time.

    pip install -c constraints.txt -e ".[plot,peers]"
    python benchmarks/likelihood.py

Everything runs on one thread, in one process; functions take turns, so that a slow moment hits all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import light_dark_peers as peers  # first: it sets the libraries' numbers of threads
import matplotlib
import numpy as np
import torch
from simulate import medians

from cpomdp_ppl import Episodes, RandomPolicy, simulate
from cpomdp_ppl.context import entropy
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ParticleFilter,
    UnscentedKalmanFilter,
)
from cpomdp_ppl.models import LightDark

matplotlib.use("Agg")
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

if TYPE_CHECKING:
    from collections.abc import Callable

REFERENCE = Path(__file__).parent.parent / "tests" / "reference" / "light_dark_dev.npz"
PEERS = {  # name: function, share of the episodes it is given (its time is scaled up)
    "numba": (peers.numba_filter, 1),
    "numba, hand-made random numbers": (peers.numba_filter_fast_rng, 1),
    "JAX, vmapped": (peers.jax_filter, 1),
    "JAX, looped": (peers.jax_filter_looped, 1),
    "particles": (peers.particles_filter, 5),
    "Pyro SMCFilter": (peers.pyro_smcfilter, 20),
}


def against_peers(model: LightDark, episodes: Episodes) -> None:
    """The same job for everybody: evidence, increments, belief rewards and ESS."""
    actions, z = episodes.actions.numpy(), episodes.observations["z"].numpy()
    print(f"LightDark, {len(episodes)} episodes × 2 contexts × T = {episodes.horizon}, one thread; medians\n")
    print("| particles | who | ms | time relative to ours |\n|---|---|---|---|")
    for N in (256, 1024):
        smc = ParticleFilter(N)
        jobs = [lambda smc=smc: smc.run(model, episodes, seed=0, moments=False)]
        for function, share in PEERS.values():
            B = len(episodes) // share
            jobs.append(lambda f=function, B=B, N=N: f(actions[:B], z[:B], N, 0))
        ours, *theirs = medians(jobs, repeats=7)
        print(f"| {N} | **ours** | {ours * 1e3:.1f} | 1 |")
        for (name, (_, share)), taken in zip(PEERS.items(), theirs, strict=True):
            print(f"| {N} | {name} | {taken * share * 1e3:.1f} | {taken * share / ours:.2f} |")


class ManyContexts(LightDark):
    """LightDark with more contexts, for their number only."""

    def __init__(self, num_contexts: int, horizon: int = 20) -> None:
        super().__init__(horizon)
        self.contexts = num_contexts


def growth(policy: RandomPolicy) -> None:
    """Our time against each size, and against threads."""

    def job(N: int = 256, T: int = 20, C: int = 2, B: int = 200) -> Callable[[], object]:
        model = ManyContexts(C, T)
        episodes = simulate(model, policy, B, seed=0)
        return lambda: ParticleFilter(N).run(model, episodes, seed=0, moments=False)

    print("\nGrowth of our particle filter (N = 256, T = 20, C = 2, B = 200 unless varied)\n")
    print("| varied | value | ms | ms per unit |\n|---|---|---|---|")
    for name, values in {
        "N": (256, 512, 1024, 2048, 4096),
        "T": (10, 20, 40, 80),
        "C": (2, 4, 8, 16),
        "B": (200, 400, 800, 1600),
    }.items():
        taken = medians([job(**{name: value}) for value in values], repeats=5)
        for value, seconds in zip(values, taken, strict=True):
            print(f"| {name} | {value} | {seconds * 1e3:.1f} | {seconds * 1e3 / value:.3f} |")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        (seconds,) = medians([job(N=1024)], repeats=7)
        print(f"| threads (N = 1024) | {threads} | {seconds * 1e3:.1f} | |")
    torch.set_num_threads(1)


def accuracy(model: LightDark) -> None:
    """Error of the context posterior's entropy against time, for every backend that serves the model."""
    data = np.load(REFERENCE)
    episodes = Episodes.from_arrays(model, data["action"], {"z": data["observation"]})
    truth = entropy(torch.tensor(data["log_likelihood_increment"]).sum(1).softmax(-1), "bits")
    backends = {f"SMC, N = {N}": ParticleFilter(N) for N in (64, 256, 1024, 4096, 16384)}
    backends |= {"EKF": ExtendedKalmanFilter(), "UKF": UnscentedKalmanFilter(), "grid": GridFilter()}
    print("\nAccuracy against time: 64 reference episodes, mean error over 5 seeds\n")
    print("| backend | ms | mean |ΔH|, bits |\n|---|---|---|".replace("|ΔH|", "\\|ΔH\\|"))
    figure, axis = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    colours = {"SMC": "#0072B2", "EKF": "#D55E00", "UKF": "#CC79A7", "grid": "k"}
    points: dict[str, list[tuple[float, float]]] = {}
    for name, backend in backends.items():
        (seconds,) = medians([lambda b=backend: b.run(model, episodes, seed=0, moments=False)], repeats=5)
        seeds = range(5) if isinstance(backend, ParticleFilter) else range(1)
        found = [entropy(backend.run(model, episodes, seed=s).posterior()[:, -1], "bits") for s in seeds]
        error = float(torch.stack([(h - truth).abs().mean() for h in found]).mean())
        print(f"| {name} | {seconds * 1e3:.1f} | {error:.5f} |")
        points.setdefault(name.split(",")[0], []).append((seconds * 1e3, error))
        axis.annotate(name, (seconds * 1e3, error), xytext=(5, 5), textcoords="offset points", fontsize=8)
    for family, values in points.items():
        times, errors = zip(*values, strict=True)
        axis.loglog(times, errors, "o-", color=colours[family])
    axis.set(xlabel="time for 64 episodes, ms", ylabel="mean |H − H exact|, bits")
    axis.set_title("LightDark: accuracy of the context posterior against time")
    axis.set_xticks([10, 20, 50, 100, 200, 500, 1000], labels=["10", "20", "50", "100", "200", "500", "1000"])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(10, 2500)
    axis.grid(alpha=0.3)
    path = Path("runs/likelihood_accuracy.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"figure: {path}", file=sys.stderr)


def main() -> None:
    torch.set_num_threads(1)
    model, policy = LightDark(), RandomPolicy(3)
    against_peers(model, simulate(model, policy, 200, seed=0))
    growth(policy)
    accuracy(model)


if __name__ == "__main__":
    main()
