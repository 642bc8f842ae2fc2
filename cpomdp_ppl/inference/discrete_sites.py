"""Conditioning a Gaussian belief on discrete observations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError
from cpomdp_ppl.inference.covariance import product, square_root
from cpomdp_ppl.inference.gaussian_belief import GaussianBelief
from cpomdp_ppl.inference.moment_matching import (
    LARGEST_ERROR,
    MatchedMoments,
    by_importance_sampling,
    by_quadrature,
)
from cpomdp_ppl.inference.observed import Observed, Scored, axes, hidden_parents, marginalised, unseen
from cpomdp_ppl.inference.quasirandom import normal_points

if TYPE_CHECKING:
    from collections.abc import Collection

    from cpomdp_ppl.inference.kalman import KalmanRecursion
    from cpomdp_ppl.signature import Signature


def condition_on_discrete_sites(
    recursion: KalmanRecursion, belief: GaussianBelief, seen: Observed
) -> tuple[GaussianBelief, Tensor]:
    """Match the moments of a Gaussian belief that is multiplied by the probability of discrete observations.

    Where these depend on one direction of the state alone, that is an integral on a line.

    Returns:
        The belief, and the logarithm of the probability of what was observed, `[C, B]`.
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
    a = None if seen.action is None else axes(seen.action, recursion.plate_axes)
    with _ScoredDiscreteSites(seen, recursion.signature, recursion.discrete) as scored:
        recursion.model.observation(recursion.coordinates.state(points), a, recursion.context)
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
