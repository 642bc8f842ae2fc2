"""What filtering says about the context: posterior, entropy, information."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cpomdp_ppl.arrays import are_probabilities, as_tensor
from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.prior import as_prior, real_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.inference.filtering import Filtering

Unit = Literal["nats", "bits"]


def entropy(probabilities: Tensor | Sequence[float], unit: Unit = "nats") -> Tensor:
    """Shannon entropy of distributions `[…, C]`, `[…]`.

    Examples:
        >>> entropy(torch.tensor([0.5, 0.5]), "bits")
        tensor(1.)
    """
    if unit not in ("nats", "bits"):
        raise invalid("unit", unit, '"nats" or "bits"')
    p = real_tensor("probabilities", probabilities)
    if p.dim() == 0 or not are_probabilities(p.detach().double()):
        raise invalid("probabilities", p.tolist(), "non-negative numbers that sum to 1 over the last axis")
    nats: Tensor = torch.special.entr(p).sum(-1)
    return nats / math.log(2) if unit == "bits" else nats


def information_gain(
    filtering: Filtering,
    contexts: Tensor | Sequence[int] | None = None,
    prior: Tensor | Sequence[float] | None = None,
) -> Tensor:
    """How much each step revealed about the context, in nats, `[B, T]`.

    With the true contexts, `log P(c | h_{t+1}) − log P(c | h_t)` of the true c, whose sum over an episode is
    `log P(c | y) − log P(c)`; it may be negative, and is `-inf` at the step that makes the true context
    impossible, and 0 from there on. Without, the fall of the posterior's entropy.

    Args:
        filtering: What any backend computed.
        contexts: The true contexts `[B]`, if known.
        prior: Prior over contexts, `[C]` or `[B, C]`; the model's if left out.
    """
    log_posterior = filtering.log_posterior(prior)  # [B, T+1, C]
    if contexts is None:
        return -entropy(log_posterior.exp()).diff(dim=1)
    c = _true_contexts(contexts, log_posterior)
    true = log_posterior.gather(2, c[:, None, None].expand(-1, log_posterior.shape[1], 1)).squeeze(2)
    # What is impossible stays so: -inf less -inf is no change.
    return torch.where(true[:, :-1] == -torch.inf, 0.0, true.diff(dim=1))  # [B, T]


@dataclass(frozen=True)
class MutualInformation:
    """An estimate of `I(C; Y)` from both sides, in nats.

    A noisy likelihood makes posteriors sharper than they should be, so `H(C) − mean H(P̂(C|y))` is biased up;
    but `H(C) + mean log P̂(c|y)` of the true context is a lower bound in expectation, whatever P̂ is. It is
    `-inf`, and its error and the gap's are `inf`, if a true context was found impossible.

    Attributes:
        upper: The estimate that is biased up.
        lower: The estimate that is biased down.
        upper_error: Standard error of `upper` over episodes.
        lower_error: Standard error of `lower` over episodes.
        gap_error: Standard error of `upper − lower`, whose terms are paired.
    """

    upper: float
    lower: float
    upper_error: float
    lower_error: float
    gap_error: float

    @property
    def gap(self) -> float:
        """`upper − lower`: with an exact likelihood zero, but for chance."""
        return self.upper - self.lower


def mutual_information(
    filtering: Filtering,
    contexts: Tensor | Sequence[int],
    prior: Tensor | Sequence[float] | None = None,
    *,
    widest: float = 0.05,
) -> MutualInformation:
    """Bracket the information that episodes hold about the context.

    Args:
        filtering: What any backend computed for episodes whose contexts were drawn from the prior (or
            balanced, if that is uniform).
        contexts: Their true contexts, `[B]`.
        prior: Prior over contexts, `[C]` or `[B, C]`; the model's if left out.
        widest: Warn if the bracket is wider than this, in nats, beyond chance.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.inference import ParticleFilter
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> episodes = simulate(model, RandomPolicy(3), 200, contexts="balanced", seed=0)
        >>> filtering = ParticleFilter(1000).run(model, episodes, seed=0)
        >>> bracket = mutual_information(filtering, episodes.contexts)
        >>> 0 < bracket.lower < 0.7
        True
    """
    log_posterior = filtering.log_posterior(prior)  # [B, T+1, C]
    last = log_posterior[:, -1]  # [B, C]
    B, C = last.shape
    require(B > 1, "filtering", f"{B} episode", "at least two, to estimate the standard error")
    p = as_prior(filtering.prior if prior is None else prior, C, B).to(last.device)
    c = _true_contexts(contexts, log_posterior)
    up = entropy(p) - entropy(last.exp())  # [B]
    before = p.log().expand_as(last).gather(1, c[:, None]).squeeze(1)
    possible = bool(torch.isfinite(before).all())
    require(possible, "contexts", c.tolist(), "contexts that the prior holds possible")
    down = last.gather(1, c[:, None]).squeeze(1) - before  # [B]

    def error(terms: Tensor) -> float:
        return float(terms.std() / B**0.5) if bool(torch.isfinite(terms).all()) else math.inf

    means = float(up.mean()), float(down.mean())
    bracket = MutualInformation(*means, error(up), error(down), error(up - down))
    lost = (down == -torch.inf).nonzero()
    if len(lost) or not bracket.gap <= widest + 3 * bracket.gap_error:
        why = f" (the true context of episode {int(lost[0])} came out impossible)" if len(lost) else ""
        warnings.warn(
            f"the mutual information is only known to lie between {bracket.lower:.3f} and "
            f"{bracket.upper:.3f} nats{why}: the likelihoods are noisy or biased; use more particles, "
            "a guide, or another backend",
            stacklevel=2,
        )
    return bracket


def _true_contexts(contexts: Tensor | Sequence[int], log_posterior: Tensor) -> Tensor:
    B, _, C = log_posterior.shape
    c = as_tensor("contexts", contexts).to(log_posterior.device)
    require(c.shape == (B,), "contexts", list(c.shape), f"shape [{B}]")
    inside = not c.is_floating_point() and bool(((c >= 0) & (c < C)).all())
    require(inside, "contexts", c.tolist(), f"indices 0 to {C - 1}")
    return c.long()
