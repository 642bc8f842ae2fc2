"""Several chains side by side, in one process or in many; when they are stopped, their draws are kept."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.experiments.execute import in_parallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.learning.metropolis import MetropolisStep, Walk
    from cpomdp_ppl.learning.posterior import Posterior

ROUND_SECONDS = 5.0
"""Seconds that processes work before they report, roughly: what Ctrl-C can cost."""


def advance(
    posterior: Posterior, walks: Sequence[Walk], warm_up: int, draws: int, workers: int | None, bar: Any
) -> tuple[list[list[MetropolisStep]], bool]:
    """Warm up and draw.

    Chains go forward in rounds, and each has its own random numbers: how they are cut into rounds, and which
    process takes them, changes nothing.

    Args:
        posterior: What the chains converge to.
        walks: The chains.
        warm_up: Number of steps of each chain that are not kept.
        draws: Number of steps of each chain that are.
        workers: Number of processes; None leaves it to joblib's configuration.
        bar: A progress bar, which counts the steps of all chains.

    Returns:
        The draws of each chain, as many of one as of another, and whether these are all.

    Raises:
        KeyboardInterrupt: If it comes before every chain has a draw; after that, it ends the run.
    """
    rounds: list[list[list[MetropolisStep]]] = []  # steps by round and chain
    taken, total = 0, warm_up + draws
    count = 1  # the first step is in this process, where errors are plainest
    try:
        while taken < total:
            began = time.perf_counter()
            round_of = partial(_advanced, posterior, count)
            advanced = dict(in_parallel(round_of, walks, workers=1 if taken == 0 else workers))
            walks = [advanced[k][0] for k in range(len(walks))]
            rounds.append([advanced[k][1] for k in range(len(walks))])
            taken += count
            bar.update(count * len(walks))
            if workers != 1:
                seconds = (time.perf_counter() - began) / count
                count = max(1, min(int(ROUND_SECONDS / seconds), 2 * count, total - taken))
    except KeyboardInterrupt:
        if taken <= warm_up:
            raise
        return _drawn(rounds, len(walks), warm_up), False
    return _drawn(rounds, len(walks), warm_up), True


def _advanced(posterior: Posterior, count: int, walk: Walk) -> tuple[Walk, list[MetropolisStep]]:
    return walk, walk.advance(posterior, count)


def _drawn(rounds: list[list[list[MetropolisStep]]], chains: int, warm_up: int) -> list[list[MetropolisStep]]:
    return [[step for one in rounds for step in one[k]][warm_up:] for k in range(chains)]
