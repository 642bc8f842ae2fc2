"""Memory for a series of results in time, taken at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpomdp_ppl.state import map_state


class TimeBuffer:
    """What a recursion says at every time, in memory that is taken at once.

    Small tensors that stay, made one by one between large ones that go, would each break a gap that the next
    large one needs, and the memory of long episodes would grow by a large tensor for every step.

    Args:
        length: At how many times.

    Attributes:
        values: Leaves `[length, C, B, …]`; None before the first is written.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.values: Any = None

    def __setitem__(self, t: int, value: Any) -> None:
        if t == 0:
            self.values = map_state(lambda leaf: leaf.new_empty((self.length, *leaf.shape)), value)
        self.values = map_state(lambda kept, leaf: _written(kept, t, leaf), self.values, value)

    def by_episode(self) -> Any:
        """Leaves `[B, length, C, …]`; None for what the recursion does not know."""
        return map_state(lambda leaf: leaf.movedim(2, 0), self.values)


def _written(kept: Tensor, t: int, leaf: Tensor) -> Tensor:
    """A series with one more of its terms; of a wider type, if the term is, as `torch.stack` has it."""
    shape = kept.shape[1:]
    if leaf.shape != shape:
        raise ValueError(f"a recursion says {list(leaf.shape)} at step {t}, but {list(shape)} at the first")
    kept = kept.to(torch.promote_types(kept.dtype, leaf.dtype))
    kept[t] = leaf
    return kept
