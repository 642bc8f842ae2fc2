"""A particle filter whose log-likelihood has a gradient, by Fisher's identity.

The gradient of `log p(o)` is the mean, given o, of the gradient of `log p(sites, o)` with the sites held
where they are. In a particle filter (Ścibior and Wood, 2021): sites are drawn without a graph, the weights
take `log p(site)` less its own value, which is zero and has the gradient alone, and resampling hands it
down. The estimate of the likelihood stays what it is, unbiased; the score is biased by O(1/N).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from cpomdp_ppl.errors import DensityError, UnsupportedModelError, invalid
from cpomdp_ppl.handlers import base_of, is_deterministic
from cpomdp_ppl.inference.cloud import Cloud, Weights
from cpomdp_ppl.inference.density import log_density
from cpomdp_ppl.inference.observed import Observed, axes
from cpomdp_ppl.inference.particle_filter import SMC
from cpomdp_ppl.inference.proposals import Bootstrap
from cpomdp_ppl.inference.sampling import Drawn, draw

if TYPE_CHECKING:
    from cpomdp_ppl.inference.cloud import Ancestors
    from cpomdp_ppl.inference.particle_filter import ParticleFilter
    from cpomdp_ppl.model import CPOMDP


COMPONENTS = (
    "base_dist",
    "component_distribution",
    "component0",
    "component1",
    "propose",
    "observation_dist",
)
"""Attributes in which distributions keep others that they are made of."""


@dataclass(frozen=True)
class ScoredCloud(Cloud):
    """Weighted particles, and the gradients of the logarithms of their weights by the constants.

    Attributes:
        score: Zeros with that gradient, `[C, B, N]`.
    """

    score: Tensor


class ScoreFilter(SMC):
    """The particle filter's recursion, with a gradient.

    Raises:
        ValueError: If the filter has a guide, or tries out next states.
    """

    def __init__(self, model: CPOMDP, settings: ParticleFilter) -> None:
        if settings.guide is not None:
            raise invalid("likelihood", "a particle filter with a guide", "one without, for a gradient")
        if settings.tries > 1:
            raise invalid("likelihood", f"a particle filter with {settings.tries} tries", "1, for a gradient")
        super().__init__(model, settings)
        self.proposal = self.held = Held(self, self.common)

    def start(self, num_episodes: int) -> ScoredCloud:
        """As `SMC.start`, with scores."""
        shape = torch.Size((self.model.num_contexts, num_episodes, self.N))
        state, score = self.held.initial(shape)
        return ScoredCloud(**vars(self.of_states(self._broadcast(state, shape))), score=score)

    def resample(self, cloud: Cloud, alive: Tensor | None = None) -> tuple[Cloud, Ancestors | None]:
        """As `SMC.resample`; scores are inherited, too."""
        assert isinstance(cloud, ScoredCloud)
        resampled, ancestors = super().resample(cloud, alive)
        assert isinstance(resampled, ScoredCloud)
        if ancestors is not None:
            resampled = replace(resampled, score=ancestors.inherit(cloud.score))
        return resampled, ancestors

    def reweight(self, cloud: Cloud, seen: Observed, log_ratio: Tensor | None) -> tuple[Cloud, Tensor]:
        """As `SMC.reweight`, with scores."""
        assert isinstance(cloud, ScoredCloud)
        log_weights = cloud.weights.values.log() + cloud.score  # [C, B, N]
        if log_ratio is not None:
            log_weights = log_weights + log_ratio
        density = self.log_density(cloud, seen, seen.rows)
        if density is not None and seen.rows is not None:
            where = density.expand(len(log_weights), len(seen.rows), self.N)
            density = torch.zeros_like(log_weights).index_copy(1, seen.rows, where)
        if density is not None:
            log_weights = log_weights + density
        impossible = (log_weights == -torch.inf).all(-1, keepdim=True)  # such a context keeps what it had
        log_weights = torch.where(impossible, cloud.weights.values.log(), log_weights)
        total = log_weights.logsumexp(-1, keepdim=True)
        log_weights = log_weights - total
        weights = log_weights.detach().exp()
        score = torch.where(log_weights == -torch.inf, 0.0, log_weights)
        increment = torch.where(impossible, -torch.inf, total).squeeze(-1)  # [C, B]
        if seen.alive is not None:
            increment = torch.where(seen.alive, increment, 0.0)
        ess = 1.0 / weights.square().sum(-1)
        return replace(cloud, weights=Weights(weights, ess), score=score - score.detach()), increment

    def log_density(self, cloud: Cloud, seen: Observed, rows: Tensor | None) -> Tensor | None:
        """As `SMC.log_density`, of sites whose gradient is right."""
        with _Still():
            return super().log_density(cloud, seen, rows)

    def hidden(self, name: str, fn: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Draw a site that was not seen. Returns the draw and its score."""
        with torch.no_grad():
            value = draw(fn, shape, self.common)
        return value, score_of(name, fn, value)


