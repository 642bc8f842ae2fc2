"""How good a policy is: what it earns, and what it finds out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.context import as_prior, entropy, stratified
from cpomdp_ppl.errors import UnsupportedModelError, require_count, require_model
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.inference.backend import inferring
from cpomdp_ppl.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History, Policy


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
        return f"{self.mean:.3f} ± {self.standard_error:.3f} (s.d. {self.deviation:.2f})"


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
        likelihood: Name of the backend behind the posteriors.
    """

    returns: Mean
    returns_by_context: Mapping[str, Mean]
    entropy: Mean
    identified: float
    regret: Mean | None
    likelihood: str

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, to be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.returns_by_context, "H(C|Y) in bits"))
        lines = [("return", str(self.returns))]
        lines += [(f"  {name}", str(mean)) for name, mean in self.returns_by_context.items()]
        lines += [
            ("H(C|Y) in bits", f"{self.entropy.mean:.4f} ± {self.entropy.standard_error:.4f}"),
            ("identified", f"{100 * self.identified:.1f} %"),
        ]
        if self.regret is not None:
            lines.append(("regret", f"{self.regret.mean:.3f} ± {self.regret.standard_error:.3f}"))
        return "\n".join(f"{name:<{width + 2}}  {value}" for name, value in lines)


def evaluate(
    model: CPOMDP,
    policy: Policy | Callable[[History], Decision],
    num_episodes: int = 4000,
    *,
    likelihood: str | Backend | None = None,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = 0,
) -> Evaluation:
    """Play a policy, and take stock. The same seed gives every policy the same contexts and first states.

    Args:
        model: The CPOMDP.
        policy: Who acts.
        num_episodes: How many episodes.
        likelihood: How to compute context posteriors: a backend or its name. Left out, the most exact that
            serves the model: exact operators, a grid for one-dimensional states, or 1,024 particles.
        prior: Over contexts, `[C]`; the model's if left out.
        seed: Of everything random; None takes fresh entropy.

    Example:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LineGrid
        >>> result = evaluate(LineGrid(), RandomPolicy(3), 100)
        >>> result.likelihood, result.returns.num_episodes
        ('exact', 100)
    """
    require_model(model)
    B = require_count("num_episodes", num_episodes)
    p = as_prior(model.prior() if prior is None else prior, model.num_contexts, B)
    contexts = stratified(p, B) if p.dim() == 1 else None
    episodes = simulate(model, policy, B, contexts=contexts, prior=p, seed=seed)
    assert episodes.contexts is not None
    assert episodes.returns is not None
    backend = most_exact(model) if likelihood is None else as_backend(likelihood)
    filtering = backend.run(model, episodes, seed=seed, moments=False)
    last = filtering.posterior(p.to(model.device))[:, -1]  # [B, C]

    c, returns = episodes.contexts, episodes.returns.double()
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
        likelihood=backend.name,
    )


def most_exact(model: CPOMDP) -> Backend:
    """The most exact backend that serves a model in reasonable time."""
    from cpomdp_ppl.inference import GridFilter, ObservableOperator, ParticleFilter
    from cpomdp_ppl.signature import signature
    from cpomdp_ppl.state import leaves

    sizes = [leaf.shape.numel() for _, leaf in leaves(signature(model).state)]
    candidates: list[Backend] = [ObservableOperator()] if model.states is not None else []
    candidates += [GridFilter()] if sum(sizes) == 1 else []
    for backend in candidates:
        try:
            with inferring(model, 0):
                backend.recursion(model)
        except UnsupportedModelError:
            continue
        return backend
    return ParticleFilter(num_particles=1024)
