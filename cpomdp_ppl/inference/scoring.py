"""The density of what was observed, read off the observation program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from cpomdp_ppl.errors import ObservationError, UnsupportedModelError
from cpomdp_ppl.handlers import is_deterministic, mask_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature


HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Seen:
    """What happened in one step of B episodes.

    Attributes:
        time: When it was seen, from 0 (before the first action) to T.
        action: `[B]`; None before the first action.
        observations: By site, `[B, …]`.
        observed: By site, bool `[B]` (`[B, …]` for sites in the program's own plates).
        rows: Indices of the episodes in which anything was observed; None if it was in all.
        alive: Which episodes are still going on, bool `[B]`; None if all are.
        offset: Number of the first of these episodes, for messages.
        numbers: Of these episodes among those, `[B]`, if they are a selection.
        complete: Whether everything is known to have been observed wherever anything was.
    """

    time: int
    action: Tensor | None
    observations: Mapping[str, Tensor]
    observed: Mapping[str, Tensor]
    rows: Tensor | None = None
    alive: Tensor | None = None
    offset: int = 0
    numbers: Tensor | None = None
    complete: bool = False

    @property
    def everything(self) -> bool:
        """Whether everything is known to have been observed in all of these episodes."""
        return self.complete and self.rows is None

    def episode(self, b: int) -> int:
        """Which episode the b-th is among all, for messages."""
        return self.offset + (b if self.numbers is None else int(self.numbers[b]))

    def select(self, rows: Tensor) -> Seen:
        """The same step for some of the episodes, in each of which something was observed."""
        return Seen(
            self.time,
            None if self.action is None else self.action[rows],
            {site: value[rows] for site, value in self.observations.items()},
            {site: flags[rows] for site, flags in self.observed.items()},
            None,
            None if self.alive is None else self.alive[rows],
            self.offset,
            rows if self.numbers is None else self.numbers[rows],
            self.complete,
        )


def axes(tensor: Tensor, own: int = 0) -> Tensor:
    """`[B]` as `[1, B, 1]`, with `own` further axes: how actions meet `[context, episode, particle]`."""
    return tensor.reshape(1, -1, 1, *[1] * own)


def log_density_of_seen(
    model: CPOMDP, signature: Signature, state: Any, context: Tensor, seen: Seen, *, draw: bool = False
) -> Tensor:
    """`log p(o | s, a, c)` of everything observed in a step, for every state.

    Args:
        model: The CPOMDP.
        signature: Of the model.
        state: Leaves `[C, B, N, …]`.
        context: `[C, 1, 1]` (with the program's own axes).
        seen: The step.
        draw: Whether to draw the value of a site that was not observed, but that others depend on: right for
            particles, each of which then has one; without, such a step is refused.

    Returns:
        `[C, B, N]`, or a shape that broadcasts to it.
    """
    action = None if seen.action is None else axes(seen.action, model.max_plate_nesting)
    with Scored(seen, signature, draw) as scored:
        model.observation(state, action, context)
    if scored.log_prob is None:
        raise ObservationError("observation: none of its sites was given in the episodes")
    return scored.log_prob


class Scored(Messenger):
    """Give every observation site what was seen there, and add up the log-densities.

    Attributes:
        log_prob: The sum so far, `[C, B, N]`; sites in the program's own plates are summed over those.
    """

    def __init__(self, seen: Seen, signature: Signature, draw: bool = False) -> None:
        super().__init__()
        self.seen = seen
        self.signature = signature
        self.draw = draw
        self.log_prob: Tensor | None = None

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        name, fn = msg["name"], unmasked(msg["fn"])
        spec = self.signature.observations[name]
        B = len(self.seen.observations[name])
        value = self.seen.observations[name].reshape(1, B, 1, *spec.shape)
        flags = self.seen.observed[name]  # [B, *plates]
        at_cells = flags.reshape(1, B, 1, *spec.plates)
        everywhere = self.seen.everything or bool(flags.all())
        self.require_visible(name, mask_of(msg), None if everywhere else at_cells)
        msg["value"] = value
        if not everywhere and name in self.signature.parents:
            self.require_drawing(name)
            event = (1,) * (value.dim() - at_cells.dim())
            msg["value"] = torch.where(at_cells.reshape(at_cells.shape + event), value, fn.sample())
        log_prob = log_density(fn, value)  # [C, B, N, *plates]
        if not everywhere:
            log_prob = torch.where(at_cells, log_prob, log_prob.new_zeros(()))
        if spec.plates:
            log_prob = log_prob.flatten(3).sum(-1)
        self.log_prob = log_prob if self.log_prob is None else self.log_prob + log_prob

    def require_drawing(self, name: str) -> None:
        """Raise if a site that others depend on was not observed, and there is no way to marginalise it."""
        if not self.draw:
            raise UnsupportedModelError(
                f"observation: other sites depend on site '{name}', which was not observed in every episode "
                f'at time {self.seen.time}; only the particle filter ("smc") can marginalise it'
            )

    def require_visible(self, name: str, mask: Tensor | bool, observed: Tensor | None) -> None:
        """Raise where something was observed (None: everywhere) that the program masks."""
        if mask is True:
            return
        visible = mask if isinstance(mask, Tensor) else torch.as_tensor(mask)
        if 0 in visible.stride():
            visible = _unexpanded(visible)
        if observed is not None:
            visible = visible | ~observed
        if not bool(visible.all()):
            B = len(self.seen.observed[name])
            hidden = ~visible.expand(torch.broadcast_shapes(visible.shape, (1, B, 1, *visible.shape[3:])))
            b = int(hidden.nonzero()[0, 1])
            raise ObservationError(
                f"site '{name}' at time {self.seen.time} of episode {self.seen.episode(b)}: it was observed, "
                "but the program masks it out there"
            )


def _unexpanded(tensor: Tensor) -> Tensor:
    """A tensor with the axes along which it was merely expanded back at size 1."""
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


def unmasked(fn: Any) -> Any:
    """A distribution without its masks."""
    if isinstance(fn, MaskedDistribution):
        return unmasked(fn.base_dist)
    if isinstance(fn, dist.Independent):
        base = unmasked(fn.base_dist)
        return fn if base is fn.base_dist else dist.Independent(base, fn.reinterpreted_batch_ndims)
    return fn


def log_density(fn: Any, value: Tensor) -> Tensor:
    """`fn.log_prob(value)`, but `-inf` wherever the value is impossible.

    torch does not say so by itself: with validation off, densities outside the support are arbitrary,
    and probabilities of 0 and 1 are clamped.
    """
    if fn.support is constraints.real:
        return _log_prob(fn, value)  # observations are finite where they count
    inside = fn.support.check(value)
    if not bool(inside.all()):
        at_events = inside.reshape(inside.shape + (1,) * len(fn.event_shape))
        value = torch.where(at_events, value, _possible_value(fn, value))
        return torch.where(inside, _log_prob(fn, value), -torch.inf)
    return _log_prob(fn, value)


def _possible_value(fn: Any, like: Tensor) -> Tensor:
    """Some value inside a distribution's support, to evaluate its density where it will not count."""
    for constant in (0.0, 1.0, 0.5):
        candidate = torch.full_like(like, constant)
        if bool(fn.support.check(candidate).all()):
            return candidate
    mean: Tensor = fn.mean
    return mean


def _log_prob(fn: Any, value: Tensor) -> Tensor:
    if type(fn) is dist.Normal:  # in half the passes over memory that torch takes
        z = (value - fn.loc).div_(fn.scale)
        return z.square_().mul_(-0.5).sub_(fn.scale.log()).sub_(HALF_LOG_2PI)
    if isinstance(fn, dist.Bernoulli) and "probs" in vars(fn):
        return torch.where(value > 0.5, fn.probs, 1 - fn.probs).log()
    if isinstance(fn, dist.Categorical) and "probs" in vars(fn):
        index = value.long()[..., None]
        shape = torch.broadcast_shapes(fn.probs.shape[:-1], value.shape)
        probs = fn.probs.expand(*shape, -1)
        return probs.gather(-1, index.expand(*shape, 1)).squeeze(-1).log()
    log_prob: Tensor = fn.log_prob(value)
    return log_prob
