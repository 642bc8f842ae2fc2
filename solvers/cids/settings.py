"""What a fit is asked for, with every default filled in."""

from __future__ import annotations

import math
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.errors import require, require_count
from cpomdp_ppl.experiments.fingerprint import describe, describe_model
from cpomdp_ppl.inference.choice import AUTO, backend_for
from cpomdp_ppl.policy import Policy
from cpomdp_ppl.rng import isolated
from solvers.cids import experience
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.estimator import ActorCritic, Reinforce, as_estimator
from solvers.cids.learner import FarGoal, Learner
from solvers.cids.lucky import search
from solvers.cids.objective import Variational, as_objective
from solvers.cids.pace import HURRY, LESS_HURRY, Pace
from solvers.cids.priors import OnePrior, as_sampler
from solvers.cids.schedules import Constant, Geometric, Linear, as_schedule
from solvers.cids.solution import shape_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from solvers.cids.estimator import Estimator
    from solvers.cids.group import SingleProcess
    from solvers.cids.lucky import Findings
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
    found: Findings | None  # what a search found beforehand, for policies that read beliefs
    far: FarGoal | None  # what is different if rewards are far away
    start: Any  # a rule that is imitated first, or None
    adaptive: bool  # whether it is left to the fit how many particles there are

    @staticmethod
    def of(
        model: CPOMDP,
        likelihood: str | Backend | None,
        policy: nn.Module | str | None,
        objective: str | Objective,
        estimator: Estimator | None,
        prior: PriorLike,
        temperature: float | Schedule | None,
        learning_rate: float | Schedule | None,
        iterations: int | None,
        batch_size: int,
        start: Any = None,
    ) -> FitSettings:
        """Check the arguments of `fit`, and fill in the defaults of those that were left out."""
        goal = as_objective(objective)
        variational = isinstance(goal, Variational)
        reads_belief = (
            isinstance(policy, BeliefPolicy) or policy == "belief" or (policy is None and not variational)
        )
        chosen = likelihood is not None and likelihood != AUTO
        if isinstance(policy, BeliefPolicy) and not chosen:
            likelihood, chosen = policy.backend, True
        require(start is None or reads_belief, "start", start, 'None, unless policy="belief" imitates it')
        require(start is None or callable(start) or isinstance(start, Policy), "start", start, "a policy")
        priors = as_sampler(model, prior)
        amortised = not isinstance(priors, OnePrior)
        one = model.prior().detach().double() if amortised else priors(1)[0].to(model.device)
        found = search(model, one) if reads_belief else None
        estimator, temperature, far = _defaults(model, estimator, temperature, variational, found, start)
        if learning_rate is None:
            first = 6e-3 if start is None else 2e-3
            learning_rate = Linear(first, 3e-4) if isinstance(estimator, ActorCritic) else Constant(1e-3)
        if iterations is None:
            iterations = 4000 if variational else 600 if reads_belief else 800
            iterations = iterations * 3 // 2 if amortised else iterations
        return FitSettings(
            model,
            backend_for(model, likelihood),
            goal,
            as_estimator(estimator),
            priors,
            one,
            as_schedule("temperature", temperature),
            as_schedule("learning_rate", learning_rate, positive=True),
            require_count("iterations", iterations),
            require_count("batch_size", batch_size),
            found,
            far,
            start,
            not chosen,
        )

    @property
    def amortised(self) -> bool:
        """Whether the policy has to serve many priors."""
        return not isinstance(self.priors, OnePrior)

    def learner(self, policy: nn.Module, seed: int, group: SingleProcess) -> Learner:
        """A learner at its start."""
        leads = None if self.found is None else self.found.leads
        critic_first = 0 if self.start is None else min(CRITIC_FIRST, self.iterations // 4)
        pace = None
        if self.found is not None:
            hurry = HURRY if self.model.box is None else LESS_HURRY
            pace = Pace(self.iterations - critic_first, self.found.constant, hurry)
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
            leads,
            pace,
            critic_first,
            self.adaptive,
            self.far,
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
            **{name: value for name, value in shape_of(policy).items() if name == "distribution"},
            **({} if self.far is None else {"far": describe(self.far)}),
            **({} if self.start is None else {"start": _name_of(self.start)}),
            **shard,
        }


