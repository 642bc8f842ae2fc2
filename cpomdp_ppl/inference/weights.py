"""Importance weights of particles, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Weights:
    """Normalised weights of the particles of every row: an episode under a context.

    Attributes:
        values: They add up to 1 over the last axis, `[C, B, N]`.
        ess: Effective sample size `1 / Σ W²`, `[C, B]`.
    """

    values: Tensor
    ess: Tensor

    @staticmethod
    def even(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Weights:
        """All the same, for particles `[C, B, N]`."""
        C, B, N = shape
        return Weights(
            torch.full((C, B, N), 1.0 / N, dtype=dtype, device=device),
            torch.full((C, B), float(N), dtype=dtype, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        """`[C, B, N]`."""
        return self.values.shape

    def times(self, *log_factors: Tensor, episodes: Tensor | None = None) -> tuple[Weights, Tensor]:
        """Multiply by factors, and normalise.

        Args:
            log_factors: Logarithms of the factors, each of which broadcasts to `[C, B', N]`.
            episodes: The episodes that they are of, `[B']` of B, if those are not all.

        Returns:
            The weights, and the log-mean of the product of all factors under the weights as they were,
            float64 `[C, B]`. Where that is minus infinity, and in episodes without factors, weights do not
            change.
        """
        old = self.values if episodes is None else self.values.index_select(1, episodes)
        first, *others = log_factors
        log_weights = old.log() + first
        for factor in others:
            log_weights += factor
        highest = log_weights.amax(-1, keepdim=True)  # [C, B', 1]
        new = log_weights.sub_(highest).exp_()
        total = new.sum(-1, keepdim=True)
        new = (new / total).to(old.dtype)
        log_mean = (highest.double() + total.double().log_()).squeeze(-1)  # [C, B']
        impossible = highest == -torch.inf
        if bool(impossible.any()):
            new = torch.where(impossible, old, new)
            log_mean = torch.where(impossible.squeeze(-1), -torch.inf, log_mean)
        ess = 1.0 / torch.linalg.vector_norm(new, dim=-1).square_()
        if episodes is None:
            return Weights(new, ess), log_mean
        weights = Weights(self.values.index_copy(1, episodes, new), self.ess.index_copy(1, episodes, ess))
        return weights, torch.zeros_like(self.ess, dtype=torch.float64).index_copy_(1, episodes, log_mean)

    def evened(self, rows: Tensor) -> Weights:
        """The same, but all alike in some of the rows, which are numbered through, `[R]` of C·B."""
        C, B, N = self.shape
        return Weights(
            self.values.view(C * B, N).index_fill(0, rows, 1.0 / N).view(C, B, N),
            self.ess.view(C * B).index_fill(0, rows, float(N)).view(C, B),
        )

    def mean(self, values: Tensor) -> Tensor:
        """`Σ_i W_i v_i` of values `[C, B, N, …]`, `[C, B, …]`."""
        values = values.to(self.values.dtype)
        if values.dim() == 3:
            total: Tensor = torch.linalg.vecdot(self.values, values)
            return total
        return torch.einsum("cbn,cbn...->cb...", self.values, values)
