"""What a model's states and observations look like, read off its programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.distributions import constraints

from cpomdp_ppl.actions import some_action
from cpomdp_ppl.dataflow import Dependencies
from cpomdp_ppl.errors import ModelError, UnsupportedModelError
from cpomdp_ppl.handlers import Batched, Recorded
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.state import State, leaves, map_state, structure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributions.constraints import Constraint

    from cpomdp_ppl.model import CPOMDP


ENDED = "ended"
"""The observation site that tells whether the episode has ended."""


def ended_in(observations: Mapping[str, Tensor], observed: Mapping[str, Tensor], axes: int = 1) -> Tensor:
    """Whether the site `ended` says so, bool `[B]`, or `[B, T]` of two axes.

    Programs with plates have more axes on the right.
    """
    ended = (observations[ENDED] != 0) & observed[ENDED]
    return ended.flatten(axes).any(axes) if ended.dim() > axes else ended


MAX_CLASSES = 64
"""Integers from a longer range than this are numbers, not classes."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state: its shape right of the engine's axes, and its dtype."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ObservationSite:
    """One observation site.

    Attributes:
        shape: Shape right of the engine's axes: the program's plates, then the event.
        plates: The part of `shape` that is plates; a mask has this shape.
        dtype: The dtype of the values.
        support: Where values lie, if that does not depend on the distribution's parameters.
    """

    shape: torch.Size
    plates: torch.Size
    dtype: torch.dtype
    support: Constraint | None = None

    @property
    def is_discrete(self) -> bool:
        """Whether values are discrete, so that equal ones occur again."""
        return not self.dtype.is_floating_point or (self.support is not None and self.support.is_discrete)

    @property
    def classes(self) -> tuple[int, int] | None:
        """The lowest integer value and the number of values, if they are few; truth values are two."""
        base: Any = base_constraint(self.support)
        if base is constraints.boolean:
            return 0, 2
        if not isinstance(base, constraints.integer_interval):
            return None
        lowest, n = int(base.lower_bound), int(base.upper_bound - base.lower_bound) + 1
        return (lowest, n) if n <= MAX_CLASSES else None


@dataclass(frozen=True)
class Signature:
    """Shapes and types of everything a model's programs produce.

    Attributes:
        state: A `Leaf` in place of every tensor of the state.
        observations: The observation sites by name.
        model: Name of the class of the model.
        dependencies: How observation sites depend on each other, where that was read off the program.
    """

    state: Any
    observations: Mapping[str, ObservationSite]
    model: str = "CPOMDP"
    dependencies: Dependencies = field(default_factory=Dependencies)

    def broadcast(self, state: State, batch_shape: torch.Size) -> State:
        """Expand a state that a program returned to the full batch; constants lack its axes.

        Raises:
            ModelError: If it is not a state like those that `initial` returns.
        """

        def expand(leaf: Leaf, tensor: Tensor) -> Tensor:
            full = batch_shape + leaf.shape
            return tensor if tensor.shape == full else tensor.expand(full)

        try:
            if isinstance(self.state, Leaf) or structure(state) == structure(self.state):
                return map_state(expand, self.state, state)  # type: ignore[no-any-return]
        except (AttributeError, RuntimeError) as error:  # not a tensor, or of another shape
            raise ModelError(self.model, [self._fault(state, batch_shape)]) from error
        raise ModelError(self.model, [self._fault(state, batch_shape)])

    def _fault(self, state: Any, batch_shape: torch.Size) -> str:
        found = {name: list(getattr(leaf, "shape", [type(leaf).__name__])) for name, leaf in leaves(state)}
        expected = {name: list(batch_shape + leaf.shape) for name, leaf in leaves(self.state)}
        return f"transition: returns a state of shapes {found}, but expected (or to broadcast to) {expected}"


def signature(model: CPOMDP) -> Signature:
    """Run a model's `initial` and `observation` once, with no batch, and note shapes and types.

    Without a batch, all axes are those of the program.
    """
    with isolated(0):
        return read_signature(model)


def read_signature(model: CPOMDP) -> Signature:
    """As `signature`, for callers that have isolated themselves already. Draws random numbers."""
    plate_axes = (1,) * model.max_plate_nesting
    zero = torch.zeros(plate_axes, dtype=torch.long, device=model.device)
    with torch.no_grad(), poutine.block(), model.running(), Batched((), model.max_plate_nesting):
        state = model.initial(zero)
        with Recorded() as program:
            model.percept(state, some_action(model, plate_axes), zero)
    if ENDED in program.sites and not model.can_end:
        fault = f"observation: a site may not be called '{ENDED}'; that is told by the program `ends`"
        raise ModelError(type(model).__name__, [fault])
    sites = {}
    for name, site in program.sites.items():
        if not bool(torch.as_tensor(site["scale"] == 1).all()):
            raise UnsupportedModelError(
                f"observation: the density of site '{name}' is scaled by {site['scale']:g} (`poutine.scale`, "
                "or a plate that takes a sample), and what is scaled is no density of anything to be seen"
            )
        value = site["value"]
        plates = value.shape[: value.dim() - site["fn"].event_dim]
        plates = plates if model.max_plate_nesting else torch.Size()
        sites[name] = ObservationSite(value.shape, plates, value.dtype, fixed_support(site["fn"]))
    return Signature(map_state(_leaf, state), sites, type(model).__name__)


def fixed_support(fn: Any) -> Constraint | None:
    """Where a distribution's values lie, unless that depends on its parameters or on rounding."""
    try:
        support: Any = fn.support
    except NotImplementedError:
        return None
    base = base_constraint(support)
    exact = base.is_discrete or base.event_dim == 0  # a simplex, say, holds only up to rounding
    plain = all(value is None or isinstance(value, int | float | str) for value in vars(base).values())
    return support if exact and plain else None


def base_constraint(support: Any) -> Any:
    """A constraint without its reinterpreted axes."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _leaf(tensor: Tensor) -> Leaf:
    return Leaf(tensor.shape, tensor.dtype)
