"""States: a tensor, or a dict of tensors (nested if need be), treated alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Tensor | Mapping[str, Any]
"""A tensor, or a mapping from names to states. `Any` stands for the recursion."""


def map_state(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Apply `function` to every leaf of `state` (and of `others`, which have the same structure).

    None, for a state that is not known, stays None.
    """
    if state is None:
        return None
    if isinstance(state, Mapping):
        return {key: map_state(function, value, *(o[key] for o in others)) for key, value in state.items()}
    return function(state, *others)


def leaves(state: Any, path: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path: `state`; or `position`, `pose.heading` and so on."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{key}" if path is None else f"{path}.{key}")
    else:
        yield "state" if path is None else path, state


def structure(state: Any) -> Any:
    """What two states must have in common to be treated alike: the keys, all the way down."""
    return {key: structure(value) for key, value in state.items()} if isinstance(state, Mapping) else None


def stack_in_time(states: list[Any], time_axis: int) -> Any:
    """Stack states of the same structure along a new time axis.

    The memory is laid out with time first, whatever the axis: to write that is several times faster,
    and so is to read one step of it.
    """
    return map_state(lambda *tensors: torch.stack(tensors).movedim(0, time_axis), *states)
