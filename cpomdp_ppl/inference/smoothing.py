"""What smoothing returns: the states in hindsight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.state import map_state

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
        trajectories: Draws of whole trajectories, leaves `[M, B, T + 1, C, …]`; SMC only.
        probabilities: `P(s_t | o_{1:T}, c)` for finite models, `[B, T + 1, C, states]`; exact only.
    """

    method: str
    state_mean: State
    state_variance: State
    trajectories: State | None = None
    probabilities: Tensor | None = None

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
