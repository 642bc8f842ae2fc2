"""How good a policy is: what it earns, and what it finds out."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch
from torch.nn.functional import one_hot

from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.experiments.execute import filters_kept, in_parallel, require_workers, stays_here
from cpomdp_ppl.inference.choice import follow_by
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.prior import one_prior, weighted_strata
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import RandomStream, fresh_seed, require_seed
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.choice import Follow
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy
    from cpomdp_ppl.progress import Bar, Progress


UNSURE = 0.05
"""Mean standard error of contexts' probabilities, beyond which there is a warning."""

PolicyLike: TypeAlias = "Policy | Callable[[History], Decision]"
"""A policy, or a function from what the agent knows to its decision."""


@dataclass(frozen=True)
class Mean:
    """An average over episodes.

    Attributes:
        mean: The average.
        standard_error: Of the average.
        deviation: Standard deviation of a single episode.
        num_episodes: How many there were.
    """

    mean: float
    standard_error: float
    deviation: float
    num_episodes: int

    @staticmethod
    def of(values: Tensor, strata: Tensor | None = None, weights: Tensor | None = None) -> Mean:
        """Average numbers `[B]`.

        A group's part of the mean has the error of its own numbers' spread. One number alone has none: it is
        taken to be as uncertain as it is far from the plain mean of all. On average that is too much rather
        than too little, as what differs between groups is in it; if all groups are of one, it is the error
        of numbers without groups.

        Args:
            values: One for each episode.
            strata: Which of several groups each belongs to, `[B]`, if the groups' sizes were fixed
                beforehand: what differs between groups is then no error of the mean.
            weights: Of the episodes, `[B]`, the same within a group; equal if left out.
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

    def __str__(self) -> str:
        return f"{self.with_error()} (s.d. {shown(self.deviation, 2)})"

    def with_error(self, digits: int = 3) -> str:
        """The average and its standard error, a dash if a single episode cannot tell.

        Example:
            >>> Mean.of(torch.tensor([1.0, 3.0])).with_error(), Mean.of(torch.tensor([1.0])).with_error(1)
            ('2.000 ± 1.000', '1.0 ± –')
        """
        return f"{self.mean:.{digits}f} ± {shown(self.standard_error, digits)}"


def _mean(content: Mapping[str, Any]) -> Mean:
    """A mean from JSON, in which NaN is null."""
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in content.items()}
    return Mean(**known)


def shown(value: float, digits: int) -> str:
    """A number, or a dash for what is not known."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


@dataclass(frozen=True, eq=False)
class PerEpisode:
    """What single episodes came to, in the order in which they were played.

    Evaluations of the same number of episodes, with the same seed, prior and `batch_size`, have the same
    contexts, first states and noise in the same place: their differences may be taken one by one.

    Attributes:
        contexts: The true ones, int64 `[B]`.
        weights: How much an episode counts, float64 `[B]`: `P(c) / n_c` in a context of which there are n_c.
        returns: Float64 `[B]`.
        entropies: Of the context posterior at the end, in bits, float64 `[B]`.
        identified: Whether the likeliest context at the end was the true one, bool `[B]`.
        drawn: Whether contexts were drawn from the prior, as there were more than episodes; all weights are
            `1 / B` then.
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
        """Average numbers of the episodes, `[B]`, over contexts as the prior has them.

        If contexts were drawn, and all are the same one, nobody knows how much others differ from it: there
        is no standard error then.

        Example:
            >>> from cpomdp_ppl import RandomPolicy
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
        entropy: Of the context posterior at the end, in bits: what is left to find out.
        identified: How often the likeliest context at the end is the true one.
        regret: How far the return is from what an agent earns that is told the context, if the model knows
            that (see `CPOMDP.context_known_return`).
        seconds_per_decision: Time that the policy took for one action of one episode, in the batches that
            were played.
        likelihood: Name of the backend behind the posteriors.
        identified_error: Standard error of `identified`.
        informed_return: What an agent earns that is told the context and sees every state, where `regret` is
            not known but this can be computed (see `cpomdp_ppl.bounds.informed_return`): nobody earns more.
        unplayed: Prior probability of all contexts in which no episode was played, for want of episodes.
        per_episode: What the averages are made of; None if they were read from a file.
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
        """What `as_dict` gave, also of earlier versions, and from JSON in which NaN is null."""
        parts: dict[str, Any] = dict(content)
        for name in ("returns", "entropy", "regret"):
            parts[name] = None if parts[name] is None else _mean(parts[name])
        parts["returns_by_context"] = {
            name: _mean(each) for name, each in parts["returns_by_context"].items()
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
            ("identified", f"{100 * self.identified:.1f} ± {shown(100 * self.identified_error, 1)} %"),
        ]
        if self.regret is not None:
            lines.append(("regret", self.regret.with_error()))
        if self.informed_return is not None and self.regret_at_most is not None:
            lines.append(("at most", f"{self.informed_return:.3f} can be earned (state and context known)"))
            lines.append(("regret, at most", self.regret_at_most.with_error()))
        return "\n".join(f"{name:<{width + 2}}  {value}" for name, value in lines)


