"""Playing policies in order to judge them: `evaluate` one, `compare` several on the same episodes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import torch
from torch.nn.functional import one_hot

from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.context import entropy
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.evaluation.mean import Mean
from cpomdp_ppl.evaluation.outcome import Comparison, Evaluation, PerEpisode
from cpomdp_ppl.experiments.execute import in_parallel, require_workers, stays_here
from cpomdp_ppl.inference.choice import follow_by
from cpomdp_ppl.policy import as_policy
from cpomdp_ppl.prior import one_prior, weighted_strata
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import RandomStream, fresh_seed
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.choice import Follow
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy
    from cpomdp_ppl.progress import Bar, Progress

UNCERTAIN_POSTERIOR = 0.05
"""Mean standard error of contexts' probabilities, beyond which there is a warning."""

PolicyLike: TypeAlias = "Policy | Callable[[History], Decision]"
"""A policy, or a function from what the agent knows to its decision."""


class EvaluationSettings(TypedDict, total=False):
    """Types of the keyword arguments that `evaluate` describes."""

    likelihood: str | Backend | None
    prior: Sequence[float] | Tensor | None
    reveal_context: bool
    batch_size: int
    workers: int | None
    progress: Progress
    seed: int | None


@overload
def evaluate(
    model: CPOMDP, policy: PolicyLike, num_episodes: int = ..., **settings: Unpack[EvaluationSettings]
) -> Evaluation: ...


@overload
def evaluate(
    model: CPOMDP,
    policy: Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = ...,
    **settings: Unpack[EvaluationSettings],
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
        policy: The policy that acts; or several, by name, for a table of them.
        num_episodes: How many episodes are played; for several policies, also by name.
        likelihood: How to compute context posteriors: a backend or its name. Left out, the most exact one,
            as far as simulated episodes tell; see `reference_backend`.
        prior: Prior over contexts, `[C]`; the model's if left out.
        reveal_context: Whether the policy is told the context: it then starts from a prior that is sure.
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
        found = {name: judge.evaluate(each, numbers[name]) for name, each in policies.items()}
    return Comparison(found, {}) if policies is policy else found[""]


def compare(
    model: CPOMDP,
    policies: Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = 4000,
    *,
    training_seconds: Mapping[str, float] | None = None,
    **settings: Unpack[EvaluationSettings],
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


class PlayedBatch(NamedTuple):
    """What came of episodes that were played side by side."""

    contexts: Tensor  # the true contexts, [B]
    returns: Tensor  # float64 [B]
    posteriors: Tensor  # P(C | y) at the end, [B, C]
    posterior_errors: Tensor  # standard errors of these probabilities, [B]
    seconds: float  # how long the policy thought
    backend: str  # name of the backend that computed the posteriors


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
        root = np.random.SeedSequence(self.seed)
        contexts, weights = weighted_strata(self.prior, B, root.spawn(1)[0])
        parts = -(-B // self.batch_size)
        seeds = root.generate_state(3 * parts).reshape(parts, 3).tolist()
        played = self._play(as_policy(policy), [(contexts[k::parts], seeds[k]) for k in range(parts)])
        backend = " and ".join(sorted({part.backend for part in played}))
        _warn_if_uncertain(float(_joined(played, "posterior_errors").mean()), backend)

        c, posteriors = _joined(played, "contexts"), _joined(played, "posteriors")
        each = PerEpisode(
            contexts=c,
            weights=torch.cat([weights[k::parts] for k in range(parts)]).cpu(),
            returns=_joined(played, "returns"),
            entropies=entropy(posteriors, "bits"),
            identified=posteriors.argmax(1) == c,
            drawn=int((self.prior > 0).sum()) > B,
        )
        seconds = sum(part.seconds for part in played)
        return self._summary(each, seconds / (B * self.model.horizon), backend)

    def _play(self, policy: Policy, batches: Sequence[tuple[Tensor, list[int]]]) -> list[PlayedBatch]:
        """Play batches, each with contexts `[B]` and seeds, here or in other processes; in their order."""
        horizon = self.model.horizon
        total = sum(len(contexts) for contexts, _ in batches) * horizon
        prior = self.prior if self.prior_given else None
        # The policy itself and not a copy of it: it may count what it does.
        play = partial(_play, self.model, policy, prior, self.reveal_context, self.follow)
        found = {}
        with bar(self.progress, total, "playing", "decisions") as progress:
            here = stays_here(self.workers)
            if here:
                play = partial(play, progress=progress)
            for k, played in in_parallel(play, batches, workers=self.workers):
                found[k] = played
                if not here:
                    progress.update(len(played.contexts) * horizon)
        return [found[k] for k in range(len(batches))]

    def _summary(self, each: PerEpisode, seconds_per_decision: float, likelihood: str) -> Evaluation:
        """Averages over episodes, with contexts weighted by the prior."""
        model, c, p = self.model, each.contexts, self.prior.cpu()
        identified = each.mean(each.identified)
        best, bound = model.context_known_return(), self._informed_return
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
            per_episode=each,
        )

    @cached_property
    def _informed_return(self) -> Tensor | None:
        """An upper bound on returns, `[C]`, for a model that knows no better."""
        known = self.model.context_known_return() is not None
        return None if known else informed_return(self.model, max_dim=1)


def _play(
    model: CPOMDP,
    policy: Policy,
    prior: Tensor | None,
    reveal_context: bool,
    follow: Follow,
    batch: tuple[Tensor, list[int]],
    progress: Bar | None = None,
) -> PlayedBatch:
    """Play episodes in contexts `[B]`, with seeds, and compute what can be believed at their end."""
    contexts, (world_seed, policy_seed, filter_seed) = batch
    timed = TimedPolicy(policy, policy_seed, progress)
    believed = one_hot(contexts, model.num_contexts).double() if reveal_context else prior
    episodes = simulate(model, timed, len(contexts), contexts=contexts, prior=believed, seed=world_seed)
    if progress is not None:
        progress.set_postfix_str("context posteriors")
    filtering, backend = follow(model, episodes, prior=prior, seed=filter_seed)
    if progress is not None:
        progress.set_postfix_str("", refresh=False)
    assert episodes.contexts is not None
    assert episodes.returns is not None
    return PlayedBatch(
        contexts=episodes.contexts,
        returns=episodes.returns.double(),
        posteriors=filtering.posterior(prior)[:, -1],
        posterior_errors=filtering.posterior_error(prior),
        seconds=timed.seconds,
        backend=backend.name,
    )


def _joined(played: Sequence[PlayedBatch], name: str) -> Tensor:
    """One array of all batches, `[B, …]`."""
    return torch.cat([getattr(part, name) for part in played]).cpu()


def _warn_if_uncertain(error: float, likelihood: str) -> None:
    if error > UNCERTAIN_POSTERIOR:
        warnings.warn(
            f"probabilities of contexts by {likelihood} have standard errors of {error:.2f} on average: "
            "H(C|Y) and how often the context is identified rest on noise. Use a ParticleFilter with more "
            "particles as `likelihood`, or another backend",
            stacklevel=4,
        )


class TimedPolicy:
    """A policy that draws from a random stream of its own, and whose thinking is timed.

    Args:
        policy: The policy that decides.
        seed: Seed of its random numbers.
        progress: A bar that shows how many decisions have been taken, if there is one.

    Attributes:
        seconds: How long it has thought.
    """

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
            if isinstance(decision, torch.distributions.Categorical):
                decision = decision.sample()
        self.seconds += time.perf_counter() - began
        if self.progress is not None:
            self.progress.update(history.num_episodes)
        return decision, memory
