"""Whether true contexts look like draws from their posteriors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpomdp_ppl.arrays import are_probabilities, as_tensor, how_many_fit, pieces
from cpomdp_ppl.diagnostics.ranks import LEVEL
from cpomdp_ppl.errors import require, require_count
from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLICATES = 9_999
"""How often contexts are drawn anew from their posteriors, to see what chance does."""

NUMBERS_AT_ONCE = 2**22
"""How many random numbers are held in memory together."""


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predicted probabilities against observed frequencies, over all episodes and contexts, by bin `[bins]`.

    Attributes:
        counts: How many pairs of an episode and a context have a probability in the bin.
        predicted: The mean of those probabilities; NaN in an empty bin.
        observed: In what fraction of the pairs the context was the true one; NaN in an empty bin.
        deviation: Standard deviation of `observed − predicted`, if the posteriors are right.
    """

    counts: Tensor
    predicted: Tensor
    observed: Tensor
    deviation: Tensor


@dataclass(frozen=True, eq=False)
class ContextCalibration:
    """Whether the true contexts may be draws from their posteriors.

    Attributes:
        posterior: `P(c | y)` at the end of every episode, float64 `[B, C]`.
        contexts: The true contexts, int64 `[B]`.
        names: Names of the contexts.
        bins: Number of bins of the reliability diagram.
        p_value: The p-value of the test; see `calibrate_contexts`.
        scores: What the test goes by, in standard deviations, `[1 + C]`: first the confidence (negative where
            posteriors are surer than they are right), then how much more often each context was the true one
            than its posterior said.
    """

    posterior: Tensor
    contexts: Tensor
    names: tuple[str, ...]
    bins: int
    p_value: float
    scores: Tensor

    @property
    def num_episodes(self) -> int:
        """Number of episodes B."""
        return len(self.contexts)

    @cached_property
    def brier(self) -> float:
        """The Brier score `Σ_c (p_c − 1[c is true])²`, on average: 0 is best, 2 is worst."""
        truth = torch.nn.functional.one_hot(self.contexts, len(self.names))
        return float((self.posterior - truth).square().sum(1).mean())

    @cached_property
    def expected_brier(self) -> float:
        """What the Brier score would be on average if the posteriors were right, `Σ_c p_c (1 − p_c)`."""
        return float((self.posterior * (1 - self.posterior)).sum(1).mean())

    @cached_property
    def reliability(self) -> Reliability:
        """Predicted probabilities against observed frequencies."""
        p = self.posterior
        which = (p * self.bins).long().clamp(max=self.bins - 1)  # [B, C]

        def total(values: Tensor) -> Tensor:
            """The sum over episodes and contexts in each bin."""
            return p.new_zeros(self.bins).scatter_add_(0, which.flatten(), values.flatten().to(p.dtype))

        n = total(torch.ones_like(p))
        truth = torch.nn.functional.one_hot(self.contexts, len(self.names))
        # The contexts of an episode exclude each other: the variance is that of its bins' probabilities.
        q = p.new_zeros(len(p), self.bins).scatter_add_(1, which, p)  # [B, bins]
        variance = (q * (1 - q)).sum(0).clamp(min=0)
        return Reliability(n.long(), total(p) / n, total(truth) / n, variance.sqrt() / n)

    @cached_property
    def ece(self) -> float:
        """The expected calibration error, `Σ_bins n / N |predicted − observed|`: above 0 by chance alone."""
        r = self.reliability
        return float((r.counts * (r.predicted - r.observed).abs()).nansum() / r.counts.sum())

    @property
    def hint(self) -> str:
        """What is wrong, in words, if anything is."""
        ruled_out = int((_of_truth(self.posterior, self.contexts) == 0).sum())
        if ruled_out:
            return f"the true context was ruled out in {ruled_out:,} episode{'s' * (ruled_out > 1)}"
        if self.p_value >= LEVEL:
            return "as often true as predicted"
        confidence, counts = self.scores[0], self.scores[1:]
        k = int(counts.abs().argmax())
        if confidence.abs() > 0.99 * counts[k].abs():  # with posteriors all alike, they say the same
            low = bool(confidence < 0)
            return "over-confident: surer than right" if low else "under-confident: righter than sure"
        return f"'{self.names[k]}' is true {'less' if counts[k] < 0 else 'more'} often than predicted"


