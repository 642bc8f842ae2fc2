"""Results of filtering and smoothing, of a batch of episodes under every context."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.state import leaves, map_state, stack_in_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.state import State

BEHIND = 7.0
"""Nats behind the likeliest context, beyond which a context's own error makes no difference: 1 in 1,000."""


@dataclass(frozen=True, eq=False)
class Filtering:
    """The forward pass of a filter over B episodes of T steps, under each of C contexts.

    Steps past an episode's length change nothing: their increments and rewards are zero, and moments stay
    what they were.

    Attributes:
        increments: `log p(o_{t+1} | h_t, a_t, c)`, float64 `[B, T, C]`; zero where nothing was observed
            (but for SMC with a guide of the user's: the importance weights of the move count there, too), and
            `-inf` where context c cannot have produced what was.
        initial_increment: The same for the observation before the first action, `[B, C]`; zero for models
            without one.
        expected_reward: `E[r_c(s_t, a_t) | o_{1:t}, a_{0:t-1}, c]`, the belief reward, `[B, T, C]`.
        prior: The model's prior over contexts, `[C]`.
        state_mean: Filtered means, leaves `[B, T + 1, C, …]`; None if not asked for.
        state_variance: Filtered variances, likewise.
        ess: Effective sample size after the reweighting of step t, `[B, T, C]`; SMC only.
        resampled: Whether the particles were resampled before step t moved them, bool `[B, T, C]`; SMC only.
            That was decided by what the step before left, so `resampled[:, t]` goes with `ess[:, t - 1]`.
        standard_error: Estimated standard error of `log_likelihood` over seeds, `[B, C]`; SMC only. Up to
            about 0.5 it can be trusted; a larger one says that there are too few particles, and is of the
            right order only. It is `inf` where it cannot be told at all, as every particle descends from the
            same one at time 0. No run knows of what none of its particles came near: where the true error is
            above 1, some report half of it or less, and only several seeds show it. It has no meaning for a
            context whose log-likelihood is `-inf`.
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

    def posterior_error(self, prior: Tensor | None = None) -> Tensor:
        """Standard error of the last posterior, of whichever context has the largest, `[B]`.

        How far a probability moves, as a root mean square, if its log-odds move by the standard error of the
        log-likelihood times a standard normal number. Contexts that are far behind stay there: few particles
        of theirs count, so that their own errors are large, and say little. It is zero for exact backends.
        """
        p = self.posterior(prior)[:, -1]  # [B, C]
        if self.standard_error is None:
            return torch.zeros_like(p[:, 0])
        behind = p < p.amax(1, keepdim=True) * math.exp(-BEHIND)
        error = torch.where(behind, 0.0, self.standard_error.to(p)).clamp(max=2 * BEHIND)
        noise = torch.special.ndtri((torch.arange(32).to(p) + 0.5) / 32)
        moved = (p.logit(1e-12)[..., None] + error[..., None] * noise).sigmoid()  # [B, C, 32]
        spread: Tensor = (moved - p[..., None]).square().mean(-1).sqrt()  # [B, C]
        return spread.amax(1)

    def __repr__(self) -> str:
        B, T, C = self.increments.shape
        evidence = (self.prior.to(self.log_likelihood).log() + self.log_likelihood).logsumexp(-1).mean()
        shown = [f"B={B}, T={T}, C={C}, mean log p(o)={float(evidence):.4g}"]
        if self.ess is not None:
            shown.append(f"smallest ESS={float(self.ess.min()):.3g}")
        if self.standard_error is not None:
            shown.append(f"largest standard error={float(self.standard_error.max()):.2g}")
        known = [name for name in ("state_mean", "state_variance") if getattr(self, name) is not None]
        return f"Filtering({', '.join(shown)}, known={known}, device='{self.increments.device}')"

    @property
    def log_likelihood(self) -> Tensor:
        """`log p(o | a, c)`, float64 `[B, C]`."""
        return self.initial_increment + self.increments.sum(1)

    def lost(self, prior: Tensor | Sequence[float] | None = None) -> Tensor:
        """Which episodes no context can have produced that the prior holds possible, bool `[B]`."""
        B, _, C = self.increments.shape
        p = as_prior(self.prior if prior is None else prior, C, B).to(self.increments.device)
        return (p.log() + self.log_likelihood).amax(-1) == -torch.inf

    def log_posterior(self, prior: Tensor | Sequence[float] | None = None) -> Tensor:
        """`log P(c | o_{1:t})` for t = 0 … T, float64 `[B, T + 1, C]`.

        Args:
            prior: Prior over contexts, `[C]` or `[B, C]`; the model's if left out.

        Raises:
            ValueError: If the prior is none.
            DegenerateWeightsError: If the prior excludes every context that can have produced an episode.
        """
        B, _, C = self.increments.shape
        p = as_prior(self.prior if prior is None else prior, C, B).to(self.increments.device)
        first = p.log().expand(B, C) + self.initial_increment  # [B, C]
        return log_normalised(torch.cat([first[:, None], self.increments], 1).cumsum(1))  # [B, T+1, C]

    def posterior(self, prior: Tensor | Sequence[float] | None = None) -> Tensor:
        """`P(c | o_{1:t})` for t = 0 … T, float64 `[B, T + 1, C]`."""
        return self.log_posterior(prior).exp()

    def with_rows(self, rows: Tensor, other: Filtering) -> Filtering:
        """The same, with the episodes `rows` as another pass over those alone has them."""

        def joined(name: str) -> Any:
            if name == "prior":
                return self.prior
            return map_state(
                lambda mine, theirs: mine.index_copy(0, rows, theirs.to(mine.dtype)),
                getattr(self, name),
                getattr(other, name),
            )

        return Filtering(**{field.name: joined(field.name) for field in fields(Filtering)})

    @staticmethod
    def concatenate(parts: Sequence[Filtering]) -> Filtering:
        """All episodes of several batches under the same model."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return values[0] if name == "prior" else map_state(lambda *x: torch.cat(x), *values)

        return Filtering(**{field.name: joined(field.name) for field in fields(Filtering)})


