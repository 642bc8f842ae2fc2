"""What learners return, what they raise when they are interrupted, and the units they know actions in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

    from cpomdp_ppl.policy import Policy


@dataclass(frozen=True)
class Learned:
    """A policy, and how it came about.

    Attributes:
        policy: What was learned.
        history: By the number of `episodes` played so far: `training_return`, the mean return of those since
            the number before, with all their exploration; and whatever else the learner keeps.
        seconds: How long it took, with evaluations.
        finished: Whether all episodes were played; if not, learning was interrupted.
    """

    policy: Policy
    history: xr.Dataset
    seconds: float
    finished: bool


class LearningInterrupted(KeyboardInterrupt):
    """Ctrl-C while a policy was learned; `learned` is what it was until then."""

    def __init__(self, learned: Learned) -> None:
        super().__init__(learned)
        self.learned = learned

    def __str__(self) -> str:
        done = self.learned.history.episodes.values
        return f"stopped after {done[-1] if len(done) else 0:,} episodes"
