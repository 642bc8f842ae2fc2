"""What filtering says about the context: posterior, entropy, information."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.arrays import are_probabilities, as_tensor
from cpomdp_ppl.errors import invalid, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.model import CPOMDP

Unit = Literal["nats", "bits"]


def as_prior(prior: Tensor | Sequence[float], num_contexts: int, num_episodes: int) -> Tensor:
    """Check a prior over contexts, `[C]` or `[B, C]`, and return a copy, float64."""
    p, B, C = _real("prior", prior).to(torch.float64, copy=True), num_episodes, num_contexts
    require(p.shape in ((C,), (B, C)), "prior", list(p.shape), f"shape [{C}] or [{B}, {C}]")
    if not are_probabilities(p):
        raise invalid("prior", p.tolist(), "non-negative probabilities that sum to 1")
    return p


def one_prior(prior: Tensor | Sequence[float] | None, model: CPOMDP) -> Tensor:
    """Check a single prior over contexts, the model's if None; a copy that sums to 1, float64 `[C]`.

    Example:
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> one_prior(None, ContextualTiger()).tolist()  # the model's own are in single precision
        [0.3333333333333333, 0.3333333333333333, 0.3333333333333333]
    """
    C = model.num_contexts
    p = _real("prior", model.prior().detach() if prior is None else prior)
    require(p.shape == (C,), "prior", list(p.shape), f"shape [{C}]")
    p = as_prior(p, C, 1)
    return p / p.sum()


def stratified(prior: Tensor, num_episodes: int, offset: float = 0.5) -> Tensor:
    """Contexts in proportion to a prior `[C]`, each as often as it can be, int64 `[B]`.

    Rare contexts may not be among them: with a random offset a mean over such episodes is right on average,
    with any other it is not. `weighted_strata` leaves out none.

    Args:
        prior: Over contexts; or one for each episode, `[B, C]`, in which case chance decides which episode
            gets which part of its distribution.
        num_episodes: How many episodes B.
        offset: In [0, 1): drawn at random, every episode's context is distributed like the prior.

    Example:
        >>> stratified(torch.tensor([0.5, 0.25, 0.25]), 4)
        tensor([0, 0, 1, 2])
    """
    levels = (torch.arange(num_episodes, dtype=torch.float64, device=prior.device) + offset) / num_episodes
    if prior.dim() == 2 and bool((prior == prior[:1]).all()):
        prior = prior[0]
    if prior.dim() == 2:
        levels = levels[torch.randperm(num_episodes, device=prior.device)][:, None]
    total = prior.double().cumsum(-1)
    drawn = torch.searchsorted(total / total[..., -1:], levels, right=True)
    return drawn.clamp(max=prior.shape[-1] - 1).reshape(num_episodes)


def weighted_strata(
    prior: Tensor, num_episodes: int, seed: int | np.random.SeedSequence | None = 0
) -> tuple[Tensor, Tensor]:
    """Contexts to play, of which none that is possible is left out, and what weight each episode then has.

    Every possible context gets two episodes, or one if there are not enough for that, and the rest goes in
    proportion to the prior. An episode has the weight `P(c) / n_c` in means over episodes: these are then
    right on average, as `Σ_c P(c)` times the mean of context c is. If there are fewer episodes than possible
    contexts, contexts are drawn from the prior, and all weights are equal.

    Args:
        prior: Over contexts, `[C]`.
        num_episodes: How many episodes B.
        seed: Of the draws, if there are any.

    Returns:
        Contexts in ascending order, int64 `[B]`, and weights that sum to 1, float64 `[B]`.

    Example:
        >>> weighted_strata(torch.tensor([0.96, 0.0, 0.04]), 6)[0]
        tensor([0, 0, 0, 0, 2, 2])
    """
    p = prior.detach().double().cpu().numpy()
    p = p / p.sum()
    if num_episodes < np.count_nonzero(p):
        contexts = np.sort(np.random.default_rng(seed).choice(len(p), num_episodes, p=p))
        weights = np.full(num_episodes, 1 / num_episodes)
    else:
        counts = _episodes_by_context(p, num_episodes)
        contexts = np.repeat(np.arange(len(p)), counts)
        weights = p[contexts] / counts[contexts]
    return torch.from_numpy(contexts).to(prior.device), torch.from_numpy(weights).to(prior.device)


def _episodes_by_context(prior: NDArray[np.float64], num_episodes: int) -> NDArray[np.int64]:
    """How many episodes each context gets, int64 `[C]`: the rarest first, of what is left its share."""
    counts = np.zeros(len(prior), dtype=np.int64)
    possible = [c for c in np.argsort(prior, kind="stable") if prior[c] > 0]
    least = min(2, num_episodes // len(possible))
    for k, c in enumerate(possible):
        share = prior[c] / prior[possible[k:]].sum()
        counts[c] = max(least, round(share * (num_episodes - counts.sum())))
    return counts


def entropy(probabilities: Tensor | Sequence[float], unit: Unit = "nats") -> Tensor:
    """Shannon entropy of distributions `[…, C]`, `[…]`.

    Example:
        >>> entropy(torch.tensor([0.5, 0.5]), "bits")
        tensor(1.)
    """
    if unit not in ("nats", "bits"):
        raise invalid("unit", unit, '"nats" or "bits"')
    p = _real("probabilities", probabilities)
    if p.dim() == 0 or not are_probabilities(p.detach().double()):
        raise invalid("probabilities", p.tolist(), "non-negative numbers that sum to 1 over the last axis")
    nats: Tensor = torch.special.entr(p).sum(-1)
    return nats / math.log(2) if unit == "bits" else nats


def information_gain(
    filtering: Filtering,
    contexts: Tensor | Sequence[int] | None = None,
    prior: Tensor | Sequence[float] | None = None,
) -> Tensor:
    """What each step told about the context, in nats, `[B, T]`.

    With the true contexts, `log P(c | h_{t+1}) − log P(c | h_t)` of the true c, whose sum over an episode is
    `log P(c | y) − log P(c)`; it may be negative, and is `-inf` at the step that makes the true context
    impossible, and 0 from there on. Without, the fall of the posterior's entropy.

    Args:
        filtering: From any backend.
        contexts: The true contexts `[B]`, if known.
        prior: Over contexts, `[C]` or `[B, C]`; the model's if left out.
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
        filtering: From any backend, of episodes whose contexts were drawn from the prior (or balanced, if
            that is uniform).
        contexts: Their true contexts, `[B]`.
        prior: Over contexts, `[C]` or `[B, C]`; the model's if left out.
        widest: Warn if the bracket is wider than this, in nats, beyond chance.

    Example:
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
    require(B > 1, "filtering", f"{B} episode", "at least two, to tell the standard error")
    p = as_prior(filtering.prior if prior is None else prior, C, B).to(last.device)
    c = _true_contexts(contexts, log_posterior)
    up = entropy(p) - entropy(last.exp())  # [B]
    before = p.log().expand_as(last).gather(1, c[:, None]).squeeze(1)
    require(
        bool(torch.isfinite(before).all()), "contexts", c.tolist(), "contexts that the prior holds possible"
    )
    down = last.gather(1, c[:, None]).squeeze(1) - before  # [B]

    def error(terms: Tensor) -> float:
        return float(terms.std() / B**0.5) if bool(torch.isfinite(terms).all()) else math.inf

    bracket = MutualInformation(
        float(up.mean()), float(down.mean()), error(up), error(down), error(up - down)
    )
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


def _real(argument: str, values: Tensor | Sequence[float]) -> Tensor:
    """Numbers as a tensor; unlike `as_tensor`, it lets gradients pass."""
    real = isinstance(values, Tensor) and not values.is_complex()
    return values if real else as_tensor(argument, values)  # type: ignore[return-value]


def _true_contexts(contexts: Tensor | Sequence[int], log_posterior: Tensor) -> Tensor:
    B, _, C = log_posterior.shape
    c = as_tensor("contexts", contexts).to(log_posterior.device)
    require(c.shape == (B,), "contexts", list(c.shape), f"shape [{B}]")
    inside = not c.is_floating_point() and bool(((c >= 0) & (c < C)).all())
    require(inside, "contexts", c.tolist(), f"indices 0 to {C - 1}")
    return c.long()
