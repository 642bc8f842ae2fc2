"""A model over some of the contexts of another."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from pyro.nn import PyroModule

from cpomdp_ppl.arrays import as_array, as_indices
from cpomdp_ppl.errors import require, require_model
from cpomdp_ppl.experiments.fingerprint import describe_model
from cpomdp_ppl.model import CPOMDP
from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpomdp_ppl.state import State


class Restricted(CPOMDP):
    """A CPOMDP over some of another's contexts, whose programs it runs.

    It has a copy of the other, with the values that its parameters have now.

    Args:
        model: The other CPOMDP.
        kept: Which contexts to keep, by index in the other or by name, in the order they have here.
        prior: Prior over the kept contexts, `[K]`.

    Attributes:
        original: The copy of the other.
        origin: A description of the other, by which saved solutions of different models can be told apart.

    Examples:
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> dull = Restricted(ContextualTiger(), ["left dull", "right dull"], [0.5, 0.5])
        >>> dull.check()
        >>> dull.context_names
        ('left dull', 'right dull')
    """

    original: CPOMDP
    index: Tensor

    def __init__(self, model: CPOMDP, kept: Sequence[int | str] | Tensor, prior: Sequence[float]) -> None:
        super().__init__()
        require_model(model)
        index = _kept(kept, model)
        self.contexts = tuple(model.context_names[c] for c in index.tolist())
        self.actions = model.actions
        self.horizon = model.horizon
        self.states = model.states
        self.initial_observation = model.initial_observation
        self.max_plate_nesting = model.max_plate_nesting
        self.context_prior = list(prior)
        self.origin = json.dumps(describe_model(model), sort_keys=True)
        self.original = _copy(model)
        self.register_buffer("index", index.to(model.device))
        self.require_definition()

    def initial(self, context: Tensor) -> State:
        """The first state, as in the original."""
        return self.original.initial(self.index[context])

    def transition(self, state: Any, action: Tensor, context: Tensor) -> State:
        """The next state, as in the original."""
        return self.original.transition(state, action, self.index[context])

    def observation(self, state: Any, action: Any, context: Tensor) -> None:
        """What is observed, as in the original."""
        self.original.observation(state, action, self.index[context])

    def reward(self, state: Any, action: Tensor, context: Tensor) -> Tensor:
        """The reward, as in the original."""
        return self.original.reward(state, action, self.index[context])

    def context_known_return(self) -> Tensor | None:
        """The best returns in the contexts that were kept."""
        best = self.original.context_known_return()
        return None if best is None else best[self.index.to(best.device)]


def _kept(kept: Any, model: CPOMDP) -> Tensor:
    """Indices of contexts, `[K]`, each there once."""
    expected = f"different indices 0 to {model.num_contexts - 1}, or names out of {list(model.context_names)}"
    array = as_array("kept", kept)
    require(array.ndim == 1 and array.dtype.kind in "iuU", "kept", kept, expected)
    index = as_indices("kept", array, model.context_names)
    inside = bool(((index >= 0) & (index < model.num_contexts)).all())
    require(inside and len(index.unique()) == len(index), "kept", kept, expected)
    return index


def _copy(model: CPOMDP) -> CPOMDP:
    """A copy that may become part of another model, with what Pyro's param store knows about it."""
    with isolated(0), model.running():
        for module in model.modules():
            for name in getattr(module, "_pyro_params", ()):
                getattr(module, name)  # reading a parameter brings it up to date
        copy = deepcopy(model)
    for module in copy.modules():
        if isinstance(module, PyroModule):
            module._pyro_context.used = False  # the copy has not run, whatever the original has
    return copy
