"""Several chains side by side, in one process or in many, of which nothing is lost when they are stopped."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.experiments.execute import in_parallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.learning.metropolis import Step, Target, Walk

ROUND = 5.0
"""Seconds that processes work before they report, roughly: what Ctrl-C can cost."""


def run(
    target: Target, walks: Sequence[Walk], warm_up: int, draws: int, workers: int | None, bar: Any
) -> tuple[list[list[Step]], bool]:
    """Warm up and draw. Returns the draws of each chain, as many of one as of another, and whether all.

    Chains go forward in rounds, and their random numbers are their own: how they are cut into rounds, and
    which process takes them, changes nothing.

    Raises:
        KeyboardInterrupt: If it comes before every chain has a draw; after that, it ends the run.
    """
    rounds: list[list[list[Step]]] = []  # of each round and chain
    taken, total = 0, warm_up + draws
    count = 1  # and in this process, where errors are plainest
    try:
        while taken < total:
            began = time.perf_counter()
            advance = partial(_advanced, target, count)
            advanced = dict(in_parallel(advance, walks, workers=1 if taken == 0 else workers))
            walks = [advanced[k][0] for k in range(len(walks))]
            rounds.append([advanced[k][1] for k in range(len(walks))])
            taken += count
            bar.update(count * len(walks))
            if workers != 1:
                seconds = (time.perf_counter() - began) / count
                count = max(1, min(int(ROUND / seconds), 2 * count, total - taken))
    except KeyboardInterrupt:
        if taken <= warm_up:
            raise
        return _drawn(rounds, len(walks), warm_up), False
    return _drawn(rounds, len(walks), warm_up), True


def _advanced(target: Target, count: int, walk: Walk) -> tuple[Walk, list[Step]]:
    return walk, walk.advance(target, count)


def _drawn(rounds: list[list[list[Step]]], chains: int, warm_up: int) -> list[list[Step]]:
    return [[step for one in rounds for step in one[k]][warm_up:] for k in range(chains)]
