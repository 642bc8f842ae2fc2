"""States of real numbers as vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Leaf, Signature


class Coordinates:
    """The leaves of a state side by side, as one vector of dimension D.

    Raises:
        UnsupportedModelError: If a leaf is not made of real numbers.
    """

    def __init__(self, model: CPOMDP, signature: Signature) -> None:
        for name, leaf in leaves(signature.state):
            if not leaf.dtype.is_floating_point:
                what = "the state" if name == "state" else f"'{name}' in the state"
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {what} is {leaf.dtype}, but Kalman filters need states of real "
                    "numbers (floating point)"
                )
        self.signature = signature
        found: list[Leaf] = [leaf for _, leaf in leaves(signature.state)]
        self.sizes = [leaf.shape.numel() for leaf in found]
        self.dim = sum(self.sizes)
        self.dtype = torch.get_default_dtype()
        for leaf in found:
            self.dtype = torch.promote_types(self.dtype, leaf.dtype)

    def vector(self, state: Any, batch_shape: torch.Size) -> Tensor:
        """A state that a program returned, as `[*batch_shape, D]`."""
        full = self.signature.broadcast(state, batch_shape)
        parts = [
            leaf.reshape(*batch_shape, size) for (_, leaf), size in zip(leaves(full), self.sizes, strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(self.dtype)

    def state(self, vector: Tensor) -> Any:
        """A vector `[…, D]` as a state, with leaves `[…, *leaf]`."""
        batch = vector.shape[:-1]
        parts = iter(vector.split(self.sizes, -1) if len(self.sizes) > 1 else (vector,))

        def leaf_of(leaf: Leaf) -> Tensor:
            part: Tensor = next(parts)
            return part.reshape(batch + leaf.shape).to(leaf.dtype)

        return map_state(leaf_of, self.signature.state)
