"""What a model's states and observations look like, read off its programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.handlers import Batched, Recorded
from cpomdp_ppl.isolation import isolated
from cpomdp_ppl.state import State, map_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.model import CPOMDP


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state: its shape right of the engine's axes, and its dtype."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ObservationSite:
    """One observation site.

    Attributes:
        shape: Shape right of the engine's axes: the program's own plates, then the event.
        plates: The part of `shape` that is plates; a mask has this shape.
        dtype: Of the values.
    """

    shape: torch.Size
    plates: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Signature:
    """Shapes and types of everything a model's programs produce.

    Attributes:
        state: A `Leaf` in place of every tensor of the state.
        observations: The observation sites by name.
    """

    state: Any
    observations: Mapping[str, ObservationSite]

    def broadcast(self, state: State, batch_shape: torch.Size) -> State:
        """Expand a state that a program returned to the full batch; constants lack its axes."""

        def expand(leaf: Leaf, tensor: Tensor) -> Tensor:
            full = batch_shape + leaf.shape
            return tensor if tensor.shape == full else tensor.expand(full)

        return map_state(expand, self.state, state)  # type: ignore[no-any-return]


def signature(model: CPOMDP) -> Signature:
    """Run a model's `initial` and `observation` once, with no batch, and note shapes and types.

    Without a batch there is no doubt which axes are the program's own.

    Example:
        >>> from cpomdp_ppl.models import LightDark
        >>> signature(LightDark()).observations["z"].shape
        torch.Size([])
    """
    with isolated(0):
        return read_signature(model)


def read_signature(model: CPOMDP) -> Signature:
    """As `signature`, for callers that have isolated themselves already. Draws random numbers."""
    own = (1,) * model.max_plate_nesting
    zero = torch.zeros(own, dtype=torch.long, device=model.device)
    with torch.no_grad(), poutine.block(), Batched((), model.max_plate_nesting):
        state = model.initial(zero)
        with Recorded() as program:
            model.observation(state, zero, zero)
    sites = {}
    for name, site in program.sites.items():
        value = site["value"]
        plates = value.shape[: value.dim() - site["fn"].event_dim]
        sites[name] = ObservationSite(
            value.shape, plates if model.max_plate_nesting else plates[:0], value.dtype
        )
    return Signature(map_state(_leaf, state), sites)


def _leaf(tensor: Tensor) -> Leaf:
    return Leaf(tensor.shape, tensor.dtype)
