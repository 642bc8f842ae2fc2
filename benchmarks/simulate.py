"""How much a program costs over the same loop written by hand.

Draws LightDark episodes under a random policy with `simulate`, and with plain torch, in turn in one
run; then `simulate` alone against the number of episodes, the horizon and the number of contexts.

    python benchmarks/simulate.py
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.models import LightDark

if TYPE_CHECKING:
    from collections.abc import Callable


def by_hand(B: int, T: int) -> dict[str, torch.Tensor]:
    """LightDark under random actions, as one would write it without a modelling language."""
    c = torch.randint(2, (B,))
    side = 1 - 2 * c
    x = 0.3 * torch.randn(B)
    states, actions, rewards, observations, observed = [x], [], [], [], []
    for _ in range(T):
        a = torch.randint(3, (B,))
        depth = side * x
        rewards.append((depth > 1).float() - (depth < 0).float())
        move = (a == 1).float() - (a == 0).float()
        x = x + move + move.abs() * (0.1**0.5 * torch.randn(B))
        lit = (side * x > 0).float()
        z = x + (lit * 1.0 + (1 - lit) * 8.0).sqrt() * torch.randn(B)
        seen = a == 2
        states.append(x)
        actions.append(a)
        observations.append(torch.where(seen, z, 0.0))
        observed.append(seen)
    series = {"actions": actions, "rewards": rewards, "observations": observations, "observed": observed}
    return {"states": torch.stack(states, 1)} | {k: torch.stack(v, 1) for k, v in series.items()}


def medians(functions: list[Callable[[], object]], repeats: int = 41) -> list[float]:
    """Median time of each; they take turns, so that a slow moment of the machine hits all."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


class ManyContexts(LightDark):
    """LightDark with names for more contexts; those past the first are all lit on the left."""

    def __init__(self, num_contexts: int) -> None:
        super().__init__()
        self.contexts = num_contexts


def main() -> None:
    torch.set_num_threads(1)
    policy = RandomPolicy(3)
    print("LightDark, random policy, T = 20, one thread; medians\n")
    print("| episodes | by hand, ms | simulate, ms | ratio |\n|---|---|---|---|")
    for B in (1_000, 10_000, 100_000):
        hand, ours = medians(
            [lambda B=B: by_hand(B, 20), lambda B=B: simulate(LightDark(), policy, B, seed=0)]
        )
        print(f"| {B:,} | {hand * 1e3:.1f} | {ours * 1e3:.1f} | {ours / hand:.2f} |")

    print("\nGrowth of simulate\n")
    print("| varied | value | ms | µs per episode-step |\n|---|---|---|---|")
    cases = [("episodes", B, LightDark(), B) for B in (10_000, 20_000, 40_000, 80_000)]
    cases += [("horizon", T, LightDark(T), 10_000) for T in (10, 20, 40, 80)]
    cases += [("contexts", C, ManyContexts(C), 10_000) for C in (2, 8, 32, 128)]
    taken = medians([lambda m=m, B=B: simulate(m, policy, B, seed=0) for _, _, m, B in cases], repeats=7)
    for (varied, value, model, B), duration in zip(cases, taken, strict=True):
        print(f"| {varied} | {value:,} | {duration * 1e3:.1f} | {duration / (B * model.horizon) * 1e6:.3f} |")


if __name__ == "__main__":
    main()
