"""Which observation sites depend on which: read off the data flow of the program, not guessed from draws."""

from __future__ import annotations

import math
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

from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.handlers import Batched, Recorded, base_of, is_deterministic, mask_of
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature

INPUT = ""
"""The mark of state, action and context; no site has this name."""

DRAWS = 64
"""At how many states a program is followed."""

EXITS = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")
"""Ways for values out of torch that are no operations of its own."""

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

    To be called inside `inferring`. Where the program looks at a value itself (an `if`, an `item()`), all
    that comes later counts as computed from it; if it looks at state, action or context, it might take
    another way next time, so every site counts as a parent of all later ones.

    Raises:
        UnsupportedModelError: If whether a site is seen depends on a site that is not seen itself.
    """
    if len(signature.observations) < 2:
        return Dependencies()
    own = (1,) * model.max_plate_nesting
    S = torch.Size((model.num_contexts, model.num_actions, DRAWS))
    context = torch.arange(S[0], device=model.device).reshape(-1, 1, 1, *own)
    action = torch.arange(S[1], device=model.device).reshape(1, -1, 1, *own)
    found: list[_Followed] = []
    with torch.no_grad(), poutine.block(), model.running():
        with Batched(S, model.max_plate_nesting):
            state = signature.broadcast(model.initial(context), S)
        for a in (action, None) if model.initial_observation else (action,):
            followed = _Followed(torch.Size((*S, *own)), len(own))
            given = [map_state(torch.clone, x) for x in (state, a, context)]
            with Exits(followed.flow), followed.flow, followed:
                followed.flow.mark(given, frozenset({INPUT}))
                model.observation(*given)
            _require_seen_parents(model, given, followed)
            found.append(followed)
    sites = list(signature.observations)
    parents = {name: _joined(found, "parents", name) for name in sites}
    mask_parents = {name: _joined(found, "mask_parents", name) for name in sites}
    numbers = (found[0].numbers.get(name, 1) for name in frozenset().union(*parents.values()))
    return Dependencies(
        {name: marks for name, marks in parents.items() if marks},
        {name: marks for name, marks in mask_parents.items() if marks},
        math.prod(numbers),
    )


def _joined(found: list[_Followed], which: str, name: str) -> Marks:
    return frozenset().union(*(getattr(followed, which).get(name, ()) for followed in found))


class DataFlow(TorchDispatchMode):
    """Follow marked tensors through everything that is computed from them.

    Marks are kept by storage, so that they follow views and what is written in place.

    Attributes:
        looked_at: Marks of the values that have left torch: for an `if`, for NumPy, as a Python number.
        paused: Whether to let everything pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looked_at: Marks = frozenset()
        self.paused = False
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
            values = tree_leaves(result)
            if not all(isinstance(value, Tensor) for value in values):  # `item`, `equal`
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
        return frozenset().union(*(self._marks.get(_address(tensor), ()) for tensor in _tensors(values)))


def _shows_in_shape(func: Any, args: Any) -> bool:
    """Whether the shape of an operation's result depends on values: `nonzero`, or an index of booleans."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


class Exits(TorchFunctionMode):
    """Notice values that leave torch without an operation of its own."""

    def __init__(self, flow: DataFlow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in EXITS and not self.flow.paused:
            self.flow.looked_at |= self.flow.of(args)
        return func(*args, **(kwargs or {}))


class _Followed(Messenger):
    """Note what every site is computed from, and mark its value with its name.

    The values of a discrete site go through its support, so that the rare ones are there, too.
    """

    def __init__(self, shape: torch.Size, own: int) -> None:
        super().__init__()
        self.shape = shape
        self.own = own
        self.flow = DataFlow()
        self.parents: dict[str, Marks] = {}
        self.mask_parents: dict[str, Marks] = {}
        self.sites: dict[str, Any] = {}
        self.strides: dict[str, int] = {}  # how many draws on a discrete site has its next value
        self.numbers: dict[str, int] = {}  # of values that a discrete site can take
        self.stride = 1

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        name, fn, flow = msg["name"], msg["fn"], self.flow
        flow.paused = True
        self.strides[name] = self.stride
        value = self._value(name, fn.expand(torch.broadcast_shapes(self.shape, fn.batch_shape)))
        flow.paused = False
        marks, mask = flow.of(fn), mask_of(msg)
        with suppress(NotImplementedError):  # a distribution may keep parameters where nobody finds them
            marks |= flow.of(base_of(fn).log_prob(value))
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
        support = _support(base)
        if support is None:
            return fn.sample().clone()  # type: ignore[no-any-return]
        self.numbers[name] = len(support) ** math.prod(base.batch_shape[len(self.shape) - self.own :])
        turn = torch.arange(DRAWS, device=support.device) // self.stride % len(support)
        self.stride = self.stride * len(support) % DRAWS or 1
        values = support[turn].reshape(-1, *[1] * (self.own + len(fn.event_shape)))
        return values.expand(fn.batch_shape + fn.event_shape).clone()


def _support(fn: Any) -> Tensor | None:
    """The values of a distribution of single numbers, `[K]`, if they are finitely many."""
    if not fn.has_enumerate_support or fn.event_shape:
        return None
    try:
        return fn.enumerate_support(expand=False).flatten()  # type: ignore[no-any-return]
    except NotImplementedError:
        return None


def _require_seen_parents(model: CPOMDP, given: list[Any], followed: _Followed) -> None:
    """Raise if whether a site is seen depends on one that is not: then that, too, would tell something."""
    axis = -1 - model.max_plate_nesting
    for name, parents in followed.mask_parents.items():
        for parent in parents:
            site = followed.sites[parent]
            dim = axis - site["fn"].event_dim
            other = site["value"].roll(followed.strides[parent], dim)  # each gets another's value
            values = {known: each["value"] for known, each in followed.sites.items()}
            with poutine.condition(data={**values, parent: other}), Recorded() as again:
                model.observation(*given)
            before, after = (torch.as_tensor(mask_of(run[name])) for run in (followed.sites, again.sites))
            hidden = ~torch.as_tensor(mask_of(site))
            if bool((hidden & (before != after)).any()):
                raise UnsupportedModelError(
                    f"observation: whether site '{name}' is seen depends on site '{parent}', which is not "
                    f"seen itself; show '{parent}' wherever '{name}' depends on it"
                )


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in a structure, also in distributions."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, (Distribution, Transform)):
        yield from _tensors(vars(values))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
