"""Two processes against one: an iteration of C-IDS on LightDark, 2,000 episodes, SMC with 256 particles.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --processes 4 --batch-size 8000

Each process has one thread. The same processes do both, by turns, so that a slow moment hits both: first one
of them plays and improves a whole batch while the others wait, then all of them do it together.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.models import LightDark
from solvers.cids.estimator import ActorCritic
from solvers.cids.experience import Experience
from solvers.cids.group import ProcessGroup, SingleProcess
from solvers.cids.learner import Learner
from solvers.cids.objective import Information
from solvers.cids.policy import LSTMPolicy
from solvers.cids.priors import as_sampler
from solvers.cids.schedules import Geometric, Linear

PHASES = ("rollout", "likelihood", "gradient")
WARM_UP = 2


def learner(group: SingleProcess, batch_size: int, num_particles: int) -> Learner:
    """As `cids.fit` sets it up for the information objective."""
    model = LightDark()
    return Learner(
        model,
        LSTMPolicy(model, seed=0),
        Experience(model, ParticleFilter(num_particles), group),
        Information(),
        ActorCritic(),
        as_sampler(model, None),
        Geometric(3.0, 0.5, until=0.7),
        Linear(6e-3, 3e-4),
        iterations=800,
        batch_size=batch_size,
        seed=0,
    )


def timed(each: Learner, group: SingleProcess) -> dict[str, float]:
    """Seconds of an iteration, by phase and in all."""
    start = time.perf_counter()
    measured = each.iterate()
    group.barrier()
    taken = {phase: measured[f"seconds_{phase}"] for phase in PHASES}
    return {**taken, "total": time.perf_counter() - start}


def member(rank: int, arguments: argparse.Namespace, rendezvous: Path) -> None:
    """One of the processes; the first prints what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that likelihoods are rough at times is not what is measured here
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=arguments.processes
    )
    single, group = SingleProcess(), ProcessGroup(torch.device("cpu"))
    sizes = arguments.batch_size, arguments.num_particles
    alone, together = learner(single, *sizes), learner(group, *sizes)
    by_one, by_all = [], []
    for _ in range(WARM_UP + arguments.repeats):
        group.barrier()
        if rank == 0:
            by_one.append(timed(alone, single))
        group.barrier()
        by_all.append(timed(together, group))
    if rank == 0:
        report(arguments, by_one[WARM_UP:], by_all[WARM_UP:])
        apart = max(
            float((one - other).abs().max())
            for one, other in zip(alone.parameters, together.parameters, strict=True)
        )
        print(f"\nLargest difference between their weights after {alone.iteration} iterations: {apart:.1e}")
    dist.destroy_process_group()


def report(
    arguments: argparse.Namespace, by_one: list[dict[str, float]], by_all: list[dict[str, float]]
) -> None:
    """Medians of both, and of how many times faster all are than one in the same turn."""
    B, N = arguments.batch_size, arguments.num_particles
    one, all_ = (
        {p: statistics.median(t[p] for t in by) for p in (*PHASES, "total")} for by in (by_one, by_all)
    )
    print(f"One iteration: {B:,} episodes, T = 20, SMC with {N} particles, one thread each; medians, s\n")
    print("| processes | rollout | likelihood | gradient | total |\n|---|---|---|---|---|")
    print("| 1 |" + "".join(f" {one[p]:.3f} |" for p in one))
    print(f"| {arguments.processes} |" + "".join(f" {all_[p]:.3f} |" for p in all_))
    turns = list(zip(by_one, by_all, strict=True))
    faster = {p: statistics.median(alone[p] / together[p] for alone, together in turns) for p in one}
    print("| speed-up |" + "".join(f" {faster[p]:.2f} |" for p in one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2000)
    parser.add_argument("--num-particles", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        spawn(member, args=(arguments, Path(place) / "rendezvous"), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
