"""How good a policy is: what it earns, and what it finds out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch
from torch.nn.functional import one_hot
from tqdm import tqdm

from cpomdp_ppl.context import entropy, one_prior, stratified
from cpomdp_ppl.errors import DensityError, UnsupportedModelError, require, require_count, require_model
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.isolation import RandomStream, fresh_seed, require_seed
from cpomdp_ppl.parallel import filters_kept, in_parallel, require_workers
from cpomdp_ppl.policy import RandomPolicy, as_policy
from cpomdp_ppl.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy


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
    def of(values: Tensor, strata: Tensor | None = None) -> Mean:
        """Average numbers `[B]`.

        Args:
            values: One for each episode.
            strata: Which of several groups each belongs to, `[B]`, if the groups' sizes were fixed
                beforehand: what differs between groups is then no error of the mean.
        """
        n = len(values)
        values = values.double()
        deviation = float(values.std()) if n > 1 else float("nan")
        error = deviation / n**0.5
        if strata is not None:
            groups = [values[strata == stratum] for stratum in strata.unique()]
            if all(len(group) > 1 for group in groups):
                error = sum(len(group) * float(group.var()) for group in groups) ** 0.5 / n
        return Mean(float(values.mean()), error, deviation, n)

    def __str__(self) -> str:
        return f"{self.with_error()} (s.d. {shown(self.deviation, 2)})"

    def with_error(self, digits: int = 3) -> str:
        """The average and its standard error, a dash if a single episode cannot tell.

        Example:
            >>> Mean.of(torch.tensor([1.0, 3.0])).with_error(), Mean.of(torch.tensor([1.0])).with_error(1)
            ('2.000 ± 1.000', '1.0 ± –')
        """
        return f"{self.mean:.{digits}f} ± {shown(self.standard_error, digits)}"


def shown(value: float, digits: int) -> str:
    """A number, or a dash for what is not known."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


@dataclass(frozen=True)
class Evaluation:
    """What a policy earns and finds out, over episodes whose contexts are spread in proportion to the prior.

    Attributes:
        returns: The return.
        returns_by_context: The return in each context, by name.
        entropy: Of the context posterior at the end, in bits: what is left to find out.
        identified: How often the likeliest context at the end is the true one.
        regret: How far the return is from what an agent earns that is told the context, if the model knows
            that (see `CPOMDP.context_known_return`).
        seconds_per_decision: Time that the policy took for one action of one episode, in the batches that
            were played.
        likelihood: Name of the backend behind the posteriors.
    """

    returns: Mean
    returns_by_context: Mapping[str, Mean]
    entropy: Mean
    identified: float
    regret: Mean | None
    seconds_per_decision: float
    likelihood: str

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.returns_by_context, "H(C|Y) in bits"))
        lines = [("return", str(self.returns))]
        lines += [(f"  {name}", str(mean)) for name, mean in self.returns_by_context.items()]
        lines += [
            ("H(C|Y) in bits", self.entropy.with_error(4)),
            ("identified", f"{100 * self.identified:.1f} %"),
        ]
        if self.regret is not None:
            lines.append(("regret", self.regret.with_error()))
        return "\n".join(f"{name:<{width + 2}}  {value}" for name, value in lines)


@overload
def evaluate(
    model: CPOMDP,
    policy: PolicyLike,
    num_episodes: int = 4000,
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    told: bool = False,
    batch_size: int = 4000,
    workers: int | None = 1,
    progress: bool = False,
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
    told: bool = False,
    batch_size: int = 4000,
    workers: int | None = 1,
    progress: bool = False,
    seed: int | None = 0,
) -> Comparison: ...


