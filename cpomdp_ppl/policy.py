"""Policies: how an agent turns what it has seen into a choice of action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from cpomdp_ppl.actions import Box
from cpomdp_ppl.arrays import filled, on_the_right
from cpomdp_ppl.errors import as_integer, invalid, require, require_count
from cpomdp_ppl.signature import ENDED, ended_in
from cpomdp_ppl.state import stack_in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Decision: TypeAlias = Tensor | torch.distributions.Distribution
"""Actions `[B]` (int64), or a `Categorical` over them with batch shape `[B]`.

Of a model with continuous actions: actions `[B, D]`, or a distribution with batch shape `[B]` and event shape
`[D]`.
"""


@dataclass(frozen=True)
class Percept:
    """What the agent learned in one step, for B episodes at once.

    Attributes:
        action: The action it had taken, `[B]` or, if continuous, `[B, D]`; None before the first.
        observations: What it then saw, by site, `[B, …]`; zero where it saw nothing.
        observed: Whether it saw it, by site, bool `[B]` (`[B, …]` for sites in plates of the program).
    """

    action: Tensor | None
    observations: Mapping[str, Tensor]
    observed: Mapping[str, Tensor]

    @property
    def ended(self) -> Tensor:
        """Whether the episode has ended with this step, bool `[B]`; never, for models that cannot end."""
        if ENDED in self.observations:
            return ended_in(self.observations, self.observed)
        flags = next(iter(self.observed.values()))
        return flags.new_zeros(len(flags))

    def only(self, alive: Tensor) -> Percept:
        """The same where episodes `[B]` went on until here; the others saw nothing."""
        observed = {site: flags & on_the_right(alive, flags) for site, flags in self.observed.items()}
        observations = {site: filled(values, observed[site]) for site, values in self.observations.items()}
        return Percept(self.action, observations, observed)


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
    def alive(self) -> Tensor | None:
        """Which episodes are still going on, bool `[B]`; None if all are, as they are where none can end."""
        if ENDED not in self.latest.observations:
            return None
        alive = ~torch.stack([percept.ended for percept in self.percepts]).any(0)
        return None if bool(alive.all()) else alive

    @property
    def actions(self) -> Tensor:
        """All actions so far, `[B, t]` or, if continuous, `[B, t, D]`; before the first, `[B, 0]`."""
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
            The decision, and the new memory.
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
        actions: Those of the model, `model.actions`: names, their number, or a `Box`.
    """

    actions: int | Sequence[str] | Box

    def __post_init__(self) -> None:
        if not isinstance(self.actions, Box):
            number = as_integer(self.actions)
            named = number is None and not isinstance(self.actions, str) and hasattr(self.actions, "__len__")
            many = len(self.actions) if named else self.actions  # type: ignore[arg-type]
            object.__setattr__(self, "actions", require_count("actions", many))

    def start(self, prior: Tensor) -> Any:
        """The decision, which is always the same."""
        B = prior.shape[:1]
        if isinstance(self.actions, Box):
            return self.actions.uniform(torch.zeros((), device=prior.device)).expand(B)
        logits = torch.zeros(self.actions, device=prior.device)  # type: ignore[arg-type]
        return UniformActions(logits=logits).expand(B)  # type: ignore[no-untyped-call]

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """A uniform choice."""
        return memory, memory


@dataclass(frozen=True)
class FunctionPolicy:
    """A plain function of the history as a policy.

    Args:
        function: Takes a `History` and returns a decision: actions `[B]`, for instance.

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


@dataclass(frozen=True)
class Greedy:
    """A policy that takes the likeliest action wherever another one would draw.

    Args:
        policy: The other one.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> simulate(LightDark(), Greedy(RandomPolicy(3)), 2, seed=0).actions.unique()
        tensor([0])
    """

    policy: Policy

    def start(self, prior: Tensor) -> Any:
        """The other policy's own memory."""
        return self.policy.start(prior)

    def act(self, history: History, memory: Any) -> tuple[Decision, Any]:
        """The mode of what the other policy decides."""
        decision, memory = self.policy.act(history, memory)
        if isinstance(decision, Categorical):
            return decision.logits.argmax(-1), memory
        if not isinstance(decision, torch.distributions.Distribution):
            return decision, memory
        try:
            mode: Tensor = decision.mode
        except NotImplementedError:
            mode = torch.tensor(torch.nan)
        kind = type(decision).__name__
        require(bool(mode.isfinite().all()), "greedy", True, f"False: a decision of kind {kind} has no mode")
        return mode, memory


def action_probabilities(decision: Decision, num_actions: int) -> Tensor:
    """A decision between finitely many actions as their probabilities, `[B, A]`."""
    if isinstance(decision, Tensor):
        return one_hot(decision, num_actions).to(torch.get_default_dtype())
    if not isinstance(decision, Categorical):
        raise invalid("policy", decision, "actions [B] or a Categorical over them")
    return decision.probs


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
