"""Per-context likelihoods: both engines beside their peers, model by model, growth, accuracy against time.

    pip install -c constraints.txt -e ".[plot,peers]"
    python benchmarks/likelihood.py

Everything runs on one thread, in one process; functions take turns, so that a slow moment hits all of them.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from pathlib import Path

import light_dark_peers as peers  # first: it sets the libraries' numbers of threads
import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from light_dark_fit_peer import filtered as filtered_by_hand
from pyro.nn import PyroParam
from simulate import medians
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.context import entropy
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ParticleFilter,
    UnscentedKalmanFilter,
)
from cpomdp_ppl.learning import particle_marginal_metropolis_hastings
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid

matplotlib.use("Agg")
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cpomdp_ppl.inference.backend import Backend

ENGINES = ("native", "eager")
REFERENCE = Path(__file__).parent.parent / "tests" / "reference" / "light_dark_dev.npz"
PEERS = {  # name: function, share of the episodes it is given (its time is scaled up)
    "numba": (peers.numba_filter, 1),
    "numba, hand-made random numbers": (peers.numba_filter_fast_rng, 1),
    "JAX, vmapped": (peers.jax_filter, 1),
    "JAX, looped": (peers.jax_filter_looped, 1),
    "particles": (peers.particles_filter, 5),
    "Pyro SMCFilter": (peers.pyro_smcfilter, 20),
}


class Ferry(CPOMDP):
    """The model of the project's README."""

    contexts = ("calm", "current left", "current right")
    actions = ("steer left", "steer right", "take a bearing")
    horizon = 12

    def initial(self, context: Tensor) -> Tensor:
        """Somewhere about the pier."""
        return pyro.sample("x", dist.Normal(0.0, 2.0))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Off with the current, and where one steers."""
        steer = (action == 1).float() - (action == 0).float()
        current = (context == 2).float() - (context == 1).float()
        return pyro.sample("x", dist.Normal(state + steer + 0.5 * current, 0.2))

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """A bearing, if one is taken."""
        pyro.sample("z", dist.Normal(state, 0.5).mask(action == 2))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The nearer to the pier, the better."""
        return -state.abs()


def against_peers(model: LightDark, episodes: Episodes) -> None:
    """The same job for everybody: evidence, increments, belief rewards and ESS."""
    actions, z = episodes.actions.numpy(), episodes.observations["z"].numpy()
    print(f"LightDark, {len(episodes)} episodes × 2 contexts × T = {episodes.horizon}, one thread; medians\n")
    print("| particles | who | ms | time relative to ours, native |\n|---|---|---|---|")
    for N in (256, 1024):
        jobs = [_filtering(ParticleFilter(N, engine=engine), model, episodes) for engine in ENGINES]
        for function, share in PEERS.values():
            B = len(episodes) // share
            jobs.append(lambda f=function, B=B, N=N: f(actions[:B], z[:B], N, 0))
        native, eager, *theirs = medians(jobs, repeats=7)
        print(f"| {N} | **ours, native** | {native * 1e3:.1f} | 1 |")
        print(f"| {N} | **ours, eager** | {eager * 1e3:.1f} | {eager / native:.2f} |")
        for (name, (_, share)), taken in zip(PEERS.items(), theirs, strict=True):
            print(f"| {N} | {name} | {taken * share * 1e3:.1f} | {taken * share / native:.2f} |")


def _filtering(backend: Backend, model: CPOMDP, episodes: Episodes) -> Callable[[], object]:
    return lambda: backend.run(model, episodes, seed=0, moments=False)


def by_model(N: int = 256, B: int = 200) -> None:
    """Every model of the package, and README's: what a particle's step costs in each engine."""
    print(f"\nParticle filter, N = {N}, {B} episodes of each model's own horizon; medians\n")
    print("| model | contexts | steps | native, ns a particle-step | eager, ns | eager / native |")
    print("|---|---|---|---|---|---|")
    for model in (LightDark(), LineGrid(), ContextualTiger(), Beacons(), Ferry()):
        episodes = simulate(model, RandomPolicy(model.num_actions), B, seed=0)
        jobs = [_filtering(ParticleFilter(N, engine=engine), model, episodes) for engine in ENGINES]
        native, eager = medians(jobs, repeats=9)
        C, T = model.num_contexts, model.horizon
        each = 1e9 / (N * B * C * T)
        times = f"{native * each:.2f} | {eager * each:.2f} | {eager / native:.1f}"
        print(f"| {type(model).__name__} | {C} | {T} | {times} |")


