"""The effect handlers under which the engine runs a model's programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pyro.distributions import (
    BetaBinomial,
    Categorical,
    Empirical,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    MixtureSameFamily,
    Normal,
)
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch.distributions import Binomial

from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.rng import index_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyro.distributions.torch_distribution import TorchDistributionMixin
    from torch import Tensor


class Batched(Messenger):
    """Broadcast every sample site to a batch, as plates to the left of the program's plates would.

    Pyro's plates also keep account of conditional independence. On a small batch, that costs more than all
    the rest of a particle filter's step, and nobody reads the account here.
    """

    def __init__(self, batch_shape: Sequence[int], max_plate_nesting: int = 0) -> None:
        super().__init__()
        self.max_plate_nesting = max_plate_nesting
        self.shape = torch.Size((*batch_shape, *[1] * max_plate_nesting))
        self._last: Any = None  # site that was visited

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, NotImplementedError) and self._last is not None and self._last["value"] is None:
            raise cannot_be_drawn(self._last, str(error)) from error

    def _pyro_sample(self, msg: Any) -> None:
        self._last = msg
        fn = msg["fn"]
        shape = getattr(fn, "batch_shape", self.shape)  # a plate's message has none
        base = base_of(fn)
        mixed = isinstance(base, MixtureSameFamily)  # only `expand` makes its two parts agree in shape
        if shape == self.shape and not mixed:
            if msg["value"] is None and not torch.is_grad_enabled():
                msg["value"] = draw_quickly(base)
            return
        if not shape and msg["value"] is None and not mixed:
            if type(fn) is Normal and not torch.is_grad_enabled():
                msg["value"] = draw_normal(fn, self.shape)
            else:
                msg["args"] = (self.shape,)  # as good as to expand, and quicker
            return
        for frame in msg["cond_indep_stack"]:
            if frame.dim is not None and frame.dim < -self.max_plate_nesting:
                raise ValueError(
                    f"site '{msg['name']}' is inside plate '{frame.name}' at dim {frame.dim}, "
                    f"but max_plate_nesting = {self.max_plate_nesting}"
                )
        msg["fn"] = expanded(fn, torch.broadcast_shapes(self.shape, shape))


def expanded(fn: Any, shape: torch.Size) -> Any:
    """A distribution for a larger batch, also if its class has no way to say so, or one that is broken."""
    try:
        return fn.expand(shape)
    except (NotImplementedError, TypeError):
        return ExpandedDistribution(fn, shape)


def cannot_be_drawn(site: Any, why: str) -> UnsupportedModelError:
    """The error about a site whose distribution has no draws, or none for a batch."""
    name = type(base_of(site["fn"])).__name__
    return UnsupportedModelError(
        f"site '{site['name']}' ({name}) cannot be drawn" + (f": {why}" if why else "")
    )


def draw_normal(fn: Normal, shape: torch.Size) -> Tensor:
    """Draw from a `Normal` of one mean and scale, in one pass over memory where `sample` takes three."""
    scale = float(fn.scale)
    if not scale >= 0:
        raise ValueError(f"a Normal has scale {scale}")
    return torch.empty(shape, dtype=fn.loc.dtype, device=fn.loc.device).normal_(float(fn.loc), scale)


def draw_quickly(fn: Any) -> Tensor | None:
    """Draw from a distribution, where there is a quicker way than its `sample`; None for others."""
    if type(fn) is Normal:
        return (
            torch.randn(fn.batch_shape, dtype=fn.loc.dtype, device=fn.loc.device).mul_(fn.scale).add_(fn.loc)
        )
    return draw_index(fn) if type(fn) is Categorical else None


def draw_index(fn: Categorical) -> Tensor | None:
    """Draw from a `Categorical` by inverting its distribution function: `multinomial` is four times slower.

    None if they are no probabilities; `multinomial` will then say so.
    """
    p = fn.probs if "probs" in vars(fn) else fn.logits.exp()  # what is not given would have to be computed
    if not float(p.min()) >= 0:  # NaN, if any is
        return None
    return index_at(p, torch.rand((*fn.batch_shape, 1), dtype=p.dtype, device=p.device))


def support_of(fn: Any) -> Tensor | None:
    """All values that a distribution has in any row, `[K, *event]`; None if they are not finitely many."""
    if not fn.has_enumerate_support:
        return None
    if isinstance(fn, ExpandedDistribution):
        return support_of(fn.base_dist)
    if isinstance(fn, Binomial | BetaBinomial):  # counts may end differently by row
        return torch.arange(int(fn.total_count.max()) + 1, device=fn.total_count.device).to(fn.mean.dtype)
    if isinstance(fn, Empirical):  # and samples differ; none is to count twice
        samples: Tensor = fn._samples.flatten(0, len(fn.batch_shape)).unique(dim=0)
        return samples
    try:
        support: Tensor = fn.enumerate_support(expand=False)
    except NotImplementedError:
        return None
    return support.reshape(-1, *fn.event_shape)


class Recorded(Messenger):
    """Keep every sample site a program visits, and name it after its time: `x` becomes `x_3`.

    A plate has a site, too, which ends here: two programs may both have a plate of the same name.
    What `pyro.deterministic` notes is renamed, but is no sample site.

    Args:
        time: The suffix; None leaves names alone.

    Attributes:
        sites: The messages by the name the program gave them; `value`, `fn` and `mask` are filled in
            once the site has run.
    """

    def __init__(self, time: int | None = None) -> None:
        super().__init__()
        self.time = time
        self.sites: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            msg["stop"] = True
            return
        name = msg["name"]
        if self.time is not None:
            msg["name"] = f"{name}_{self.time}"
        if is_deterministic(msg):
            return
        if name in self.sites:
            raise ValueError(f"two sample sites are named '{name}'")
        self.sites[name] = msg


def is_deterministic(msg: Any) -> bool:
    """Whether a message is of `pyro.deterministic`, which does not count as a sample site here."""
    return bool(msg["is_observed"] and msg["infer"].get("_deterministic"))


def base_of(fn: Any) -> Any:
    """A distribution without its masks and reinterpreted axes."""
    while isinstance(fn, (MaskedDistribution, Independent)):
        fn = fn.base_dist
    return fn


def mask_of(site: Any) -> Tensor | bool:
    """Where a site counts, by its distribution and any `poutine.mask`: broadcasts with its batch shape."""
    mask = _mask_of_distribution(site["fn"])
    outer: Tensor | bool | None = site["mask"]
    if outer is None or outer is True:
        return mask
    return outer if mask is True else mask & outer


def _mask_of_distribution(fn: TorchDistributionMixin) -> Tensor | bool:
    if isinstance(fn, MaskedDistribution):
        inner = _mask_of_distribution(fn.base_dist)
        mask: Tensor | bool = fn._mask
        return mask if inner is True else inner & mask
    reinterpreted = getattr(fn, "reinterpreted_batch_ndims", 0)
    if reinterpreted:  # a mask below `.to_event(n)` covers the event: seen if all of it is seen
        inner = _mask_of_distribution(fn.base_dist)
        return inner if isinstance(inner, bool) else inner.flatten(-reinterpreted).all(-1)
    return True
