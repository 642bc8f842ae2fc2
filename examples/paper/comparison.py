"""The paper's numbers beside ours, and in words what the difference is."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import t as student  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from examples.paper.published import Published

LEVEL = 0.95
"""A difference is clear if its interval of this confidence, by Student's t, leaves out zero."""

QUANTITIES = {"return": "returns", "entropy": "entropy"}
"""What is compared, and under which name evaluations have it."""

BETTER = {"return": 1, "entropy": -1}
"""Which way is better."""


@dataclass(frozen=True)
class Measured:
    """A number of ours.

    Attributes:
        mean: Over seeds of the learner, and over episodes.
        standard_error: Of the mean.
        freedom: Degrees of freedom of the standard error: few seeds do not know it well.
        over_seeds: Standard deviation of what single fits come to; None if there is only one.
        num_seeds: How many fits, or 1 for what is not learned.
        num_episodes: How many episodes each was judged by.
    """

    mean: float
    standard_error: float
    freedom: float
    over_seeds: float | None
    num_seeds: int
    num_episodes: int

    @staticmethod
    def of_evaluations(results: Sequence[Mapping[str, Any]], quantity: str) -> Measured:
        """Of one policy, or of the same learner with several seeds.

        Seeds are judged by the same episodes, so that their luck does not average out: the squared error of
        the mean is that of a single evaluation, on average, and the variance between seeds over their number.
        """
        each = [result[QUANTITIES[quantity]] for result in results]
        means = np.array([one["mean"] for one in each])
        n, N = len(means), int(each[0]["num_episodes"])
        shared = float(np.mean([one["standard_error"] ** 2 for one in each]))
        over_seeds = float(means.std(ddof=1)) if n > 1 else None
        parts = [(shared, N - 1)] + ([] if over_seeds is None else [(over_seeds**2 / n, n - 1)])
        error, freedom = welch(parts)
        return Measured(float(means.mean()), error, freedom, over_seeds, n, N)

    @staticmethod
    def of_seeds(values: Sequence[float], num_episodes: int) -> Measured:
        """Of one number for each seed, measured on episodes of its own."""
        numbers = np.array(values, dtype=float)
        n = len(numbers)
        over_seeds = float(numbers.std(ddof=1)) if n > 1 else None
        error = math.nan if over_seeds is None else over_seeds / math.sqrt(n)
        return Measured(float(numbers.mean()), error, n - 1, over_seeds, n, int(num_episodes))

    def minus(self, other: Measured) -> tuple[float, float, float]:
        """A difference, its standard error, and the degrees of freedom of that."""
        error, freedom = welch([(each.standard_error**2, each.freedom) for each in (self, other)])
        return self.mean - other.mean, error, freedom


def welch(variances: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Standard error of a sum from the variances of its terms and their degrees of freedom, and its own.

    The degrees of freedom are Welch's and Satterthwaite's, `(Σ v)² / Σ v² / ν`.
    """
    total = sum(v for v, _ in variances)
    if not total > 0:  # nothing varies, or nobody knows
        return math.sqrt(total), math.inf
    return math.sqrt(total), total**2 / sum(v**2 / nu for v, nu in variances if v > 0)


def reach(error: float, freedom: float) -> float:
    """How far from zero a difference may be by chance."""
    return error * float(student.ppf((1 + LEVEL) / 2, freedom)) if error > 0 else error


@dataclass(frozen=True)
class Comparison:
    """A number of the paper, if it has one, and ours.

    Attributes:
        policy: Whose, as we call it.
        quantity: `"return"` or `"entropy"`.
        paper: The paper's number, or None.
        ours: Ours.
        where: Which part of the reproduction it comes from.
    """

    policy: str
    quantity: str
    paper: Published | None
    ours: Measured
    where: str

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
