"""What an agent may believe about the context before an episode: one prior, or many to be ready for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from cpomdp_ppl.errors import invalid, require
from cpomdp_ppl.prior import as_prior, one_prior

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP

EXCLUDED = 1e-3
"""A context with a smaller prior may as well be impossible."""

PriorSampler: TypeAlias = Callable[[int], Tensor]
"""From a number of episodes B to a prior for each, `[B, C]`."""

PriorLike: TypeAlias = "Sequence[float] | Tensor | str | PriorSampler | None"
"""A prior `[C]`, `"dirichlet"`, a sampler of priors, or None for the model's own."""


@dataclass(frozen=True)
class OnePrior:
    """The same prior for every episode."""

    prior: tuple[float, ...]  # probabilities of the C contexts

    def __call__(self, num_episodes: int) -> Tensor:
        """The prior, `[B, C]`."""
        return torch.tensor(self.prior, dtype=torch.float64).expand(num_episodes, -1)


@dataclass(frozen=True)
class DirichletPriors:
    """Priors from all over the simplex, and often the one to begin with.

    With a concentration below 1 most of them are close to a corner, as posteriors are after an informative
    episode.

    Args:
        own: The prior to begin with, C numbers; contexts that it excludes are excluded from all.
        concentration: Concentration of the Dirichlet distribution.
        share: Which share of the priors are the one to begin with.

    Examples:
        >>> DirichletPriors((0.5, 0.5))(4).shape
        torch.Size([4, 2])
    """

    own: tuple[float, ...]
    concentration: float = 0.5
    share: float = 0.3

    def __post_init__(self) -> None:
        require(self.concentration > 0, "concentration", self.concentration, "a positive number")
        require(0 <= self.share <= 1, "share", self.share, "between 0 and 1")

    def __call__(self, num_episodes: int) -> Tensor:
        """Draw priors, `[B, C]`."""
        own = torch.tensor(self.own, dtype=torch.float64)
        # Gamma variables of a small shape may all be 0 in double precision: not their logarithms.
        shape = torch.full_like(own, self.concentration + 1).expand(num_episodes, -1)
        u = torch.rand(num_episodes, len(own), dtype=torch.float64)
        log_gamma = torch._standard_gamma(shape).log() + u.log() / self.concentration
        drawn = log_gamma.masked_fill(own == 0, -torch.inf).softmax(-1)
        as_own = torch.arange(num_episodes) < round(self.share * num_episodes)
        return torch.where(as_own[:, None], own, drawn)


def as_sampler(model: CPOMDP, prior: PriorLike) -> PriorSampler:
    """A sampler as it is, one of Dirichlet priors by its name, and a prior as one that always gives it."""
    own = tuple(model.prior().detach().double().tolist())
    if prior is None:
        return OnePrior(own)
    if isinstance(prior, str):
        if prior != "dirichlet":
            raise invalid("prior", prior, '"dirichlet", probabilities, or a function that draws priors')
        return DirichletPriors(own)
    if callable(prior):
        return prior
    return OnePrior(tuple(one_prior(prior, model).tolist()))


def log_odds(prior: Tensor, dtype: torch.dtype) -> Tensor:
    """A prior as a network gets it, `[B, C]`: logarithms less their mean, 0 if it is uniform.

    Probabilities below `EXCLUDED` count as that.
    """
    least = min(EXCLUDED, 0.1 / prior.shape[-1])
    log_prior = prior.to(dtype).clamp(min=least).log()
    return log_prior - log_prior.mean(-1, keepdim=True)


def draw_priors(sampler: PriorSampler, num_episodes: int, num_contexts: int) -> Tensor:
    """Draw priors and see that they are such, float64 `[B, C]`."""
    p = as_prior(sampler(num_episodes), num_contexts, num_episodes)
    require(p.dim() == 2, "prior", list(p.shape), f"a sampler of shape [{num_episodes}, {num_contexts}]")
    return p
