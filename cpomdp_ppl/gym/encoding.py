"""What an agent learns in a step, as an element of a Gymnasium space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces

from cpomdp_ppl.errors import require, require_model
from cpomdp_ppl.signature import signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import ObservationSite

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Observation: TypeAlias = Array | dict[str, Any]
"""A vector if `flat`, or arrays by name."""

LARGEST = float(np.finfo(np.float32).max)
"""The bound of values that have none: Gymnasium takes an infinite one for a mistake."""


class SpaceEncoding:
    """What an agent learns in a step, and nothing else, as an element of a Gymnasium space.

    By name, for every observation site its value (zero where it was not seen), and as `<site>_seen` whether
    it was seen; `previous_action`, which is A before the first; and `time`, from 0 at the first step to 1
    at the end. Values are `MultiBinary` where the program says that they are bits, `Discrete`
    (`MultiDiscrete`) and counted from 0 where they are one of a few integers, and a `Box` otherwise. A single
    number has an axis of length 1, unless it is `Discrete`: many a library cannot do with less.

    If `flat`, all of this is one vector: the previous action, one-hot; the time; and for each site the flags
    and the values, one-hot where they are `Discrete`, and zero throughout where nothing was seen.

    Args:
        model: The model whose percepts are encoded.
        flat: Whether to make a single vector of it.

    Attributes:
        space: Where the observation of one episode lies.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> sorted(SpaceEncoding(LineGrid()).space)
        ['previous_action', 'side', 'side_seen', 'time']
        >>> SpaceEncoding(LineGrid(), flat=True).space.shape
        (7,)
    """

    def __init__(self, model: CPOMDP, *, flat: bool = False) -> None:
        require_model(model)
        self.num_actions = model.num_actions
        self.horizon = model.horizon
        self.flat = flat
        self.sites = dict(signature(model).observations)
        self.space: spaces.Space[Any] = self._vector_space() if flat else self._dict_space()

    def encode(self, percept: Percept, time: int) -> Observation:
        """Encode what B agents learned in the step that led to `time`, with B as the first axis."""
        flags = {name: numpy_copy(percept.observed[name]) for name in self.sites}
        values = {name: numpy_copy(percept.observations[name]) for name in self.sites}
        B = len(next(iter(flags.values())))
        action = np.full(B, self.num_actions) if percept.action is None else numpy_copy(percept.action)
        at = np.full((B, 1), time / self.horizon, np.float32)
        if self.flat:
            return self._vector(action, at, flags, values)
        encoded = {"previous_action": action, "time": at}
        for name, site in self.sites.items():
            encoded[name] = _value(site, values[name], flags[name])
            encoded[f"{name}_seen"] = flags[name].reshape(B, *(site.plates or (1,))).astype(np.int8)
        return encoded

    def _dict_space(self) -> spaces.Dict:
        parts: dict[str, spaces.Space[Any]] = {
            "previous_action": spaces.Discrete(self.num_actions + 1),
            "time": spaces.Box(0.0, 1.0, (1,), np.float32),
        }
        for name, site in self.sites.items():
            both = {name: _value_space(site), f"{name}_seen": spaces.MultiBinary(site.plates or (1,))}
            taken = sorted(both.keys() & parts.keys())
            found = f"an observation site that makes {taken}"
            require(not taken, "model", found, "sites of other names, or flat=True")
            parts |= both
        return spaces.Dict(parts)

    def _vector_space(self) -> spaces.Box:
        low, high = [np.zeros(self.num_actions + 2)], [np.ones(self.num_actions + 2)]
        for site in self.sites.values():
            width, bounded = _width(site), site.classes is not None
            low += [np.zeros(site.plates.numel()), np.full(width, 0.0 if bounded else -LARGEST)]
            high += [np.ones(site.plates.numel()), np.full(width, 1.0 if bounded else LARGEST)]
        low_, high_ = (np.concatenate(bounds).astype(np.float32) for bounds in (low, high))
        return spaces.Box(low_, high_, dtype=np.float32)

    def _vector(
        self, action: Array, at: Array, flags: Mapping[str, Array], values: Mapping[str, Array]
    ) -> Array:
        B = len(at)
        parts = [np.eye(self.num_actions + 1, dtype=np.float32)[action], at]
        for name, site in self.sites.items():
            value, seen = _value(site, values[name], flags[name]), flags[name]
            if _is_index(site):
                _, n = site.classes or (0, 0)
                one_hot = np.eye(n, dtype=np.float32)[value]  # [B, …, n]
                value = one_hot * seen.reshape(seen.shape + (1,) * (one_hot.ndim - seen.ndim))
            parts += [seen.reshape(B, -1), value.reshape(B, -1)]
        return np.concatenate(parts, 1, dtype=np.float32)


def _is_index(site: ObservationSite) -> bool:
    """Whether values are one of a few integers; bits are numbers already."""
    return site.classes not in (None, (0, 2))


def _width(site: ObservationSite) -> int:
    _, n = site.classes or (0, 1)
    return site.shape.numel() * (n if _is_index(site) else 1)


def _value_space(site: ObservationSite) -> spaces.Space[Any]:
    classes = site.classes
    if classes is None:
        return spaces.Box(-LARGEST, LARGEST, site.shape or (1,), np.float32)
    if not _is_index(site):
        return spaces.MultiBinary(site.shape or (1,))
    return (
        spaces.MultiDiscrete(np.full(site.shape, classes[1])) if site.shape else spaces.Discrete(classes[1])
    )


def _value(site: ObservationSite, value: Array, seen: Array) -> Array:
    """Values `[B, …]` as elements of the site's space."""
    classes = site.classes
    shape = (len(value), *(site.shape or (1,)))
    if classes is None:  # float64 may lie beyond float32
        return np.clip(value, -LARGEST, LARGEST).astype(np.float32).reshape(shape)
    if not _is_index(site):
        return value.astype(np.int8).reshape(shape)
    from_zero = value.astype(np.int64) - classes[0]
    return np.where(seen.reshape(seen.shape + (1,) * (value.ndim - seen.ndim)), from_zero, 0)


def numpy_copy(tensor: Tensor) -> Array:
    """A copy: what is handed out must not change with a program's tensors, nor they with it."""
    return tensor.detach().cpu().numpy().copy()
