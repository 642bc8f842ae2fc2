"""Where the truth of episodes ranks among draws from what a filter believed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.arrays import how_many_fit, on_the_right, pieces
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import require_same_sites
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.persistence import Persistent, Track
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.rng import inverse_cdf
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import Signature
    from cpomdp_ppl.state import State

LEVEL = 0.01
"""How likely it may be that a filter without fault is called not calibrated, over all tests together."""

ROUNDING = 64.0
"""Where all draws are the same, those this many units of rounding from the truth are tied with it."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """Where the truth came among draws from what was believed: uniform on [0, 1) if the belief is right.

    Attributes:
        values: `(rank + u) / (draws + 1)` with u uniform, one for each episode, float64 `[n]`.
        bins: Number of bins of the histogram.
    """

    values: Tensor
    bins: int

    @property
    def num_episodes(self) -> int:
        """Number of episodes n with a rank."""
        return len(self.values)

    @cached_property
    def counts(self) -> Tensor:
        """The rank histogram, int64 `[bins]`."""
        return histogram(self.values, self.bins)

    @cached_property
    def p_value(self) -> float:
        """The p-value of Pearson's χ² test against the uniform distribution; NaN without any episode.

        The test takes fewer bins than the histogram where those would have less than five episodes each, as
        the approximation by χ² is poor there.
        """
        n = self.num_episodes
        if not n:
            return math.nan
        bins = max(2, min(self.bins, n // 5))
        counts = self.counts if bins == self.bins else histogram(self.values, bins)
        chi2 = (counts - n / bins).double().square().sum() / (n / bins)
        # The upper tail of χ² with k degrees of freedom is Q(k/2, χ²/2); SciPy is not needed for that.
        return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), chi2 / 2))

    @property
    def hint(self) -> str:
        """What is wrong, in words, if anything is."""
        if not self.num_episodes:
            return "never seen"
        if self.p_value >= LEVEL:
            return "uniform"
        deviation = self.values - 0.5
        n = self.num_episodes
        shift = float(deviation.mean()) * (12 * n) ** 0.5  # standard normal, if ranks are uniform
        spread = (float(deviation.square().mean()) - 1 / 12) * (180 * n) ** 0.5  # likewise
        if max(abs(shift), abs(spread)) < 3:
            return "uneven: neither a shift nor a spread"
        if abs(spread) >= abs(shift):
            if spread > 0:
                return "over-confident: ranks pile up at both ends"
            return "under-confident: ranks crowd in the middle"
        return (
            f"too {'low' if shift > 0 else 'high'}: the truth ranks {'above' if shift > 0 else 'below'} draws"
        )


def histogram(values: Tensor, bins: int) -> Tensor:
    """How many of the values in [0, 1) are in each of so many bins of equal width, int64 `[bins]`."""
    return torch.bincount((values * bins).long().clamp(max=bins - 1), minlength=bins)


def normalised_ranks(truth: Tensor, draws: Tensor, possible: Tensor | None = None) -> Tensor:
    """Where the truth `[B, K]` comes among draws `[B, M, K]`, as a number in [0, 1), `[B, K]`.

    It is `(rank + u) / (M + 1)` with u uniform: exactly uniform, if the truth is one more such draw. Draws
    that equal the truth are tied with it; where all draws are the same up to rounding, up to rounding. Only
    `possible` draws count; the rank is NaN where there are none.
    """
    exact = not (truth.is_floating_point() or draws.is_floating_point())
    unit = 0.0 if exact else max(torch.finfo(x.dtype).eps for x in (truth, draws) if x.is_floating_point())
    y, x = truth.double()[:, None], draws.double()
    # Only where all is known for sure may rounding tell draws from the truth; elsewhere it would hide errors.
    known = x.amax(1, keepdim=True) - x.amin(1, keepdim=True) <= 4 * unit * y.abs()  # [B, 1, K]
    tied = torch.where(known, torch.isclose(x, y, rtol=ROUNDING * unit, atol=0.0), x == y)
    below = (x < y) & ~tied
    if possible is not None:
        tied, below = tied & possible, below & possible
    M = draws.shape[1] if possible is None else possible.sum(1)
    u = torch.rand(truth.shape, dtype=torch.float64, device=truth.device)
    ranks = (below.sum(1) + u * (tied.sum(1) + 1)) / (M + 1)
    return ranks if possible is None else torch.where(possible.any(1), ranks, torch.nan)


COMPONENTS_AT_ONCE = 2**22
"""How many components of drawn states and observations are held in memory together."""

Component = tuple[str, str]
"""A kind of quantity, `"states"` or `"observations"`, and the name of a leaf or site."""

Compared = tuple[Tensor, Tensor, Tensor | None]
"""What `normalised_ranks` takes: the truth `[R, K]`, draws `[R, M, K]`, and which of them count."""


def rank_episodes(
    backend: Backend, model: CPOMDP, episodes: Episodes, prior: Tensor, num_draws: int, progress: bool
) -> tuple[Tensor, dict[Component, Tensor]]:
    """Filter episodes, and rank what was so among draws from what was believed, at times drawn at random.

    To be called inside `inference_scope`. Returns the posterior over contexts at the end, `[B, C]`, and
    normalised ranks `[B, K]` of the K numbers of every state leaf and observation site; NaN for those that no
    time was found for.
    """
    recursion = backend.recursion(model)
    require_same_sites(recursion.model, recursion.signature, episodes)
    programs = Generative(model)
    times = _times(programs.signature, episodes)
    B = len(episodes)
    size = min(backend.episodes_at_once(model, recursion), _draws_at_once(recursion, num_draws))
    parts = [
        _Chunk(
            backend,
            recursion,
            programs,
            episodes if size >= B else episodes[rows],
            {what: at[rows] for what, at in times.items()},
            num_draws,
            prior,
            offset=rows.start,
        ).run()
        for rows in tqdm(list(pieces(B, size)), disable=not progress, desc="episodes")
    ]
    posterior = torch.cat([last for last, _ in parts])
    return posterior, {what: torch.cat([ranks[what] for _, ranks in parts]) for what in times}


class _Chunk:
    """Some of the episodes, from number `offset` on, and the filter at work on them."""

    def __init__(
        self,
        backend: Backend,
        recursion: Recursion,
        programs: Generative,
        episodes: Episodes,
        times: Mapping[Component, Tensor],
        num_draws: int,
        prior: Tensor,
        offset: int,
    ) -> None:
        self.backend = backend
        self.recursion = recursion
        self.programs = programs
        self.episodes = episodes
        self.times = times
        self.M = num_draws
        self.offset = offset
        self.prior = prior  # [C]
        self.ranks = {
            what: torch.full(at.shape, torch.nan, dtype=torch.float64, device=at.device)
            for what, at in times.items()
        }

    def run(self) -> tuple[Tensor, dict[Component, Tensor]]:
        """Filter, and rank each component at its time: as `rank_episodes` returns it."""
        prior = self.prior.double().expand(len(self.episodes), -1)
        persistent = Persistent(self.backend, self.recursion, prior)
        for step in scan(persistent, self.episodes, self.offset, allow_lost=True):  # it would have raised
            self.compare("observations", self.predicted, step.before, step.observed)
            self.compare("states", self.filtered, step.after, step.observed)
        return self.posterior(step.after.log_likelihood, self.episodes.horizon), self.ranks

    def compare(
        self, kind: str, compared: Callable[..., Iterator[Compared]], track: Track, seen: Observed
    ) -> None:
        """Rank one kind of quantity, in the episodes whose time it is."""
        due = {what: at == seen.time for what, at in self.times.items() if what[0] == kind}
        rows = torch.cat(list(due.values()), 1).any(1).nonzero()[:, 0]
        if not len(rows):
            return
        for what, each in zip(due, compared(track, seen, rows), strict=True):
            found = normalised_ranks(*each)
            self.ranks[what][rows] = torch.where(due[what][rows], found, self.ranks[what][rows])

    def posterior(self, total: Tensor, time: int) -> Tensor:
        """`P(c | o_{1:t})` from log-likelihoods `[C, B]`, `[B, C]`."""
        return log_normalised((self.prior.log() + total.T)[:, None], time).squeeze(1).exp()

    def draw(self, track: Track, time: int, rows: Tensor) -> tuple[Tensor, State]:
        """Contexts `[R, M]` and states with leaves `[R, M, …]`, jointly, from the belief in R episodes."""
        contexts = _draw_contexts(self.posterior(track.log_likelihood, time)[rows], self.M)
        mine = map_belief(lambda tensor: tensor.index_select(1, rows), track.belief)
        states = self.recursion.draw(mine, self.M)  # [C, R, M, …]
        r = torch.arange(len(rows), device=rows.device)[:, None]
        m = torch.arange(self.M, device=rows.device)
        # Some filters compute in double precision; the programs want states as they make them.
        return contexts, map_state(
            lambda leaf, values: values[contexts, r, m].to(leaf.dtype), self.programs.signature.state, states
        )

    def filtered(self, track: Track, seen: Observed, rows: Tensor) -> Iterator[Compared]:
        """The true `s_t`, and draws from `P(s_t | o_{1:t})`, by leaf."""
        _, states = self.draw(track, seen.time, rows)
        true = map_state(lambda leaf: leaf[rows, seen.time], self.episodes.states)
        for (_, draws), (_, truth) in zip(leaves(states), leaves(true), strict=True):
            yield truth.reshape(len(rows), -1), draws.reshape(len(rows), self.M, -1), None

    def predicted(self, track: Track, seen: Observed, rows: Tensor) -> Iterator[Compared]:
        """What was seen at t + 1, and draws from `P(o_{t+1} | h_t, a_t)`, by site."""
        R, M = len(rows), self.M
        contexts, states = self.draw(track, seen.time - 1, rows)
        percept = self.next_percept(
            map_state(lambda leaf: leaf.flatten(0, 1), states),
            None if seen.action is None else seen.action[rows].repeat_interleave(M, 0),
            contexts.flatten(),
        )
        for name, draws in percept.observations.items():
            # A draw in which the site is masked, as it may be by another site, says nothing of its value.
            possible = on_the_right(percept.observed[name], draws).expand_as(draws)
            truth = seen.observations[name][rows].reshape(R, -1)
            yield truth, draws.reshape(R, M, -1), possible.reshape(R, M, -1)

    def next_percept(self, states: State, actions: Tensor | None, contexts: Tensor) -> Percept:
        """What is seen after actions `[N]` in states with leaves `[N, …]`; right there, without any."""
        if actions is None:
            return self.programs.observe(states, contexts)
        return self.programs.step(states, actions, contexts).percept


def _times(signature: Signature, episodes: Episodes) -> dict[Component, Tensor]:
    """At which time each component is looked at in each episode, `[B, K]`, by kind and name; -1 for never.

    States of an episode that is over by then are looked at where it ended: that it is over depends on nothing
    that comes later, so that ranks are still uniform.
    """
    B, T = episodes.actions.shape[:2]
    t = torch.randint(1, T + 1, (B, 1), device=episodes.device)
    t = torch.minimum(t, episodes.lengths[:, None])
    times: dict[Component, Tensor] = {
        ("states", name): t.expand(-1, leaf.shape.numel()) for name, leaf in leaves(signature.state)
    }
    for site, spec in signature.observations.items():
        flags = episodes.observed[site]  # [B, T, *plates]
        first = torch.zeros_like(flags[:, 0])
        if episodes.initially_observed is not None:
            first = episodes.initially_observed[site]
        flags = torch.cat([first[:, None], flags], 1)
        flags = on_the_right(flags, flags.new_empty((B, T + 1, *spec.shape))).expand(B, T + 1, *spec.shape)
        times["observations", site] = observed_times(flags.reshape(B, T + 1, -1))
    return times


def observed_times(observed: Tensor) -> Tensor:
    """For each episode and component of flags `[B, T, K]`, a time at which it was seen, `[B, K]`; or -1.

    A time drawn from all at which an episode saw something would be biased: an agent that looks until it
    sees what it likes has few looks where the first is to its liking, each of which would be drawn more
    often. Whether to take a look must not depend on what it shows, nor on what comes after. So an episode
    takes its first look at or after a time at which the *next* episode looked; the last takes its first.
    """
    B, T, K = observed.shape
    lots = torch.rand(B, T, 1, device=observed.device).expand(-1, -1, K)
    wish = torch.where(observed, lots, -1.0).argmax(1)  # [B, K]
    wish = torch.where(observed.any(1), wish, 0)
    earliest = torch.cat([wish[1:], wish.new_zeros(1, K)])
    t = torch.arange(T, device=observed.device)[:, None]
    found = torch.where(observed & (t >= earliest[:, None]), t, T).amin(1)
    return torch.where(found < T, found, -1)


def _draws_at_once(recursion: Recursion, M: int) -> int:
    """In how many episodes M draws fit in memory, for all contexts, if all are due at the same time."""
    sizes = [leaf.shape.numel() for _, leaf in leaves(recursion.signature.state)]
    sizes += [site.shape.numel() for site in recursion.signature.observations.values()]
    return how_many_fit(COMPONENTS_AT_ONCE, recursion.model.num_contexts * M * max(sum(sizes), 1))


def _draw_contexts(posterior: Tensor, num_draws: int) -> Tensor:
    """Contexts `[B, M]` from distributions `[B, C]`; one of probability 0 never comes."""
    u = torch.rand(len(posterior), num_draws, dtype=posterior.dtype, device=posterior.device)
    return inverse_cdf(posterior, u)
