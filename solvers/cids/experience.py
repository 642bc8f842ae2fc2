"""Playing and filtering a batch: the step of an iteration that meets the world."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import one_hot

from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import Filtering
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.rollout import simulate
from solvers.cids.batch import Batch
from solvers.cids.group import SINGLE_PROCESS
from solvers.cids.playing import Lead, Played, play_out
from solvers.cids.policy import previous_actions

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy
    from solvers.cids.batch import Statistics
    from solvers.cids.group import SingleProcess
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


@dataclass(frozen=True, eq=False)
class Beginnings:
    """How the episodes of a batch begin.

    Attributes:
        contexts: Their true contexts, `[B]`.
        prior: What is believed about them, `[B, C]`.
        told: Which of them are told the context, bool `[B]`.
        lead: What is done at first, before the policy acts; None for nothing.
    """

    contexts: Tensor
    prior: Tensor
    told: Tensor
    lead: Lead | None

    @staticmethod
    def of(
        contexts: Tensor, prior: Tensor, told: float, led: float, leads: tuple[Tensor, Tensor] | None
    ) -> Beginnings:
        """Tell a share of the episodes their context, and lead others to all sorts of places.

        Contexts `[B]` come in order, so that those who begin otherwise are spread evenly over them.
        """
        B = len(contexts)
        evenly = (torch.arange(B, device=contexts.device) * GOLDEN_RATIO + float(torch.rand(()))) % 1  # [B]
        evenly[0] = 1.0  # even of a few, one is of the problem itself
        tells = evenly < told
        sure = one_hot(contexts, prior.shape[1]).to(prior)
        prior = torch.where(tells[:, None], sure, prior)
        if leads is None or not led:
            return Beginnings(contexts, prior, tells, None)
        actions, steps = leads
        drawn = torch.randint(len(steps), (B,), device=contexts.device)
        leading = (evenly >= told) & (evenly < told + led)
        return Beginnings(contexts, prior, tells, Lead(actions[drawn], torch.where(leading, steps[drawn], 0)))

    def rows(self, rows: slice) -> Beginnings:
        """Those of some episodes."""
        lead = None if self.lead is None else self.lead.rows(rows)
        return Beginnings(self.contexts[rows], self.prior[rows], self.told[rows], lead)


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

    def live(self, acting: Exploring, beginnings: Beginnings, seed: int) -> Batch:
        """Play this process's episodes of a batch by a policy that reads beliefs, with the filter inside it.

        Raises:
            DegenerateWeightsError: If the filter could follow none of the episodes of one of the processes.
        """
        B = len(beginnings.contexts)
        parts, played = [], []
        for shard in self.shards(B):
            parts.append(beginnings.rows(shard.rows))
            contexts, prior, lead = parts[-1].contexts, parts[-1].prior, parts[-1].lead
            played.append(play_out(self.model, acting, contexts, prior, lead, shard.seed(seed)))
        done = played[0] if len(played) == 1 else Played.joined(played)
        died = self.group.first_message("all particles died" if bool(done.lost.all()) else None)
        if died is not None:
            raise DegenerateWeightsError(died)
        prior = torch.cat([part.prior for part in parts])
        since = torch.zeros_like(done.lost, dtype=torch.long)
        if beginnings.lead is not None:
            since = torch.cat([part.lead.steps for part in parts if part.lead is not None])
        return Batch(
            done.episodes,
            done.filtering,
            prior,
            done.filtering.log_posterior(prior),
            self.statistics,
            previous_actions(done.episodes.actions),
            since,
            torch.cat([part.told for part in parts]),
            done.inputs,
            done.lost,
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
