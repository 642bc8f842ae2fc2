"""Playing and filtering a batch: the step of an iteration that meets the world."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import one_hot

from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import Filtering
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.rollout import simulate
from solvers.cids.batch import Batch
from solvers.cids.group import SINGLE_PROCESS
from solvers.cids.playing import Moments, Played, play_on

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy
    from solvers.cids.batch import Statistics
    from solvers.cids.group import SingleProcess
    from solvers.cids.lucky import LuckyMoments
    from solvers.cids.policy import Exploring

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, less whole numbers, are spread evenly."""

SHARD = 250
"""Most episodes in a shard. It is part of what a seed means: another number makes larger batches differ."""


@dataclass(frozen=True)
class Shard:
    """Successive episodes of a batch that are played with random numbers of their own."""

    number: int  # its place among the shards of the batch, from 0
    rows: slice  # its episodes

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def seed(self, seed: int) -> int:
        """The seed of this shard, derived from the batch's; the first shard has the batch's own."""
        return seed if self.number == 0 else seed_for(seed, self.number)


def split(batch_size: int) -> list[Shard]:
    """Split a batch into as few shards as possible, all of about the same size.

    What is played in a shard depends on the batch alone, not on how many processes share it.

    Examples:
        >>> [len(shard) for shard in split(200)], [len(shard) for shard in split(700)]
        ([200], [234, 233, 233])
    """
    number = -(-batch_size // SHARD)
    size, longer = divmod(batch_size, number)
    starts = [k * size + min(k, longer) for k in range(number + 1)]
    return [Shard(k, slice(starts[k], starts[k + 1])) for k in range(number)]


class Begun(NamedTuple):
    """Moments that episodes begin from, and which of them are the problem's own, or told the context."""

    moments: Moments
    own: Tensor  # bool [B]
    told: Tensor  # bool [B]


@dataclass(frozen=True, eq=False)
class Beginnings:
    """How episodes begin.

    Attributes:
        told: Which share of them is told the context.
        restarts: Which share begins in the middle of lucky episodes.
        lucky: Those moments; None if there are none.
    """

    told: float = 0.0
    restarts: float = 0.0
    lucky: LuckyMoments | None = None

    def of(self, backend: Backend, model: CPOMDP, contexts: Tensor, prior: Tensor) -> Begun:
        """Moments to begin from in contexts `[B]` with priors `[B, C]`.

        To be called inside `inference_scope`. Contexts come in order, so that those who begin otherwise are
        spread evenly over them.
        """
        B = len(contexts)
        evenly = (torch.arange(B, device=contexts.device) * GOLDEN_RATIO + float(torch.rand(()))) % 1  # [B]
        again = evenly < self.restarts
        again = again & self.lucky.has(contexts) if self.lucky is not None else torch.zeros_like(again)
        told = (evenly < self.restarts + self.told) & ~again
        sure = one_hot(contexts, prior.shape[1]).to(prior)
        prior = torch.where(told[:, None], sure, prior)
        if not bool(again.any()):
            return Begun(Moments.first(backend, model, contexts, prior), ~told, told)
        assert self.lucky is not None
        first = (~again).nonzero()[:, 0]
        parts = [Moments.first(backend, model, contexts[first], prior[first])] if len(first) else []
        moments = Moments.joined([*parts, self.lucky.draw(contexts[again])])
        none = torch.zeros(int(again.sum()), dtype=torch.bool, device=told.device)
        return Begun(moments, torch.cat([~told[first], none]), torch.cat([told[first], none]))


@dataclass(frozen=True)
class Experience:
    """Plays episodes of a model and filters them, in shards that a group of processes can divide up."""

    model: CPOMDP
    backend: Backend
    group: SingleProcess = SINGLE_PROCESS

    @property
    def statistics(self) -> Statistics:
        """Means over all episodes of a batch."""
        return self.group

    def shards(self, batch_size: int) -> list[Shard]:
        """Those that this process plays; if they cannot be dealt evenly, the last processes have one more."""
        rank, size = self.group.rank, self.group.size
        return split(batch_size)[::-1][size - 1 - rank :: size][::-1]

    def play(self, policy: Policy, contexts: Tensor, prior: Tensor, seed: int) -> Episodes:
        """This process's episodes of a batch with true contexts `[B]`, priors `[B, C]` and a seed."""
        parts = []
        for shard in self.shards(len(prior)):
            c, p = contexts[shard.rows], prior[shard.rows]
            parts.append(simulate(self.model, policy, len(c), contexts=c, prior=p, seed=shard.seed(seed)))
        return parts[0] if len(parts) == 1 else Episodes.concatenate(parts)

    def live(
        self, acting: Exploring, contexts: Tensor, prior: Tensor, beginnings: Beginnings, seed: int
    ) -> Batch:
        """Play this process's episodes of a batch with the filter inside the policy.

        Args:
            acting: The policy, which reads beliefs.
            contexts: The true contexts of the batch, `[B]`.
            prior: Priors, `[B, C]`.
            beginnings: How episodes begin.
            seed: Seed of the batch.
        """
        parts, begun = [], []
        for shard in self.shards(len(prior)):
            with inference_scope(self.model, seed_for(shard.seed(seed), 0)):
                begun.append(
                    beginnings.of(acting.policy.backend, self.model, contexts[shard.rows], prior[shard.rows])
                )
            parts.append(play_on(self.model, acting, begun[-1].moments, shard.seed(seed)))
        played = parts[0] if len(parts) == 1 else Played.joined(parts)
        log_posterior = played.filtering.log_posterior(played.prior)
        return Batch(
            played.episodes,
            played.filtering,
            played.prior,
            log_posterior,
            self.statistics,
            played.previous,
            torch.cat([each.own for each in begun]),
            torch.cat([each.told for each in begun]),
            played.inputs,
        )

    def filter(self, episodes: Episodes, prior: Tensor, seed: int) -> Batch:
        """What the filter makes of this process's episodes of a batch with priors `[B, C]`.

        Raises:
            DegenerateWeightsError: If all particles of an episode died, in whichever process.
        """
        shards = self.shards(len(prior))
        prior_here = torch.cat([prior[shard.rows] for shard in shards])
        died = None
        try:
            filtering = self._filtering(shards, episodes, prior_here, seed)
            batch = Batch.of(episodes, filtering, prior_here, self.statistics)
        except DegenerateWeightsError as error:
            died = str(error)
            if len(prior) > SHARD:  # the message counts the episodes of a shard, not of the batch
                died = re.sub(r" of episode \d+", "", died)
        died = self.group.first_message(died)
        if died is not None:
            raise DegenerateWeightsError(died)
        return batch

    def _filtering(self, shards: list[Shard], episodes: Episodes, prior: Tensor, seed: int) -> Filtering:
        """Filter shard by shard if random numbers are drawn, or else all at once, which takes less time."""
        sizes = [len(shard) for shard in shards]
        if not vars(type(self.backend)).get("draws", True):
            shards, sizes = shards[:1], [len(episodes)]
        parts, start = [], 0
        for shard, size in zip(shards, sizes, strict=True):
            rows, start = slice(start, start + size), start + size
            seed_here, some = shard.seed(seed), episodes[rows]
            parts.append(
                filtered(self.backend, self.model, some, prior=prior[rows], seed=seed_here, moments=False)
            )
        return Filtering.concatenate(parts)
