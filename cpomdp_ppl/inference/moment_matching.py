"""Gaussian beliefs conditioned on discrete sites: mean and covariance of a normal times a probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from cpomdp_ppl.errors import DensityError
from cpomdp_ppl.inference.gaussian_belief import GaussianBelief, product, square_root
from cpomdp_ppl.inference.observed import Observed, Scored, axes, hidden_parents, marginalised, unseen
from cpomdp_ppl.rng import first_above

if TYPE_CHECKING:
    from collections.abc import Collection

    from cpomdp_ppl.inference.kalman import KalmanRecursion
    from cpomdp_ppl.signature import Signature

QUADRATURE_NODES = 1024
"""Number of nodes of the quadrature."""

QUADRATURE_ROUNDS = 8
"""How often the nodes are moved, at the most."""

QUADRATURE_REACH = 12.0
"""Standard deviations that the nodes reach."""

QUADRATURE_TOLERANCE = 2e-3
"""Nats by which one round of the quadrature may differ from the last."""

POINTS_PER_GAUSSIAN = 512
"""Points drawn from every Gaussian of the importance sampler."""

FIRST_SCALES = (1.0, 2.0, 4.0)
"""Scales of the Gaussians that importance sampling begins with."""

MOST_PEAKS = 3
"""How many peaks are looked for."""

NEWTON_STEPS = 12
"""Steps of Newton's method towards a peak."""

PEAK_DEPTH = 12.0
"""Nats below the top of a peak from which on a point may belong to another one: five standard deviations."""

MOST_ADDED = 4
"""How many Gaussians that follow the weights are added, at the most."""

WIDENING = 1.5
"""How much larger the covariance of a Gaussian is than that of the weights it follows."""

SMALL_ERROR = 0.07
"""Relative error of Z below which no more Gaussians are added."""

LARGEST_ERROR = 0.2
"""Relative error of Z above which the integral counts as unknown."""

LogProbability: TypeAlias = Callable[[Tensor], Tensor]
"""A function from points `[C, B, P, r]` to `log p`, `[C, B, P]`."""


