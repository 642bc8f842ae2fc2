"""The paper's numbers beside ours, and in words what the difference is."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import t as student  # type: ignore[import-untyped]

from cpomdp_ppl.evaluation import Mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from examples.paper.published import Published

LEVEL = 0.95
"""A difference is clear if its interval of this confidence, by Student's t, leaves out zero."""

QUANTITIES = {"return": "returns", "entropy": "entropy"}
"""What is compared, and under which name evaluations have it."""

BETTER = {"return": 1, "entropy": -1}
"""Which way is better."""


@dataclass(frozen=True, eq=False)
class Played:
    """What fits of a learner, one for each seed, came to on the same episodes.

    Seed i gets in episode j what seeds get on average, what is its own, what is the episode's luck, and what
    is the luck of both together, `x_ij = μ_c + a_i + b_j + e_ij`; c is the episode's context, and how many
    there are of each is no matter of chance.
    """

    values: NDArray[np.float64]  # `[n, N]`, by seed and episode
    contexts: NDArray[np.int64]  # `[N]`

    def __sub__(self, other: Played) -> Played:
        """The difference of two learners, seed by seed and episode by episode."""
        return Played(self.values - other.values, self.contexts)

    def pairs_with(self, other: Played) -> bool:
        """Whether these are the same seeds on the same episodes."""
        same = self.values.shape == other.values.shape
        return same and bool((self.contexts == other.contexts).all())

    def mean(self) -> tuple[float, float, float]:
        """The mean, its standard error, and the degrees of freedom of that.

        The mean over seeds has in every episode the variance `σ_b² + σ_e² / n`, and seeds' means have
        `σ_a² + σ_e² / N`. The mean's is `σ_a² / n + σ_b² / N + σ_e² / (n N)`: the sum of the former over N
        and the latter over n, less the last term, which both have.
        """
        x, c = self.values, self.contexts
        n, N = x.shape
        of_episodes = Mean.of(torch.from_numpy(x.mean(0)), torch.from_numpy(c)).standard_error ** 2
        parts = [(of_episodes, float(N - len(np.unique(c))))]
        if n > 1:
            twice, freedom = self._both()
            of_seeds = float(x.mean(1).var(ddof=1)) / n
            if of_seeds > twice:  # or seeds are more alike than luck makes them, and add nothing
                parts += [(of_seeds, n - 1.0), (-twice, freedom)]
        return float(x.mean()), *welch(parts)

    def _both(self) -> tuple[float, float]:
        """`σ_e² / (n N)` from what is left of each context's episodes, and its degrees of freedom."""
        n, N = self.values.shape
        squares, freedom = 0.0, 0
        for c in np.unique(self.contexts):
            x = self.values[:, self.contexts == c]
            rest = x - x.mean(0) - x.mean(1, keepdims=True) + x.mean()
            squares += float((rest**2).sum())
            freedom += (n - 1) * (x.shape[1] - 1)
        return squares / max(freedom, 1) / (n * N), float(max(freedom, 1))


@dataclass(frozen=True)
class Measured:
    """A number of ours."""

    mean: float  # over seeds of the learner, and over episodes
    standard_error: float
    freedom: float  # degrees of freedom of the standard error: few seeds do not know it well
    over_seeds: float | None  # standard deviation of what single fits come to; None if there is only one
    num_seeds: int  # how many fits, or 1 for what is not learned
    num_episodes: int  # how many episodes each was judged by
    # what each came to in each episode, where seeds are judged by the same ones
    played: Played | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of_evaluations(results: Sequence[Mapping[str, Any]], quantity: str) -> Measured:
        """Of one policy, or of the same learner with several seeds, all judged by the same episodes."""
        each = [result["each"] for result in results]
        played = Played(
            np.array([one[QUANTITIES[quantity]] for one in each], dtype=float), np.array(each[0]["contexts"])
        )
        n, N = played.values.shape
        over_seeds = float(played.values.mean(1).std(ddof=1)) if n > 1 else None
        return Measured(*played.mean(), over_seeds, n, N, played)

    @staticmethod
    def of_seeds(values: Sequence[float], num_episodes: int) -> Measured:
        """Of one number for each seed, measured on episodes of its own."""
        numbers = np.array(values, dtype=float)
        n = len(numbers)
        over_seeds = float(numbers.std(ddof=1)) if n > 1 else None
        error = math.nan if over_seeds is None else over_seeds / math.sqrt(n)
        return Measured(float(numbers.mean()), error, n - 1, over_seeds, n, int(num_episodes))

    def minus(self, other: Measured) -> tuple[float, float, float]:
        """A difference, its standard error, and the degrees of freedom of that.

        If the same seeds were judged by the same episodes, differences are taken one by one, as both have
        part of their luck in common; otherwise the two are taken for independent.
        """
        if self.played is not None and other.played is not None and self.played.pairs_with(other.played):
            return (self.played - other.played).mean()
        error, freedom = welch([(each.standard_error**2, each.freedom) for each in (self, other)])
        return self.mean - other.mean, error, freedom


