"""What smoothing returns: the states in hindsight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
