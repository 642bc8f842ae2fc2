"""Distributions over a box of actions: what networks decide where actions are continuous."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import softplus

from cpomdp_ppl.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.actions import Box

EDGE = 1e-6
"""How near a draw comes to the faces of the box, as a share of its width: further out densities are lost."""
SMALLEST_LOG_SD, LARGEST_LOG_SD = -5.0, 1.0
FURTHEST_MEAN = 5.0
"""Of a Gaussian before it is squashed: further out, draws are at the edge, with densities not theirs."""
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(16)
"""Of Gauss–Hermite quadrature, for means under a normal distribution."""


class BoxDistribution(torch.distributions.Distribution):
    """A distribution over a `Box`, its axes independent, by two numbers for each axis.

    Attributes:
        box: The box, of D axes.
        first: The first numbers, `[…, D]`.
        second: The second numbers, `[…, D]`, positive.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True

    def __init__(self, box: Box, first: Tensor, second: Tensor) -> None:
        self.box, self.first, self.second = box, first, second
        self.low, high = box.bounds(first)
        self.width = high - self.low
        super().__init__(first.shape[:-1], first.shape[-1:], validate_args=False)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> Any:
        """The box."""
        return constraints.independent(constraints.interval(self.low, self.low + self.width), 1)

    @classmethod
    @abstractmethod
    def of(cls, box: Box, outputs: Tensor) -> BoxDistribution:
        """What the outputs of a network `[…, 2 D]` stand for; zeros for a wide one."""

    @classmethod
    def stack(cls, series: Sequence[BoxDistribution]) -> BoxDistribution:
        """Distributions `[B, T]` from those of T times, `[B]`."""
        first, second = (torch.stack([getattr(each, name) for each in series], 1) for name in PARAMETERS)
        return cls(series[0].box, first, second)

    @abstractmethod
    def near(self, previous: Tensor, persistence: float) -> BoxDistribution:
        """The same, drawn towards previous actions `[…, D]`; those that are NaN are none.

        One that is wide repeats its actions, on average, for `exp(persistence)` steps: then each is the
        middle of the next.
        """

    @abstractmethod
    def wider(self, chance: float) -> BoxDistribution:
        """The same with more left to chance: 0 for nothing, and near 1 for about all of the box."""

    @abstractmethod
    def share(self, sample_shape: torch.Size) -> Tensor:
        """A draw as a share of the width, from 0 to 1."""

    @abstractmethod
    def log_density(self, share: Tensor) -> Tensor:
        """The log-density, on each axis, of shares of the width `[…, D]`."""

    @abstractmethod
    def axis_entropy(self) -> Tensor:
        """The entropy of the share of the width on each axis, `[…, D]`."""

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Actions `[…, D]`, with gradients."""
        share = self.share(torch.Size(sample_shape)).clamp(EDGE, 1 - EDGE)
        return (self.low + self.width * share).clamp(self.low, self.low + self.width)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Actions `[…, D]`."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of actions `[…, D]`."""
        return (self.log_density(self._share_of(value)) - self.width.log()).sum(-1)

    def entropy(self) -> Tensor:
        """The differential entropy, `[…]`."""
        return (self.axis_entropy() + self.width.log()).sum(-1)

    def _share_of(self, value: Tensor) -> Tensor:
        return ((value.to(self.first) - self.low) / self.width).clamp(EDGE, 1 - EDGE)


PARAMETERS = ("first", "second")


class SquashedGaussian(BoxDistribution):
    """A Gaussian, by mean and standard deviation, whose draws a sigmoid function takes into the box.

    Examples:
        >>> from cpomdp_ppl.actions import Box
        >>> action = SquashedGaussian(Box(-2.0, 2.0), torch.zeros(5, 1), torch.full((5, 1), 1e-3))
        >>> action.mode.shape, bool((action.sample().abs() < 0.01).all())
        (torch.Size([5, 1]), True)
    """

    @classmethod
    def of(cls, box: Box, outputs: Tensor) -> SquashedGaussian:
        """Means, and logarithms of standard deviations."""
        mean, log_sd = outputs.chunk(2, -1)
        sd = _bounded(log_sd, SMALLEST_LOG_SD, LARGEST_LOG_SD).exp()
        return cls(box, _bounded(mean, -FURTHEST_MEAN, FURTHEST_MEAN), sd)

    @property
    def mode(self) -> Tensor:
        """Where the mean gets to, which is the median."""
        return self.low + self.width * (2 * self.first).sigmoid()

    def near(self, previous: Tensor, persistence: float) -> SquashedGaussian:
        """The product with a Gaussian around previous actions."""
        if not persistence:
            return self
        precision, extra = self.second.square().reciprocal(), math.expm1(persistence)
        none = previous.isnan()
        share = self._share_of(previous.nan_to_num())
        pull = torch.where(none, 0.0, extra * _before_squashing(share))
        total = precision + torch.where(none, 0.0, extra)
        return SquashedGaussian(self.box, (self.first * precision + pull) / total, total.rsqrt())

    def wider(self, chance: float) -> SquashedGaussian:
        """With noise of a standard deviation `chance` on top, before squashing."""
        if not chance:
            return self
        return SquashedGaussian(self.box, self.first, (self.second.square() + chance**2).sqrt())

    def share(self, sample_shape: torch.Size) -> Tensor:
        """`sigmoid(2 x) = (1 + tanh x) / 2` of Gaussian draws x."""
        noise = torch.randn(sample_shape + self.first.shape, dtype=self.first.dtype, device=self.first.device)
        return (2 * (self.first + self.second * noise)).sigmoid()

    def log_density(self, share: Tensor) -> Tensor:
        """By the change of variables."""
        x = _before_squashing(share)
        z = (x - self.first) / self.second
        normal = -0.5 * z.square() - self.second.log() - 0.5 * math.log(2 * math.pi)
        return normal - (2 * share * (1 - share)).log()

    def axis_entropy(self) -> Tensor:
        """That of the Gaussian, and the mean of `log d share / dx`, by quadrature."""
        nodes = torch.as_tensor(NODES).to(self.first)
        weights = torch.as_tensor(WEIGHTS / WEIGHTS.sum()).to(self.first)
        x = self.first[..., None] + self.second[..., None] * nodes
        slope = math.log(2) - softplus(-2 * x) - softplus(2 * x)
        gaussian = self.second.log() + 0.5 * math.log(2 * math.pi * math.e)
        return gaussian + (slope * weights).sum(-1)