@cache
def normal_points(num_points: int, dim: int) -> Tensor:
    """N points `[N, D]` spread out like a standard normal, for means of functions that may jump.

    Sobol's points, whose coordinates are replaced, rank for rank, by the midpoints' quantiles of the normal.
    The outermost two are moved out until the second moment is 1, since the tails that they stand for are
    what midpoints leave out; then what correlation is left is taken away. So the mean of a linear or
    quadratic function is exact (a quadratic one in D > 1 dimensions only if N > 2D).

    Examples:
        >>> points = normal_points(64, 2)
        >>> (points.mT @ points / 64).round(decimals=6).abs()
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    levels = (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points
    quantiles = torch.special.ndtri(levels)
    if num_points > 1:
        inner = quantiles[1:-1].square().sum()
        quantiles[-1] = ((num_points - inner) / 2).sqrt()
        quantiles[0] = -quantiles[-1]
    ranks = SobolEngine(dim).draw(num_points, dtype=torch.float64).argsort(0).argsort(0)
    points: Tensor = quantiles[ranks]
    if 1 < 2 * dim < num_points:
        factor = torch.linalg.cholesky(points.mT @ points / num_points)
        points = torch.linalg.solve_triangular(factor.mT, points, upper=True, left=False)
    return points


@dataclass(frozen=True)
class MatchedMoments:
    """Mass, mean and covariance of `N(u; 0, I) p(u)`.

    Attributes:
        log_mass: `log Z`, float64 `[C, B]`.
        mean: Mean of u, `[C, B, r]`.
        covariance: Covariance of u, `[C, B, r, r]`.
        error: Estimated error of `log_mass`, `[C, B]`.
    """

    log_mass: Tensor
    mean: Tensor
    covariance: Tensor
    error: Tensor

    @staticmethod
    def of(u: Tensor, log_p: Tensor, log_ratio: Tensor) -> MatchedMoments:
        """The moments of points `[C, B, P, r]` whose weights add up to Z.

        The error is that of independent draws. Where all points are equally likely, nothing is learned, and
        nothing needs to be rounded either.
        """
        log_w, flat = log_p + log_ratio, log_p.amax(-1) == log_p.amin(-1)
        nowhere = (log_w == -torch.inf).all(-1)  # [C, B]
        w = torch.where(nowhere[..., None], 0.0, log_w).softmax(-1)
        mean = (w[..., None] * u).sum(2)
        left = u - mean[:, :, None]
        covariance = (w[..., None] * left).mT @ left
        error = torch.where(nowhere, 0.0, w.square().sum(-1).sqrt()).detach()
        found = MatchedMoments(log_w.double().logsumexp(-1), mean, covariance, error)
        unit = torch.eye(u.shape[-1]).to(covariance).expand_as(covariance)
        unlearned = MatchedMoments(
            log_p[..., 0].double(), torch.zeros_like(mean), unit, torch.zeros_like(error)
        )
        return found.where(flat, unlearned)

    def where(self, rows: Tensor, other: MatchedMoments) -> MatchedMoments:
        """The same, except in some rows, bool `[C, B]`, where it is another."""

        def choose(mine: Tensor, others: Tensor) -> Tensor:
            return torch.where(rows.reshape(rows.shape + (1,) * (mine.dim() - 2)), others, mine)

        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return MatchedMoments(*(choose(mine, others) for mine, others in pairs))


def by_quadrature(log_p: LogProbability, like: Tensor) -> MatchedMoments:
    """Integrate over a single number u by the trapezoidal rule; `like [C, B, …]` tells rows, type and device.

    Nodes move to where the mass is until the integral no longer changes.
    """
    C, B = like.shape[:2]
    base = torch.linspace(-QUADRATURE_REACH, QUADRATURE_REACH, QUADRATURE_NODES).to(like)
    u = base.expand(C, B, -1)  # [C, B, P]
    found = None
    for _ in range(QUADRATURE_ROUNDS):
        gaps = torch.nn.functional.pad(u.diff(dim=-1), (1, 1))
        widths = (gaps[..., 1:] + gaps[..., :-1]) / 2
        log_prob = log_p(u[..., None])
        log_ratio = widths.log() - u.square() / 2 - 0.5 * math.log(2 * math.pi)
        now = MatchedMoments.of(u[..., None], log_prob, log_ratio)
        if found is None:
            found = replace(now, error=torch.full_like(now.error, torch.inf))
        else:
            change = (now.log_mass - found.log_mass).abs().nan_to_num(0.0, posinf=torch.inf).detach()
            found = found.where(found.error > QUADRATURE_TOLERANCE, replace(now, error=change.to(now.error)))
        if bool((found.error <= QUADRATURE_TOLERANCE).all()):
            break
        at_mass = _quantiles(u, (log_prob + log_ratio).detach(), QUADRATURE_NODES // 2)
        u = torch.cat([base[::2].expand(C, B, -1), at_mass], -1).sort(-1)[0]
    assert found is not None
    return found


def _quantiles(u: Tensor, log_w: Tensor, number: int) -> Tensor:
    """Points `[C, B, number]` where weighted nodes `[C, B, P]` have their mass, and around it."""
    log_w = torch.where((log_w == -torch.inf).all(-1, keepdim=True), 0.0, log_w)
    log_w = torch.nn.functional.max_pool1d(log_w, 3, stride=1, padding=1)  # a peak may be beside its node
    mass = 0.5 * log_w.softmax(-1) + 0.5 * (log_w / 4).softmax(-1)  # which is the highest is not yet known
    middles = (u[..., 1:] + u[..., :-1]) / 2
    edges = torch.cat([u[..., :1], middles, u[..., -1:]], -1)  # [C, B, P + 1]
    cumulative = mass.cumsum(-1)
    below = torch.nn.functional.pad(cumulative, (1, 0))
    levels = (torch.arange(number).to(u) + 0.5) / number * below[..., -1:]
    k = first_above(cumulative, levels)
    part = ((levels - below.gather(-1, k)) / mass.gather(-1, k).clamp(min=1e-300)).clamp(0, 1)
    return edges.gather(-1, k) + part * (edges.gather(-1, k + 1) - edges.gather(-1, k))


class _Mixture:
    """Points drawn from several Gaussians, and the probabilities of the observation there.

    As far as weights are concerned, all points are drawn from a mixture of all the Gaussians.
    """

    def __init__(self, log_p: LogProbability, like: Tensor) -> None:
        self.log_p, self.shape = log_p, like.shape
        self.standard = normal_points(POINTS_PER_GAUSSIAN, like.shape[-1]).to(like)
        self.gaussians: list[tuple[Tensor, Tensor]] = []
        self._points: list[Tensor] = []
        self._log_probs: list[Tensor] = []

    def add(self, mean: Tensor, root: Tensor) -> None:
        """Add a Gaussian by its mean `[C, B, D]` and the root of its covariance `[C, B, D, D]`."""
        C, B, _ = self.shape
        points = mean[:, :, None] + self.standard @ root.mT  # [C, B, P, D]
        self.gaussians.append((mean, root))
        self._points.append(points)
        self._log_probs.append(self.log_p(points).expand(C, B, POINTS_PER_GAUSSIAN))

    @property
    def points(self) -> Tensor:
        """All points, `[C, B, K P, D]`."""
        return torch.cat(self._points, 2)

    @property
    def log_probs(self) -> Tensor:
        """`log p` at all points, `[C, B, K P]`."""
        return torch.cat(self._log_probs, 2)

    def moments(self) -> MatchedMoments:
        """The moments by importance sampling from the mixture."""
        points, D = self.points, self.shape[-1]
        log_q = torch.stack([_log_normal(points, *each) for each in self.gaussians]).logsumexp(0)
        log_ratio = -0.5 * points.square().sum(-1) - 0.5 * D * math.log(2 * math.pi) - log_q
        return MatchedMoments.of(points, self.log_probs, log_ratio - math.log(POINTS_PER_GAUSSIAN))

    def highest_point_away_from(self, peaks: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The point with the highest density that is on none of the peaks that are known, `[C, B, D]`."""
        C, B, D = self.shape
        points = self.points
        height = (self.log_probs - 0.5 * points.square().sum(-1)).detach()
        for top, root in peaks:
            near = _log_normal(points, top, root) > _log_normal(top[:, :, None], top, root) - PEAK_DEPTH
            height = torch.where(near, -torch.inf, height)
        return points.gather(2, height.argmax(-1)[..., None, None].expand(C, B, 1, D))[:, :, 0]


