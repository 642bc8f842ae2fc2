"""The forward pass of a filter over recorded episodes: all that filters a batch goes through `scan`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError
from cpomdp_ppl.inference.belief import where_alive
from cpomdp_ppl.inference.observed import Observed, rows_observed
from cpomdp_ppl.signature import ENDED
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP


Step: TypeAlias = "Callable[[Any, Observed], tuple[Any, Tensor]]"
"""From a belief and what was done and observed to the next belief and the increment `[C, B]`."""


class TimeBuffer:
    """What a recursion says at each of `length` times, in memory that is taken at once.

    Small tensors that stay, made one by one between large ones that go, would each break a gap that the next
    large one needs, and the memory of long episodes would grow by a large tensor for every step.

    Attributes:
        values: Leaves `[length, C, B, …]`; None before the first is written.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.values: Any = None

    def __setitem__(self, t: int, value: Any) -> None:
        if t == 0:
            self.values = map_state(lambda leaf: leaf.new_empty((self.length, *leaf.shape)), value)
        self.values = map_state(lambda kept, leaf: _written(kept, t, leaf), self.values, value)

    def by_episode(self) -> Any:
        """Leaves `[B, length, C, …]`; None for what the recursion does not know."""
        return map_state(lambda leaf: leaf.movedim(2, 0), self.values)


def _written(kept: Tensor, t: int, leaf: Tensor) -> Tensor:
    """A series with one more of its terms; of a wider type, if the term is, as `torch.stack` has it."""
    shape = kept.shape[1:]
    if leaf.shape != shape:
        raise ValueError(f"a recursion says {list(leaf.shape)} at step {t}, but {list(shape)} at the first")
    kept = kept.to(torch.promote_types(kept.dtype, leaf.dtype))
    kept[t] = leaf
    return kept


class Stepping(Protocol):
    """What `scan` needs of a recursion; see `cpomdp_ppl.inference.backend.Recursion`."""

    model: CPOMDP

    def start(self, num_episodes: int) -> Any:
        """The belief about `s_0`."""
        ...

    def condition(self, belief: Any, observed: Observed) -> tuple[Any, Tensor]:
        """Condition on what was observed, without moving. Returns the belief and the increment `[C, B]`."""
        ...

    def step(self, belief: Any, observed: Observed) -> tuple[Any, Tensor]:
        """Move by the action, then condition on what was observed. Returns belief and increment `[C, B]`."""
        ...


class FilterStep:
    """One time of a forward pass: a belief, what was observed, and what the belief becomes.

    The filter takes the step when `after` or `increment` is first asked for, or when the pass goes on. What a
    consumer draws from `before` until then comes before the filter's own random numbers.

    Attributes:
        before: The belief before the step.
        observed: What was done and observed; at time 0 of models without an initial observation, nothing.
    """

    def __init__(
        self, recursion: Stepping, before: Any, observed: Observed, num_episodes: int, step: Step
    ) -> None:
        self._recursion, self._num_episodes, self._step = recursion, num_episodes, step
        self.before, self.observed = before, observed

    @property
    def after(self) -> Any:
        """The belief after the step; episodes that are over keep theirs."""
        return self._outcome[0]

    @property
    def increment(self) -> Tensor:
        """`log p(o_t | h_{t-1}, a_{t-1}, c)`, float64 `[C, B]`; zero for episodes that are over."""
        return self._outcome[1]

    @cached_property
    def _outcome(self) -> tuple[Any, Tensor]:
        recursion, observed = self._recursion, self.observed
        if observed.action is not None:
            after, increment = self._step(self.before, observed)
        elif observed.observations:
            after, increment = recursion.condition(self.before, observed)
        else:
            model, B = recursion.model, self._num_episodes
            return self.before, torch.zeros(model.num_contexts, B, dtype=torch.float64, device=model.device)
        if observed.alive is not None:
            after = where_alive(observed.alive, after, self.before)
        return after, increment


