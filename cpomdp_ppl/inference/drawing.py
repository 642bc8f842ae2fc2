"""Drawing a program's latent sites for particles, with noise that contexts may share."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.inference.scoring import unmasked


class Drawn(Messenger):
    """Draw every site for `[context, episode, particle]`.

    With common random numbers all contexts of an episode see the same noise: differences between their
    likelihoods are then due to the contexts, not to luck.

    Args:
        shape: `[C, B, N]`.
        common: Whether contexts share the noise.
        max_plate_nesting: How many axes on the right belong to the program's own plates.

    Attributes:
        sites: By name, the distribution and the value drawn.
    """

    def __init__(self, shape: tuple[int, int, int], common: bool, max_plate_nesting: int = 0) -> None:
        super().__init__()
        own = (1,) * max_plate_nesting
        self.shape = torch.Size((*shape, *own))
        self.noise_shape = torch.Size((1 if common else shape[0], *shape[1:], *own))
        self.sites: dict[str, tuple[Any, Tensor]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or msg["value"] is not None:
            return
        fn = unmasked(msg["fn"])
        msg["value"] = draw(fn, self.shape, self.noise_shape)
        self.sites[msg["name"]] = (fn, msg["value"])


def draw(fn: Any, shape: torch.Size, noise_shape: torch.Size) -> Tensor:
    """Draw from a distribution for a batch `shape`, out of noise of `noise_shape`.

    The two differ where contexts share their noise; the result may then be of `noise_shape`, too, if the
    distribution is the same in all contexts.
    """
    batch = fn.batch_shape
    if not batch and type(fn) is dist.Normal:
        value: Tensor = torch.empty(noise_shape, dtype=fn.loc.dtype, device=fn.loc.device)
        return value.normal_(float(fn.loc), float(fn.scale))
    if batch and torch.broadcast_shapes(batch, noise_shape) != noise_shape:  # differs between contexts
        return _transform(fn, shape, noise_shape)
    if isinstance(fn, dist.Bernoulli | dist.Categorical | dist.Normal):
        return _transform(fn, noise_shape, noise_shape)
    full = torch.broadcast_shapes(batch, noise_shape) if batch else noise_shape
    value = fn(full) if not batch else fn.expand(full).sample()
    return value


def _transform(fn: Any, shape: torch.Size, noise_shape: torch.Size) -> Tensor:
    """A draw as a function of standard noise, for the distributions that have one."""
    base, event_shape = fn, torch.Size()
    while isinstance(base, dist.Independent):
        base = base.base_dist
    if base is not fn:
        event_shape = fn.event_shape
    full = torch.broadcast_shapes(shape + event_shape, base.batch_shape)
    noise = torch.Size(n if s == 1 else f for n, s, f in zip(noise_shape, noise_shape, full, strict=False))
    noise = noise + full[len(noise) :]
    if isinstance(base, dist.Normal):
        epsilon = torch.randn(noise, dtype=base.loc.dtype, device=base.loc.device)
        return base.loc + base.scale * epsilon
    if isinstance(base, dist.MultivariateNormal):
        epsilon = torch.randn(noise + base.event_shape, dtype=base.loc.dtype, device=base.loc.device)
        return base.loc + (base.scale_tril @ epsilon[..., None]).squeeze(-1)
    if isinstance(base, dist.Delta):
        value: Tensor = base.v
        return value
    if isinstance(base, dist.Bernoulli):
        u = torch.rand(noise, device=base.probs.device)
        return (u < base.probs).to(base.probs.dtype)
    if isinstance(base, dist.Categorical):
        u = torch.rand(noise, device=base.probs.device)
        last = base.probs.shape[-1] - 1
        return (base.probs.cumsum(-1) <= u[..., None]).sum(-1).clamp(max=last)
    try:
        u = torch.rand(noise, device=fn.icdf(torch.tensor(0.5)).device).clamp(1e-7, 1 - 1e-7)
        return base.icdf(u)  # type: ignore[no-any-return]
    except NotImplementedError:  # no way to share noise: contexts draw on their own
        independent: Tensor = base.expand(full).sample()
        return independent