@filters_kept()
def evaluate(
    model: CPOMDP,
    policy: PolicyLike | Mapping[str, PolicyLike],
    num_episodes: int | Mapping[str, int] = 4000,
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    told: bool = False,
    batch_size: int = 4000,
    workers: int | None = 1,
    progress: bool = False,
    seed: int | None = 0,
) -> Evaluation | Comparison:
    """Play a policy, or several by name, and take stock.

    The same seed gives every policy the same contexts, first states and noise of the world, whatever random
    numbers the policy itself draws: differences between policies are less noisy than either's return.

    Args:
        model: The CPOMDP.
        policy: Who acts; several, by name, are given to `compare`, which returns a table of them.
        num_episodes: How many episodes; for several, also by name.
        likelihood: How to compute context posteriors: a backend or its name. Left out, the most exact that
            serves the model: exact operators, a grid for one-dimensional states, or 1,024 particles.
        prior: Over contexts, `[C]`; the model's if left out.
        told: Whether the policy is told the context: it then starts from a prior that is sure of it.
        batch_size: How many episodes are played side by side.
        workers: In how many processes batches are played, for planners that take their time; more than one
            needs the extra `parallel`. None leaves it to joblib's configuration, a Dask cluster for instance,
            or takes all cores; see `cpomdp_ppl.parallel`. It makes no difference to the result, unless a
            policy changes as it plays: what it does to itself in another process stays there.
        progress: Whether to show a progress bar, by batches.
        seed: Of everything random; None takes fresh entropy.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> result = evaluate(LineGrid(), RandomPolicy(3), 100)
        >>> result.likelihood, result.returns.num_episodes
        ('exact', 100)
    """
    require_model(model)
    if isinstance(policy, Mapping):
        return compare(
            model,
            policy,
            num_episodes,
            likelihood=likelihood,
            prior=prior,
            told=told,
            batch_size=batch_size,
            workers=workers,
            progress=progress,
            seed=seed,
        )
    B = require_count("num_episodes", num_episodes)
    require_seed(seed)
    size = require_count("batch_size", batch_size)
    require_workers(workers)
    p = one_prior(prior, model)
    backend = most_exact(model) if likelihood is None else as_backend(likelihood)
    root = np.random.SeedSequence(seed)
    parts = -(-B // size)
    contexts = stratified(p, B)
    given = None if prior is None else p
    tasks = [
        (model, as_policy(policy), contexts[k::parts], given, told, backend, [int(word) for word in words])
        for k, words in enumerate(root.generate_state(3 * parts).reshape(parts, 3))
    ]
    # The policy itself and not a copy of it: it may count what it does.
    played = in_parallel(_play, tasks, workers=workers, copies=False)
    by_part = dict(tqdm(played, total=parts, disable=not progress, desc="episodes"))
    outcomes = [by_part[k] for k in range(parts)]
    c, returns, last = (
        torch.cat(series) for series in zip(*[outcome[:3] for outcome in outcomes], strict=True)
    )
    seconds = sum(outcome[3] for outcome in outcomes)

    best = model.context_known_return()
    return Evaluation(
        returns=Mean.of(returns, c),
        returns_by_context={
            name: Mean.of(returns[c == i])
            for i, name in enumerate(model.context_names)
            if bool((c == i).any())
        },
        entropy=Mean.of(entropy(last, "bits")),
        identified=float((last.argmax(1) == c).double().mean()),
        regret=None if best is None else Mean.of(best.to(returns)[c] - returns, c),
        seconds_per_decision=seconds / (B * model.horizon),
        likelihood=backend.name,
    )


Task: TypeAlias = "tuple[CPOMDP, Policy, Tensor, Tensor | None, bool, Backend, list[int]]"
Outcome: TypeAlias = "tuple[Tensor, Tensor, Tensor, float]"
"""Contexts `[B]`, returns `[B]`, posterior at the end `[B, C]`, and seconds spent on decisions."""


def _play(task: Task) -> Outcome:
    model, policy, contexts, prior, told, backend, seeds = task
    watched = Watched(policy, seeds[1])
    believed = one_hot(contexts, model.num_contexts).double() if told else prior
    episodes = simulate(model, watched, len(contexts), contexts=contexts, prior=believed, seed=seeds[0])
    filtering = backend.run(model, episodes, seed=seeds[2], moments=False)
    assert episodes.contexts is not None
    assert episodes.returns is not None
    last = filtering.posterior(prior)[:, -1]  # [B, C]
    return episodes.contexts, episodes.returns.double(), last, watched.seconds


class Watched:
    """A policy with random numbers of its own, and a clock.

    Args:
        policy: Who decides.
        seed: Of its random numbers.

    Attributes:
        seconds: How long it has thought.
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
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
                "–" if e.regret is None else f"{e.regret.mean:.2f}",
                f"{1e3 * e.seconds_per_decision:.3g}",
                f"{self.training_seconds[name]:.0f}" if name in self.training_seconds else "–",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON."""
        return asdict(self)


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
    require(isinstance(policies, Mapping) and len(policies) > 0, "policies", policies, "policies by name")
    many = dict(num_episodes) if isinstance(num_episodes, Mapping) else dict.fromkeys(policies, num_episodes)
    require(
        many.keys() == policies.keys(), "num_episodes", num_episodes, f"a number, or one for {list(policies)}"
    )
    seed = fresh_seed(seed)  # the same for all
    evaluations = {
        name: evaluate(model, policy, many[name], seed=seed, **settings) for name, policy in policies.items()
    }
    return Comparison(evaluations, dict(training_seconds or {}))


def most_exact(model: CPOMDP) -> Backend:
    """The most exact backend that serves a model in reasonable time."""
    from cpomdp_ppl.inference import GridFilter, ObservableOperator, ParticleFilter
    from cpomdp_ppl.signature import signature
    from cpomdp_ppl.state import leaves

    sizes = [leaf.shape.numel() for _, leaf in leaves(signature(model).state)]
    candidates: list[Backend] = [ObservableOperator()] if model.states is not None else []
    candidates += [GridFilter()] if sum(sizes) == 1 else []
    episodes = simulate(model, RandomPolicy(model.num_actions), 2, seed=0)
    for backend in candidates:
        try:
            backend.run(model, episodes, seed=0)
        except (UnsupportedModelError, DensityError):
            continue
        return backend
    return ParticleFilter(num_particles=1024)
