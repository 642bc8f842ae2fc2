"""Beliefs: what a filter knows, as a dataclass of tensors whose first axes are `[C, B]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Belief = TypeVar("Belief")


def map_belief(function: Callable[..., Any], belief: Belief, *others: Any) -> Belief:
    """Apply `function` to every tensor of a belief (and of `others`, which have the same structure).

    A tuple, for what has no axes `[C, B]`, stays as it is.
    """
    if belief is None or isinstance(belief, tuple):
        return belief
    if isinstance(belief, Mapping):
        mapped = {k: map_belief(function, v, *(o[k] for o in others)) for k, v in belief.items()}
        return cast("Belief", mapped)
    if is_dataclass(belief) and not isinstance(belief, type):
        changes = {
            f.name: map_belief(function, getattr(belief, f.name), *(getattr(o, f.name) for o in others))
            for f in fields(belief)
        }
        return cast("Belief", replace(belief, **changes))
    return cast("Belief", function(belief, *others))


def where_alive(alive: Tensor, new: Belief, old: Belief) -> Belief:
    """The new belief for episodes that are still going on (`alive [B]`), the old one for the others."""

    def choose(after: Tensor, before: Tensor) -> Tensor:
        return torch.where(alive.reshape(1, -1, *[1] * (after.dim() - 2)), after, before)

    return map_belief(choose, new, old)