def _defaults(
    model: CPOMDP,
    estimator: Estimator | None,
    temperature: float | Schedule | None,
    variational: bool,
    found: Findings | None,
    start: Any,
) -> tuple[Estimator, float | Schedule, FarGoal | None]:
    """Estimator and temperature unless they are given, and what is different if rewards are far away."""
    if found is None:
        by_name = Reinforce() if variational else ActorCritic()
        falling = Constant(0.2) if variational else Geometric(3.0, 0.5, until=0.7)
        return estimator or by_name, falling if temperature is None else temperature, None
    far = None
    if found.is_far and start is None:
        nat = (
            per_nat(found.prior, found.worth)
            if temperature is None
            else as_schedule("temperature", temperature)
        )
        by_default = explorer(model, found) if model.box is None else OVER_A_BOX
        after = by_default if estimator is None else as_estimator(estimator)
        far = FarGoal(practising(model, found), after, nat)
    if temperature is None:
        worth = found.worth if start is not None else found.constant_told - found.constant
        temperature = per_nat(found.prior, worth or found.unit)
    if start is not None:
        by_default = REFINING if model.box is None else replace(REFINING, random_actions=WIDER)
    else:
        by_default = NEAR if model.box is None else OVER_A_BOX
    return estimator or by_default, temperature, far


CRITIC_FIRST = 20
"""Iterations in which the critic learns alone, after a rule was imitated."""
REFINING = ActorCritic(random_actions=0.02, exploration=Linear(0.01, 0.0), told=Linear(0.2, 0.0, until=0.8))
"""The estimator for policies that have imitated a rule: small steps away from it."""


NEAR = ActorCritic(
    random_actions=Linear(0.1, 0.0, until=0.5),
    told=Linear(0.2, 0.0, until=0.8),
    exploration=Linear(0.05, 0.0),
)
"""The estimator for policies that read beliefs, where rewards are not far away."""
WIDER = Linear(0.15, 0.0, until=0.7)
"""How much wider decisions over a box are made; see `BoxDistribution.wider`."""
OVER_A_BOX = ActorCritic(
    random_actions=WIDER,
    told=Linear(0.2, 0.0, until=0.8),
    exploration=Linear(0.04, 0.0, until=0.6),
)
"""The estimator for policies that read beliefs, where actions are continuous, also after practice."""


def practising(model: CPOMDP, found: Findings) -> ActorCritic:
    """The estimator for practice; how persistent the policy is at first, a search has found."""
    return ActorCritic(
        random_actions=Linear(0.1, 0.0, until=0.6),
        persistence=Linear(persistence(model, found), 0.0, until=0.6),
        exploration=Linear(0.05, 0.0),
    )


def explorer(model: CPOMDP, found: Findings) -> ActorCritic:
    """The estimator for policies that read beliefs and have practised."""
    return ActorCritic(
        random_actions=Linear(0.1, 0.0, until=0.5),
        persistence=Linear(persistence(model, found), 0.0, until=0.6),
        told=Linear(0.2, 0.0, until=0.8),
        led=Linear(0.3, 0.0, until=0.6),
        exploration=Linear(0.05, 0.0),
    )


def persistence(model: CPOMDP, found: Findings) -> float:
    """How persistent an indifferent policy has to be to repeat actions for such runs as were found lucky.

    To a logit this is added; over a box, see `BoxDistribution.near`.
    """
    if model.box is not None:
        return math.log(found.run_length)
    return math.log(max((found.run_length - 1) * (model.num_actions - 1), 1.0))


def per_nat(prior: Tensor, worth: float) -> Schedule:
    """τ: some of what it is worth to know the context, for each nat of that, and less of it later."""
    entropy = float(torch.special.entr(prior).sum())
    nat = (worth or 1.0) / max(entropy, 0.1)
    return Geometric(float(f"{0.115 * nat:.3g}"), float(f"{0.0185 * nat:.3g}"), until=0.7)


def _name_of(rule: Any) -> str:
    return str(getattr(rule, "__qualname__", type(rule).__qualname__))


def describe_priors(sampler: PriorSampler) -> Any:
    """A sampler of priors as JSON that tells it from others: its settings, or else some of its draws."""
    if is_dataclass(sampler):
        return describe(sampler)
    with isolated(0):
        return sampler(8).tolist()
