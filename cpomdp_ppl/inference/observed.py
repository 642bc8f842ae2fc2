"""The density of what was observed, read off the observation program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import pyro.distributions as dist
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.dataflow import dependencies
from cpomdp_ppl.errors import ObservationError, UnsupportedModelError
from cpomdp_ppl.handlers import is_deterministic, mask_of, support_of
from cpomdp_ppl.inference.density import log_density, unmasked
from cpomdp_ppl.inference.enumeration import ENGINE_AXES, Enumerated
from cpomdp_ppl.inference.sampling import draw
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.generative import Generative
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import Signature

MOST_VALUES = 64
"""Over how many combinations of values of hidden sites to sum, at the most."""


@dataclass(frozen=True)
class Observed:
    """What happened in one step of B episodes.

    Attributes:
        time: When it was seen, from 0 (before the first action) to T.
        action: `[B]`, or `[B, D]` of continuous ones; None before the first action.
        observations: By site, `[B, …]`.
        observed: By site, bool `[B]` (`[B, …]` for sites in the program's own plates).
        rows: Indices of the episodes in which anything was observed; None if it was in all.
        alive: Which episodes are still going on, bool `[B]`; None if all are.
        offset: Number of the first of these episodes, for messages.
        numbers: Numbers of these episodes among those, `[B]`, if they are a selection.
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

    @staticmethod
    def at(
        time: int,
        action: Tensor | None,
        observations: Mapping[str, Tensor],
        observed: Mapping[str, Tensor],
        **others: Any,
    ) -> Observed:
        """A step of which it is found out where anything was observed."""
        (rows,), (complete,) = rows_observed({site: flags[None] for site, flags in observed.items()})
        return Observed(time, action, observations, observed, rows, complete=complete, **others)

    @property
    def everything(self) -> bool:
        """Whether everything is known to have been observed in all of these episodes."""
        return self.complete and self.rows is None

    def episode(self, b: int) -> int:
        """Which episode the b-th is among all, for messages."""
        return self.offset + (b if self.numbers is None else int(self.numbers[b]))

    def select(self, rows: Tensor) -> Observed:
        """The same step for some of the episodes, in each of which something was observed."""
        return Observed(
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


def rows_observed(observed: Mapping[str, Tensor]) -> tuple[list[Tensor | None], list[bool]]:
    """In which episodes anything was observed (None for all), and whether everything was in those.

    For every time, read all at once from the flags `[T, B, …]`.
    """
    flags = torch.cat(
        [each.flatten(2) if each.dim() > 2 else each[..., None] for each in observed.values()], -1
    )
    anything = flags.any(-1)  # [T, B]
    counts = anything.sum(1).tolist()
    complete = (flags.all(-1) == anything).all(1).tolist()
    episode = anything.nonzero()[:, 1].split(counts)
    B = anything.shape[1]
    return [None if count == B else rows for count, rows in zip(counts, episode, strict=True)], complete


def axes(tensor: Tensor, plate_axes: int = 0) -> Tensor:
    """`[B, …]` as `[1, B, 1, …]`, a 1 for each plate: how actions meet `[context, episode, particle]`."""
    return tensor.reshape(1, -1, 1, *[1] * plate_axes, *tensor.shape[1:])


def hidden_parents(
    signature: Signature, seen: Observed, children: Collection[str] | None = None
) -> frozenset[str]:
    """Sites that were not seen everywhere, though the distribution of something that was depends on them.

    With `children`, of the distributions of these sites alone.
    """
    parents = signature.dependencies.parents
    if not parents or seen.everything:
        return frozenset()
    needed: set[str] = set()
    for name in reversed(list(signature.observations)):  # what comes later has its say first
        counts = (children is None or name in children) and bool(seen.observed[name].any())
        if name in parents and (counts or name in needed):
            needed |= parents[name]
    return frozenset(name for name in needed if not bool(seen.observed[name].all()))


def unseen(name: str, time: int, why: str) -> UnsupportedModelError:
    """The error that a site was not seen that others depend on, and why that cannot be helped."""
    return UnsupportedModelError(
        f"observation: other sites depend on site '{name}', which was not observed in every episode at time "
        f'{time}, and {why}; the particle filter ("smc") can do without it'
    )


Draw: TypeAlias = Callable[[str, Any], tuple[Tensor, Tensor]]
"""From the name of a site and its distribution to a value for every particle, and `log p / q` of these."""


def log_density_of_seen(
    model: CPOMDP,
    signature: Signature,
    state: Any,
    context: Tensor,
    seen: Observed,
    *,
    draw: Draw | None = None,
    most: int = MOST_VALUES,
) -> Tensor:
    """`log p(o | s, a, c)` of everything observed in a step, for every state: broadcasts to `[C, B, N]`.

    A site that was not observed, but on which others depend that were, is summed over.

    Args:
        model: The CPOMDP.
        signature: Signature of the model.
        state: Leaves `[C, B, N, …]`.
        context: `[C, 1, 1]` (with the program's own axes).
        seen: The step.
        draw: Draws the values of such sites where they cannot be summed over: right for particles, each of
            which then has one; without, such a step is refused.
        most: Over how many combinations of values to sum.

    Raises:
        UnsupportedModelError: If a site cannot be summed over, and there is nothing to draw with.
    """
    action = None if seen.action is None else axes(seen.action, model.max_plate_nesting)
    with Scored(seen, signature, draw, most) as scored:
        model.percept(state, action, context)
    if scored.log_prob is None:
        raise ObservationError("observation: none of its sites was given in the episodes")
    return marginalised(scored.log_prob)


def marginalised(log_prob: Tensor) -> Tensor:
    """Sum over the values of hidden sites, which are on axes left of `[C, B, N]`."""
    added = log_prob.dim() - ENGINE_AXES
    return log_prob.flatten(0, added - 1).logsumexp(0) if added > 0 else log_prob


class Scored(Enumerated):
    """Give every observation site what was seen there, and add up the log-densities.

    A site that was not seen takes all its values at once, on new axes, if others depend on it.

    Attributes:
        log_prob: The sum so far, `[…, C, B, N]`; sites in the program's own plates are summed over those.
    """

    def __init__(
        self, seen: Observed, signature: Signature, draw: Draw | None = None, most: int = MOST_VALUES
    ) -> None:
        own = next(len(site.plates) for site in signature.observations.values())
        super().__init__("observation", own)
        self.seen = seen
        self.signature = signature
        self.draw = draw
        self.left = most
        self.hidden = hidden_parents(signature, seen)
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
        possible = self.possible(name, mask_of(msg), None if everywhere else at_cells)
        log_prob = log_density(fn, value, name)  # [C, B, N, *plates]
        if not everywhere:
            log_prob = torch.where(at_cells, log_prob, log_prob.new_zeros(()))
        if possible is not None:
            log_prob = torch.where(possible, log_prob, -torch.inf)
        msg["value"] = value
        if name in self.hidden:
            others, log_prior = self.others(name, fn, at_cells)
            event = (1,) * (value.dim() - at_cells.dim())
            msg["value"] = torch.where(at_cells.reshape(at_cells.shape + event), value, others)
            log_prob = log_prob + log_prior
        if spec.plates:
            log_prob = log_prob.flatten(-self.plate_axes).sum(-1)
        self.log_prob = log_prob if self.log_prob is None else self.log_prob + log_prob

    def others(self, name: str, fn: Any, seen: Tensor) -> tuple[Tensor, Tensor]:
        """What a hidden site may have been, and how likely that is where it was not seen, `[…, *plates]`.

        Where it was seen, all its values stand for the same one and share its probability.
        """
        base, independent = fn, 0
        while isinstance(base, dist.Independent):
            base, independent = base.base_dist, independent + base.reinterpreted_batch_ndims
        support = support_of(base)
        cells = (*self._plates(fn), *fn.event_shape[:independent])
        many = None if support is None else len(support) ** math.prod(cells)
        if many is None or many > self.left:
            if self.draw is None:
                number = "infinitely many" if many is None else f"{many} (at most {self.left} here)"
                raise unseen(name, self.seen.time, f"its values are too many to be summed over: {number}")
            drawn, log_ratio = self.draw(name, fn)
            return drawn, torch.where(seen, 0.0, log_ratio)
        assert support is not None
        self.left //= many
        values = support[self._grid(torch.arange(len(support), device=support.device), cells)]
        self.axes += math.prod(cells)
        log_p = log_density(base, values, name)  # [K, …, K, C, B, N, *cells]
        log_p = log_p.flatten(-independent).sum(-1) if independent else log_p
        shared = -math.log(len(support)) * math.prod(fn.event_shape[:independent])
        return values, torch.where(seen, shared, log_p)

    def possible(self, name: str, mask: Tensor | bool, observed: Tensor | None) -> Tensor | None:
        """Where what was observed (None: everywhere) can have been seen, as the program masks it; None: all.

        That may depend on what a hidden site was; a value of the site that masks what was seen is impossible.

        Raises:
            ObservationError: If something was observed that the program masks whatever the others were.
        """
        if mask is True:
            return None
        visible = mask if isinstance(mask, Tensor) else torch.as_tensor(mask)
        if 0 in visible.stride():
            visible = unexpanded(visible)
        visible = visible.reshape((1,) * (ENGINE_AXES + self.plate_axes - visible.dim()) + visible.shape)
        if observed is not None:
            visible = visible | ~observed
        if bool(visible.all()):
            return None
        depends = not self.hidden.isdisjoint(self.signature.dependencies.mask_parents.get(name, ()))
        B, first = len(self.seen.observed[name]), visible.dim() - ENGINE_AXES - self.plate_axes
        shown = visible.expand(*visible.shape[: first + 1], B, *visible.shape[first + 2 :])
        if depends:  # along the values of hidden sites, or from particle to particle
            shown = shown.flatten(0, first).any(0)[None].any(2, keepdim=True)
        if bool(shown.all()):
            return visible
        b = int((~shown).nonzero()[0, shown.dim() - self.plate_axes - 2])
        raise ObservationError(
            f"site '{name}' at time {self.seen.time} of episode {self.seen.episode(b)}: it was observed, "
            "but the program masks it out there"
        )


def unexpanded(tensor: Tensor) -> Tensor:
    """A tensor with the axes along which it was merely expanded back at size 1."""
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


class PerceptDensity:
    """The density of percepts, as the `observation` program of a model has it.

    To be made and used inside `inference_scope`.

    Args:
        programs: The programs of the CPOMDP.

    Examples:
        >>> from cpomdp_ppl.generative import Generative
        >>> from cpomdp_ppl.inference import inference_scope
        >>> from cpomdp_ppl.models import LightDark
        >>> from cpomdp_ppl.policy import Percept
        >>> model = LightDark()
        >>> percept = Percept(torch.tensor([2]), {"z": torch.tensor([0.4])}, {"z": torch.tensor([True])})
        >>> with inference_scope(model, seed=0):
        ...     PerceptDensity(Generative(model))(torch.tensor([0.5]), percept).shape
        torch.Size([1, 2])
    """

    def __init__(self, programs: Generative) -> None:
        self.model = programs.model
        self.programs = programs

    @cached_property
    def signature(self) -> Signature:
        """The signature of the model, with what its observation sites depend on."""
        signature = self.programs.signature
        return replace(signature, dependencies=dependencies(self.model, signature))

    def __call__(self, state: Any, percept: Percept) -> Tensor:
        """`log p(o | s, a, c)` of what was observed in states with leaves `[N, …]`, by context, `[N, C]`."""
        C, N = self.model.num_contexts, len(next(iter(percept.observed.values())))
        plates = [1] * self.model.max_plate_nesting
        states = map_state(lambda leaf: leaf[None, :, None], state)  # [1, N, 1, …]
        contexts = torch.arange(C, device=self.model.device).reshape(-1, 1, 1, *plates)
        observed = Observed(0, percept.action, percept.observations, percept.observed)
        shape = torch.Size((C, N, 1, *plates))

        def draw_hidden(name: str, fn: Any) -> tuple[Tensor, Tensor]:
            return draw(fn, shape, common=True), torch.zeros((), device=self.model.device)

        density = log_density_of_seen(
            self.model, self.signature, states, contexts, observed, draw=draw_hidden
        )
        return density.expand(C, N, 1)[..., 0].T