def log_normalised(joint: Tensor, time: int = 0) -> Tensor:
    """`log P(c | o_{1:t})` out of `log P(c, o_{1:t})`, `[B, T, C]`; raises if no context is left."""
    nothing = joint.amax(-1) == -torch.inf  # [B, T]
    if bool(nothing.any()):
        b, t = nothing.nonzero()[0].tolist()
        raise DegenerateWeightsError(
            f"time {time + t} of episode {b}: the prior excludes every context that can have produced what "
            "was seen; either it is too sure, or the data are not the model's"
        )
    return joint.log_softmax(-1)


@dataclass(frozen=True, eq=False)
class Smoothing:
    """The states of B episodes given all that was observed, under each of C contexts.

    Attributes:
        method: How it was done: `"backward sampling"`, `"genealogy"`, `"forward-backward"` or `"RTS"`.
        state_mean: Smoothed means, leaves `[B, T + 1, C, …]`.
        state_variance: Smoothed variances, likewise.
        trajectories: Draws of whole trajectories, leaves `[M, B, T + 1, C, …]` of the model's own types. Past
            the end of an episode they stand still.
        probabilities: `P(s_t | o_{1:T}, c)` for finite models, `[B, T + 1, C, states]`; exact only.
    """

    method: str
    state_mean: State
    state_variance: State
    trajectories: State
    probabilities: Tensor | None = None

    def __repr__(self) -> str:
        parts = dict(leaves(self.trajectories))
        M, B, T, C = next(iter(parts.values())).shape[:4]
        return f"Smoothing(method='{self.method}', B={B}, T={T - 1}, C={C}, M={M}, states={list(parts)})"

    @staticmethod
    def concatenate(parts: Sequence[Smoothing]) -> Smoothing:
        """All episodes of several batches, smoothed by the same method."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str, axis: int) -> Any:
            return map_state(lambda *x: torch.cat(x, axis), *(getattr(part, name) for part in parts))

        return Smoothing(
            parts[0].method,
            joined("state_mean", 0),
            joined("state_variance", 0),
            joined("trajectories", 1),
            joined("probabilities", 0),
        )


def moments_in_time(moments: Sequence[tuple[State, State]]) -> tuple[State, State]:
    """Means and variances at T + 1 times, leaves `[C, B, …]`, as leaves `[B, T + 1, C, …]`."""
    means, variances = (
        map_state(lambda leaf: leaf.movedim(2, 0), stack_in_time(list(series), 0))
        for series in zip(*moments, strict=True)
    )
    return means, variances


def trajectories_in_time(states: Sequence[State]) -> State:
    """Draws at T + 1 times, leaves `[C, B, M, …]`, as finite trajectories `[M, B, T + 1, C, …]`."""
    for name, leaf in (pair for state in states for pair in leaves(state)):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise DensityError(f"transition: '{name}' is not finite in a smoothed trajectory")
    stacked: State = map_state(lambda *x: torch.stack(x, 2).movedim(3, 0).movedim(1, 3), *states)
    return stacked
