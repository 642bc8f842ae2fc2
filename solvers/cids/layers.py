"""Small layers along episodes, in the order of memory in which torch takes the least time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def on_features(layer: nn.Module, features: Tensor) -> Tensor:
    """A layer on features `[B, T, H]`, `[B, T, …]`.

    A recurrent network lays them out with time first, and a layer would copy what is not in order.
    """
    output: Tensor = layer(features.transpose(0, 1)).transpose(0, 1)
    return output


def log_probabilities(logits: Tensor) -> Tensor:
    """`log_softmax` over the last axis of logits `[…, K]`; over a first axis it is many times quicker."""
    return logits.movedim(-1, 0).log_softmax(0).movedim(0, -1)
