"""Priors over contexts: checked, and turned into the contexts that a batch of episodes plays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.arrays import are_probabilities, as_tensor
from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.rng import inverse_cdf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cpomdp_ppl.model import CPOMDP


def as_prior(prior: Tensor | Sequence[float], num_contexts: int, num_episodes: int) -> Tensor:
    """Check a prior over contexts, `[C]` or `[B, C]`, and return a copy, float64."""
    p, B, C = real_tensor("prior", prior).to(torch.float64, copy=True), num_episodes, num_contexts
    require(p.shape in ((C,), (B, C)), "prior", list(p.shape), f"shape [{C}] or [{B}, {C}]")
    if not are_probabilities(p):
        raise invalid("prior", p.tolist(), "non-negative probabilities that sum to 1")
    return p


def one_prior(prior: Tensor | Sequence[float] | None, model: CPOMDP) -> Tensor:
    """Check a single prior over contexts, the model's if None; a copy that sums to 1, float64 `[C]`."""
    C = model.num_contexts
    p = real_tensor("prior", model.prior().detach() if prior is None else prior)
    require(p.shape == (C,), "prior", list(p.shape), f"shape [{C}]")
    p = as_prior(p, C, 1)
    return p / p.sum()


def stratified(prior: Tensor, num_episodes: int, offset: float = 0.5) -> Tensor:
    """Contexts in proportion to a prior `[C]`, as evenly as whole episodes allow, int64 `[B]`.

    Rare contexts may not be among them: with a random offset in [0, 1) a mean over such episodes is right on
    average, with any other it is not. `weighted_strata` leaves out none. With one prior for each episode,
    `[B, C]`, chance decides which episode gets which part of its distribution.

    Examples:
        >>> stratified(torch.tensor([0.5, 0.25, 0.25]), 4)
        tensor([0, 0, 1, 2])
    """
    levels = (torch.arange(num_episodes, dtype=torch.float64, device=prior.device) + offset) / num_episodes
    if prior.dim() == 2 and bool((prior == prior[:1]).all()):
        prior = prior[0]
    if prior.dim() == 2:
        levels = levels[torch.randperm(num_episodes, device=prior.device)][:, None]
    return inverse_cdf(prior.double(), levels).reshape(num_episodes)


def weighted_strata(
    prior: Tensor, num_episodes: int, seed: int | np.random.SeedSequence | None = 0
) -> tuple[Tensor, Tensor]:
    """Contexts to play, including every possible one, and the weight of each episode.

    Every possible context gets two episodes, or one if there are not enough for that, and the rest goes in
    proportion to the prior. An episode has the weight `P(c) / n_c` in means over episodes: these are then
    right on average, as `Σ_c P(c)` times the mean of context c is. If there are fewer episodes than possible
    contexts, contexts are drawn from the prior, and all weights are equal.

    Returns:
        Contexts in ascending order, int64 `[B]`, and weights that sum to 1, float64 `[B]`.

    Examples:
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
    """How many episodes each context gets, int64 `[C]`; the rarest takes its share first."""
    counts = np.zeros(len(prior), dtype=np.int64)
    possible = [c for c in np.argsort(prior, kind="stable") if prior[c] > 0]
    least = min(2, num_episodes // len(possible))
    for k, c in enumerate(possible):
        share = prior[c] / prior[possible[k:]].sum()
        counts[c] = max(least, round(share * (num_episodes - counts.sum())))
    return counts


def real_tensor(argument: str, values: Tensor | Sequence[float]) -> Tensor:
    """Numbers as a tensor; unlike `as_tensor`, it lets gradients pass."""
    real = isinstance(values, Tensor) and not values.is_complex()
    return values if real else as_tensor(argument, values)  # type: ignore[return-value]
