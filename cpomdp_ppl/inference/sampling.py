"""Drawing a program's latent sites for particles, with noise that contexts may share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.errors import DensityError
from cpomdp_ppl.handlers import cannot_be_drawn, draw_normal, expanded
from cpomdp_ppl.inference.density import is_discrete, unfit, unmasked
from cpomdp_ppl.rng import first_above, index_at

if TYPE_CHECKING:
    from collections.abc import Sequence


class Drawn(Messenger):
    """Draw every site for `[context, episode, particle]`.

    With common random numbers all contexts of an episode see the same noise: differences between their
    likelihoods are then due to the contexts, not to luck.

    Attributes:
        sites: By name, the distribution and the value drawn.
    """

    def __init__(self, shape: Sequence[int], common: bool, max_plate_nesting: int = 0) -> None:
        super().__init__()
        self.shape = torch.Size((*shape, *[1] * max_plate_nesting))
        self.common = common
        self.sites: dict[str, tuple[Any, Tensor]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or msg["value"] is not None:
            return
        fn = unmasked(msg["fn"])
        _require_probabilities(msg["name"], fn)
        try:
            value = draw(fn, self.shape, self.common)
        except NotImplementedError as error:
            raise cannot_be_drawn(msg, str(error)) from error
        msg["value"] = value
        self.sites[msg["name"]] = (fn, value)


def _require_probabilities(name: str, fn: Any) -> None:
    """Comparisons with NaN are false, so that a broken probability would pass for a certain outcome."""
    if isinstance(fn, dist.Bernoulli | dist.Categorical):
        probs = fn.probs
        if not bool(((probs >= 0) & (probs <= 1)).all()):
            bad = probs[~((probs >= 0) & (probs <= 1))]
            raise DensityError(f"site '{name}' has probability {float(bad[0])} in some state")


def draw(fn: Any, shape: torch.Size, common: bool) -> Tensor:
    """Draw from a distribution for a batch `[C, B, N]`, and 1 for each of the program's own axes.

    With `common`, contexts share the noise; their axis then has size 1 if the distribution is the same in
    all of them.
    """
    differs = len(fn.batch_shape) == len(shape) and fn.batch_shape[0] > 1
    batch = shape if differs or not common else torch.Size((1, *shape[1:]))
    if fn.batch_shape:
        batch = torch.broadcast_shapes(batch, fn.batch_shape)
    elif type(fn) is dist.Normal:
        return draw_normal(fn, batch)
    noise = torch.Size((1, *batch[1:])) if common else batch
    base, event = fn, torch.Size()
    while isinstance(base, dist.Independent):
        event = base.base_dist.batch_shape[len(base.batch_shape) :] + event
        base = base.base_dist
    why = unfit(base)
    if why is not None:
        raise NotImplementedError(why)
    value: Tensor | None = from_noise(base, noise + event)
    if value is None:  # no way to share noise: contexts draw on their own
        value = expanded(fn, batch)()  # as Pyro does: some draw differently by `sample`
    return value


def from_noise(fn: Any, shape: torch.Size) -> Any:
    """A draw as a function of standard noise of this shape; None for distributions that have none."""
    if isinstance(fn, dist.Normal):
        return fn.loc + fn.scale * torch.randn(shape, dtype=fn.loc.dtype, device=fn.loc.device)
    if isinstance(fn, dist.MultivariateNormal):
        epsilon = torch.randn(shape + fn.event_shape, dtype=fn.loc.dtype, device=fn.loc.device)
        return fn.loc + (fn.scale_tril @ epsilon[..., None]).squeeze(-1)
    if isinstance(fn, dist.Delta):
        return fn.v
    if isinstance(fn, dist.Bernoulli):
        p = fn.probs
        return (torch.rand(shape, dtype=p.dtype, device=p.device) < p).to(p.dtype)
    if isinstance(fn, dist.Categorical):
        p = fn.probs
        return index_at(p, torch.rand((*shape, 1), dtype=p.dtype, device=p.device))
    if fn.event_shape or is_discrete(fn):
        return None
    try:  # in float64, whose uniform numbers get 8 standard deviations far: those of float32, 5
        median = fn.icdf(torch.tensor(0.5))  # tells type and device
        levels = torch.rand(shape, dtype=torch.float64, device=median.device).clamp_(2**-50, 1 - 2**-50)
        return fn.icdf(levels).to(median.dtype)
    except (NotImplementedError, AttributeError):
        return None


def choose(weights: Tensor, number: int) -> Tensor:
    """Draw indices `[…, number]` by weights `[…, N]`, which need not add up to 1, independently."""
    cumulative = weights.double().cumsum(-1)  # in float32, it would miss the last index
    levels = torch.rand(*weights.shape[:-1], number, dtype=torch.float64, device=weights.device)
    return first_above(cumulative, levels * cumulative[..., -1:])
