"""What an evaluation found: single episodes, averages, and tables of several policies."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.evaluation.mean import Mean, decimal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PerEpisode:
    """What single episodes came to, in the order in which they were played.

    Evaluations of the same number of episodes, with the same seed, prior and `batch_size`, have the same
    contexts, first states and noise in the same place, so their differences may be taken one by one.

    Attributes:
        contexts: The true contexts, int64 `[B]`.
        weights: How much an episode counts, float64 `[B]`: `P(c) / n_c` in a context with n_c episodes.
        returns: The returns, float64 `[B]`.
        entropies: Entropies of the context posteriors at the end, in bits, float64 `[B]`.
        identified: Whether the likeliest context at the end was the true one, bool `[B]`.
        drawn: Whether contexts were drawn from the prior because there were more contexts than episodes; all
            weights are `1 / B` then.
    """

    contexts: Tensor
    weights: Tensor
    returns: Tensor
    entropies: Tensor
    identified: Tensor
    drawn: bool

    def __repr__(self) -> str:
        return f"PerEpisode(B={len(self.contexts)}, drawn={self.drawn})"

    def mean(self, values: Tensor) -> Mean:
        """Average numbers of the episodes, `[B]`, with contexts weighted by the prior.

        If contexts were drawn, and all came out the same, nobody knows how much the others differ: there is
        no standard error then.

        Examples:
            >>> from cpomdp_ppl import RandomPolicy, evaluate
            >>> from cpomdp_ppl.models import LineGrid
            >>> one, other = (evaluate(LineGrid(), RandomPolicy(3), 50).per_episode for _ in range(2))
            >>> one.mean(one.returns - other.returns).mean
            0.0
        """
        if not self.drawn:
            return Mean.of(values, self.contexts, self.weights)
        mean = Mean.of(values)
        alike = bool((self.contexts == self.contexts[0]).all())
        return replace(mean, standard_error=math.nan, deviation=math.nan) if alike else mean


@dataclass(frozen=True)
class Evaluation:
    """What a policy earns and finds out; contexts count as much as the prior says.

    Attributes:
        returns: The return.
        returns_by_context: The return in each context that was played, by name.
        entropy: The entropy of the context posterior at the end, in bits: what is left to find out.
        identified: How often the likeliest context at the end is the true one.
        regret: How far the return is from that of an agent who knows the context, if the model knows that
            (see `CPOMDP.context_known_return`).
        seconds_per_decision: Time that the policy took for one action of one episode, in the batches that
            were played.
        likelihood: Name of the backend behind the posteriors.
        identified_error: Standard error of `identified`.
        informed_return: The return of an agent who knows the context and sees every state, where `regret` is
            not known but this can be computed (see `cpomdp_ppl.bounds.informed_return`): nobody earns more.
        unplayed: Prior probability of all contexts in which no episode was played, for want of episodes.
        per_episode: The numbers of single episodes, of which the averages are made; None if the evaluation
            was read from a file.
    """

    returns: Mean
    returns_by_context: Mapping[str, Mean]
    entropy: Mean
    identified: float
    regret: Mean | None
    seconds_per_decision: float
    likelihood: str
    identified_error: float = math.nan
    informed_return: float | None = None
    unplayed: float = 0.0
    per_episode: PerEpisode | None = field(default=None, repr=False, compare=False)

    @property
    def regret_at_most(self) -> Mean | None:
        """How far the return is from `informed_return`: an upper bound on regret, but for chance."""
        if self.informed_return is None:
            return None
        return replace(self.returns, mean=self.informed_return - self.returns.mean)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON: all but `per_episode`."""
        content = asdict(replace(self, per_episode=None))
        del content["per_episode"]
        return content

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Evaluation:
        """Read what `as_dict` gave, also in earlier versions, and from JSON in which NaN is null."""
        parts: dict[str, Any] = dict(content)
        for name in ("returns", "entropy", "regret"):
            parts[name] = None if parts[name] is None else Mean.from_dict(parts[name])
        parts["returns_by_context"] = {
            name: Mean.from_dict(each) for name, each in parts["returns_by_context"].items()
        }
        if parts.get("identified_error") is None:
            parts["identified_error"] = math.nan
        return Evaluation(**parts)

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.returns_by_context, "H(C|Y) in bits"))
        lines = [("return", str(self.returns))]
        lines += [(f"  {name}", str(mean)) for name, mean in self.returns_by_context.items()]
        if self.unplayed > 0:
            lines.append(
                ("  not played", f"contexts of probability {self.unplayed:.2g}, for want of episodes")
            )
        lines += [
            ("H(C|Y) in bits", self.entropy.with_error(4)),
            ("identified", f"{100 * self.identified:.1f} ± {decimal(100 * self.identified_error, 1)} %"),
        ]
        if self.regret is not None:
            lines.append(("regret", self.regret.with_error()))
        if self.informed_return is not None and self.regret_at_most is not None:
            lines.append(("at most", f"{self.informed_return:.3f} can be earned (state and context known)"))
            lines.append(("regret, at most", self.regret_at_most.with_error()))
        return "\n".join(f"{name:<{width + 2}}  {value}" for name, value in lines)


@dataclass(frozen=True)
class Comparison:
    """Several policies on the same episodes.

    Attributes:
        evaluations: The evaluations, by name of the policy.
        training_seconds: How long a policy took to learn, by name, where that is known.
    """

    evaluations: Mapping[str, Evaluation]
    training_seconds: Mapping[str, float]

    def __str__(self) -> str:
        """A Markdown table."""
        head = ["policy", "episodes", "return ± s.e.", "s.d.", "H(C\\|Y) bits", "identified", "regret"]
        head += ["ms a decision", "training, s"]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name, e in self.evaluations.items():
            cells = [
                name,
                f"{e.returns.num_episodes:,}",
                e.returns.with_error(),
                decimal(e.returns.deviation, 2),
                f"{e.entropy.mean:.3f}",
                f"{100 * e.identified:.1f} %",
                _regret(e),
                f"{1e3 * e.seconds_per_decision:.3g}",
                f"{self.training_seconds[name]:.0f}" if name in self.training_seconds else "–",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        bounds = {e.informed_return for e in self.evaluations.values()} - {None}
        if bounds:
            most = " or ".join(f"{bound:.3f}" for bound in bounds)
            lines += [
                "",
                f"≤: regret is at most this, as nobody earns more than {most}, told context and state.",
            ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON; see `Evaluation.as_dict`."""
        evaluations = {name: evaluation.as_dict() for name, evaluation in self.evaluations.items()}
        return {"evaluations": evaluations, "training_seconds": dict(self.training_seconds)}


def _regret(evaluation: Evaluation) -> str:
    """The table's cell for regret: known, bounded, or neither."""
    if evaluation.regret is not None:
        return f"{evaluation.regret.mean:.2f}"
    return "–" if (most := evaluation.regret_at_most) is None else f"≤ {most.mean:.2f}"
