"""Policies: how an agent turns what it has seen into a choice of action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl.errors import require, require_count
from cpomdp_ppl.state import stack_in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Decision: TypeAlias = Tensor | dist.Categorical
"""Actions `[B]` (int64), or a `Categorical` over actions with batch shape `[B]`."""


@dataclass(frozen=True)
class Percept:
    """What the agent learned in one step, for B episodes at once.

    Attributes:
        action: The action it had taken, `[B]`; None before the first.
        observations: What it then saw, by site, `[B, …]`; zero where it saw nothing.
        observed: Whether it saw it, by site, bool `[B]` (`[B, …]` for sites in plates of the program).
    """

    action: Tensor | None
    observations: Mapping[str, Tensor]
    observed: Mapping[str, Tensor]


@dataclass(frozen=True)
class History:
    """Everything an agent may know at time t, `h_t = (o_{1:t}, a_{0:t-1})`, for B episodes at once.

    Attributes:
        percepts: One for every time 0 … t. The first has no action, and has seen something only if the
            model asks for an initial observation.
    """

    percepts: tuple[Percept, ...]

    @property
    def time(self) -> int:
        """The time t, from 0."""
        return len(self.percepts) - 1

    @property
    def latest(self) -> Percept:
        """The newest percept: the previous action and what was seen after it."""
        return self.percepts[-1]

    @property
    def num_episodes(self) -> int:
        """How many episodes B there are."""
        return next(iter(self.percepts[0].observed.values())).shape[0]

    @property
    def actions(self) -> Tensor:
        """All actions so far, `[B, t]`."""
        if not self.time:
            flags = next(iter(self.percepts[0].observed.values()))
            return torch.zeros(len(flags), 0, dtype=torch.long, device=flags.device)
        return stack_in_time([p.action for p in self.percepts[1:]], 1)  # type: ignore[no-any-return]

    @property
    def observations(self) -> dict[str, Tensor]:
        """All observations so far, oldest first, by site, `[B, t + 1, …]`; index 0 is time 0."""
        return stack_in_time([p.observations for p in self.percepts], 1)  # type: ignore[no-any-return]

    @property
    def observed(self) -> dict[str, Tensor]:
        """Whether each was seen, by site, bool `[B, t + 1]`; index 0 is time 0."""
        return stack_in_time([p.observed for p in self.percepts], 1)  # type: ignore[no-any-return]

    def extended(self, percept: Percept) -> History:
        """The history one step later."""
        return History((*self.percepts, percept))


@runtime_checkable
class Policy(Protocol):
    """Anything that decides, for B episodes at once, from what an agent may know.

    A policy keeps nothing on itself between calls: whatever it wants to remember (a recurrent state, a
    belief, a search tree) it returns as its memory and gets back at the next step. Memory may be anything.
    """

    def start(self, prior: Tensor) -> Any:
        """The memory before the first step.

        Args:
            prior: The agent's prior over contexts, `[B, C]`.
        """
        ...

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """Decide at time t.

        Args:
            history: What the agent knows.
            memory: What this policy returned at the step before (or from `start`).

        Returns:
            Actions `[B]` or a `Categorical` over them, and the new memory.
        """
        ...


class UniformActions(dist.Categorical):
    """A `Categorical` whose logits are all equal, drawn with `randint`: `multinomial` is much slower."""

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw actions, `sample_shape + [B]`."""
        shape = torch.Size(sample_shape) + self.batch_shape
        return torch.randint(self.logits.shape[-1], shape, device=self.logits.device)


@dataclass(frozen=True)
class RandomPolicy:
    """Every action equally likely, whatever was seen.

    Args:
        num_actions: How many actions there are: `model.num_actions`.
    """

    num_actions: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_actions", require_count("num_actions", self.num_actions))

    def start(self, prior: Tensor) -> UniformActions:
        """The decision, which is always the same."""
        logits = torch.zeros(self.num_actions, device=prior.device)
        decision: UniformActions = UniformActions(logits=logits).expand(prior.shape[:1])  # type: ignore[no-untyped-call]
        return decision

    def act(self, history: History, memory: UniformActions) -> tuple[Decision, UniformActions]:
        """A uniform choice."""
        return memory, memory


@dataclass(frozen=True)
class FunctionPolicy:
    """A plain function of the history as a policy.

    Args:
        function: Takes a `History` and returns actions `[B]` or a `Categorical` over them.

    Examples:
        >>> go_right = FunctionPolicy(lambda history: torch.ones(history.num_episodes, dtype=torch.long))
        >>> look_first = FunctionPolicy(
        ...     lambda history: torch.where(history.observed["z"].sum(1) < 3, 2, 1))
    """

    function: Callable[[History], Decision]

    def __post_init__(self) -> None:
        require(callable(self.function), "function", self.function, "a function of a History")

    def start(self, prior: Tensor) -> None:
        """A function remembers nothing."""

    def act(self, history: History, memory: None) -> tuple[Decision, None]:
        """Call the function."""
        return self.function(history), None


def as_policy(policy: Policy | Callable[[History], Decision], argument: str = "policy") -> Policy:
    """Return a policy as it is, and a plain function wrapped as one; `argument` names it in an error."""
    if isinstance(policy, Policy) and not isinstance(policy, type):
        return policy
    require(
        callable(policy) and not isinstance(policy, type),
        argument,
        policy,
        "an object with `start` and `act`, or a function of a History",
    )
    return FunctionPolicy(policy)