class Held(Bootstrap):
    """The model's programs as proposals, whose draws are held where they are while constants move."""

    def initial(self, shape: torch.Size, seen: Observed | None = None) -> tuple[Any, Any]:
        """Draw from `initial`; the score of the draws is their log-ratio."""
        with _Fixed(shape, self.common, self.plate_axes) as drawn:
            state = self.model.initial(self.context)
        return state, drawn.score(shape)

    def transition(self, state: Any, shape: torch.Size, seen: Observed) -> tuple[Any, Any]:
        """Draw from `transition`; the score of the draws is their log-ratio."""
        assert seen.action is not None
        with _Fixed(shape, self.common, self.plate_axes) as drawn:
            state = self.model.transition(state, axes(seen.action, self.plate_axes), self.context)
        return state, drawn.score(shape)


class _Fixed(Drawn):
    def _pyro_sample(self, msg: Any) -> None:
        with torch.no_grad():
            super()._pyro_sample(msg)

    def score(self, shape: torch.Size) -> Tensor:
        """The score of everything drawn, `[C, B, N]`."""
        total = torch.zeros(shape, dtype=torch.float64)
        for name, (fn, value) in self.sites.items():
            score = score_of(name, fn, value)
            total = total + (score.flatten(3).sum(-1) if score.dim() > 3 else score)
        return total


def score_of(name: str, fn: Any, value: Tensor) -> Tensor:
    """Zeros with the gradient of `log p(value)`, `[C, B, N, *plates]`, if Fisher's identity holds there."""
    if isinstance(base_of(fn), dist.Delta) or not torch.is_grad_enabled():  # a Delta's value has the graph
        return torch.zeros((), dtype=torch.float64, device=value.device)
    _require_still(name, fn)
    log_p = log_density(fn, value, name)
    if not bool(torch.isfinite(log_p).all()):
        raise DensityError(f"site '{name}' ({type(base_of(fn)).__name__}) drew a value of infinite density")
    return log_p - log_p.detach()


class _Still(Messenger):
    def _pyro_sample(self, msg: Any) -> None:
        if not (site_is_subsample(msg) or is_deterministic(msg)):
            _require_still(msg["name"], msg["fn"])


def _require_still(name: str, fn: Any) -> None:
    """Raise if what is possible at a site depends on constants: the gradient would miss what comes in."""
    if _moves(fn):
        raise UnsupportedModelError(
            f"site '{name}' ({type(base_of(fn)).__name__}): which values are possible depends on constants "
            'to be learned, which the gradient of "smc" does not see; '
            "make it a function of a site that has none"
        )


def _moves(fn: Any) -> bool:
    """Whether the support of a distribution has a graph."""
    if isinstance(fn, dist.Delta):
        return _has_graph(fn.v)
    if isinstance(fn, dist.Empirical):
        return _has_graph(fn._samples)
    if any(_moves(vars(fn)[part]) for part in COMPONENTS if part in vars(fn)):
        return True
    support = getattr_static(type(fn), "support")
    if isinstance(support, constraints.Constraint) and not constraints.is_dependent(support):
        return False
    if support is vars(td.TransformedDistribution)["support"] and not _is_real(fn.base_dist.support):
        return _has_graph(fn.transforms)  # whose codomains know nothing of what goes in
    try:
        return _has_graph(fn.support)
    except NotImplementedError:
        return False


def _is_real(support: Any) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


def _has_graph(thing: Any) -> bool:
    if isinstance(thing, Tensor):
        return thing.requires_grad
    if isinstance(thing, (list, tuple)):
        return any(map(_has_graph, thing))
    return isinstance(thing, (constraints.Constraint, td.Transform)) and _has_graph(
        list(vars(thing).values())
    )