def kalman(model: LightDark, episodes: Episodes) -> None:
    """Kalman filters. The one by hand is for this model alone, and has no checks."""
    a, z = episodes.actions.T.contiguous(), episodes.observations["z"].T.contiguous()  # [T, B]
    kinds = {"EKF": ExtendedKalmanFilter, "UKF": UnscentedKalmanFilter}
    jobs: dict[str, Callable[[], object]] = {"EKF, by hand in torch": lambda: filtered_by_hand(a, z)}
    for name, kind in kinds.items():
        jobs |= {f"**{name}, {e}**": _filtering(kind(engine=e), model, episodes) for e in ENGINES}
    taken = dict(zip(jobs, medians(list(jobs.values()), repeats=15), strict=True))
    hand = next(iter(taken.values()))
    print(f"\nKalman filters of LightDark, {len(episodes)} episodes, T = {episodes.horizon}; medians\n")
    print("| who | ms | time relative to by hand |\n|---|---|---|")
    for name, seconds in taken.items():
        print(f"| {name} | {seconds * 1e3:.2f} | {seconds / hand:.2f} |")


def online(model: LightDark, episode: Episodes, repeats: int = 9) -> None:
    """One step of a filter that follows one episode as it happens."""
    steps = list(zip(episode.actions[0].tolist(), episode.observations["z"][0].tolist(), strict=True))

    def seconds_a_step(backend: Backend) -> float:
        follower = backend.online(model, seed=0)
        start = time.perf_counter()
        for action, z in steps:
            follower.observe(action, {"z": z} if action == peers.OBSERVE else None)
        return (time.perf_counter() - start) / len(steps)

    print("\nOne step of `OnlineFilter`, one episode of LightDark; medians\n")
    print("| filter | native, µs | eager, µs | eager / native |\n|---|---|---|---|")
    kinds: dict[str, Callable[[str], Backend]] = {
        "SMC, N = 256": lambda engine: ParticleFilter(256, engine=engine),
        "SMC, N = 4096": lambda engine: ParticleFilter(4096, engine=engine),
    }
    for name, kind in kinds.items():
        taken: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for k in range(repeats + 1):
            for engine, found in taken.items():
                seconds = seconds_a_step(kind(engine))
                if k > 0:  # the first of all may compile
                    found.append(seconds)
        native, eager = (statistics.median(found) for found in taken.values())
        print(f"| {name} | {native * 1e6:.0f} | {eager * 1e6:.0f} | {eager / native:.1f} |")


def sampling(episodes: Episodes, iterations: int = 60, repeats: int = 3) -> None:
    """Particle marginal Metropolis–Hastings of LightDark's three variances, a whole call."""
    guesses = {"process_variance": 0.3, "light_variance": 3.0, "dark_variance": 4.0}
    model = LightDark(**{k: PyroParam(torch.tensor(v), constraints.positive) for k, v in guesses.items()})
    prior = {name: dist.LogNormal(0.0, 2.0) for name in guesses}

    def job(engine: str) -> Callable[[], object]:
        return lambda: particle_marginal_metropolis_hastings(
            model,
            episodes,
            prior,
            likelihood=ParticleFilter(256, engine=engine),
            chains=1,
            draws=iterations // 2,
            warm_up=iterations // 2,
            seed=0,
            progress=False,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that so short a chain is not good is not what is measured here
        native, eager = medians([job(engine) for engine in ENGINES], repeats)
    print(f"\nPMMH of LightDark's variances, {len(episodes)} episodes, N = 256, one chain; medians\n")
    print(f"A whole call of {iterations} iterations, with compiling and the replicates in the end.\n")
    print("| engine | iterations a second |\n|---|---|")
    for engine, seconds in zip(ENGINES, (native, eager), strict=True):
        print(f"| {engine} | {iterations / seconds:.1f} |")
    print(f"| native / eager | {eager / native:.1f} |")


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
    ticks = [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(0.15, 2500)
    axis.grid(alpha=0.3)
    path = Path("runs/likelihood_accuracy.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"figure: {path}", file=sys.stderr)


def main() -> None:
    torch.set_num_threads(1)
    model, policy = LightDark(), RandomPolicy(3)
    episodes = simulate(model, policy, 200, seed=0)
    against_peers(model, episodes)
    by_model()
    kalman(model, episodes)
    online(model, episodes[:1])
    sampling(episodes)
    growth(policy)
    accuracy(model)


if __name__ == "__main__":
    main()