def calibrate_contexts(
    posterior: Tensor | Sequence[Sequence[float]],
    contexts: Tensor | Sequence[int],
    *,
    names: Sequence[str] | None = None,
    bins: int = 16,
    seed: int | None = 0,
) -> ContextCalibration:
    """Test whether true contexts may be draws from posteriors, wherever those come from.

    The test looks at the sum of Brier scores, less what the posteriors expect it to be, and at how often
    each context was true, likewise. It compares both with the same for contexts drawn from the posteriors,
    which makes it exact for any number of episodes and however sure posteriors are; but no p-value is below
    `1 / (REPLICATES + 1)`, unless a true context has probability 0, which fails it outright.

    Args:
        posterior: One distribution over contexts for each episode, `[B, C]`.
        contexts: The true contexts, `[B]`.
        names: Names of the contexts; their numbers if left out.
        bins: Number of bins of the reliability diagram.
        seed: Seed of the draws; None takes fresh entropy.

    Examples:
        >>> truth = [0, 0, 0, 1] * 50
        >>> fair, sure = calibrate_contexts([[0.75, 0.25]] * 200, truth), calibrate_contexts(
        ...     [[0.95, 0.05]] * 200, truth)
        >>> fair.p_value > 0.5, sure.p_value < 0.001, sure.hint
        (True, True, 'over-confident: surer than right')
    """
    p = as_tensor("posterior", posterior).double()
    proper = p.dim() == 2 and 0 not in p.shape and are_probabilities(p)
    require(proper, "posterior", posterior, "[B, C], non-negative, rows that sum to 1")
    B, C = p.shape
    c = as_tensor("contexts", contexts).to(p.device)
    inside = c.shape == (B,) and not c.is_floating_point() and bool(((c >= 0) & (c < C)).all())
    require(inside, "contexts", sorted(set(c.flatten().tolist())), f"{B} indices from 0 to {C - 1}")
    require(names is None or isinstance(names, list | tuple), "names", names, f"{C} names")
    known = tuple(map(str, range(C))) if names is None else tuple(names)
    require(len(known) == C, "names", known, f"{C} names")
    bins, c = require_count("bins", bins), c.long()
    require(bins > 1, "bins", bins, "at least 2")

    with isolated(seed):
        sums = _scores_of_true_and_drawn(p, c)
    spread = sums[1:].std(0)
    ruled_out = bool((_of_truth(p, c) == 0).any())
    return ContextCalibration(
        p,
        c,
        known,
        bins,
        0.0 if ruled_out else _rarity(sums),
        torch.where(spread > 1e-9, sums[0] / spread, 0.0),
    )


def _scores_of_true_and_drawn(p: Tensor, c: Tensor) -> Tensor:
    """Scores summed over episodes, `[1 + REPLICATES, 1 + C]`: of true contexts `[B]`, then of draws.

    Score 0 is half of what the Brier score falls short of its expectation; the others count how often each
    context comes, less how often it should. All have mean 0 under the posteriors `[B, C]`.
    """
    B, C = p.shape
    brier = p - p.square().sum(1, keepdim=True)  # [B, C]
    counts = torch.eye(C).to(p) - p[:, None]  # [B, C, C]
    scores = torch.cat([brier[..., None], counts], -1)  # [B, C, 1 + C]
    # A score is linear in 1[context ≤ k], so that sums over episodes are products of matrices.
    rises = (scores[:, :-1] - scores[:, 1:]).flatten(0, 1)  # [B (C − 1), 1 + C]

    def summed(at_most: Tensor) -> Tensor:  # [R, B, C − 1] → [R, 1 + C]
        return at_most.flatten(1).to(p.dtype) @ rises + scores[:, -1].sum(0)

    total = p.cumsum(1)
    total = total[:, :-1] / total[:, -1:]  # [B, C − 1]
    drawn = [
        summed(torch.rand(r.stop - r.start, B, 1, dtype=p.dtype, device=p.device) < total)
        for r in pieces(REPLICATES, how_many_fit(NUMBERS_AT_ONCE, B * C))
    ]
    return torch.cat([summed(c[None, :, None] <= torch.arange(C - 1, device=c.device)), *drawn])


def _rarity(sums: Tensor) -> float:
    """How rare the first of exchangeable rows `[n, K]` is by its most extreme column (Westfall and Young)."""
    extreme = sums.abs().round(decimals=9).T.contiguous()  # [K, n]; the order of a sum must not break a tie
    below = torch.searchsorted(extreme.sort(-1).values, extreme)  # how many are less extreme
    most = below.amax(0)  # [n]
    return float((most >= most[0]).double().mean())


def _of_truth(posterior: Tensor, contexts: Tensor) -> Tensor:
    """What posteriors `[B, C]` say of the true contexts, `[B]`."""
    return posterior.gather(1, contexts[:, None]).squeeze(1)
