"""What smoothing returns: the states in hindsight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.errors import DensityError
from cpomdp_ppl.state import leaves, map_state, stack_in_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpomdp_ppl.state import State


@dataclass(frozen=True, eq=False)
class Smoothing:
    """The states of B episodes given all that was observed, under each of C contexts.

    Attributes:
        method: How it was done: `"backward sampling"`, `"genealogy"`, `"forward-backward"` or `"RTS"`.
        state_mean: Smoothed means, leaves `[B, T + 1, C, …]`.
        state_variance: Smoothed variances, likewise.
        trajectories: Draws of whole trajectories, leaves `[M, B, T + 1, C, …]` of the model's own types. Past
            the end of an episode they stand still.
        probabilities: `P(s_t | o_{1:T}, c)` for finite models, `[B, T + 1, C, states]`; exact only.
    """

    method: str
    state_mean: State
    state_variance: State
    trajectories: State
    probabilities: Tensor | None = None

    def __repr__(self) -> str:
        parts = dict(leaves(self.trajectories))
        M, B, T, C = next(iter(parts.values())).shape[:4]
        return f"Smoothing(method='{self.method}', B={B}, T={T - 1}, C={C}, M={M}, states={list(parts)})"

    @staticmethod
    def concatenate(parts: Sequence[Smoothing]) -> Smoothing:
        """All episodes of several batches, smoothed by the same method."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str, axis: int) -> Any:
            return map_state(lambda *x: torch.cat(x, axis), *(getattr(part, name) for part in parts))

        return Smoothing(
            parts[0].method,
            joined("state_mean", 0),
            joined("state_variance", 0),
            joined("trajectories", 1),
            joined("probabilities", 0),
        )


def moments_in_time(moments: Sequence[tuple[State, State]]) -> tuple[State, State]:
    """Means and variances at T + 1 times, leaves `[C, B, …]`, as leaves `[B, T + 1, C, …]`."""
    means, variances = (
        map_state(lambda leaf: leaf.movedim(2, 0), stack_in_time(list(series), 0))
        for series in zip(*moments, strict=True)
    )
    return means, variances


def trajectories_in_time(states: Sequence[State]) -> State:
    """Draws at T + 1 times, leaves `[C, B, M, …]`, as trajectories `[M, B, T + 1, C, …]`.

    Raises:
        DensityError: If a state left the reals.
    """
    for name, leaf in (pair for state in states for pair in leaves(state)):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise DensityError(f"transition: '{name}' is not finite in a smoothed trajectory")
    stacked: State = map_state(lambda *x: torch.stack(x, 2).movedim(3, 0).movedim(1, 3), *states)
    return stacked
