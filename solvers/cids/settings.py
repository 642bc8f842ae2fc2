"""What a fit is asked for, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.errors import require_count
from cpomdp_ppl.experiments.fingerprint import describe, describe_model
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.rng import isolated
from solvers.cids import experience
from solvers.cids.estimator import ActorCritic, Reinforce, as_estimator
from solvers.cids.learner import Learner
from solvers.cids.objective import Variational, as_objective
from solvers.cids.priors import OnePrior, as_sampler
from solvers.cids.schedules import Constant, Geometric, Linear, as_schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from solvers.cids.estimator import Estimator
    from solvers.cids.group import SingleProcess
    from solvers.cids.objective import Objective
    from solvers.cids.priors import PriorLike, PriorSampler
    from solvers.cids.schedules import Schedule


@dataclass(frozen=True, eq=False)
class FitSettings:
    """What decides a fit but for its policy and seed; see `Learner`."""

    model: CPOMDP
    backend: Backend  # computes the likelihoods
    objective: Objective
    estimator: Estimator
    priors: PriorSampler
    prior: Tensor  # that the policy is learned for, [C]; if amortised, so that it serves many, the model's
    temperature: Schedule
    learning_rate: Schedule
    iterations: int
    batch_size: int

    @staticmethod
    def of(
        model: CPOMDP,
        likelihood: str | Backend | None,
        objective: str | Objective,
        estimator: Estimator | None,
        prior: PriorLike,
        temperature: float | Schedule | None,
        learning_rate: float | Schedule | None,
        iterations: int | None,
        batch_size: int,
    ) -> FitSettings:
        """Check the arguments of `fit`, and fill in the defaults of those that were left out."""
        goal = as_objective(objective)
        variational = isinstance(goal, Variational)
        if estimator is None:
            estimator = Reinforce() if variational else ActorCritic()
        if temperature is None:
            temperature = Constant(0.2) if variational else Geometric(3.0, 0.5, until=0.7)
        if learning_rate is None:
            learning_rate = Linear(6e-3, 3e-4) if isinstance(estimator, ActorCritic) else Constant(1e-3)
        priors = as_sampler(model, prior)
        amortised = not isinstance(priors, OnePrior)
        if iterations is None:
            iterations = (4000 if variational else 800) * (3 if amortised else 2) // 2
        return FitSettings(
            model,
            backend_for(model, likelihood),
            goal,
            as_estimator(estimator),
            priors,
            model.prior().detach().double() if amortised else priors(1)[0],
            as_schedule("temperature", temperature),
            as_schedule("learning_rate", learning_rate, positive=True),
            require_count("iterations", iterations),
            require_count("batch_size", batch_size),
        )

    @property
    def amortised(self) -> bool:
        """Whether the policy has to serve many priors."""
        return not isinstance(self.priors, OnePrior)

    def learner(self, policy: nn.Module, seed: int, group: SingleProcess) -> Learner:
        """A learner at its start."""
        return Learner(
            self.model,
            policy,
            experience.Experience(self.model, self.backend, group),
            self.objective,
            self.estimator,
            self.priors,
            self.temperature,
            self.learning_rate,
            self.iterations,
            self.batch_size,
            seed,
        )

    def describe(self, policy: nn.Module, seed: int) -> dict[str, Any]:
        """Everything that tells this fit from others, as JSON."""
        shard = {"shard": experience.SHARD} if self.batch_size > experience.SHARD else {}
        return {
            **describe_model(self.model),
            "likelihood": describe(self.backend),
            "objective": describe(self.objective),
            "estimator": describe(self.estimator),
            "policy": [[name, list(weight.shape)] for name, weight in policy.state_dict().items()],
            "prior": describe_priors(self.priors) if self.amortised else self.prior.tolist(),
            "temperature": describe(self.temperature),
            "learning_rate": describe(self.learning_rate),
            "iterations": self.iterations,
            "batch_size": self.batch_size,
            "seed": seed,
            **shard,
        }


def describe_priors(sampler: PriorSampler) -> Any:
    """A sampler of priors as JSON that tells it from others: its settings, or else some of its draws."""
    if is_dataclass(sampler):
        return describe(sampler)
    with isolated(0):
        return sampler(8).tolist()
