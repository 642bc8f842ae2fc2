"""Several chains side by side, in one process or in many, of which nothing is lost when they are stopped."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cpomdp_ppl.learning.metropolis import Step, Target, Walk

ROUND = 5.0
"""Seconds that processes work before they report, roughly: what Ctrl-C can cost."""


def run(
    target: Target, walks: Sequence[Walk], warm_up: int, draws: int, workers: int, bar: Any
) -> tuple[list[list[Step]], bool]:
    """Warm up and draw. Returns the draws of each chain, as many of one as of another, and whether all.

    Chains go forward in rounds, and their random numbers are their own: how they are cut into rounds, and
    which process takes them, changes nothing.

    Raises:
        KeyboardInterrupt: If it comes before every chain has a draw; after that, it ends the run.
    """
    rounds: list[list[list[Step]]] = []  # of each round and chain
    taken, total = 0, warm_up + draws
    try:
        with _processes(min(workers, len(walks))) as parallel:
            count = 1  # and in this process, where errors are plainest
            while taken < total:
                began = time.perf_counter()
                if parallel is None or taken == 0:
                    steps = [walk.advance(target, count) for walk in walks]
                else:
                    from joblib import delayed  # type: ignore[import-untyped]

                    advanced = parallel(delayed(_advance_alone)(walk, target, count) for walk in walks)
                    walks, steps = ([one[k] for one in advanced] for k in range(2))
                rounds.append(steps)
                taken += count
                bar.update(count * len(walks))
                if parallel is not None:
                    seconds = (time.perf_counter() - began) / count
                    count = max(1, min(int(ROUND / seconds), 2 * count, total - taken))
    except KeyboardInterrupt:
        if taken <= warm_up:
            raise
        return _drawn(rounds, len(walks), warm_up), False
    return _drawn(rounds, len(walks), warm_up), True


def _drawn(rounds: list[list[list[Step]]], chains: int, warm_up: int) -> list[list[Step]]:
    return [[step for one in rounds for step in one[k]][warm_up:] for k in range(chains)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in the same order everywhere, and no threads of one process in the way of another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _processes(workers: int) -> Iterator[Any]:
    with one_thread():
        if workers == 1:
            yield None
            return
        from joblib import Parallel

        with Parallel(n_jobs=workers) as parallel:
            yield parallel


def _advance_alone(walk: Walk, target: Target, count: int) -> tuple[Walk, list[Step]]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one deals with it
    torch.set_num_threads(1)
    return walk, walk.advance(target, count)