def by_importance_sampling(log_p: LogProbability, like: Tensor) -> MatchedMoments:
    """Integrate over several numbers by importance sampling; `like [C, B, D]` tells rows, type and device."""
    C, B, D = like.shape
    unit = torch.eye(D).to(like).expand(C, B, D, D)
    zero = torch.zeros_like(like)
    mixture = _Mixture(log_p, like)
    for scale in FIRST_SCALES:
        mixture.add(zero, scale * unit)
    start, peaks = zero, []
    for _ in range(MOST_PEAKS):
        peak = _laplace(log_p, start)
        if peak is None:
            break
        mixture.add(*peak)
        peaks.append(peak)
        start = mixture.highest_point_away_from(peaks)
    found = None
    for _ in range(MOST_ADDED + 1):
        now = mixture.moments()
        found = now if found is None else found.where(found.error > SMALL_ERROR, now)
        if bool((found.error <= SMALL_ERROR).all()):
            break
        mixture.add(now.mean.detach(), _root(WIDENING * now.covariance.detach() + 1e-6 * unit))
    assert found is not None
    return found


def _laplace(log_p: LogProbability, u: Tensor) -> tuple[Tensor, Tensor] | None:
    """A Gaussian about a peak near `u [C, B, D]` with the curvature there, widened; None without gradients.

    Newton's method on `log p(u) - u²/2`, whose curvature is taken to be at least that of the second term.
    """
    C, B, D = u.shape
    steps = torch.tensor([0.0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0]).to(u)
    with torch.enable_grad():
        for _ in range(NEWTON_STEPS):
            u = u.detach().requires_grad_()
            height = log_p(u[:, :, None])
            if not height.requires_grad:
                return None
            (slope,) = torch.autograd.grad(height.sum(), u, create_graph=True)
            bent = _hessian(slope, u)
            with torch.no_grad():
                slope, bent = slope.nan_to_num(0.0, 0.0, 0.0), bent.nan_to_num(0.0, 0.0, 0.0)
                sizes, vectors = torch.linalg.eigh(torch.eye(D).to(u) - (bent + bent.mT) / 2)
                sizes = sizes.clamp(min=1.0)[..., None]
                step = (vectors @ ((vectors.mT @ (slope - u)[..., None]) / sizes))[..., 0]
                tried = u[:, :, None] + steps[:, None] * step[:, :, None]  # [C, B, S, D]
                heights = log_p(tried).expand(tried.shape[:3]) - 0.5 * tried.square().sum(-1)
                best = heights.nan_to_num(-torch.inf, -torch.inf, -torch.inf).argmax(-1)
                u = tried.gather(2, best[..., None, None].expand(C, B, 1, D))[:, :, 0]
    root = vectors @ ((WIDENING / sizes[..., 0]).sqrt()[..., None] * vectors.mT)
    return u.detach(), _root(root @ root.mT)


