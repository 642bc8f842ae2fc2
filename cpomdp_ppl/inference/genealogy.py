"""Who descends from whom: what resampling does to particles, and what it tells of their number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.inference.weights import Weights


@dataclass(frozen=True)
class Ancestors:
    """The outcome of resampling in some rows: an episode under a context each.

    Attributes:
        rows: Which of the C·B rows, `[R]`.
        index: The ancestor of every particle in them, `[R, N]`.
    """

    rows: Tensor
    index: Tensor

    @cached_property
    def _flat(self) -> Tensor:
        """Ancestors among all C·B·N particles, `[R·N]`."""
        return (self.rows[:, None] * self.index.shape[1] + self.index).view(-1)

    def everywhere(self, shape: torch.Size) -> Tensor:
        """The ancestor of every particle, `[C, B, N]`: its own number where there was no resampling."""
        C, B, N = shape
        index = torch.arange(N, device=self.rows.device).repeat(C * B, 1)
        return index.index_copy_(0, self.rows, self.index).reshape(shape)

    def inherit(self, leaf: Tensor) -> Tensor:
        """Replace every particle of those rows by its ancestor, in a tensor `[C, B, N, …]`."""
        C, B, N, *event = leaf.shape
        inherited = leaf.reshape(C * B * N, *event).index_select(0, self._flat).view(-1, N, *event)
        return leaf.reshape(C * B, N, *event).index_copy(0, self.rows, inherited).view(leaf.shape)


@dataclass(frozen=True)
class Families:
    """Particles that descend from the same one at time 0, the founder of their family.

    Attributes:
        founders: The founder of every particle, `[C, B, N]`.
        noise: The squared changes of the families' shares by resampling, summed, `[C, B]`.
    """

    founders: Tensor
    noise: Tensor

    @staticmethod
    def new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Families:
        """Every particle of `[C, B, N]` the founder of a family."""
        C, B, N = shape
        founders = torch.arange(N, device=device, dtype=torch.int32).repeat(C, B, 1)
        return Families(founders, torch.zeros((C, B), dtype=dtype, device=device))

    def after(self, ancestors: Ancestors, weights: Weights) -> Families:
        """After resampling by those weights."""
        (C, B, N), rows = weights.shape, ancestors.rows
        before = weights.values.view(C * B, N).index_select(0, rows)  # [R, N]
        founders = self.founders.view(C * B, N)
        was = founders.index_select(0, rows).long()
        now = was.gather(1, ancestors.index.long())
        change = torch.zeros_like(before).scatter_add_(1, was, before)  # of the families' shares, [R, N]
        change.scatter_add_(1, now, torch.full_like(before, -1.0 / N))
        return Families(
            founders.index_copy(0, rows, now.to(founders.dtype)).view(C, B, N),
            self.noise.flatten().index_add(0, rows, change.square_().sum(1)).view(C, B),
        )

    def standard_error(self, weights: Weights) -> Tensor:
        """Estimated standard error of the log-likelihood, `[C, B]`; see `Filtering.standard_error`.

        Families are what is independent in a particle filter (Chan and Lai, 2013). This is the jackknife over
        them: how much the log-likelihood changes if one family, with its share S of the weights, is left out,
        which is `log(1 - S)` but for a constant. To take S itself, as is usual, falls short where few
        families hold most of the weight; the jackknife's variance is on average too large rather than too
        small (Efron and Stein, 1981).

        Resampling makes shares more unequal even where all particles weigh the same and the likelihood stays
        as it is. What it added to the squares is taken off, which for the multinomial scheme is to first
        order the correction of Lee and Whiteley (2018). As a sum of N squares it is known to a relative error
        of √(2/N), and below that error nothing is known of the variance either.
        """
        W, N = weights.values.double(), weights.shape[-1]
        shares = torch.zeros_like(W).scatter_add_(2, self.founders.long(), W)  # [C, B, N]
        left_out = (-shares / shares.sum(-1, keepdim=True)).log1p_()
        variance = left_out.var(-1, unbiased=False) * (N - 1)  # NaN if a single family has all the weight
        error = torch.maximum(variance - self.noise, (2 / N) ** 0.5 * self.noise).sqrt()
        return torch.where(error.isnan(), torch.inf, error).to(weights.values.dtype)
