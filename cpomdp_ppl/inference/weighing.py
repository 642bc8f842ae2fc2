"""A standard normal u, and something discrete is seen: how likely was that, and what is then known of u?

`Z = ∫ N(u; 0, I) p(u) du`, and the moments of what stands under the integral. On a line that is quadrature,
with ever more nodes where the mass is, until it no longer changes. In more dimensions it is importance
sampling from several Gaussians at once: the belief, wider ones, so that nothing in its tails is missed,
Laplace's approximation, and what follows the weights. Every row stands for itself: neither method looks at
what other rows are like.

What would make it wrong: of several peaks one that is narrower than a few thousandths on a line, or than what
some thousand points see in more dimensions; and what is more than `REACH` standard deviations away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

NODES, ROUNDS, REACH = 1024, 8, 12.0
"""Of the quadrature: how many nodes, how often they are moved at the most, and how far they reach."""

SETTLED = 2e-3
"""Nats that one round of the quadrature may differ from the last."""

POINTS, ADDED = 512, 4
"""Points of every Gaussian that is sampled from, and how many Gaussians are added that follow the weights."""

SCALES = (1.0, 2.0, 4.0)
"""Of the Gaussians to begin with."""

WIDER = 1.5
"""How much larger the covariance of a Gaussian is than that of the weights it follows."""

ENOUGH, TOO_FEW = 0.07, 0.2
"""Relative errors of Z at which no more Gaussians are added, and above which it is not settled."""

PEAKS, FAR = 3, 12.0
"""How many peaks are looked for, and how many nats below one's top another may begin: five s.d."""

LogProbability: TypeAlias = Callable[[Tensor], Tensor]
"""From points `[C, B, P, r]` to `log p`, `[C, B, P]`."""


@dataclass(frozen=True)
class Weighed:
    """What is known after something discrete was seen.

    Attributes:
        log_mean: `log Z`, float64 `[C, B]`.
        mean: Of u, `[C, B, r]`.
        covariance: `[C, B, r, r]`.
        error: Of `log_mean`, estimated, `[C, B]`.
    """

    log_mean: Tensor
    mean: Tensor
    covariance: Tensor
    error: Tensor

    @staticmethod
    def of(u: Tensor, log_p: Tensor, log_ratio: Tensor) -> Weighed:
        """Points `[C, B, P, r]` with weights that add up to Z; the error is that of independent draws.

        Where all points are equally likely, nothing is learned, and nothing is to be rounded either.
        """
        log_w, flat = log_p + log_ratio, log_p.amax(-1) == log_p.amin(-1)
        nowhere = (log_w == -torch.inf).all(-1)  # [C, B]
        w = torch.where(nowhere[..., None], 0.0, log_w).softmax(-1)
        mean = (w[..., None] * u).sum(2)
        left = u - mean[:, :, None]
        covariance = (w[..., None] * left).mT @ left
        error = torch.where(nowhere, 0.0, w.square().sum(-1).sqrt()).detach()
        found = Weighed(log_w.double().logsumexp(-1), mean, covariance, error)
        unit = torch.eye(u.shape[-1]).to(covariance).expand_as(covariance)
        nothing = Weighed(log_p[..., 0].double(), torch.zeros_like(mean), unit, torch.zeros_like(error))
        return found.where(flat, nothing)

    def where(self, rows: Tensor, other: Weighed) -> Weighed:
        """The same, but another in some rows, bool `[C, B]`."""

        def choose(mine: Tensor, others: Tensor) -> Tensor:
            return torch.where(rows.reshape(rows.shape + (1,) * (mine.dim() - 2)), others, mine)

        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Weighed(*(choose(mine, others) for mine, others in pairs))