def _hessian(slope: Tensor, u: Tensor) -> Tensor:
    """Second derivatives `[C, B, D, D]` from a gradient `[C, B, D]` that may have no graph."""
    if not slope.requires_grad:
        return torch.zeros(*u.shape, u.shape[-1]).to(u)
    rows = [
        torch.autograd.grad(one.sum(), u, retain_graph=True, allow_unused=True)[0] for one in slope.unbind(-1)
    ]
    return torch.stack([torch.zeros_like(u) if row is None else row for row in rows], -2)


def _log_normal(u: Tensor, mean: Tensor, root: Tensor) -> Tensor:
    """`log N(u; μ, L Lᵀ)` at points `[C, B, P, D]`, `[C, B, P]`."""
    z = torch.linalg.solve_triangular(root, (u - mean[:, :, None]).mT, upper=False)  # [C, B, D, P]
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)[..., None]
    log_density: Tensor = -0.5 * z.square().sum(-2) - log_det - 0.5 * u.shape[-1] * math.log(2 * math.pi)
    return log_density


def _root(covariance: Tensor) -> Tensor:
    """The Cholesky factor of a covariance; that of the unit matrix where there is none."""
    root, failed = torch.linalg.cholesky_ex(covariance)
    unit = torch.eye(root.shape[-1]).to(root)
    return torch.where((failed != 0)[..., None, None], unit, root)


def condition_on_discrete_sites(
    recursion: KalmanRecursion, belief: GaussianBelief, seen: Observed
) -> tuple[GaussianBelief, Tensor]:
    """The belief with the moments of a Gaussian times the probability of what was observed, and its log.

    Where discrete sites depend on one direction of the state alone, that is an integral on a line.
    """
    v = _direction(recursion, belief, seen)  # [C, B, D]
    on_line = torch.linalg.vector_norm(v, dim=-1) > 0  # [C, B]

    def log_p(u: Tensor) -> Tensor:
        x = belief.mean[:, :, None] + product(u, belief.root.mT)
        return log_density_of_discrete_sites(recursion, x, seen).expand(u.shape[:3])

    D, found = v.shape[-1], None
    unit = torch.eye(D, dtype=v.dtype, device=v.device)
    if bool(on_line.any()):
        line = by_quadrature(lambda u: log_p(u * v[:, :, None]), v)
        # Along v, the unit variance becomes that on the line; across, nothing is learned.
        learned = (line.covariance - 1) * v[..., :, None] * v[..., None, :]
        found = replace(line, mean=line.mean * v, covariance=unit + learned)
    if not bool(on_line.all()):
        space = by_importance_sampling(log_p, v)
        found = space if found is None else space.where(on_line, found)
    assert found is not None
    _require_settled(recursion, found, seen)
    mean = belief.mean + product(belief.root, found.mean[..., None])[..., 0]
    root = product(belief.root, square_root(found.covariance))
    impossible = (found.log_mass == -torch.inf)[..., None]
    return GaussianBelief(
        torch.where(impossible, belief.mean, mean), torch.where(impossible[..., None], belief.root, root)
    ), found.log_mass


