"""How good a policy is: what it earns and finds out, of one policy or of several on the same episodes."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.experiments.execute import in_parallel, require_workers, stays_here
from cpomdp_ppl.inference.choice import follow_by
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.prior import one_prior, weighted_strata
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import RandomStream, fresh_seed
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.choice import Follow
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy
    from cpomdp_ppl.progress import Bar, Progress

UNCERTAIN_POSTERIOR = 0.05
"""Mean standard error of contexts' probabilities, beyond which there is a warning."""

Outcome = TypeVar("Outcome")

Worlds: TypeAlias = "tuple[Tensor, list[int]]"
"""Episodes to play side by side: their contexts `[B]`, and seeds of world, policy and filter."""

PolicyLike: TypeAlias = "Policy | Callable[[History], Decision]"
"""A policy, or a function from what the agent knows to its decision."""

CLOSED_FORM = "an agent that is told the context, in closed form"
SAME_POLICY = "the same policy, told the context"
TOLD = "{}, told the context"
"""What regret is against: the model's formula, the policy itself, or another one by name."""

BELOW_ZERO = "told the context, the reference earns less: it was learned or written, and is not the optimum"
"""What regret below zero means."""


@dataclass(frozen=True)
class Mean:
    """An average over episodes.

    Attributes:
        mean: The average.
        standard_error: Standard error of the average.
        deviation: Standard deviation of a single episode.
        num_episodes: How many episodes there were.
    """

    mean: float
    standard_error: float
    deviation: float
    num_episodes: int

    @staticmethod
    def of(values: Tensor, strata: Tensor | None = None, weights: Tensor | None = None) -> Mean:
        """Average numbers `[B]`.

        The error of the mean is made up of the errors of the groups' means, each estimated from the spread
        within its group. The number of a group of one is taken to be as uncertain as it is far from the plain
        mean of all, which on average is too much rather than too little.

        Args:
            values: One number for each episode.
            strata: Which of several groups each belongs to, `[B]`, if the groups' sizes were fixed
                beforehand: what differs between groups is then no error of the mean.
            weights: Weights of the episodes, `[B]`, the same within a group; equal if left out.
        """
        n, y = len(values), values.double()
        if n == 1:
            return Mean(float(y), math.nan, math.nan, 1)
        w = torch.ones_like(y) if weights is None else weights.to(y)
        mean = float((w * y).sum() / w.sum())
        w = w / w.sum()
        deviation = float((w * (y - mean) ** 2).sum() * n / (n - 1)) ** 0.5
        if strata is None:
            return Mean(mean, deviation * float((w**2).sum()) ** 0.5, deviation, n)
        squares = 0.0
        for stratum in strata.unique():
            some = strata == stratum
            m = int(some.sum())
            # From the plain mean: one heavy episode is its own weighted mean, and would look certain.
            variance = y[some].var() if m > 1 else (y[some] - y.mean()).square().sum() * n / (n - 1)
            squares += float(w[some].sum() ** 2 * variance / m)
        return Mean(mean, squares**0.5, deviation, n)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Mean:
        """Read a mean from JSON, in which NaN is null."""
        numbers: Any = {name: math.nan if value is None else value for name, value in content.items()}
        return Mean(**numbers)

    def __str__(self) -> str:
        return f"{self.with_error()} (s.d. {decimal(self.deviation, 2)})"

    def with_error(self, digits: int = 3) -> str:
        """The average and its standard error, or a dash if a single episode cannot tell.

        Examples:
            >>> Mean.of(torch.tensor([1.0, 3.0])).with_error(), Mean.of(torch.tensor([1.0])).with_error(1)
            ('2.000 ± 1.000', '1.0 ± –')
        """
        return f"{self.mean:.{digits}f} ± {decimal(self.standard_error, digits)}"


def _percent(share: float, error: float) -> str:
    return f"{100 * share:.1f} ± {decimal(100 * error, 1)} %"


