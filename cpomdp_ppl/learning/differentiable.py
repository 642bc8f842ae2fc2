"""Recursions whose likelihood has a gradient by the model's constants.

The recursions of `cpomdp_ppl.inference` run fast without gradients: they cut graphs and write in place. Those
here do not, and take care where a derivative would be 0 · ∞.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function as Differentiable

from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import invalid
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
    UnscentedKalmanFilter,
)
from cpomdp_ppl.inference.cells import Band, BandedTransition, nonnegative
from cpomdp_ppl.inference.discrete import DiscreteRecursion
from cpomdp_ppl.inference.extended import ExtendedRecursion
from cpomdp_ppl.inference.finite import FiniteRecursion
from cpomdp_ppl.inference.gaussian import GaussianSite, Sensed
from cpomdp_ppl.inference.gaussian_belief import GaussianBelief, Transformed
from cpomdp_ppl.inference.grid import GridRecursion
from cpomdp_ppl.inference.kalman import Function, KalmanRecursion
from cpomdp_ppl.inference.unscented import UnscentedRecursion
from cpomdp_ppl.learning.fisher import ScoreFilter
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.model import CPOMDP

TINY_VARIANCE = 1e-30
"""Added to covariances: their roots have no slope at zero, though what is made of them depends on squares."""

GRAPH_NUMBERS = 2**25
"""About how many numbers the graph of a batch of episodes may hold."""


def differentiable(backend: Backend, model: CPOMDP) -> Recursion:
    """A backend's recursion, for a model whose constants have a graph; raises if it has no gradient."""
    if isinstance(backend, ExtendedKalmanFilter):
        return _Extended(model, backend.reward_points)
    if isinstance(backend, UnscentedKalmanFilter):
        return _Unscented(model, backend)
    if isinstance(backend, ObservableOperator):
        return _Finite(model)
    if isinstance(backend, GridFilter):
        return _Grid(model, backend)
    if isinstance(backend, ParticleFilter):
        return ScoreFilter(model, backend)
    raise invalid(
        "likelihood",
        f'"{backend.name}"',
        'a backend that can be differentiated: "ekf", "ukf", "exact", "grid" or "smc"',
    )


def episodes_with_graph(recursion: Recursion, horizon: int) -> int:
    """Number of episodes whose graph may be in memory together."""
    if isinstance(recursion, DiscreteRecursion):
        width = recursion.initial.shape[1]
    elif isinstance(recursion, ScoreFilter):
        numbers = sum(leaf.shape.numel() for _, leaf in leaves(recursion.signature.state))
        seen = sum(site.shape.numel() for site in recursion.signature.observations.values())
        width = recursion.N * (numbers + seen + 1)
    else:
        assert isinstance(recursion, KalmanRecursion)
        n = recursion.coordinates.dim + recursion.transition_noise
        width = (2 * n + 1) * (n + recursion.num_values**2)
    return how_many_fit(GRAPH_NUMBERS, 10 * horizon * recursion.model.num_contexts * width)


class _Floored(Transformed):
    """Moments with covariances that have roots with a slope."""

    def covariance(self, left: Tensor, right: Tensor) -> Tensor:
        return super().covariance(left, right) + TINY_VARIANCE


def _floored(transformed: Transformed) -> Transformed:
    return _Floored(**{field.name: getattr(transformed, field.name) for field in fields(Transformed)})


class _SensedWithGraph(Sensed):
    """Keeps the graph of the noise."""

    def scale_of(self, site: GaussianSite) -> Tensor | None:
        return site.scale


class _Kalman(KalmanRecursion):
    """A Kalman filter in which noise has a graph."""

    sensing = _SensedWithGraph


class _Unscented(_Kalman, UnscentedRecursion):
    def transform(
        self, function: Function, size: int, belief: GaussianBelief, num_noise: int = 0
    ) -> Transformed:
        return _floored(super().transform(function, size, belief, num_noise))


class _Extended(_Kalman, ExtendedRecursion):
    keeps_graph = True

    def transform(
        self, function: Function, size: int, belief: GaussianBelief, num_noise: int = 0
    ) -> Transformed:
        moved = super().transform(function, size, belief, num_noise)
        return _floored(moved) if torch.is_grad_enabled() else moved


class _Discrete(DiscreteRecursion):
    """Bayes' rule for rows in which nothing is possible has no gradient, instead of NaN."""

    def _posterior(self, p: Tensor, seen: Observed) -> tuple[Tensor, Tensor]:
        self._before = p
        posterior, increment = super()._posterior(p, seen)
        impossible = self._impossible
        posterior = torch.where(impossible[..., None], p, posterior)
        return posterior, torch.where(impossible, -torch.inf, increment)

    def log_likelihood(self, seen: Observed) -> Tensor:
        """The log-likelihood; where nothing is possible, zero, and that is noted."""
        log_likelihood = super().log_likelihood(seen)  # type: ignore[safe-super]
        nothing = (log_likelihood == -torch.inf) | (self._before <= 0)
        self._impossible = nothing.all(-1)  # [C, B]
        return torch.where(self._impossible[..., None], 0.0, log_likelihood)


class _Finite(_Discrete, FiniteRecursion):
    pass


class _Grid(_Discrete, GridRecursion):
    """The grid stays where it is while tables and densities on it are differentiated."""

    def __init__(self, model: CPOMDP, settings: GridFilter) -> None:
        with torch.no_grad():
            super().__init__(model, settings)
        self._transitions.clear()
        self.initial = self._initial()

    def _deposit(self, where: Tensor, weights: Tensor) -> Tensor:
        """As the base class, but a hair beside the points, on which shares do not depend on the place."""
        return super()._deposit(where + 3e-9 * self.grid.finest if where.requires_grad else where, weights)

    def _transition(self, a: int) -> BandedTransition:
        """As the base class, but with a graph, if there is one, in which contexts may differ."""
        x = self.grid.points
        with torch.no_grad():
            nodes = self._nodes("transition", x[:: max(1, len(x) // 64)], a)
        where, weights, _ = self._push("transition", x[:1], a, nodes)
        if not (where.requires_grad or weights.requires_grad):
            found = super()._transition(a)
            return _Moving(found.bands, found.identity, found.signed, found.shape)
        blocks = self._blocks(a, nodes, len(where) * len(self.context))
        bands = [Band.of(start, table) for start, table in blocks]
        return _Moving(bands, identity=False, signed=True, shape=self.grid.shape)


class _Moving(BandedTransition):
    """A transition that can be differentiated."""

    def __call__(self, p: Tensor) -> Tensor:
        if self.identity:
            return p
        apply: Any = _Moved.apply
        moved: Tensor = apply(p, self, *[band.weights for band in self.bands])
        return nonnegative(moved, self.shape) if self.signed else moved


class _Moved(Differentiable):
    """`p T` for the banded table T of a transition."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, transition: BandedTransition, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(p, *weights)
        plain = BandedTransition(transition.bands, identity=False, signed=False, shape=transition.shape)
        ctx.transition = plain
        return plain(p)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # [C, R, G]
        p, *weights = ctx.saved_tensors
        by_p = ctx.transition.expect(gradient) if ctx.needs_input_grad[0] else None
        by_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            for k, band in enumerate(ctx.transition.bands):
                rows = p[..., band.start : band.start + band.weights.shape[1]]
                found = rows.mT @ gradient[..., band.low : band.high]  # [C, P, W]
                by_weights[k] = found.sum(0, keepdim=True) if len(band.weights) == 1 else found
        return by_p, None, *by_weights
