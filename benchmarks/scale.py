"""The particle filter at scale: time linear in every factor, memory bounded, a million particles exact.

    python benchmarks/scale.py
    python benchmarks/scale.py --quick  # the same tables of sizes that take a minute

Every size has a fresh process of its own, with one thread, so that peak memory is that size's alone. Sizes
that are compared take turns, one process at work at a time, so that a slow moment of the machine hits all.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Never

import pyro
import pyro.distributions as dist
import torch
from tqdm import tqdm

from cpomdp_ppl import CPOMDP, RandomPolicy, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from cpomdp_ppl.inference import Filtering

MIB = 2**20
LIMIT = 4096  # MiB, of the full size
STANDARD_ERRORS = 4.0  # that an estimate may be away from the truth


class Currents(CPOMDP):
    """A boat held by a spring, in one of many currents; its position is measured at every step.

    Linear and Gaussian, so that the Kalman filter is exact; and it comes back, so that it can go on for long.
    """

    actions = ("row left", "row right")

    def __init__(self, num_contexts: int, horizon: int) -> None:
        super().__init__()
        self.contexts = num_contexts
        self.horizon = horizon

    def initial(self, context: Tensor) -> Tensor:
        """At rest, more or less."""
        return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Back to the middle, off with the current, and whither one rows."""
        current = (context + 0.5) / self.num_contexts - 0.5  # evenly from -1/2 to 1/2
        rowed = 0.5 * action - 0.25
        return pyro.sample("x", dist.Normal(0.8 * state + (current + rowed), 0.5))

    def observation(self, state: Tensor, action: Tensor, context: Tensor) -> None:
        """Position, with an error."""
        pyro.sample("z", dist.Normal(state, 1.0))

    def reward(self, state: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """The nearer to the middle, the better."""
        return -state.abs()


@dataclass(frozen=True)
class Size:
    """How much there is to filter: contexts, particles, steps, episodes."""

    C: int
    N: int
    T: int
    B: int

    def __str__(self) -> str:
        return " × ".join(f"{n:,}" for n in astuple(self))

    def halved(self, factor: str) -> Size:
        """With half of one factor."""
        return replace(self, **{factor: getattr(self, factor) // 2})

    def doubled(self, factor: str) -> Size:
        """With twice of one factor."""
        return replace(self, **{factor: getattr(self, factor) * 2})


FACTORS = {"C": "contexts", "N": "particles", "T": "steps", "B": "episodes"}
BASE, FULL, MILLION = Size(32, 512, 100, 32), Size(64, 1024, 500, 64), Size(2, 1_000_000, 500, 1)
QUICK = Size(16, 256, 20, 16), Size(16, 512, 50, 16), Size(2, 1_000_000, 10, 1)


@dataclass(frozen=True)
class Measured:
    """What one run took.

    Attributes:
        seconds: Of the work alone.
        processor: Seconds that the processor gave to it: less, if others use the machine.
        peak: The most memory the process ever had, MiB.
        libraries: What it had before the work: Python, torch and Pyro, MiB.
    """

    seconds: float
    processor: float
    peak: float
    libraries: float

    @property
    def own(self) -> float:
        """Memory for the work, MiB."""
        return self.peak - self.libraries


@dataclass(frozen=True)
class Exactness:
    """Log-likelihoods of one episode under every context `[C]`: estimates, their standard errors, truth."""

    estimate: list[float]
    error: list[float]
    truth: list[float]


def peak_memory() -> float:
    """Of this process so far, MiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / MIB if sys.platform == "darwin" else most / 1024


LIBRARIES = peak_memory()


def timed(work: Callable[[], object]) -> Measured:
    """Do it once."""
    start, began = time.perf_counter(), time.process_time()
    work()
    seconds, processor = time.perf_counter() - start, time.process_time() - began
    return Measured(seconds, processor, peak_memory(), LIBRARIES)


def filtered(size: Size, engine: str = "auto") -> Measured:
    """Filter episodes of this size, as a user would."""
    torch.set_num_threads(1)
    model, smc, policy = Currents(size.C, size.T), ParticleFilter(size.N, engine=engine), RandomPolicy(2)
    episodes = simulate(model, policy, size.B, seed=0)
    smc.run(model, episodes[:4].truncated(2), seed=0)  # what is done only once is not part of the time
    return timed(lambda: smc.run(model, episodes, seed=0))


def simulated(size: Size) -> Measured:
    """Draw that many episodes; there are no particles in it."""
    torch.set_num_threads(1)
    model = Currents(size.C, size.T)
    return timed(lambda: simulate(model, RandomPolicy(2), size.B, seed=0))


def compared(size: Size) -> tuple[Measured, Exactness]:
    """One episode by particles, and by the Kalman filter."""
    torch.set_num_threads(1)
    model = Currents(size.C, size.T)
    episode = simulate(model, RandomPolicy(2), 1, seed=0)
    results: list[Filtering] = []
    measured = timed(lambda: results.append(ParticleFilter(size.N).run(model, episode, seed=0)))
    (found,) = results
    truth = ExtendedKalmanFilter().run(model, episode).log_likelihood[0]
    assert found.standard_error is not None
    estimate, error = found.log_likelihood[0], found.standard_error[0]
    return measured, Exactness(estimate.tolist(), error.tolist(), truth.tolist())


def in_turn(
    work: Callable[[Size], Measured], sizes: Sequence[Size], repeats: int, progress: tqdm[Never]
) -> list[Measured]:
    """Median times of each size, each in a process of its own, and its peak memory the first time."""
    taken: list[list[Measured]] = [[] for _ in sizes]
    with ExitStack() as processes:
        workers = [processes.enter_context(fresh_process()) for _ in sizes]
        for _ in range(repeats):
            for size, worker, found in zip(sizes, workers, taken, strict=True):
                progress.set_postfix_str(str(size))
                found.append(worker.submit(work, size).result())
                progress.update()
    return [
        replace(
            found[0],
            seconds=statistics.median(each.seconds for each in found),
            processor=statistics.median(each.processor for each in found),
        )
        for found in taken
    ]


def fresh_process() -> ProcessPoolExecutor:
    """A process that has done nothing yet; it begins with the first thing it is given."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def growth(centre: Size, factors_of: tuple[str, ...], repeats: int, progress: tqdm[Never]) -> Measured:
    """A size, and the same with each factor changed alone; prints the table, returns what the size took."""
    cases = [(name, change, getattr(centre, change)(name)) for name in FACTORS for change in factors_of]
    whole, *others = in_turn(filtered, [centre, *(size for _, _, size in cases)], repeats, progress)
    print(f"\n### Around {centre}\n")
    print(f"Contexts × particles × steps × episodes; medians of {repeats}.\n")
    print("| varied | value | time, s | ratio | processor time, ratio | memory, MiB | for the work | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| nothing | | {whole.seconds:.2f} | 1 | 1 | {whole.peak:.0f} | {whole.own:.0f} | 1 |")
    for (name, _, size), found in zip(cases, others, strict=True):
        print(
            f"| {FACTORS[name]} | {getattr(size, name):,} | {found.seconds:.2f} "
            f"| {found.seconds / whole.seconds:.2f} | {found.processor / whole.processor:.2f} "
            f"| {found.peak:.0f} | {found.own:.0f} "
            f"| {found.own / whole.own:.2f} |"
        )
    cells = math.prod(astuple(centre))
    print(f"\n{whole.seconds / cells * 1e9:.1f} ns for a particle's step, {cells:.3g} of them.")
    return whole


def engines(size: Size, progress: tqdm[Never]) -> None:
    """The same by both engines, each in a process of its own."""
    print(f"\n### {size}, compiled and as programs are\n")
    print("| engine | time, s | processor time, s | memory, MiB | for the work |\n|---|---|---|---|---|")
    taken = []
    for engine in ("native", "eager"):
        (found,) = in_turn(partial(filtered, engine=engine), [size], 1, progress)
        taken.append(found)
        times = f"{found.seconds:.2f} | {found.processor:.2f} | {found.peak:.0f} | {found.own:.0f}"
        print(f"| {engine} | {times} |")
    native, eager = taken
    ratios = [eager.seconds / native.seconds, eager.processor / native.processor, eager.peak / native.peak]
    print("| eager / native |" + "".join(f" {ratio:.1f} |" for ratio in ratios) + " |")


def million(size: Size, progress: tqdm[Never]) -> float:
    """Very many particles on one episode. Returns how many standard errors they are off, at worst."""
    with fresh_process() as process:
        found, exact = process.submit(compared, size).result()
    progress.update()
    print(f"\n### {size.N:,} particles on one episode\n")
    print(f"{size.C} contexts, {size.T} steps: {found.seconds:.1f} s, peak memory {found.peak:.0f} MiB.\n")
    print("| context | log-likelihood | standard error | Kalman filter, exact | off, in standard errors |")
    print("|---|---|---|---|---|")
    off = []
    for c, (estimate, error, truth) in enumerate(zip(exact.estimate, exact.error, exact.truth, strict=True)):
        off.append(abs(estimate - truth) / error)
        print(f"| {c} | {estimate:.4f} | {error:.4f} | {truth:.4f} | {off[-1]:.1f} |")
    return math.nan if any(map(math.isnan, off)) else max(off)


def memory_of_simulate(sizes: Sequence[Size], progress: tqdm[Never]) -> None:
    """What `simulate` needs, which has no particles but keeps all that it draws."""
    print("\n### Memory of `simulate`\n")
    print("It keeps every step until the end, so memory grows with episodes × steps, not with contexts.\n")
    print("| contexts | steps | episodes | time, s | peak memory, MiB | for the work, bytes per step |")
    print("|---|---|---|---|---|---|")
    for size, found in zip(sizes, in_turn(simulated, sizes, 1, progress), strict=True):
        each = found.own * MIB / (size.T * size.B)
        print(f"| {size.C} | {size.T} | {size.B:,} | {found.seconds:.2f} | {found.peak:.0f} | {each:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--repeats", type=int, default=5, help="runs of every size around the smaller one")
    parser.add_argument("--full-repeats", type=int, default=2, help="runs of every size around the full one")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    base, full, many = QUICK if arguments.quick else (BASE, FULL, MILLION)
    drawn = [Size(full.C, 1, full.T, B) for B in ((1_000, 2_000) if arguments.quick else (10_000, 20_000))]
    drawn.append(replace(drawn[-1], C=2))
    total = 9 * arguments.repeats + 5 * arguments.full_repeats + 2 + 1 + len(drawn)
    progress: tqdm[Never] = tqdm(total=total, desc="scale")
    with progress:
        print("One thread. Memory is the peak of a fresh process, with Python, torch and Pyro in it.")
        growth(base, ("halved", "doubled"), arguments.repeats, progress)
        whole = growth(full, ("halved",), arguments.full_repeats, progress)
        verdict = "under" if whole.peak < LIMIT else "NOT under"
        print(f"\n{full}: peak memory {whole.peak:.0f} MiB, {verdict} {LIMIT / 1024:g} GiB.")
        engines(full, progress)
        off = million(many, progress)
        memory_of_simulate(drawn, progress)
    if whole.peak >= LIMIT:
        sys.exit(f"peak memory is {whole.peak:.0f} MiB, but expected under {LIMIT}")
    if not off < STANDARD_ERRORS:  # it may be NaN
        sys.exit(f"likelihoods are {off:.1f} standard errors off, at worst")


if __name__ == "__main__":
    main()