def decimal(value: float, digits: int) -> str:
    """A number with so many decimals, or a dash if it is NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


@dataclass(frozen=True, eq=False)
class PerEpisode:
    """What single episodes came to, in the order in which they were played.

    Evaluations of the same number of episodes, with the same seed, prior and `batch_size`, have the same
    contexts, first states and noise in the same place, so their differences may be taken one by one.

    Attributes:
        contexts: The true contexts, int64 `[B]`.
        weights: How much an episode counts, float64 `[B]`: `P(c) / n_c` in a context with n_c episodes.
        returns: The returns, discounted if the model says so, float64 `[B]`.
        entropies: Entropies of the context posteriors at the end, in bits, float64 `[B]`.
        identified: Whether the likeliest context at the end was the true one, bool `[B]`.
        drawn: Whether contexts were drawn from the prior because there were more contexts than episodes; all
            weights are `1 / B` then.
        reference_returns: What the policy that regret is against earned in the same worlds, told the context,
            float64 `[B]`; None where none was told.
        lengths: How many steps each took, int64 `[B]`; None in files of earlier versions.
        ended: Which of them the model ended, bool `[B]`; None for models that cannot end.
    """

    contexts: Tensor
    weights: Tensor
    returns: Tensor
    entropies: Tensor
    identified: Tensor
    drawn: bool
    reference_returns: Tensor | None = None
    lengths: Tensor | None = None
    ended: Tensor | None = None

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

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON."""
        parts = vars(self).items()
        return {name: part.tolist() if isinstance(part, Tensor) else part for name, part in parts}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> PerEpisode:
        """Read what `as_dict` gave."""
        parts: Any = {
            name: torch.from_numpy(np.array(part)) if isinstance(part, list) else part
            for name, part in content.items()
        }
        return PerEpisode(**parts)