class ScaledBeta(BoxDistribution):
    """A Beta distribution on each axis, by its two concentrations: it has all of the box, and its faces.

    Examples:
        >>> from cpomdp_ppl.actions import Box
        >>> ScaledBeta.of(Box(-2.0, 2.0), torch.zeros(5, 2)).mode[:, 0]
        tensor([0., 0., 0., 0., 0.])
    """

    @classmethod
    def of(cls, box: Box, outputs: Tensor) -> ScaledBeta:
        """Concentrations of more than one, so that there is a single mode."""
        first, second = (1 + softplus(outputs)).chunk(2, -1)
        return cls(box, first, second)

    @property
    def beta(self) -> torch.distributions.Beta:
        """The distribution of the share of the width; in single precision, high densities are nats off."""
        return torch.distributions.Beta(self.first.double(), self.second.double(), validate_args=False)

    @property
    def mode(self) -> Tensor:
        """Where the density is highest; in the middle, if it is so everywhere."""
        above, below = self.first - 1, self.second - 1
        total = above + below
        share = torch.where(total > 0, above / torch.where(total > 0, total, 1.0), 0.5)
        return self.low + self.width * share

    def near(self, previous: Tensor, persistence: float) -> ScaledBeta:
        """The product with a Beta distribution around previous actions."""
        if not persistence:
            return self
        counts = 2 * math.expm1(persistence)
        share = self._share_of(previous.nan_to_num())
        more = (torch.where(previous.isnan(), 0.0, counts * part) for part in (share, 1 - share))
        return ScaledBeta(self.box, self.first + next(more), self.second + next(more))

    def wider(self, chance: float) -> ScaledBeta:
        """With fewer counts; where these are many, draws spread as those of a squashed Gaussian would."""
        if not chance:
            return self
        total = self.first + self.second
        mean = self.first / total
        tightness = 1 / (1 + total)  # the variance, as a share of the largest that this mean allows
        wide = tightness + 4 * mean * (1 - mean) * chance**2 * (1 - tightness)
        fewer = 1 / wide - 1
        return ScaledBeta(self.box, mean * fewer, (1 - mean) * fewer)

    def share(self, sample_shape: torch.Size) -> Tensor:
        """Draws of the Beta distribution."""
        draw: Tensor = self.beta.rsample(sample_shape).to(self.first)
        return draw

    def log_density(self, share: Tensor) -> Tensor:
        """Of the Beta distribution."""
        log_density: Tensor = self.beta.log_prob(share.double()).to(self.first)
        return log_density

    def axis_entropy(self) -> Tensor:
        """Of the Beta distribution."""
        entropy: Tensor = self.beta.entropy().to(self.first)
        return entropy


FAMILIES: dict[str, type[BoxDistribution]] = {"squashed": SquashedGaussian, "beta": ScaledBeta}
"""Distributions that a network may decide by, by name."""


def as_family(box: Box | None, distribution: str | None) -> type[BoxDistribution] | None:
    """The family of a name; by default a squashed Gaussian. None for finitely many actions."""
    if box is None:
        if distribution is not None:
            raise invalid("distribution", distribution, "None, as there are finitely many actions")
        return None
    name = "squashed" if distribution is None else distribution
    if name not in FAMILIES:
        raise invalid("distribution", distribution, f"None, or a name out of {list(FAMILIES)}")
    return FAMILIES[name]


def _bounded(x: Tensor, low: float, high: float) -> Tensor:
    """Numbers between two bounds, the same near 0; unlike those that are clamped, they find back inside."""
    return torch.where(x > 0, high * (x / high).tanh(), low * (x / low).tanh())


def _before_squashing(share: Tensor) -> Tensor:
    return 0.5 * (share.log() - torch.log1p(-share))
