"""What every likelihood backend returns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.state import State


@dataclass(frozen=True, eq=False)
class Filtering:
    """The forward pass of a filter over B episodes of T steps, under each of C contexts.

    Steps past an episode's length change nothing: their increments and rewards are zero, and moments stay
    what they were.

    Attributes:
        increments: `log p(o_{t+1} | h_t, a_t, c)`, float64 `[B, T, C]`; zero where nothing was observed, and
            `-inf` where context c cannot have produced what was.
        initial_increment: The same for the observation before the first action, `[B, C]`; zero for models
            without one.
        expected_reward: `E[r_c(s_t, a_t) | o_{1:t}, a_{0:t-1}, c]`, the belief reward, `[B, T, C]`.
        prior: The model's prior over contexts, `[C]`.
        state_mean: Filtered means, leaves `[B, T + 1, C, …]`; None if not asked for.
        state_variance: Filtered variances, likewise.
        ess: Effective sample size before each resampling decision, `[B, T, C]`; SMC only.
        resampled: Whether the particles were resampled before the step, bool `[B, T, C]`; SMC only.
        standard_error: Estimated standard error of `log_likelihood`, `[B, C]`; SMC only.
    """

    increments: Tensor
    initial_increment: Tensor
    expected_reward: Tensor
    prior: Tensor
    state_mean: State | None = None
    state_variance: State | None = None
    ess: Tensor | None = None
    resampled: Tensor | None = None
    standard_error: Tensor | None = None

    @property
    def log_likelihood(self) -> Tensor:
        """`log p(o | a, c)`, float64 `[B, C]`."""
        return self.initial_increment + self.increments.sum(1)

    def log_posterior(self, prior: Tensor | Sequence[float] | None = None) -> Tensor:
        """`log P(c | o_{1:t})` for t = 0 … T, float64 `[B, T + 1, C]`.

        Args:
            prior: Over contexts, `[C]` or `[B, C]`; the model's if left out.
        """
        p = torch.as_tensor(self.prior if prior is None else prior, device=self.increments.device)
        first = p.double().log().expand(len(self.increments), -1) + self.initial_increment  # [B, C]
        joint = torch.cat([first[:, None], self.increments], 1).cumsum(1)  # [B, T+1, C]
        return joint.log_softmax(-1)

    def posterior(self, prior: Tensor | Sequence[float] | None = None) -> Tensor:
        """`P(c | o_{1:t})` for t = 0 … T, float64 `[B, T + 1, C]`."""
        return self.log_posterior(prior).exp()

    @staticmethod
    def concatenate(parts: Sequence[Filtering]) -> Filtering:
        """All episodes of several batches under the same model."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return values[0] if name == "prior" else map_state(lambda *x: torch.cat(x), *values)

        return Filtering(**{field.name: joined(field.name) for field in fields(Filtering)})