@dataclass(frozen=True)
class Evaluation:
    """What a policy earns and finds out; contexts count as much as the prior says.

    Attributes:
        returns: The return `Σ_t γ^t r_t`, up to the end of each episode.
        returns_by_context: The return in each context that was played, by name.
        entropy: The entropy of the context posterior at the end, in bits: what is left to find out.
        identified: How often the likeliest context at the end is the true one.
        regret: How far the return is from that of an agent who knows the context, as `regret_against` says.
        seconds_per_decision: Time that the policy took for one action of one episode, in the batches that
            were played.
        likelihood: The backend behind the posteriors, in a few words.
        identified_error: Standard error of `identified`.
        informed_return: The return of an agent who knows the context and sees every state, where the model
            does not say what knowing the context alone earns but this can be computed (see
            `cpomdp_ppl.bounds.informed_return`): nobody earns more.
        unplayed: Prior probability of all contexts in which no episode was played, for want of episodes.
        regret_against: Who it is that knows the context: an agent that earns what the model says (see
            `CPOMDP.context_known_return`), or a policy that was told the context and played the same worlds.
            Such a policy was learned or written, and may not be the best there is: regret is then too small,
            and below zero if it earns less than the policy does that was told nothing.
        ended: Which share of episodes the model ended; None for models that cannot end.
        end_time: After how many steps, on average over those that did; None if none did.
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
    regret_against: str | None = None
    ended: Mean | None = None
    end_time: Mean | None = None
    per_episode: PerEpisode | None = field(default=None, repr=False, compare=False)

    @property
    def regret_at_most(self) -> Mean | None:
        """How far the return is from `informed_return`: an upper bound on regret, but for chance."""
        if self.informed_return is None:
            return None
        return replace(self.returns, mean=self.informed_return - self.returns.mean)

    @property
    def beats_reference(self) -> bool:
        """Whether regret against a policy is below zero by more than two standard errors."""
        if self.regret is None or self.regret_against in (None, CLOSED_FORM):
            return False
        return self.regret.mean < -2 * self.regret.standard_error

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON: all but `per_episode`."""
        content = asdict(replace(self, per_episode=None))
        del content["per_episode"]
        return content

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Evaluation:
        """Read what `as_dict` gave, also in earlier versions, and from JSON in which NaN is null."""
        parts: dict[str, Any] = dict(content)
        for name in ("returns", "entropy", "regret", "ended", "end_time"):
            parts[name] = None if parts.get(name) is None else Mean.from_dict(parts[name])
        by_context = parts["returns_by_context"].items()
        parts["returns_by_context"] = {name: Mean.from_dict(each) for name, each in by_context}
        if parts.get("identified_error") is None:
            parts["identified_error"] = math.nan
        if parts["regret"] is not None:
            parts.setdefault("regret_against", CLOSED_FORM)  # there was no other
        return Evaluation(**parts)

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.returns_by_context, "H(C|Y) in bits"))
        lines = [("return", str(self.returns))]
        lines += [(f"  {name}", str(mean)) for name, mean in self.returns_by_context.items()]
        if self.unplayed > 0:
            missing = f"contexts of probability {self.unplayed:.2g}, for want of episodes"
            lines.append(("  not played", missing))
        lines += [
            ("H(C|Y) in bits", self.entropy.with_error(4)),
            ("identified", _percent(self.identified, self.identified_error)),
        ]
        if self.ended is not None:
            when = "" if self.end_time is None else f", after {self.end_time.with_error(2)} steps"
            lines.append(("ended", _percent(self.ended.mean, self.ended.standard_error) + when))
        if self.regret is not None:
            lines.append(("regret", self.regret.with_error()))
        if self.regret_against is not None:
            lines.append(("  against", self.regret_against))
        if self.beats_reference:
            lines.append(("  below zero", BELOW_ZERO))
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
        can_end = any(e.ended is not None for e in self.evaluations.values())
        head = ["policy", "episodes", "return ± s.e.", "s.d.", "H(C\\|Y) bits", "identified"]
        head += [*["ended"] * can_end, "regret", "ms a decision", "training, s"]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name, e in self.evaluations.items():
            bound = "" if e.regret_at_most is None else f"≤ {e.regret_at_most.mean:.2f}"
            regret = bound or "–"
            if e.regret is not None:
                regret = e.regret.with_error(2) + (f" ({bound})" if bound else "")
            cells = [
                name,
                f"{e.returns.num_episodes:,}",
                e.returns.with_error(),
                decimal(e.returns.deviation, 2),
                f"{e.entropy.mean:.3f}",
                f"{100 * e.identified:.1f} %",
                *["–" if e.ended is None else f"{100 * e.ended.mean:.1f} %"] * can_end,
                regret,
                f"{1e3 * e.seconds_per_decision:.3g}",
                f"{self.training_seconds[name]:.0f}" if name in self.training_seconds else "–",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        notes = []
        references = dict.fromkeys(e.regret_against for e in self.evaluations.values() if e.regret_against)
        if references:
            notes.append(f"regret: against {'; or '.join(references)}.")
        winners = [name for name, e in self.evaluations.items() if e.beats_reference]
        if winners:
            notes.append(f"Regret of {', '.join(winners)} is below zero: {BELOW_ZERO}.")
        bounds = {e.informed_return for e in self.evaluations.values()} - {None}
        if bounds:
            most = " or ".join(f"{bound:.3f}" for bound in bounds)
            notes.append(
                f"≤: regret is at most this, as nobody earns more than {most}, told context and state."
            )
        return "\n".join(lines + [line for note in notes for line in ("", note)])

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON; see `Evaluation.as_dict`."""
        evaluations = {name: evaluation.as_dict() for name, evaluation in self.evaluations.items()}
        return {"evaluations": evaluations, "training_seconds": dict(self.training_seconds)}


@overload
def evaluate(model: CPOMDP, policy: PolicyLike, num_episodes: int = ..., **settings: Any) -> Evaluation: ...


@overload
def evaluate(
    model: CPOMDP,
    policy: Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = ...,
    **settings: Any,
) -> Comparison: ...


def evaluate(  # type: ignore[misc]  # the overloads' settings are those that follow
    model: CPOMDP,
    policy: PolicyLike | Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = 4000,
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    reveal_context: bool = False,
    reference: PolicyLike | None = None,
    batch_size: int = 4000,
    workers: int | None = 1,
    progress: Progress = False,
    seed: int | None = 0,
) -> Evaluation | Comparison:
    """Play a policy, or several by name, and take stock.

    The same seed gives every policy the same contexts, first states and noise of the world, whatever random
    numbers the policy itself draws: differences between policies are less noisy than either's return.

    Every context that the prior holds possible is played, however rare: at least twice, or once if there are
    fewer than two episodes for each, and otherwise in proportion to the prior. Averages are
    `Σ_c P(c)` times the mean of context c, and their errors those of such means; see `Mean.of` for contexts
    of a single episode. With fewer episodes than possible contexts, contexts are drawn from the prior:
    averages are then right on average, and `Evaluation.unplayed` says what they do not tell about.

    Regret is against what the model says that knowing the context earns (`CPOMDP.context_known_return`). If
    it does not say, it is against a policy that is told the context in the same worlds: the policy itself if
    it reads the prior (its `amortised` is True), or of several such policies the one that then earns most.

    Args:
        model: The CPOMDP.
        policy: The policy that acts; or several, by name, for a table of them.
        num_episodes: How many episodes are played; for several policies, also by name.
        likelihood: How to compute context posteriors: a backend or its name. Left out or `"auto"`, the most
            exact one, as far as simulated episodes tell; see `reference_backend`.
        prior: Prior over contexts, `[C]`; the model's if left out.
        reveal_context: Whether the policy is told the context: it then starts from a prior that is sure.
        reference: The policy that is told the context, for regret against it; it should read the prior. Left
            out, it is chosen as said above.
        batch_size: How many episodes are played side by side.
        workers: In how many processes batches are played, for planners that take their time; more than one
            needs the extra `parallel`. None leaves it to joblib's configuration, a Dask cluster for instance,
            or takes all cores; see `cpomdp_ppl.experiments.execute`. It makes no difference to the result,
            unless a policy changes as it plays: what it does to itself in another process stays there.
        progress: Whether to show a progress bar, by decisions (by batches, if those are played in other
            processes); or a function that is given a line of text now and then, about how far it has got.
        seed: Seed of all random numbers; None takes fresh entropy, once for all policies.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> result = evaluate(LineGrid(), RandomPolicy(3), 100)
        >>> result.likelihood, result.returns.num_episodes
        ('exact', 100)
    """
    require_model(model)
    require_workers(workers)
    if isinstance(policy, Mapping):
        policies, numbers = policy, _episodes_by_name(policy, num_episodes)
    else:
        policies, numbers = {"": policy}, {"": require_count("num_episodes", num_episodes)}
    with warnings.catch_warnings():  # what is imported on the way adds filters of its own
        judge = Judge(
            model=model,
            prior=one_prior(prior, model),
            prior_given=prior is not None,
            reveal_context=reveal_context,
            batch_size=require_count("batch_size", batch_size),
            workers=workers,
            progress=progress,
            seed=fresh_seed(seed),
            follow=follow_by(model, likelihood),
        )
        references = _references(model, policies, reference)
        found = {name: judge.evaluate(each, numbers[name]) for name, each in policies.items()}
        sizes = set(numbers.values())
        told = {who: {B: judge.told(each, B) for B in sizes} for who, each in references.items()}
        found = with_regret(found, told)
    return Comparison(found, {}) if policies is policy else found[""]


def compare(
    model: CPOMDP,
    policies: Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = 4000,
    *,
    training_seconds: Mapping[str, float] | None = None,
    **settings: Any,
) -> Comparison:
    """Evaluate several policies on the same contexts, first states and noise, into one table.

    Args:
        model: The CPOMDP.
        policies: The policies, by name.
        num_episodes: How many episodes all of them play, or how many by name: planners may be too slow for
            as many as learned policies get.
        training_seconds: How long policies took to learn, by name, for the table.
        settings: Further settings of `evaluate`.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> table = compare(LineGrid(), {"random": RandomPolicy(3)}, 50)
        >>> table.evaluations["random"].returns.num_episodes
        50
    """
    require(isinstance(policies, Mapping), "policies", policies, "policies by name")
    comparison = evaluate(model, policies, num_episodes, **settings)
    return replace(comparison, training_seconds=dict(training_seconds or {}))


def _episodes_by_name(
    policies: Mapping[str, PolicyLike], num_episodes: int | Mapping[str, int]
) -> dict[str, int]:
    """How many episodes each policy plays."""
    require(len(policies) > 0, "policies", policies, "policies by name")
    many = dict(num_episodes) if isinstance(num_episodes, Mapping) else dict.fromkeys(policies, num_episodes)
    expected = f"a number, or one for {list(policies)}"
    require(many.keys() == policies.keys(), "num_episodes", num_episodes, expected)
    return {name: require_count("num_episodes", number) for name, number in many.items()}


def _references(
    model: CPOMDP, policies: Mapping[str, PolicyLike], reference: PolicyLike | None
) -> dict[str, PolicyLike]:
    """Policies that regret may be against, by what `Evaluation.regret_against` says of them."""
    if reference is not None:
        as_policy(reference, "reference")
        there = [name for name, policy in policies.items() if policy is reference]
        found = {there[0] if there else getattr(reference, "__name__", type(reference).__name__): reference}
    elif model.context_known_return() is None:
        found = {name: policy for name, policy in policies.items() if getattr(policy, "amortised", False)}
    else:
        found = {}
    return {TOLD.format(name) if name else SAME_POLICY: policy for name, policy in found.items()}


def with_regret(
    evaluations: Mapping[str, Evaluation], told: Mapping[str, Mapping[int, Tensor]]
) -> dict[str, Evaluation]:
    """Evaluations with regret against the policy that earns most when it is told the context.

    Args:
        evaluations: Evaluations by name; those without `per_episode` stay as they are.
        told: What policies earned that were told the context, float64 `[B]`, in the order of `per_episode`:
            by what `regret_against` is to say, and by the number of episodes B.
    """
    single = {name: e.per_episode for name, e in evaluations.items() if e.per_episode is not None}
    if not single or not told:
        return dict(evaluations)
    most = max(single.values(), key=lambda each: len(each.returns))
    best = max(told, key=lambda who: most.mean(told[who][len(most.returns)]).mean)
    found = dict(evaluations)
    for name, each in single.items():
        earned = told[best][len(each.returns)]
        found[name] = replace(
            evaluations[name],
            regret=each.mean(earned - each.returns),
            regret_against=best,
            per_episode=replace(each, reference_returns=earned),
        )
    return found


class PlayedBatch(NamedTuple):
    """What came of episodes that were played side by side."""

    contexts: Tensor  # the true contexts, [B]
    returns: Tensor  # float64 [B]
    posteriors: Tensor  # P(C | y) at the end, [B, C]
    posterior_errors: Tensor  # standard errors of these probabilities, [B]
    lengths: Tensor  # how many steps were taken, [B]
    ended: Tensor  # whether that was because the model ended the episode, bool [B]
    seconds: float  # how long the policy thought
    backend: str  # label of the backend that computed the posteriors


@dataclass(frozen=True)
class Judge:
    """How policies are judged: the settings of `evaluate`, checked."""

    model: CPOMDP
    prior: Tensor  # over contexts, [C]
    prior_given: bool  # whether that is the caller's prior rather than the model's
    reveal_context: bool
    batch_size: int
    workers: int | None
    progress: Progress
    seed: int
    follow: Follow  # computes posteriors

    def evaluate(self, policy: PolicyLike, num_episodes: int) -> Evaluation:
        """Play one policy, and take stock."""
        B = num_episodes
        batches = self._batches(B)
        # The policy itself and not a copy of it: it may count what it does.
        acting, prior = as_policy(policy), self.prior if self.prior_given else None
        play = partial(_play, self.model, acting, prior, self.reveal_context, self.follow)
        played = self._in_batches(play, [batch[:2] for batch in batches], "playing")
        backend = " and ".join(sorted({part.backend for part in played}))
        tensors = zip(*(part[:6] for part in played), strict=True)
        c, returns, posteriors, errors, lengths, ended = (torch.cat(parts).cpu() for parts in tensors)
        _warn_if_uncertain(float(errors.mean()), backend)
        each = PerEpisode(
            contexts=c,
            weights=torch.cat([weights for _, _, weights in batches]).cpu(),
            returns=returns,
            entropies=entropy(posteriors, "bits"),
            identified=posteriors.argmax(1) == c,
            drawn=int((self.prior > 0).sum()) > B,
            lengths=lengths,
            ended=ended if self.model.can_end else None,
        )
        seconds = sum(part.seconds for part in played)
        return self._summary(each, seconds / int(lengths.sum()), backend)

    def told(self, policy: PolicyLike, num_episodes: int) -> Tensor:
        """What a policy earns in the same worlds if it is told the context, float64 `[B]`."""
        batches = [batch[:2] for batch in self._batches(num_episodes)]
        play = partial(_told, self.model, as_policy(policy))
        return torch.cat(self._in_batches(play, batches, "told the context")).cpu()

    def _batches(self, num_episodes: int) -> list[tuple[Tensor, list[int], Tensor]]:
        """Batches of episodes, each with contexts `[B]`, seeds, and weights `[B]`."""
        root = np.random.SeedSequence(self.seed)
        contexts, weights = weighted_strata(self.prior, num_episodes, root.spawn(1)[0])
        n = -(-num_episodes // self.batch_size)
        seeds = root.generate_state(3 * n).reshape(n, 3).tolist()
        return [(contexts[k::n], seeds[k], weights[k::n]) for k in range(n)]

    def _in_batches(
        self, play: Callable[..., Outcome], batches: Sequence[Worlds], what: str
    ) -> list[Outcome]:
        """Play batches, here or in other processes; in their order."""
        horizon = self.model.horizon
        total = sum(len(contexts) for contexts, _ in batches) * horizon
        found = {}
        with bar(self.progress, total, what, "decisions") as progress:
            here = stays_here(self.workers)
            if here:
                play = partial(play, progress=progress)
            for k, played in in_parallel(play, batches, workers=self.workers):
                found[k] = played
                if not here:
                    progress.update(len(batches[k][0]) * horizon)
        return [found[k] for k in range(len(batches))]

    def _summary(self, each: PerEpisode, seconds_per_decision: float, likelihood: str) -> Evaluation:
        """Averages over episodes, with contexts weighted by the prior."""
        model, c, p = self.model, each.contexts, self.prior.cpu()
        identified = each.mean(each.identified)
        best, bound = model.context_known_return(), self._informed_return
        against = None if best is None else CLOSED_FORM
        return Evaluation(
            returns=each.mean(each.returns),
            returns_by_context={
                name: Mean.of(each.returns[c == i])
                for i, name in enumerate(model.context_names)
                if bool((c == i).any())
            },
            entropy=each.mean(each.entropies),
            identified=identified.mean,
            regret=None if best is None else each.mean(best.to(each.returns)[c] - each.returns),
            seconds_per_decision=seconds_per_decision,
            likelihood=likelihood,
            identified_error=identified.standard_error,
            informed_return=None if bound is None else float((p * bound.to(p)).sum()),
            unplayed=float(p[torch.bincount(c, minlength=len(p)) == 0].sum()),
            regret_against=against,
            ended=None if each.ended is None else each.mean(each.ended),
            end_time=_end_time(each),
            per_episode=each,
        )

    @cached_property
    def _informed_return(self) -> Tensor | None:
        """An upper bound on returns, `[C]`, for a model that knows no better."""
        known = self.model.context_known_return() is not None
        return None if known else informed_return(self.model, max_dim=1)


def _end_time(each: PerEpisode) -> Mean | None:
    """After how many steps episodes ended, of those that did; how many those are was not fixed beforehand."""
    if each.ended is None or each.lengths is None or not bool(each.ended.any()):
        return None
    return Mean.of(each.lengths[each.ended], weights=each.weights[each.ended])


def _play(
    model: CPOMDP,
    policy: Policy,
    prior: Tensor | None,
    reveal_context: bool,
    follow: Follow,
    batch: Worlds,
    progress: Bar | None = None,
) -> PlayedBatch:
    """Play episodes, and compute what can be believed at their end."""
    episodes, seconds = _simulated(model, policy, prior, reveal_context, batch, progress)
    if progress is not None:
        progress.set_postfix_str("context posteriors")
    filtering, backend = follow(model, episodes, prior=prior, seed=batch[1][2])
    if progress is not None:
        progress.set_postfix_str("", refresh=False)
    assert episodes.contexts is not None
    assert episodes.returns is not None
    return PlayedBatch(
        contexts=episodes.contexts,
        returns=episodes.returns.double(),
        posteriors=filtering.posterior(prior)[:, -1],
        posterior_errors=filtering.posterior_error(prior),
        lengths=episodes.lengths,
        ended=episodes.ended,
        seconds=seconds,
        backend=backend.label,
    )


def _told(model: CPOMDP, policy: Policy, batch: Worlds, progress: Bar | None = None) -> Tensor:
    """Returns of episodes of a policy that is told the context, float64 `[B]`."""
    returns = _simulated(model, policy, None, True, batch, progress)[0].returns
    assert returns is not None
    return returns.double()


def _simulated(
    model: CPOMDP,
    policy: Policy,
    prior: Tensor | None,
    reveal_context: bool,
    batch: Worlds,
    progress: Bar | None,
) -> tuple[Episodes, float]:
    """Episodes, and the seconds that the policy took."""
    contexts, (world_seed, policy_seed, _) = batch
    timed = TimedPolicy(policy, policy_seed, progress)
    believed = one_hot(contexts, model.num_contexts).double() if reveal_context else prior
    episodes = simulate(model, timed, len(contexts), contexts=contexts, prior=believed, seed=world_seed)
    return episodes, timed.seconds


def _warn_if_uncertain(error: float, likelihood: str) -> None:
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals["__name__"] == __name__:
        frame, level = frame.f_back, level + 1  # up to whoever called `evaluate` or `compare`
    if error > UNCERTAIN_POSTERIOR:
        warnings.warn(
            f"probabilities of contexts (by {likelihood}) have standard errors of {error:.2f} on average: "
            "H(C|Y) and how often the context is identified rest on noise. Use a ParticleFilter with more "
            "particles as `likelihood`, or another backend",
            stacklevel=level,
        )


def _drawn(decision: Decision) -> Decision:
    """Actions in place of a distribution over them; one of another kind is for play to refuse."""
    if not isinstance(decision, torch.distributions.Distribution):
        return decision
    continuous = len(decision.batch_shape) == len(decision.event_shape) == 1
    proper = continuous or isinstance(decision, torch.distributions.Categorical)
    return decision.sample() if proper else decision


class TimedPolicy:
    """A policy that draws from a random stream of its own, and whose `seconds` of thinking are counted."""

    def __init__(self, policy: Policy, seed: int, progress: Bar | None = None) -> None:
        self.policy = policy
        self.progress = progress
        self.stream = RandomStream(seed)
        self.seconds = 0.0

    def start(self, prior: Tensor) -> Any:
        """The memory of the policy."""
        with self.stream:
            return self.policy.start(prior)

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """The policy's decision, with the actions drawn."""
        began = time.perf_counter()
        with self.stream:
            decision, memory = self.policy.act(history, memory)
            decision = _drawn(decision)
        self.seconds += time.perf_counter() - began
        if self.progress is not None:
            self.progress.update(history.num_episodes)
        return decision, memory