@overload
def evaluate(
    model: CPOMDP,
    policy: PolicyLike,
    num_episodes: int = 4000,
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    reveal_context: bool = False,
    batch_size: int = 4000,
    workers: int | None = 1,
    progress: Progress = False,
    seed: int | None = 0,
) -> Evaluation: ...


@overload
def evaluate(
    model: CPOMDP,
    policy: Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = 4000,
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    reveal_context: bool = False,
    batch_size: int = 4000,
    workers: int | None = 1,
    progress: Progress = False,
    seed: int | None = 0,
) -> Comparison: ...


def evaluate(
    model: CPOMDP,
    policy: PolicyLike | Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = 4000,
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    reveal_context: bool = False,
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

    Args:
        model: The CPOMDP.
        policy: Who acts; several, by name, are given to `compare`, which returns a table of them.
        num_episodes: How many episodes; for several, also by name.
        likelihood: How to compute context posteriors: a backend or its name. Left out, the most exact one,
            as far as simulated episodes tell; see `reference_backend`.
        prior: Over contexts, `[C]`; the model's if left out.
        reveal_context: Whether the policy is told the context: it then starts from a prior that is sure of it.
        batch_size: How many episodes are played side by side.
        workers: In how many processes batches are played, for planners that take their time; more than one
            needs the extra `parallel`. None leaves it to joblib's configuration, a Dask cluster for instance,
            or takes all cores; see `cpomdp_ppl.experiments.execute`. It makes no difference to the result, unless a
            policy changes as it plays: what it does to itself in another process stays there.
        progress: Whether to show a progress bar, by decisions (by batches, if those are played in other
            processes); or a function that is told now and then how far it has got, and how long it will take.
        seed: Of everything random; None takes fresh entropy.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> result = evaluate(LineGrid(), RandomPolicy(3), 100)
        >>> result.likelihood, result.returns.num_episodes
        ('exact', 100)
    """
    settings: dict[str, Any] = {
        "likelihood": likelihood,
        "prior": prior,
        "reveal_context": reveal_context,
        "batch_size": batch_size,
        "workers": workers,
        "progress": progress,
        "seed": seed,
    }
    if isinstance(policy, Mapping):
        return compare(model, policy, num_episodes, **settings)
    return _evaluate(model, policy, num_episodes, lambda: _most(model), **settings)


def _most(model: CPOMDP) -> Tensor | None:
    """An upper bound on returns `[C]` for a model that knows no better."""
    return informed_return(model, max_dim=1) if model.context_known_return() is None else None


@filters_kept()
def _evaluate(
    model: CPOMDP,
    policy: PolicyLike,
    num_episodes: Any,
    most: Callable[[], Tensor | None],
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    reveal_context: bool = False,
    batch_size: int = 4000,
    workers: int | None = 1,
    progress: Progress = False,
    seed: int | None = 0,
) -> Evaluation:
    """As `evaluate`, of one policy, with what tells how much can be earned at most, asked at the end."""
    require_model(model)
    B = require_count("num_episodes", num_episodes)
    require_seed(seed)
    size = require_count("batch_size", batch_size)
    require_workers(workers)
    p = one_prior(prior, model)
    follow = follow_by(model, likelihood)
    root = np.random.SeedSequence(seed)
    parts = -(-B // size)
    contexts, weights = weighted_strata(p, B, root.spawn(1)[0])
    given = None if prior is None else p
    tasks = [
        (
            model,
            as_policy(policy),
            contexts[k::parts],
            given,
            reveal_context,
            follow,
            [int(word) for word in words],
        )
        for k, words in enumerate(root.generate_state(3 * parts).reshape(parts, 3))
    ]
    # The policy itself and not a copy of it: it may count what it does.
    with bar(progress, B * model.horizon, "playing", "decisions") as shown:
        here = stays_here(workers)
        play = partial(_play, shown=shown) if here else _play
        by_part = {}
        for k, outcome in in_parallel(play, tasks, workers=workers, copies=False):
            by_part[k] = outcome
            if not here:
                shown.update(len(outcome[0]) * model.horizon)
    outcomes = [by_part[k] for k in range(parts)]
    c, returns, last, unsure = (
        torch.cat(series).cpu() for series in zip(*[outcome[:4] for outcome in outcomes], strict=True)
    )
    seconds = sum(outcome[4] for outcome in outcomes)
    backends = " and ".join(sorted({outcome[5] for outcome in outcomes}))
    _warn_if_unsure(float(unsure.mean()), backends)

    each = PerEpisode(
        contexts=c,
        weights=torch.cat([weights[k::parts] for k in range(parts)]).cpu(),
        returns=returns,
        entropies=entropy(last, "bits"),
        identified=last.argmax(1) == c,
        drawn=int((p > 0).sum()) > B,
    )
    identified = each.mean(each.identified)
    best = model.context_known_return()
    bound, p = most(), p.cpu()
    return Evaluation(
        returns=each.mean(returns),
        returns_by_context={
            name: Mean.of(returns[c == i])
            for i, name in enumerate(model.context_names)
            if bool((c == i).any())
        },
        entropy=each.mean(each.entropies),
        identified=identified.mean,
        regret=None if best is None else each.mean(best.to(returns)[c] - returns),
        seconds_per_decision=seconds / (B * model.horizon),
        likelihood=backends,
        identified_error=identified.standard_error,
        informed_return=None if bound is None else float((p * bound.to(p)).sum()),
        unplayed=float(p[torch.bincount(c, minlength=len(p)) == 0].sum()),
        per_episode=each,
    )


def _warn_if_unsure(error: float, likelihood: str) -> None:
    if error > UNSURE:
        warnings.warn(
            f"probabilities of contexts by {likelihood} have standard errors of {error:.2f} on average: "
            "H(C|Y) and how often the context is identified rest on noise. Use a ParticleFilter with more "
            "particles as `likelihood`, or another backend",
            stacklevel=5,
        )


Task: TypeAlias = "tuple[CPOMDP, Policy, Tensor, Tensor | None, bool, Follow, list[int]]"
Outcome: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor, float, str]"
"""Contexts `[B]`, returns `[B]`, posterior at the end `[B, C]` and its standard error `[B]`, seconds spent on
decisions, and the name of the backend."""


def _play(task: Task, shown: Bar | None = None) -> Outcome:
    model, policy, contexts, prior, reveal_context, follow, seeds = task
    watched = Watched(policy, seeds[1], shown)
    believed = one_hot(contexts, model.num_contexts).double() if reveal_context else prior
    episodes = simulate(model, watched, len(contexts), contexts=contexts, prior=believed, seed=seeds[0])
    if shown is not None:
        shown.set_postfix_str("context posteriors")
    filtering, backend = follow(model, episodes, prior=prior, seed=seeds[2])
    if shown is not None:
        shown.set_postfix_str("", refresh=False)
    assert episodes.contexts is not None
    assert episodes.returns is not None
    last = filtering.posterior(prior)[:, -1]  # [B, C]
    error = filtering.posterior_error(prior)
    return episodes.contexts, episodes.returns.double(), last, error, watched.seconds, backend.name


class Watched:
    """A policy with random numbers of its own, and a clock.

    Args:
        policy: Who decides.
        seed: Of its random numbers.
        shown: What shows how many decisions have been taken, if anything.

    Attributes:
        seconds: How long it has thought.
    """

    def __init__(self, policy: Policy, seed: int, shown: Bar | None = None) -> None:
        self.policy = policy
        self.shown = shown
        self.stream = RandomStream(seed)
        self.seconds = 0.0

    def start(self, prior: Tensor) -> Any:
        """The policy's own memory."""
        with self.stream:
            return self.policy.start(prior)

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """The policy's decision, with the actions drawn."""
        began = time.perf_counter()
        with self.stream:
            decision, memory = self.policy.act(history, memory)
            if isinstance(decision, torch.distributions.Categorical):
                decision = decision.sample()
        self.seconds += time.perf_counter() - began
        if self.shown is not None:
            self.shown.update(history.num_episodes)
        return decision, memory


@dataclass(frozen=True)
class Comparison:
    """Several policies on the same episodes.

    Attributes:
        evaluations: By name of the policy.
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
                shown(e.returns.deviation, 2),
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
    """For a table: known, bounded, or neither."""
    if evaluation.regret is not None:
        return f"{evaluation.regret.mean:.2f}"
    return "–" if (most := evaluation.regret_at_most) is None else f"≤ {most.mean:.2f}"


def compare(
    model: CPOMDP,
    policies: Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = 4000,
    *,
    training_seconds: Mapping[str, float] | None = None,
    seed: int | None = 0,
    **settings: Any,
) -> Comparison:
    """Evaluate several policies on the same contexts, first states and noise, into one table.

    Args:
        model: The CPOMDP.
        policies: By name.
        num_episodes: For all, or by name: planners may be too slow for as many as learned policies get.
        training_seconds: How long policies took to learn, by name, for the table.
        seed: Of everything random; None takes fresh entropy, once for all.
        settings: As for `evaluate`.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> table = compare(LineGrid(), {"random": RandomPolicy(3)}, 50)
        >>> table.evaluations["random"].returns.num_episodes
        50
    """
    require_model(model)
    require(isinstance(policies, Mapping) and len(policies) > 0, "policies", policies, "policies by name")
    many = dict(num_episodes) if isinstance(num_episodes, Mapping) else dict.fromkeys(policies, num_episodes)
    require(
        many.keys() == policies.keys(), "num_episodes", num_episodes, f"a number, or one for {list(policies)}"
    )
    seed = fresh_seed(seed)  # the same for all
    most = cache(lambda: _most(model))
    evaluations = {
        name: _evaluate(model, policy, many[name], most, seed=seed, **settings)
        for name, policy in policies.items()
    }
    return Comparison(evaluations, dict(training_seconds or {}))
