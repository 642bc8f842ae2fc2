"""Clouds as a kernel leaves them: one block of memory, and tensors of it when somebody asks for them."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.inference.cloud import Cloud, Families, Weights
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.signature import Signature

ALIGNMENT = 64


@lru_cache(maxsize=256)
def array_of(kind: Any, length: int) -> Any:
    """The type of C's arrays of so many; ctypes itself forgets those that nobody keeps."""
    return kind * length


@dataclass(frozen=True)
class BlockPart:
    """One tensor in a block: where it begins, and what it is like."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, block: Tensor) -> Tensor:
        """The tensor itself."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return block[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class Layout:
    """Where the parts of a cloud are in a block.

    Args:
        signature: The model's signature.
        shape: `[C, B, N]`.
        dtype: The type of weights.
    """

    def __init__(self, signature: Signature, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        C, B, _ = self.shape = shape
        self.size = 0
        self.state: Any = map_state(
            lambda leaf: self._part((*shape, *leaf.shape), leaf.dtype), signature.state
        )
        self.weights, self.ess = self._part(shape, dtype), self._part((C, B), dtype)
        self.founders, self.noise = self._part(shape, torch.int32), self._part((C, B), dtype)
        self.resampled = self._part((B, C), torch.bool)  # as the kernel writes it
        parts = {"weights": self.weights, "ess": self.ess, "founders": self.founders, "noise": self.noise}
        self._offsets = {
            way: [(f"{name}_{way}", part.offset) for name, part in parts.items()] for way in ("in", "out")
        }
        self._numbers = [
            part.offset + k * part.dtype.itemsize
            for _, part in leaves(self.state)
            for k in range(math.prod(part.shape[3:]))
        ]

    def _part(self, shape: tuple[int, ...], dtype: torch.dtype) -> BlockPart:
        part = BlockPart(self.size, shape, dtype)
        bytes_after = self.size + math.prod(shape) * dtype.itemsize
        self.size = -(-bytes_after // ALIGNMENT) * ALIGNMENT
        return part

    def places(self, block: Tensor, way: str, places: dict[str, int]) -> Any:
        """Note where the parts are, under the kernel's names. What is returned must live as long."""
        base = block.data_ptr()
        for name, offset in self._offsets[way]:
            places[name] = base + offset
        addresses = array_of(ctypes.c_void_p, len(self._numbers))(
            *[base + number for number in self._numbers]
        )
        places[f"state_{way}"] = ctypes.addressof(addresses)
        return addresses


class KernelCloud(Cloud):
    """A cloud in a block of memory, which nobody writes to any more.

    Tensors of its parts share the block's memory. What `dataclasses.replace` makes of it has no block.

    Attributes:
        block: The memory.
        layout: What is where in it.
    """

    block: Tensor
    layout: Layout

    def __getattr__(self, name: str) -> Any:
        """Make the tensors, the first time that one of them is asked for."""
        if name not in ("state", "weights", "families", "resampled") or "block" not in vars(self):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        block, layout = self.block, self.layout
        made = {
            "state": map_state(lambda part: part.within(block), layout.state),
            "weights": Weights(layout.weights.within(block), layout.ess.within(block)),
            "families": Families(layout.founders.within(block), layout.noise.within(block)),
            "resampled": layout.resampled.within(block).T,
        }
        vars(self).update({**made, **vars(self)})
        return vars(self)[name]

    @property
    def shape(self) -> torch.Size:
        """The shape of the particles, `[C, B, N]`."""
        return torch.Size(self.layout.shape) if "layout" in vars(self) else super().shape

    @staticmethod
    def within(block: Tensor, layout: Layout, resampled: Tensor | None = None) -> KernelCloud:
        """The cloud that a kernel has left, or is about to leave, in a block; see `Cloud.resampled`."""
        cloud = object.__new__(KernelCloud)
        vars(cloud).update(block=block, layout=layout)
        if resampled is not None:
            vars(cloud)["resampled"] = resampled
        return cloud
