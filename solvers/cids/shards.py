"""A batch in parts that can be played apart, each with random numbers of its own."""

from __future__ import annotations

from dataclasses import dataclass

from cpomdp_ppl.rng import seed_for

SHARD = 250
"""Episodes in a shard, at most. It is part of what a seed means: with another, larger batches are others."""


@dataclass(frozen=True)
class Shard:
    """Some episodes of a batch, one after the other.

    Attributes:
        number: Which of the shards, from 0.
        rows: Its episodes.
    """

    number: int
    rows: slice

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def seed(self, seed: int) -> int:
        """A seed for this shard, of one for the batch; the first has the batch's own."""
        return seed if self.number == 0 else seed_for(seed, self.number)


def split(batch_size: int) -> list[Shard]:
    """A batch in as few shards as can be, all of about the same size.

    What is played in a shard depends on the batch alone, not on how many processes share it.

    Example:
        >>> [len(shard) for shard in split(200)], [len(shard) for shard in split(700)]
        ([200], [234, 233, 233])
    """
    number = -(-batch_size // SHARD)
    size, longer = divmod(batch_size, number)
    starts = [k * size + min(k, longer) for k in range(number + 1)]
    return [Shard(k, slice(starts[k], starts[k + 1])) for k in range(number)]
