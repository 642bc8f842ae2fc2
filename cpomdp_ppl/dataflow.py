"""Which observation sites depend on which, read off the data flow of the program."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cpomdp_ppl.actions import probes
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.handlers import (
    Batched,
    Recorded,
    base_of,
    expanded,
    is_deterministic,
    mask_of,
    support_of,
)
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature

INPUT = ""
"""The mark of state, action and context; no site has this name."""

STATES_FOLLOWED, CELLS_FOLLOWED = 64, 2**15
"""Number of states at which a program is followed, and of states, actions and contexts together, at most."""

EXITS = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "__reduce_ex__", "__repr__", "__format__")
"""Ways in which values leave torch without one of its operations."""

COPIES = ("tensor", "as_tensor", "asarray", "new_tensor")
"""Functions by which they come back into it."""

VALUES_TRIED = torch.cat([torch.zeros(1), *(sign * torch.logspace(-3, 6, 64) for sign in (1, -1))])
"""Values at which a hidden site is tried that has infinitely many."""

Marks = frozenset[str]


@dataclass(frozen=True)
class Dependencies:
    """How the sites of an observation program depend on each other directly.

    Attributes:
        parents: By site, those whose values its distribution or its mask is computed from; sites that have
            none are left out.
        mask_parents: Likewise, for the mask alone.
        combinations: How many values those parents that have finitely many can take together.
    """

    parents: Mapping[str, Marks] = field(default_factory=dict)
    mask_parents: Mapping[str, Marks] = field(default_factory=dict)
    combinations: int = 1


def dependencies(model: CPOMDP, signature: Signature) -> Dependencies:
    """Run the observation program once, and follow the value of every site to where it is used.

    To be called inside `inference_scope`. Where the program looks at a value itself (an `if`, an `item()`),
    everything after that counts as computed from it. If it looks at state, action or context, it might branch
    differently the next time, so every site counts as a parent of all later ones. What happens in other
    threads cannot be followed; therefore the program is also run with other values of every hidden site, and
    whatever changes then depends on that site, too.

    Raises:
        UnsupportedModelError: If whether a site is seen depends on a site that is not seen itself.
    """
    if len(signature.observations) < 2:
        return Dependencies()
    plate_axes = (1,) * model.max_plate_nesting
    action = probes(model)
    C, A = model.num_contexts, len(action)
    S = torch.Size((C, A, max(2, min(STATES_FOLLOWED, CELLS_FOLLOWED // (C * A)))))
    context = torch.arange(C, device=model.device).reshape(-1, 1, 1, *plate_axes)
    action = action.reshape(1, -1, 1, *plate_axes, *action.shape[1:])
    found: list[_Followed] = []
    with torch.no_grad(), poutine.block(), model.running():
        with Batched(S, model.max_plate_nesting):
            state = signature.broadcast(model.initial(context), S)
        for a in (action, None) if model.initial_observation else (action,):
            followed = _Followed(torch.Size((*S, *plate_axes)), len(plate_axes))
            given = [map_state(torch.clone, x) for x in (state, a, context)]
            with Exits(followed.flow), followed.flow, followed:
                followed.flow.mark(given, frozenset({INPUT}))
                model.percept(*given)
            _try_other_values(model, given, followed)
            found.append(followed)
    sites = list(signature.observations)
    parents = {name: _union(followed.parents.get(name, ()) for followed in found) for name in sites}
    mask_parents = {name: _union(followed.mask_parents.get(name, ()) for followed in found) for name in sites}
    return Dependencies(
        {name: marks for name, marks in parents.items() if marks},
        {name: marks for name, marks in mask_parents.items() if marks},
        math.prod(found[0].numbers.get(name, 1) for name in _union(parents.values())),
    )


def _union(marks: Iterable[Iterable[str]]) -> Marks:
    return frozenset().union(*marks)


class DataFlow(TorchDispatchMode):
    """Follow marked tensors through everything that is computed from them.

    Marks are kept by storage, so that they follow views and what is written in place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looked_at: Marks = frozenset()  # of values that have left torch: for an `if`, for NumPy
        self.paused = False  # whether operations go unnoticed
        self._marks: dict[int, Marks] = {}  # by address
        self._kept: list[Tensor] = []  # an address must not be used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        marks = frozenset() if self.paused else self.of((args, kwargs))
        if marks:
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            leaves = [value for value in tree_leaves(result) if value is not None]
            if not all(isinstance(value, Tensor) for value in leaves):  # `item`, `equal`
                self.looked_at |= marks
            if _shows_in_shape(func, args):
                self.looked_at |= marks
            self.mark((result, written), marks)
        return result

    def mark(self, values: Any, marks: Marks) -> None:
        """Add marks to all tensors in a structure."""
        for tensor in _tensors(values):
            address = _address(tensor)
            self._marks[address] = self._marks.get(address, frozenset()) | marks
            self._kept.append(tensor)

    def of(self, values: Any) -> Marks:
        """The marks of all tensors in a structure together."""
        return _union(self._marks.get(_address(tensor), ()) for tensor in _tensors(values))


