"""What callers pass as one step of their episodes (numbers, names, arrays), as tensors that are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.actions import as_actions, require_actions, some_action
from cpomdp_ppl.arrays import (
    as_tensor,
    as_type,
    filled,
    on_the_right,
    require_finite,
    without_unit_axes,
)
from cpomdp_ppl.errors import require
from cpomdp_ppl.inference.observed import Observed

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import ObservationSite, Signature

INTEGERS = frozenset({int, np.int64, np.int32})
NUMBERS = INTEGERS | {bool, float, np.float64, np.float32}
"""Types of numbers of which it is plain what tensors they become."""

LARGEST = {torch.float32: torch.finfo(torch.float32).max, torch.float64: torch.finfo(torch.float64).max}
EXACT = 2**53
"""Integers up to this one are real numbers without rounding."""

CPU = torch.device("cpu")


class StepArguments:
    """Reads what a caller passes as one step of B episodes.

    Usual arguments for a single episode take a short way, on which nothing is ever wrong: all that is not
    plain goes the long way, which serves it, or says what is wrong with it.

    Args:
        model: The model.
        signature: Its signature.
        num_episodes: Number of episodes B.
    """

    def __init__(self, model: CPOMDP, signature: Signature, num_episodes: int) -> None:
        self.model = model
        self.num_episodes = num_episodes
        self._sites = signature.observations
        self._short = num_episodes == 1 and model.device == CPU

    def read(self, time: int, action: Any, observations: Any, observed: Any) -> Observed:
        """One step; see `OnlineFilter.observe`.

        Raises:
            ValueError: If this cannot be a step of the model.
        """
        found = self._plain(time, action, observations, observed) if self._short else None
        return self._any(time, action, observations, observed) if found is None else found

    def actions(self, action: Any) -> Tensor:
        """An action for all episodes, or one for each, as indices `[B]` or real vectors `[B, D]`.

        Raises:
            ValueError: If these are no actions of the model.
        """
        B, own = self.num_episodes, some_action(self.model).shape
        a = as_actions("action", action, self.model)
        expected = f"an index, a name, or either for each: [{B}]" if not own else f"shape {[B, *own]}"
        require(a.shape in (own, (B, *own)), "action", action, expected)
        require_actions("action", a, self.model)
        return a.expand(B, *own)

    # ------------------------------------------------------------------------------------------ the long way

    def _any(self, time: int, action: Any, observations: Any, observed: Any) -> Observed:
        _require_sites("observations", observations, self._sites)
        if observed is not None:
            _require_sites("observed", observed, self._sites)
        values, flags = {}, {}
        for name, spec in self._sites.items():
            given = name in observations if observed is None else observed.get(name, False)
            flag = self._flags(name, spec, given)
            if name in observations:
                value = self._values(name, spec, observations[name], flag)
            else:
                require(not bool(flag.any()), f"observed['{name}']", True, "False: it is not in observations")
                value = torch.zeros(self.num_episodes, *spec.shape, dtype=spec.dtype, device=flag.device)
            values[name], flags[name] = value, flag
        actions = None if action is None else self.actions(action)
        return Observed.at(time, actions, values, flags)

    def _flags(self, name: str, spec: ObservationSite, given: Any) -> Tensor:
        """Which values at a site count, bool `[B, *plates]`."""
        shape = (self.num_episodes, *spec.plates)
        what = f"observed['{name}']"
        flags = as_tensor(what, given).to(self.model.device)
        require(flags.dtype == torch.bool, what, given, "booleans")
        if flags.dim() == 0:
            return flags.expand(shape)
        if self.num_episodes == 1 and flags.shape == spec.plates:
            flags = flags[None]
        require(flags.shape in (shape, shape[:1]), what, list(flags.shape), f"shape {list(shape)}")
        return on_the_right(flags, flags.new_empty(shape)).expand(shape)

    def _values(self, name: str, spec: ObservationSite, given: Any, flags: Tensor) -> Tensor:
        """What was seen at a site, `[B, …]`, zero where that does not count."""
        B, what = self.num_episodes, f"observations['{name}']"
        value = as_tensor(what, given).to(self.model.device)
        axes = value.shape if B == 1 else value.shape[1:]  # a single episode may lack its axis
        fits = without_unit_axes(axes) == without_unit_axes(spec.shape) and (
            B == 1 or value.shape[:1] == (B,)
        )
        require(fits, what, list(value.shape), f"shape {[B, *spec.shape]}")
        value = value.reshape(B, *spec.shape)
        require_finite(what, value, flags)
        return as_type(what, filled(value, flags), spec.dtype, flags)

    # ----------------------------------------------------------------------------------------- the short way

    def _plain(self, time: int, action: Any, observations: Any, observed: Any) -> Observed | None:
        """What `_any` comes to; None if the arguments are not plain."""
        sites = self._sites
        if type(observations) is not dict or not observations.keys() <= sites.keys():
            return None
        if observed is not None and not (type(observed) is dict and observed.keys() <= sites.keys()):
            return None
        number = None
        if action is not None:
            number = _plain_action(action, self.model)
            if number is None:
                return None
        values, flags, seen = {}, {}, []
        for name, spec in sites.items():
            there = name in observations
            flag = there if observed is None else _plain_flag(observed.get(name, False), spec)
            if flag is None or (flag and not there):
                return None
            if there:
                value = _plain_value(observations[name], spec, flag)
                if value is None:
                    return None
            else:
                value = torch.zeros((1, *spec.shape), dtype=spec.dtype, device=CPU)
            seen.append(flag)
            values[name], flags[name] = value, torch.full((1, *spec.plates), flag, device=CPU)
        rows = None if any(seen) else torch.arange(0, device=CPU)
        actions = None if number is None else torch.full((1,), number, device=CPU)
        return Observed(time, actions, values, flags, rows, complete=all(seen) or not any(seen))


def _require_sites(argument: str, given: Any, sites: Mapping[str, ObservationSite]) -> None:
    require(isinstance(given, Mapping), argument, given, f"a mapping from sites out of {sorted(sites)}")
    unknown = sorted(map(str, set(given) - set(sites)))
    require(not unknown, argument, unknown, f"sites out of {sorted(sites)}")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()


def _plain_action(given: Any, model: CPOMDP) -> int | None:
    kind = type(given)
    if model.box is not None:
        return None
    if kind is str:
        names = model.action_names
        return names.index(given) if names.count(given) == 1 else None
    if kind is Tensor:
        if given.dtype is not torch.int64 or given.shape not in ((1,), ()) or not _is_plain(given):
            return None
    elif kind not in INTEGERS:
        return None
    number = int(given)
    return number if 0 <= number < model.num_actions else None


def _plain_flag(given: Any, spec: ObservationSite) -> bool | None:
    if given is True or given is False:
        return bool(given)
    if type(given) is Tensor and given.dtype is torch.bool and not spec.plates and _is_plain(given):
        return bool(given) if given.shape in ((1,), ()) else None
    return None


def _plain_value(given: Any, spec: ObservationSite, flag: bool) -> Tensor | None:
    """What was seen at a site, `[1, …]`, zero if that does not count."""
    dtype, shape = spec.dtype, (1, *spec.shape)
    if type(given) is not Tensor:
        return _plain_number(given, spec, flag)
    if given.dtype is not dtype or given.shape not in (shape, spec.shape) or not _is_plain(given):
        return None
    if not flag:
        return torch.zeros(shape, dtype=dtype, device=CPU)
    if given.numel() == 1 and dtype in LARGEST:
        return _plain_number(given.item(), spec, flag)
    if dtype.is_floating_point and not math.isfinite(given.sum().item()):
        return None
    value = (given.detach() if given.requires_grad else given).clone()
    return value if value.dim() == len(shape) else value.reshape(shape)


def _plain_number(given: Any, spec: ObservationSite, flag: bool) -> Tensor | None:
    kind, dtype, shape = type(given), spec.dtype, (1, *spec.shape)
    if kind not in NUMBERS or spec.shape.numel() != 1:
        return None
    whole = kind is bool or kind in INTEGERS
    if whole and not -EXACT <= given <= EXACT:
        return None
    if not flag:
        return torch.zeros(shape, dtype=dtype, device=CPU)
    if dtype in LARGEST:
        number = float(given)
        return torch.full(shape, number, dtype=dtype, device=CPU) if abs(number) <= LARGEST[dtype] else None
    return torch.full(shape, int(given), device=CPU) if whole and dtype is torch.int64 else None
