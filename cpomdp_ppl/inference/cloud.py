"""Weighted particles: what a particle filter knows about the state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.inference.sampling import choose
from cpomdp_ppl.rng import inverse_cdf
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from cpomdp_ppl.inference.genealogy import Families
    from cpomdp_ppl.inference.weights import Weights
    from cpomdp_ppl.state import State

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


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
        """Draw J states in each of R episodes, with their contexts.

        Args:
            log_posterior: Log-posterior over contexts in those episodes, `[R, C]`.
            episodes: Which of the B those are, `[R]`.
            num_draws: How many J.

        Returns:
            States, leaves `[R·J, …]`, and contexts `[R·J]`.
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
