"""Rules that a learner has to beat: cheap to write down, and some of them hard to improve on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from cpomdp_ppl.actions import as_actions, require_actions, some_action
from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.errors import require, require_count, require_model
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.policy import action_probabilities, as_policy

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.online import OnlineFilter
    from cpomdp_ppl.policy import Decision, History, Policy

Action: TypeAlias = int | str | Sequence[float] | Tensor
"""An action by index or name, or the numbers of a continuous one."""


class Always:
    """The same action whatever happens: in Light–Dark, one way.

    Args:
        model: The CPOMDP.
        action: By index or name, or as D numbers.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> simulate(LightDark(), Always(LightDark(), "right"), 2, seed=0).actions.unique()
        tensor([1])
    """

    def __init__(self, model: CPOMDP, action: Action) -> None:
        self.action = as_action("action", model, action)

    def start(self, prior: Tensor) -> Tensor:
        """The actions, which never change."""
        return repeated(self.action, len(prior))

    def act(self, history: History, memory: Tensor) -> tuple[Decision, Tensor]:
        """That action."""
        return memory, memory


class Tracking(ABC):
    """A policy that follows the context with a filter, and decides by the posterior."""

    def __init__(self, model: CPOMDP, likelihood: str | Backend | None = None, seed: int = 0) -> None:
        require_model(model)
        self.model = model
        self.backend = backend_for(model, likelihood)
        self.seed = seed

    def start(self, prior: Tensor) -> tuple[OnlineFilter, Any]:
        """A filter at its start, and whatever the rule itself remembers."""
        online = self.backend.online(self.model, len(prior), prior=renormalised(prior), seed=self.seed)
        return online, self.begin(prior)

    def act(self, history: History, memory: tuple[OnlineFilter, Any]) -> tuple[Decision, Any]:
        """Condition the filter on what is new, and decide."""
        online, rest = memory
        if history.time or self.model.initial_observation:
            latest = history.latest
            online.observe(latest.action, latest.observations, latest.observed)
        decision, rest = self.decide(online, history, rest)
        return decision, (online, rest)

    def begin(self, prior: Tensor) -> Any:
        """What the rule remembers before the first step."""
        return None

    @abstractmethod
    def decide(self, online: OnlineFilter, history: History, memory: Any) -> tuple[Decision, Any]:
        """Choose by what the filter says."""


class ByContext(Tracking):
    """One policy for each context, of which the posterior over contexts picks one at every step.

    All of them follow the episode, so that whichever is picked knows what happened.

    Args:
        model: The CPOMDP.
        policies: One for each context: what to do if that were it. `cids.fit` with a point prior learns them.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        seed: Seed of the filter.
    """

    def __init__(
        self,
        model: CPOMDP,
        policies: Sequence[Policy | Callable[[History], Decision]],
        likelihood: str | Backend | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, likelihood, seed)
        self.policies = as_policies(model, policies)

    def begin(self, prior: Tensor) -> list[Any]:
        """The memories of all policies, each certain of its context."""
        points = torch.eye(self.model.num_contexts, dtype=prior.dtype, device=prior.device)
        return [policy.start(points[c].expand_as(prior)) for c, policy in enumerate(self.policies)]

    def decide(self, online: OnlineFilter, history: History, memory: list[Any]) -> tuple[Decision, list[Any]]:
        """As the policy of the picked context does."""
        return decide_by(self.model, self.pick(online.posterior), self.policies, history, memory)

    @abstractmethod
    def pick(self, posterior: Tensor) -> Tensor:
        """Choose contexts `[B]` by their posterior `[B, C]`."""


class MostLikelyContext(ByContext):
    """Act as if the likeliest context were it: certainty equivalence, which never looks on purpose.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> rule = MostLikelyContext(model, [Always(model, "right"), Always(model, "left")], "ekf")
        >>> simulate(model, rule, 3, seed=0).actions.shape
        torch.Size([3, 20])
    """

    def pick(self, posterior: Tensor) -> Tensor:
        """The likeliest."""
        return posterior.argmax(-1)


class ThompsonSampling(ByContext):
    """Act as if a context drawn from the posterior were it, drawn anew at every step.

    `PosteriorSampling` draws once for each episode.
    """

    def pick(self, posterior: Tensor) -> Tensor:
        """At random."""
        drawn: Tensor = torch.distributions.Categorical(posterior).sample()
        return drawn


class ContextKnown:
    """The oracle: acts as the policy of the true context does, which must be revealed to it.

    It takes the prior at its word: play it with a prior that is sure of each episode's context, as
    `evaluate(…, reveal_context=True)` does.

    Args:
        model: The CPOMDP.
        policies: One for each context.
    """

    def __init__(self, model: CPOMDP, policies: Sequence[Policy | Callable[[History], Decision]]) -> None:
        require_model(model)
        self.model = model
        self.policies = as_policies(model, policies)

    def start(self, prior: Tensor) -> tuple[Tensor, list[Any]]:
        """The context that was revealed, and the memories of all policies."""
        require(
            bool((prior.amax(-1) > 0.999).all()), "prior", prior.tolist(), "a sure context in every episode"
        )
        return prior.argmax(-1), [policy.start(prior) for policy in self.policies]

    def act(self, history: History, memory: tuple[Tensor, list[Any]]) -> tuple[Decision, Any]:
        """As the policy of the context does."""
        context, memories = memory
        decision, memories = decide_by(self.model, context, self.policies, history, memories)
        return decision, (context, memories)


class PosteriorSampling(ContextKnown):
    """Thompson sampling by episodes: draw a context from the prior, and act as if it were true to the end.

    Over many episodes in one context, as `cids.run` plays them, this is what C-IDS has to be compared with:
    it looks only by accident, but its draws are right more and more often.

    Args:
        model: The CPOMDP.
        policies: One for each context; a policy that reads the prior may stand for all, `[policy] * C`.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> rule = PosteriorSampling(model, [Always(model, "right"), Always(model, "left")])
        >>> simulate(model, rule, 50, prior=[0.0, 1.0], seed=0).actions.unique()
        tensor([0])
    """

    def start(self, prior: Tensor) -> tuple[Tensor, list[Any]]:
        """The context that was drawn, and the memories of policies that take it for certain."""
        drawn = torch.distributions.Categorical(prior).sample()
        return super().start(one_hot(drawn, prior.shape[-1]).to(prior))


class ApproachObserveCommit(Tracking):
    """Go somewhere, look until sure, commit.

    On Light–Dark, with the best two numbers, this earns over nine tenths of the optimum: the rule to beat.

    Args:
        model: The CPOMDP.
        approach: The action to begin with, by index or name, or as D numbers.
        steps: How often.
        observe: The action that looks.
        commit: For each context, the action to take for good once the agent is sure of it.
        confidence: How likely a context must be for that.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        seed: Seed of the filter.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> rule = ApproachObserveCommit(model, "right", 1, "observe", ["right", "left"], 0.9, "ekf")
        >>> simulate(model, rule, 3, seed=0).actions[:, :2]
        tensor([[1, 2],
                [1, 2],
                [1, 2]])
    """

    def __init__(
        self,
        model: CPOMDP,
        approach: Action,
        steps: int,
        observe: Action,
        commit: Sequence[Action],
        confidence: float = 0.9,
        likelihood: str | Backend | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, likelihood, seed)
        self.approach = as_action("approach", model, approach)
        self.steps = 0 if steps == 0 else require_count("steps", steps)
        self.observe = as_action("observe", model, observe)
        C = model.num_contexts
        require(len(commit) == C, "commit", commit, f"an action for each of {C} contexts")
        self.commit = torch.stack([as_action("commit", model, action) for action in commit])
        require(0 < confidence < 1, "confidence", confidence, "between 0 and 1")
        self.confidence = confidence

    def begin(self, prior: Tensor) -> Tensor:
        """Which context the agent has committed to; -1 for none yet, `[B]`."""
        return torch.full(prior.shape[:1], -1, device=prior.device)

    def decide(self, online: OnlineFilter, history: History, memory: Tensor) -> tuple[Decision, Tensor]:
        """Approach, observe, or what it has committed to."""
        if history.time < self.steps:
            return repeated(self.approach, len(memory)), memory
        likely, context = online.posterior.max(-1)
        memory = torch.where((memory < 0) & (likely > self.confidence), context, memory)
        committed = self.commit[memory.clamp(min=0)]
        return torch.where(on_the_right(memory < 0, committed), self.observe, committed), memory


def decide_by(
    model: CPOMDP, context: Tensor, policies: Sequence[Policy], history: History, memories: list[Any]
) -> tuple[Decision, list[Any]]:
    """Let every policy decide, and take in each episode `[B]` the decision of its context's policy.

    Continuous actions are drawn before one is taken.
    """
    decided = [policy.act(history, memory) for policy, memory in zip(policies, memories, strict=True)]
    decisions, memories = [decision for decision, _ in decided], [memory for _, memory in decided]
    episode = torch.arange(len(context), device=context.device)
    if model.box is not None:
        drawn = [each if isinstance(each, Tensor) else each.sample() for each in decisions]
        return torch.stack(drawn)[context, episode], memories
    each = torch.stack([action_probabilities(decision, model.num_actions) for decision in decisions])
    return dist.Categorical(probs=each[context, episode]), memories  # each is [C, B, A]


def as_action(argument: str, model: CPOMDP, action: Any) -> Tensor:
    """A single action, by index or name, or as D numbers: `[]` or `[D]`."""
    require_model(model)
    one = as_actions(argument, action, model)
    require(one.shape == some_action(model).shape, argument, action, "a single action")
    require_actions(argument, one, model)
    return one


def repeated(action: Tensor, num_episodes: int) -> Tensor:
    """A single action for each of B episodes, `[B]` or `[B, D]`."""
    return action.expand(num_episodes, *action.shape)


def as_policies(model: CPOMDP, policies: Sequence[Policy | Callable[[History], Decision]]) -> list[Policy]:
    """A policy for each context."""
    C = model.num_contexts
    proper = isinstance(policies, list | tuple) and len(policies) == C
    require(proper, "policies", policies, f"a policy for each of {C} contexts")
    return [as_policy(policy) for policy in policies]


def renormalised(prior: Tensor) -> Tensor:
    """A prior in single precision as one in double that sums to 1."""
    return prior.double() / prior.double().sum(-1, keepdim=True)