def _shows_in_shape(func: Any, args: Any) -> bool:
    """Whether the shape of an operation's result depends on values: `nonzero`, or an index of booleans."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


class Exits(TorchFunctionMode):
    """Notice values that leave torch without one of its operations."""

    def __init__(self, flow: DataFlow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.flow.paused:
            if func.__name__ in EXITS:
                self.flow.looked_at |= self.flow.of(args)
            elif func.__name__ in COPIES:
                self.flow.mark(result, self.flow.of(args))
        return result


class _Followed(Messenger):
    """Note what every site is computed from, and mark its value with its name.

    The values of a discrete site go through its support, so that the rare ones are there, too.
    """

    def __init__(self, shape: torch.Size, num_plate_axes: int) -> None:
        super().__init__()
        self.shape = shape  # [C, A, D, *plate_axes]
        self.num_plate_axes = num_plate_axes
        self.flow = DataFlow()
        self.parents: dict[str, Marks] = {}
        self.mask_parents: dict[str, Marks] = {}
        self.sites: dict[str, Any] = {}
        self.supports: dict[str, tuple[Tensor, Tensor]] = {}  # values [K, …], and whose turn it is [D]
        self.numbers: dict[str, int] = {}  # of values that a discrete site can take
        self.stride = 1  # how many draws on the next discrete site has its next value

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        name, fn, flow = msg["name"], msg["fn"], self.flow
        flow.paused = True
        value = self._value(name, expanded(fn, torch.broadcast_shapes(self.shape, fn.batch_shape)))
        flow.paused = False
        marks, mask, before = flow.of(fn), mask_of(msg), flow.looked_at
        marks |= flow.of(_log_prob(fn, value))  # it may keep parameters where nobody finds them
        marks |= flow.looked_at
        flow.looked_at = before  # what a distribution looks at concerns nobody else
        self.mask_parents[name] = self._sites(flow.of(mask) | flow.looked_at)
        self.parents[name] = self._sites(marks) | self.mask_parents[name]
        flow.mark(value, frozenset({name}))
        msg["value"] = value
        self.sites[name] = msg

    def _sites(self, marks: Marks) -> Marks:
        if INPUT in self.flow.looked_at:
            marks |= self.parents.keys()
        return marks - {INPUT}

    def _value(self, name: str, fn: Any) -> Tensor:
        base = base_of(fn)
        support = support_of(base)
        if support is None:
            return fn.sample().clone()  # type: ignore[no-any-return]
        self.numbers[name] = len(support) ** math.prod(
            base.batch_shape[len(self.shape) - self.num_plate_axes :]
        )
        D = self.shape[2]
        turn = torch.arange(D, device=support.device) // self.stride % len(support)
        self.stride = self.stride * len(support) % D or 1
        self.supports[name] = support, turn
        return self.spread(support[turn], fn)

    def spread(self, values: Tensor, fn: Any) -> Tensor:
        """One value for each draw, `[D, …]`, in the shape of a site's value."""
        event = values.dim() - 1
        axes = [1] * (self.num_plate_axes + len(fn.event_shape) - event)
        shape = torch.broadcast_shapes(self.shape, fn.batch_shape) + fn.event_shape
        return values.reshape(len(values), *axes, *values.shape[1:]).expand(shape).clone()

    def others(self, name: str) -> Iterator[Tensor]:
        """Values of a site that differ from those it had: all it can take, or some from far and wide."""
        site, D = self.sites[name], self.shape[2]
        value = site["value"]
        if name in self.supports:
            support, turn = self.supports[name]
            tried = int(turn.max()) + 1
            candidates = [support[(turn + 1 + k) % len(support)] for k in range(0, len(support), tried)]
        else:
            yield expanded(site["fn"], value.shape[: value.dim() - site["fn"].event_dim]).sample()
            tried_at = VALUES_TRIED.to(value.device).split(D)
            candidates = [each[torch.arange(D) % len(each)] for each in tried_at]
        for values in candidates:
            yield self.spread(values.to(value.dtype), site["fn"])


def _try_other_values(model: CPOMDP, given: list[Any], followed: _Followed) -> None:
    """Run the program with other values of hidden sites, and add to their children what then changes.

    Raises:
        UnsupportedModelError: If a mask changes: whether its site is seen would then be informative.
    """
    values = {name: site["value"] for name, site in followed.sites.items()}
    gates = _union(followed.mask_parents.values())
    for parent, site in followed.sites.items():
        hidden = ~torch.as_tensor(mask_of(site))
        if not bool(hidden.any()):
            continue
        hidden = hidden.reshape(hidden.shape + (1,) * site["fn"].event_dim)
        for number, other in enumerate(followed.others(parent)):
            if number > 0 and parent not in gates:  # all others matter to masks alone
                break
            changed = {**values, parent: torch.where(hidden, other, values[parent])}
            with warnings.catch_warnings(), suppress(Exception), Recorded() as again:
                warnings.simplefilter("ignore")  # such a value may well be one that the site cannot have
                with poutine.condition(data=changed):
                    model.percept(*given)
            for name, after in again.sites.items():
                before = followed.sites.get(name)
                if before is None or name == parent:
                    continue
                if not _same(torch.as_tensor(mask_of(before)), torch.as_tensor(mask_of(after))):
                    raise UnsupportedModelError(
                        f"observation: whether site '{name}' is seen depends on site '{parent}', which is "
                        f"not seen itself; show '{parent}' wherever '{name}' depends on it"
                    )
                if parent not in followed.parents[name] and not _same(
                    *(_log_prob(each["fn"], values[name]) for each in (before, after))
                ):
                    followed.parents[name] |= {parent}


def _log_prob(fn: Any, value: Tensor) -> Tensor:
    """Log-density of a value; zero where a distribution has none, or none for a batch."""
    with suppress(Exception):
        return base_of(fn).log_prob(value)  # type: ignore[no-any-return]
    return torch.zeros(())


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*torch.broadcast_tensors(one.nan_to_num(), other.nan_to_num()))


def _tensors(values: Any, visited: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors in a structure, also in distributions; transforms may have each other in a circle."""
    visited = set() if visited is None else visited
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value, visited)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value, visited)
    elif isinstance(values, (Distribution, Transform)) and id(values) not in visited:
        visited.add(id(values))
        yield from _tensors(vars(values), visited)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