def on_a_line(log_p: LogProbability, like: Tensor) -> Weighed:
    """By the trapezoidal rule, for a single number u; `like [C, B, …]` tells rows, type and device."""
    C, B = like.shape[:2]
    base = torch.linspace(-REACH, REACH, NODES).to(like)
    u = base.expand(C, B, -1)  # [C, B, P]
    found = None
    for _ in range(ROUNDS):
        gaps = torch.nn.functional.pad(u.diff(dim=-1), (1, 1))
        widths = (gaps[..., 1:] + gaps[..., :-1]) / 2
        log_prob = log_p(u[..., None])
        log_ratio = widths.log() - u.square() / 2 - 0.5 * math.log(2 * math.pi)
        now = Weighed.of(u[..., None], log_prob, log_ratio)
        if found is None:
            found = replace(now, error=torch.full_like(now.error, torch.inf))
        else:
            change = (now.log_mean - found.log_mean).abs().nan_to_num(0.0, posinf=torch.inf).detach()
            found = found.where(found.error > SETTLED, replace(now, error=change.to(now.error)))
        if bool((found.error <= SETTLED).all()):
            break
        u = torch.cat(
            [base[::2].expand(C, B, -1), _quantiles(u, (log_prob + log_ratio).detach(), NODES // 2)], -1
        ).sort(-1)[0]
    assert found is not None
    return found


def _quantiles(u: Tensor, log_w: Tensor, number: int) -> Tensor:
    """So many points `[C, B, n]` where weighted nodes `[C, B, P]` have their mass, and around it."""
    log_w = torch.where((log_w == -torch.inf).all(-1, keepdim=True), 0.0, log_w)
    log_w = torch.nn.functional.max_pool1d(log_w, 3, stride=1, padding=1)  # a peak may be beside its node
    mass = 0.5 * log_w.softmax(-1) + 0.5 * (log_w / 4).softmax(-1)  # which is the highest is not yet known
    middles = (u[..., 1:] + u[..., :-1]) / 2
    edges = torch.cat([u[..., :1], middles, u[..., -1:]], -1)  # [C, B, P + 1]
    below = torch.nn.functional.pad(mass.cumsum(-1), (1, 0))
    levels = (torch.arange(number).to(u) + 0.5) / number * below[..., -1:]
    k = (torch.searchsorted(below, levels, right=True) - 1).clamp(0, mass.shape[-1] - 1)
    part = ((levels - below.gather(-1, k)) / mass.gather(-1, k).clamp(min=1e-300)).clamp(0, 1)
    return edges.gather(-1, k) + part * (edges.gather(-1, k + 1) - edges.gather(-1, k))


def in_space(log_p: LogProbability, like: Tensor) -> Weighed:
    """By importance sampling, for several numbers; `like [C, B, D]` tells rows, type and device.

    All points are drawn from a mixture of all Gaussians, as far as their weights are concerned.
    """
    C, B, D = like.shape
    xi = normal_points(POINTS, D).to(like)
    unit = torch.eye(D).to(like).expand(C, B, D, D)
    zero = torch.zeros_like(like)
    gaussians = [(zero, scale * unit) for scale in SCALES]
    u: list[Tensor] = []
    log_ps: list[Tensor] = []

    def drawn() -> tuple[Tensor, Tensor]:
        for mean, root in gaussians[len(u) :]:
            u.append(mean[:, :, None] + xi @ root.mT)  # [C, B, P, D]
            log_ps.append(log_p(u[-1]).expand(C, B, POINTS))
        return torch.cat(u, 2), torch.cat(log_ps, 2)  # [C, B, K P, D], [C, B, K P]

    start = zero
    for _ in range(PEAKS):
        peak = _laplace(log_p, start)
        if peak is None:
            break
        gaussians.append(peak)
        # The next from the best point that is on none of those that are known.
        points, log_prob = drawn()
        height = (log_prob - 0.5 * points.square().sum(-1)).detach()
        for top, root in gaussians[len(SCALES) :]:
            near = _log_normal(points, top, root) > _log_normal(top[:, :, None], top, root) - FAR
            height = torch.where(near, -torch.inf, height)
        start = points.gather(2, height.argmax(-1)[..., None, None].expand(C, B, 1, D))[:, :, 0]
    found = None
    for _ in range(ADDED + 1):
        points, log_prob = drawn()
        log_q = torch.stack([_log_normal(points, *each) for each in gaussians]).logsumexp(0)
        log_ratio = -0.5 * points.square().sum(-1) - 0.5 * D * math.log(2 * math.pi) - log_q
        now = Weighed.of(points, log_prob, log_ratio - math.log(POINTS))
        found = now if found is None else found.where(found.error > ENOUGH, now)
        if bool((found.error <= ENOUGH).all()):
            break
        gaussians.append((now.mean.detach(), _root(WIDER * now.covariance.detach() + 1e-6 * unit)))
    assert found is not None
    return found


def _laplace(log_p: LogProbability, u: Tensor) -> tuple[Tensor, Tensor] | None:
    """A Gaussian about a peak near `u [C, B, D]`, with the curvature there, widened; None without gradients.

    Newton's method on `log p(u) - u²/2`, whose curvature is taken for at least that of the second term.
    """
    C, B, D = u.shape
    unit = torch.eye(D).to(u)
    steps = torch.tensor([0.0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0]).to(u)
    with torch.enable_grad():
        for _ in range(12):
            u = u.detach().requires_grad_()
            height = log_p(u[:, :, None])
            if not height.requires_grad:
                return None
            (slope,) = torch.autograd.grad(height.sum(), u, create_graph=True)
            rows = [
                torch.autograd.grad(slope[..., i].sum(), u, retain_graph=True, allow_unused=True)[0]
                if slope.requires_grad
                else None
                for i in range(D)
            ]
            bent = torch.stack([torch.zeros_like(u) if row is None else row for row in rows], -2)
            with torch.no_grad():
                slope, bent = slope.nan_to_num(0.0, 0.0, 0.0), bent.nan_to_num(0.0, 0.0, 0.0)
                sizes, vectors = torch.linalg.eigh(unit - (bent + bent.mT) / 2)
                sizes = sizes.clamp(min=1.0)[..., None]
                step = (vectors @ ((vectors.mT @ (slope - u)[..., None]) / sizes))[..., 0]
                tried = u[:, :, None] + steps[:, None] * step[:, :, None]  # [C, B, S, D]
                heights = log_p(tried).expand(tried.shape[:3]) - 0.5 * tried.square().sum(-1)
                best = heights.nan_to_num(-torch.inf, -torch.inf, -torch.inf).argmax(-1)
                u = tried.gather(2, best[..., None, None].expand(C, B, 1, D))[:, :, 0]
    root = vectors @ ((WIDER / sizes[..., 0]).sqrt()[..., None] * vectors.mT)
    return u.detach(), _root(root @ root.mT)


def _log_normal(u: Tensor, mean: Tensor, root: Tensor) -> Tensor:
    """`log N(u; μ, L Lᵀ)` of points `[C, B, P, D]`, `[C, B, P]`."""
    z = torch.linalg.solve_triangular(root, (u - mean[:, :, None]).mT, upper=False)  # [C, B, D, P]
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)[..., None]
    log_density: Tensor = -0.5 * z.square().sum(-2) - log_det - 0.5 * u.shape[-1] * math.log(2 * math.pi)
    return log_density


def _root(covariance: Tensor) -> Tensor:
    """A Cholesky factor; of the unit matrix where there is none."""
    root, failed = torch.linalg.cholesky_ex(covariance)
    unit = torch.eye(root.shape[-1]).to(root)
    return torch.where((failed != 0)[..., None, None], unit, root)


@cache
def normal_points(num_points: int, dim: int) -> Tensor:
    """N points `[N, D]` spread out like a standard normal, for means of functions that may jump.

    Sobol's points, whose coordinates are replaced, rank for rank, by the midpoints' quantiles of the normal.
    The outermost two are moved out until the second moment is 1, since the tails that they stand for are
    what midpoints leave out; then what correlation is left is taken away. So the mean of a linear or
    quadratic function is exact (a quadratic one in D > 1 dimensions only if N > 2D).

    Example:
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