def _direction(recursion: KalmanRecursion, belief: GaussianBelief, seen: Observed) -> Tensor:
    """The direction of the standardised belief that the discrete sites depend on, `[C, B, D]`.

    If there is such a direction, all gradients are along it; that nothing else matters is checked by leaving
    everything else out. It is a unit vector, or zero where there is no such direction.
    """
    C, B, D = belief.mean.shape
    if D == 1:
        return torch.ones_like(belief.mean)
    mean, root = belief.mean.detach(), belief.root.detach()
    u = 2 * normal_points(64, D).to(mean).expand(C, B, -1, D)  # [C, B, P, D]
    with torch.enable_grad():
        u = u.clone().requires_grad_()
        log_p = log_density_of_discrete_sites(recursion, mean[:, :, None] + product(u, root.mT), seen)
        log_p = log_p.expand(u.shape[:3])
        if not log_p.requires_grad:
            return torch.zeros_like(mean)
        (g,) = torch.autograd.grad(torch.where(log_p > -torch.inf, log_p, 0.0).sum(), u)
    size = torch.linalg.vector_norm(g, dim=-1, keepdim=True)  # [C, B, P, 1]
    g = torch.where(size > 0, g / size, 0.0).nan_to_num(0.0)  # no place drowns another
    v = torch.linalg.eigh(product(g.mT, g))[1][..., -1]  # [C, B, D]
    along = product(u.detach(), v[..., None]) * v[:, :, None]
    same = log_density_of_discrete_sites(recursion, mean[:, :, None] + product(along, root.mT), seen)
    close = torch.isclose(same.expand_as(log_p), log_p.detach(), rtol=1e-6, atol=1e-6).all(-1)
    known = close & (size.squeeze(-1) > 0).any(-1)
    return torch.where(known[..., None], v, 0.0)


def _require_settled(recursion: KalmanRecursion, found: MatchedMoments, seen: Observed) -> None:
    poor = ~(found.error <= LARGEST_ERROR)
    if bool(poor.any()):
        c, b = poor.nonzero()[0].tolist()
        sites = ", ".join(f"'{site}'" for site in recursion.discrete)
        raise DensityError(
            f"time {seen.time} of episode {seen.episode(b)} in context '{recursion.model.context_names[c]}': "
            f"points of a Gaussian belief do not settle how likely site {sites} was, as few of them "
            'count; "smc" does not depend on that'
        )


def log_density_of_discrete_sites(recursion: KalmanRecursion, points: Tensor, seen: Observed) -> Tensor:
    """`log p` of the discrete sites as a function of points `[C, B, P, D]`, `[C, B, P]`."""
    a = None if seen.action is None else axes(recursion.precise(seen.action), recursion.plate_axes)
    with _ScoredDiscreteSites(seen, recursion.signature, recursion.discrete) as scored:
        recursion.model.percept(recursion.coordinates.state(points), a, recursion.context)
    assert scored.log_prob is not None
    return marginalised(scored.log_prob).to(points.dtype)


class _ScoredDiscreteSites(Scored):
    """Scores the discrete sites alone."""

    def __init__(self, seen: Observed, signature: Signature, discrete: Collection[str]) -> None:
        super().__init__(seen, signature)
        self.discrete = discrete
        self.hidden = hidden_parents(signature, seen, discrete)

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if name in self.discrete:
            super()._pyro_sample(msg)
        elif name in self.hidden:
            raise unseen(name, self.seen.time, "they are discrete, which a Gaussian filter cannot average")
        elif name in self.signature.observations:
            value = self.seen.observations[name]
            msg["value"] = value.reshape(1, len(value), 1, *value.shape[1:])