def scan(
    recursion: Stepping,
    episodes: Episodes,
    offset: int = 0,
    *,
    allow_lost: bool = False,
    step_by: Step | None = None,
) -> Iterator[FilterStep]:
    """Filter a batch of episodes: the steps to times 0 … T, one after the other.

    The first is the initial observation; for models without one, nothing is observed, and nothing changes.

    Args:
        recursion: The filter at work.
        episodes: What was done and observed, in B episodes.
        offset: Number of the first of these episodes, for messages.
        allow_lost: Whether an episode may be impossible under every context.
        step_by: What to do in place of `recursion.step`: the same, and to note how it came about.

    Raises:
        DegenerateWeightsError: If no context can have produced an episode, at the end of the pass.
        DensityError: If a density is not a number, likewise.
    """
    times = list(observed_in_time(episodes, offset))
    increments = TimeBuffer(len(times))
    for t, step in enumerate(steps_through(recursion, times, len(episodes), step_by)):
        yield step
        increments[t] = step.increment.detach()
    require_possible(recursion.model, times, increments.values, allow_lost=allow_lost)


def steps_through(
    recursion: Stepping, times: Iterable[Observed], num_episodes: int, step_by: Step | None = None
) -> Iterator[FilterStep]:
    """The steps of a filter through what was observed in B episodes, possible or not."""
    belief = recursion.start(num_episodes)
    for observed in times:
        step = FilterStep(recursion, belief, observed, num_episodes, step_by or recursion.step)
        yield step
        belief = step.after


def observed_in_time(episodes: Episodes, offset: int = 0) -> Iterator[Observed]:
    """What was done and observed in a batch of episodes, at times 0 … T."""
    yield _observed_first(episodes, offset)
    actions = episodes.lasting_actions.unbind(1)
    observations = {site: value.unbind(1) for site, value in episodes.observations.items()}
    observed = {site: flags.unbind(1) for site, flags in episodes.observed.items()}
    shortest = int(episodes.lengths.min())
    rows, complete = rows_observed({site: flags.movedim(1, 0) for site, flags in episodes.observed.items()})
    for t in range(episodes.horizon):
        yield Observed(
            t + 1,
            actions[t],
            {site: value[t] for site, value in observations.items()},
            {site: flags[t] for site, flags in observed.items()},
            rows[t],
            None if t < shortest else t < episodes.lengths,
            offset,
            complete=complete[t],
        )


def _observed_first(episodes: Episodes, offset: int) -> Observed:
    """What was observed before the first action."""
    values, flags = episodes.initial_observations, episodes.initially_observed
    if values is None or flags is None:
        return Observed(0, None, {}, {}, torch.arange(0, device=episodes.device), None, offset)
    return Observed.at(0, None, values, flags, offset=offset)


def require_possible(
    model: CPOMDP, times: Sequence[Observed], increments: Tensor, *, allow_lost: bool = False
) -> None:
    """Raise unless every episode is possible, by increments `[times, C, B]`; see `scan`."""
    highest = increments.sum(0).amax(0)  # [B]
    if not bool((torch.isfinite(highest) | (allow_lost & (highest == -torch.inf))).all()):
        total = torch.zeros_like(increments[0])
        for observed, increment in zip(times, increments, strict=True):
            total = added(model, total, increment, observed)


def added(model: CPOMDP, total: Tensor, increment: Tensor, observed: Observed) -> Tensor:
    """Log-likelihoods `[C, B]` with the increment of one step; raises as `scan` does."""
    total = total + increment
    highest = total.amax(0)  # [B]: NaN wins, and -inf only if every context is impossible
    if not bool(torch.isfinite(highest).all()):
        bad = torch.isnan(increment) | (increment == torch.inf)
        values = ", ".join(f"'{site}'" for site in observed.observations)
        if bool(bad.any()):
            c, b = bad.nonzero()[0].tolist()
            raise DensityError(
                f"time {observed.time} of episode {observed.episode(b)} in context "
                f"'{model.context_names[c]}': the density of site {values} is {increment[c, b]}"
            )
        b = int((~torch.isfinite(highest)).nonzero()[0])
        sites = [site for site, flags in observed.observed.items() if bool(flags[b].any())]
        shown = ", ".join(f"'{site}' = {_plain(observed.observations[site][b])}" for site in sites)
        advice = "try more of them (`num_particles`)"
        if ENDED in sites:
            advice += (
                ", or next states for each (`tries`, which costs less); a chance in place of an end that is "
                'certain, or "grid", leave some alive'
            )
        raise DegenerateWeightsError(
            f"time {observed.time} of episode {observed.episode(b)}: no context can have produced site "
            f"{shown}; either the data are not the model's or, in a particle filter, all particles are "
            f"elsewhere: {advice}"
        )
    return total


def _plain(value: Tensor) -> Any:
    return value.item() if value.numel() == 1 else value.tolist()
