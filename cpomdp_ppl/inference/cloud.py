"""Weighted particles: what a particle filter knows about the state, and who descends from whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.inference.sampling import choose
from cpomdp_ppl.rng import inverse_cdf
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.state import State

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


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
        """Multiply by factors, whose logarithms broadcast to `[C, B', N]`, and normalise.

        `episodes [B']` says which of the B they are of, if not all. With the weights comes the log-mean of
        all factors' product under the weights as they were, float64 `[C, B]`; where that is minus infinity,
        and in episodes without factors, weights do not change.
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


@dataclass(frozen=True)
class Cloud:
    """Weighted particles, for every context and episode.

    Attributes:
        state: Leaves `[C, B, N, …]`.
        weights: Weights of the particles.
        families: Which particle of time 0 each one descends from.
        resampled: Which rows were resampled before the last move, bool `[C, B]`.
    """

    state: Any
    weights: Weights
    families: Families
    resampled: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the particles, `[C, B, N]`."""
        return self.weights.shape

    def moments(self) -> tuple[Any, Any]:
        """Weighted means and variances of the particles, leaves `[C, B, …]`; of booleans, as of 0 and 1."""
        means = map_state(self.weights.mean, self.state)
        return means, map_state(
            lambda leaf, mean: self.weights.mean((as_real(leaf) - mean.unsqueeze(2)) ** 2), self.state, means
        )

    def draw(self, num_draws: int) -> State:
        """States drawn independently, leaves `[C, B, M, …]`."""
        drawn: State = pick(self.state, choose(self.weights.values, num_draws))
        return drawn

    def spread(self, num_states: int) -> State:
        """M states of equal weight, spread evenly, leaves `[C, B, M, …]`; contexts share their luck."""
        (C, B, _), M, device = self.shape, num_states, self.weights.values.device
        levels = torch.arange(M, device=device) + torch.rand(1, B, 1, dtype=torch.float64, device=device)
        index = inverse_cdf(self.weights.values.double(), (levels / M).expand(C, B, M).contiguous())
        rows = torch.arange(C * B, device=device).view(C, B, 1)
        return self._at(rows, index, (C, B, M))

    def draw_jointly(self, log_posterior: Tensor, episodes: Tensor, num_draws: int) -> tuple[State, Tensor]:
        """Draw J states in each of R episodes, leaves `[R·J, …]`, with their contexts, `[R·J]`.

        `log_posterior [R, C]` is over contexts in those of the B episodes that `episodes [R]` says.
        """
        C, B, _ = self.shape
        R, J, device = len(episodes), num_draws, episodes.device
        # Levels of a golden sequence: each is uniform, and the first few are well spread, however few.
        levels = torch.rand(R, 1, dtype=torch.float64, device=device)
        levels = (levels + GOLDEN_RATIO * torch.arange(J, dtype=torch.float64, device=device)) % 1  # [R, J]
        contexts = inverse_cdf(log_posterior.exp(), levels)  # [R, J]
        weights = self.weights.values.index_select(1, episodes)  # [C, R, N]
        levels = torch.rand(R, J, dtype=weights.dtype, device=device).expand(C, R, J)
        index = inverse_cdf(weights, levels.contiguous()).gather(0, contexts[None])[0]  # [R, J]
        rows = contexts * B + episodes[:, None]
        return self._at(rows, index, (R * J,)), contexts.view(-1)

    def _at(self, rows: Tensor, index: Tensor, shape: tuple[int, ...]) -> State:
        """Particles by their row, of C·B, and index there; leaves `[*shape, …]`."""
        flat = (rows * self.shape[-1] + index).view(-1)
        found: State = map_state(
            lambda leaf: leaf.flatten(0, 2).index_select(0, flat).view(*shape, *leaf.shape[3:]), self.state
        )
        return found


def pick(state: Any, index: Tensor) -> Any:
    """The particles with these indices: leaves `[C, B, N, …]`, indices `[C, B, M]`."""

    def at_index(leaf: Tensor) -> Tensor:
        where = index.reshape(*index.shape, *[1] * (leaf.dim() - 3))
        return leaf.gather(2, where.expand(*index.shape, *leaf.shape[3:]))

    return map_state(at_index, state)


def as_real(values: Tensor) -> Tensor:
    """Numbers that have a mean; those that are real already keep their precision."""
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())
