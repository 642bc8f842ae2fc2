"""How good the likelihoods are: what batches tell about it, and warnings if it is not enough."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import DegenerateWeightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from solvers.cids.batch import Batch

LARGEST_GAP = 0.1
"""Nats between the two estimates of the information, beyond which likelihoods are too poor."""
SMALLEST_ESS = 4
"""Effective number of particles, below which likelihoods and belief rewards rest on chance."""
FEW_LOST = 0.01
"""If no more than this share of a batch's episodes is lost, that is passed over."""
JUDGED_BATCHES = 20
"""How many batches are averaged before likelihoods are judged."""
MOST_LOST_BATCHES = 20
"""How many batches in a row may be lost before the fit is given up."""

REMEDY = 'more particles, ParticleFilter(guide="ekf"), or another backend'


@dataclass
class LikelihoodQuality:
    """Follows how well the likelihoods tell contexts apart, and warns, once, when they do it poorly."""

    batch_size: int
    lost: int = 0  # batches in a row that had to be left out
    # Of the latest batches, the gap between the two estimates of the information, its squared standard error,
    # and the effective number of particles.
    recent: list[tuple[float, float, float]] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)  # what has been warned of already

    def measure(self, batch: Batch) -> dict[str, float]:
        """Entropy of the last posterior in bits, and estimates of `I(C; Y)` in nats from both sides."""
        self.lost = 0
        left = entropy(batch.log_posterior[batch.own, -1].exp())  # [B]
        upper = entropy(batch.prior[batch.own]) - left  # [B]
        lower = (batch.log_true()[:, -1] - batch.prior_true().log())[batch.own]  # [B]
        kinds = {"entropy": left, "information_upper": upper, "information_lower": lower}
        if batch.filtering.ess is not None:
            c = batch.contexts[:, None, None].expand(-1, batch.episodes.horizon, 1)
            ess = batch.filtering.ess.gather(2, c).squeeze(2)  # [B, T]
            kinds["ess"] = ess[batch.own[:, None] & batch.episodes.alive]
        measured = {name: float(batch.mean(values)) for name, values in kinds.items()}
        measured["entropy"] /= math.log(2)
        spread, gap = (float(moment) for moment in batch.spread(upper - lower))
        number = self.batch_size * float(batch.mean(batch.own.double()))
        error = spread**2 / (number - 1) if number > 1 else math.inf
        self.recent = [*self.recent[1 - JUDGED_BATCHES :], (gap, error, measured.get("ess", math.inf))]
        return measured

    @property
    def is_poor(self) -> bool:
        """Whether the gap is larger than chance explains, or too few particles count, on average."""
        gap, error, ess = self._averages()
        chance = 3 * (error / len(self.recent)) ** 0.5
        return gap > LARGEST_GAP + chance or ess < SMALLEST_ESS

    def _averages(self) -> Iterator[float]:
        return (sum(series) / len(self.recent) for series in zip(*self.recent, strict=True))

    def judge(self, iteration: int, last: bool, improve: Callable[[], bool]) -> None:
        """If likelihoods are poor, have them improved; if that cannot be, warn."""
        if not (last or len(self.recent) == JUDGED_BATCHES) or not self.is_poor:
            return
        if improve():
            self.recent = []
        else:
            gap, _, ess = self._averages()
            particles = "" if ess == math.inf else f", and {ess:.1f} particles count on average"
            self._warn(
                "poor",
                f"iteration {iteration}: the information about the context is only known within "
                f"{gap:.2f} nats{particles}: likelihoods are noisy or biased. Use {REMEDY}",
                stacklevel=8,
            )

    def note_lost(self, batch: Batch, iteration: int, improve: Callable[[], bool]) -> None:
        """If some episodes were lost, have likelihoods improved; if that cannot be, warn."""
        share = 0.0 if batch.lost is None else float(batch.mean(batch.lost.double()))
        if share > FEW_LOST and not improve():
            self._warn(
                "some lost",
                f"iteration {iteration}: {100 * share:.2g} % of the episodes teach nothing, because all "
                f"particles died. Use {REMEDY}",
                stacklevel=7,
            )

    def lose(self, error: str, iteration: int) -> None:
        """Leave a batch out whose particles died.

        Raises:
            DegenerateWeightsError: If there were too many in a row.
        """
        self.lost += 1
        if self.lost >= MOST_LOST_BATCHES:
            raise DegenerateWeightsError(f"iteration {iteration}, {self.lost} batches in a row: {error}")
        self._warn(
            "lost",
            f"iteration {iteration}: a batch is left out, because all particles died ({error}). Use {REMEDY}",
            stacklevel=7,
        )

    def _warn(self, kind: str, message: str, stacklevel: int) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(message, stacklevel=stacklevel)  # at the call of `fit`

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as plain numbers and words."""
        recent = [list(batch) for batch in self.recent]
        return {"lost": self.lost, "recent": recent, "warned": sorted(self.warned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.lost = state["lost"]
        self.recent = [(gap, error, ess) for gap, error, ess in state["recent"]]
        self.warned = set(state["warned"])