def welch(variances: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Standard error from variances that add up to its square, with their degrees of freedom; and its own.

    The degrees of freedom are Welch's and Satterthwaite's, `(Σ v)² / Σ v² / ν`.
    """
    total = sum(v for v, _ in variances)
    if not total > 0:  # nothing varies, or nobody knows
        return math.sqrt(total), math.inf
    return math.sqrt(total), total**2 / sum(v**2 / nu for v, nu in variances if v != 0)


def reach(error: float, freedom: float) -> float:
    """How far from zero a difference may be by chance."""
    return error * float(student.ppf((1 + LEVEL) / 2, freedom)) if error > 0 else error


@dataclass(frozen=True)
class Comparison:
    """A number of the paper, if it has one, and ours."""

    policy: str  # whose, as we call it
    quantity: str  # `"return"` or `"entropy"`
    paper: Published | None
    ours: Measured
    where: str  # which part of the reproduction it comes from

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.paper is None else self.ours.mean - self.paper.value

    @property
    def verdict(self) -> str:
        """What the difference comes to, in a few words."""
        if self.paper is None or self.difference is None:
            return ""
        d, error, spread = self.difference, self.ours.standard_error, self.paper.spread
        by = f"{abs(d):.3f} ± {error:.3f}"
        clear = _clear(d, error, self.ours.freedom)
        if clear is None:
            return f"differs by {d:+.3f}, nobody knows how surely"
        if clear == 0:
            return f"no clear difference ({d:+.3f} ± {error:.3f})"
        good = "better" if d * BETTER[self.quantity] > 0 else "worse"
        words = f"{'higher' if d > 0 else 'lower'} than the paper by {by} ({good})"
        if spread is None:
            return words
        near = abs(d) <= spread + reach(error, self.ours.freedom)
        return f"{words}, {'within' if near else 'beyond'} the paper's own ± {spread:.3f}"

    def sentence(self) -> str:
        """The verdict with its numbers."""
        assert self.paper is not None
        return (
            f"{self.policy}: the {self.quantity} is {self.ours.mean:.3f}, and {self.paper.value:.3f} in the "
            f"paper ({self.paper.place}): {self.verdict}."
        )


def trend(what: str, before: tuple[str, Measured], after: tuple[str, Measured]) -> str:
    """How a number changes from one setting to another, and whether that is clear."""
    (one, first), (other, second) = before, after
    d, error, freedom = second.minus(first)
    numbers = f"{first.mean:.3f} to {second.mean:.3f}, {d:+.3f} ± {error:.3f}"
    words = {None: "changes, nobody knows how surely", 0: "does not clearly change", 1: "rises", -1: "falls"}
    return f"From {one} to {other}, the {what} {words[_clear(d, error, freedom)]} ({numbers})."


def contrast(what: str, one: tuple[str, Measured], other: tuple[str, Measured]) -> str:
    """Whose number is higher, and whether that is clear."""
    (name, first), (other_name, second) = one, other
    d, error, freedom = first.minus(second)
    numbers = f"{first.mean:.3f} and {second.mean:.3f}, {d:+.3f} ± {error:.3f}"
    words = {
        None: "apart from, nobody knows how surely,",
        0: "not clearly different from",
        1: "higher than",
        -1: "lower than",
    }
    return f"the {what} of {name} is {words[_clear(d, error, freedom)]} that of {other_name} ({numbers})"


def _clear(difference: float, error: float, freedom: float) -> int | None:
    """1 if clearly above zero, −1 if clearly below, 0 if neither, None if nobody can tell."""
    if not math.isfinite(error):
        return None
    return 0 if abs(difference) <= reach(error, freedom) else int(math.copysign(1, difference))


def as_markdown(rows: Sequence[Comparison]) -> str:
    """A table, paper | ours | difference."""
    head = ["", "quantity", "paper", "ours ± s.e.", "over seeds", "difference", "episodes", "where"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        ours = row.ours
        seeds = "–" if ours.over_seeds is None else f"s.d. {ours.over_seeds:.3f} of {ours.num_seeds}"
        cells = [
            row.policy,
            "H(C\\|Y), bits" if row.quantity == "entropy" else row.quantity,
            _printed(row.paper),
            f"{ours.mean:.3f} ± {ours.standard_error:.3f}",
            seeds,
            "–" if row.difference is None else f"{row.difference:+.3f}",
            f"{ours.num_episodes:,}",
            row.where,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_csv(rows: Sequence[Comparison]) -> str:
    """The same with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = "policy quantity paper paper_spread paper_place ours standard_error over_seeds seeds episodes"
    writer.writerow([*head.split(), "difference", "verdict", "where"])
    for row in rows:
        paper, ours = row.paper, row.ours
        theirs = ["", "", ""] if paper is None else [paper.value, paper.spread, paper.place]
        numbers = [ours.mean, ours.standard_error, ours.over_seeds, ours.num_seeds, ours.num_episodes]
        writer.writerow([row.policy, row.quantity, *theirs, *numbers, row.difference, row.verdict, row.where])
    return text.getvalue()


def _printed(paper: Published | None) -> str:
    if paper is None:
        return "–"
    return f"{paper.value:.3f} ± {paper.spread:.3f}" if paper.spread is not None else f"≈ {paper.value:g}"
