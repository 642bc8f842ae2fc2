"""Programs without chance: every sample site takes all its values at once, each with its probability."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.handlers import is_deterministic, support_of
from cpomdp_ppl.inference.density import log_density, unfit, unmasked
from cpomdp_ppl.inference.site_parameters import require_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE_AXES = 3
"""Number of axes that the engine puts before those of a program: `[context, episode, particle]`."""


class Nodes:
    """Points ε and weights that stand for a standard normal variable: the trapezoidal rule up to a `reach`.

    For smooth functions of ε the rule converges faster than any power of the number of points.
    """

    def __init__(self, number: int, reach: float = 6.5) -> None:
        self.epsilon = torch.linspace(-reach, reach, number, dtype=torch.float64)
        density = (-0.5 * self.epsilon**2).exp()
        self.weights = density / density.sum()

    def __len__(self) -> int:
        return len(self.epsilon)


class Enumerated(Messenger):
    """Gives every sample site all its values in parallel, on new axes left of the engine's.

    A site in the program's own plates, or with independent components, is a product: each component has
    an axis of its own. So after the program has run, its result has the axes
    `[last component, …, first component, context, episode, particle, …]`, and so has `weights`.

    Args:
        program: Name of the program, for messages.
        max_plate_nesting: Number of axes on the right that belong to the program's own plates.
        nodes: Points that stand in for the noise of continuous sites; None refuses such sites.

    Attributes:
        weights: Joint probability of the values so far; broadcasts with `[…, context, episode, particle]`.
        axes: Number of axes added so far.
        noise_axes: Those of them, counted from the right, that belong to `nodes`; the others belong to
            discrete values.
    """

    def __init__(self, program: str, max_plate_nesting: int, nodes: Nodes | None = None) -> None:
        super().__init__()
        self.program = program
        self.plate_axes = max_plate_nesting
        self.nodes = nodes
        self.weights = torch.ones((1,) * ENGINE_AXES, dtype=torch.float64)
        self.axes = 0
        self.noise_axes: list[int] = []

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        fn, name = unmasked(msg["fn"]), msg["name"]
        if msg["is_observed"]:
            if isinstance(fn, dist.Delta):
                return
            raise UnsupportedModelError(f"{self.program}: site '{name}' is observed already")
        msg["value"] = fn.v if isinstance(fn, dist.Delta) else self._values(fn, name)
        msg["stop"] = True

    def _values(self, fn: Any, name: str) -> Tensor:
        base = fn
        while isinstance(base, dist.Independent):
            base = base.base_dist
        require_parameters(self.program, name, base)
        why = unfit(base)
        if why is not None:
            raise self._unsupported(fn, name, f"cannot be followed: {why}")
        if base.has_enumerate_support:
            return self._enumerated(fn, base, name)
        if self.nodes is None:
            raise self._unsupported(fn, name, "has no finite support")
        if isinstance(base, dist.Normal):
            return base.loc + base.scale * self._noise(fn)
        if isinstance(base, dist.MultivariateNormal):
            noise = self._noise(fn)[..., None]
            return base.loc + (base.scale_tril @ noise).squeeze(-1)
        # Any other distribution of one real number is a function of a normal one: its quantiles.
        try:
            levels = torch.special.ndtr(self._noise(fn)).clamp(2**-50, 1 - 2**-50)  # 8 standard deviations
            quantiles: Tensor = base.icdf(levels)
        except (NotImplementedError, AttributeError):
            reason = "has neither finitely many values nor an inverse distribution function"
            raise self._unsupported(fn, name, reason) from None
        return quantiles

    def _enumerated(self, fn: Any, base: Any, name: str) -> Tensor:
        support = support_of(base)
        if support is None:
            raise self._unsupported(fn, name, "cannot be enumerated")
        independent = fn.event_dim - base.event_dim
        cells = (*self._plates(fn), *fn.event_shape[:independent])
        value = support[self._grid(torch.arange(len(support), device=support.device), cells)]
        self.axes += math.prod(cells)
        probability = log_density(base, value, name).double().exp()  # […, *cells]
        self._weigh(probability.flatten(-independent).prod(-1) if independent else probability)
        return value

    def _noise(self, fn: Any) -> Tensor:
        """ε for every component of a site."""
        assert self.nodes is not None
        cells = (*self._plates(fn), *fn.event_shape)
        epsilon, weights = self._grid(self.nodes.epsilon, cells), self._grid(self.nodes.weights, cells)
        self.noise_axes += range(self.axes, self.axes + math.prod(cells))
        self.axes += math.prod(cells)
        self._weigh(weights.flatten(-fn.event_dim).prod(-1) if fn.event_dim else weights)
        return epsilon

    def _grid(self, points: Tensor, cells: Sequence[int]) -> Tensor:
        """All combinations of K points for independent cells: `[K, …, K, 1, …, 1, *cells]`."""
        n, depth = math.prod(cells), self.axes + ENGINE_AXES
        combinations = torch.stack(torch.meshgrid(*[points] * n, indexing="ij"), -1)
        return combinations.reshape(*[len(points)] * n, *[1] * depth, *cells)

    def _plates(self, fn: Any) -> tuple[int, ...]:
        """Sizes of the program's own plates around a site, on `plate_axes` axes."""
        return (
            tuple(((1,) * self.plate_axes + tuple(fn.batch_shape))[-self.plate_axes :])
            if self.plate_axes
            else ()
        )

    def _weigh(self, weights: Tensor) -> None:
        """Multiply by a site's weights `[…, context, episode, particle, *plates]`."""
        self.weights = self.weights * (
            weights.flatten(-self.plate_axes).prod(-1) if self.plate_axes else weights
        )

    def _unsupported(self, fn: Any, name: str, reason: str) -> UnsupportedModelError:
        base = fn.base_dist if isinstance(fn, dist.Independent) else fn
        return UnsupportedModelError(f"{self.program}: site '{name}' ({type(base).__name__}) {reason}")
