"""A CPOMDP as pomdp-py wants it: its states, actions, observations, models and planners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pomdp_py
from greenlet import getcurrent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Augmented(pomdp_py.State):
    """A state, its context and the time, with what the step that led there gave.

    One is like another only if it is the same: pomdp-py hashes and copies states far too often to do more.
    The log-posterior, up to a constant, is kept up to date only for rollouts that go by it.
    """

    __slots__ = ("context", "log_posterior", "reward", "row", "seen", "time")

    def __init__(
        self,
        row: list[float],
        context: int,
        time: int,
        reward: float = 0.0,
        seen: Symbol | None = None,
        log_posterior: Sequence[float] = (),
    ) -> None:
        self.row = row
        self.context = context
        self.time = time
        self.reward = reward
        self.seen = seen
        self.log_posterior = log_posterior

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __deepcopy__(self, memo: Any) -> Augmented:
        return self


class Choice(pomdp_py.Action):
    """An action, by its index. There is one object for each, so that identity is equality."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __deepcopy__(self, memo: Any) -> Choice:
        return self

    def __reduce__(self) -> Any:  # that of pomdp-py would leave the index behind
        return Choice, (self.index,)


class Symbol(pomdp_py.Observation):
    """What was seen at all sites, as one hashable tuple; see `Binning`."""

    __slots__ = ("value",)

    def __init__(self, value: tuple[float, ...]) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and self.value == other.value

    def __deepcopy__(self, memo: Any) -> Symbol:
        return self


class SuccessorModel(pomdp_py.TransitionModel):
    """Successors, from whoever started the greenlet that asks."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.end = Augmented([], 0, horizon, 0.0, Symbol(()))

    def sample(self, state: Augmented, action: Choice) -> Augmented:
        """Draw `(s, c, t)` one step later; after the horizon nothing happens any more."""
        if state.time >= self.horizon:
            return self.end
        return ask_step(state, action.index)


class SeenModel(pomdp_py.ObservationModel):
    """What was seen on the way to a state."""

    def sample(self, next_state: Augmented, action: Choice) -> Symbol | None:
        """It was drawn together with the state."""
        return next_state.seen


class EarnedModel(pomdp_py.RewardModel):
    """What the way to a state earned."""

    def sample(self, state: Augmented, action: Choice, next_state: Augmented) -> float:
        """It was computed together with the state."""
        return next_state.reward


class Choices(pomdp_py.RolloutPolicy):
    """All actions, always."""

    def __init__(self, num_actions: int) -> None:
        self.choices = tuple(Choice(index) for index in range(num_actions))

    def __reduce__(self) -> Any:
        return Choices, (len(self.choices),)

    def get_all_actions(self, state: Any = None, history: Any = None) -> tuple[Choice, ...]:
        """Every action of the model."""
        return self.choices


class StepRequest(NamedTuple):
    """A planner asks where an action leads."""

    state: Augmented
    action: int


class RolloutRequest(NamedTuple):
    """A planner asks what the rest of an episode is worth."""

    state: Augmented


def ask_step(state: Augmented, action: int) -> Augmented:
    """Sleep until `LockStep` has played an action in a state; returns where that led."""
    reply: Augmented = getcurrent().parent.switch(StepRequest(state, action))
    return reply


def ask_rollout(state: Augmented) -> list[float]:
    """Sleep until `LockStep` has played an episode to its end; returns what `Rollouts.values` found."""
    reply: list[float] = getcurrent().parent.switch(RolloutRequest(state))
    return reply


class RolloutsAsked:
    """Leaves rollouts to `LockStep`; those of pomdp-py would wake the planner for each step."""

    _horizon: int

    def _rollout(self, state: Augmented, history: Any, root: Any, depth: int) -> float:
        if state.time >= self._horizon:
            return 0.0
        values = ask_rollout(state)
        if len(values) > 1:  # one for each action: each counts as its first visit
            root.num_visits += len(values)
            for choice, child in root.children.items():
                child.num_visits, child.value = 1, values[choice.index]
        return max(values)


class PlannerPOUCT(RolloutsAsked, pomdp_py.POUCT):
    """pomdp-py's POUCT."""


class PlannerPOMCP(RolloutsAsked, pomdp_py.POMCP):
    """pomdp-py's POMCP."""


def planner(
    kind: type[RolloutsAsked],
    *,
    horizon: int,
    time: int,
    num_simulations: int,
    exploration: float,
    policy: Choices,
) -> Any:
    """One of pomdp-py's planners at time t, whose search ends at the horizon."""
    made = kind(  # type: ignore[call-arg]
        max_depth=horizon - time,
        num_sims=num_simulations,
        planning_time=-1.0,
        discount_factor=1.0,
        exploration_const=exploration,
        num_visits_init=0,
        value_init=0,
        rollout_policy=policy,
    )
    made._horizon = horizon
    return made


def most_visited(agent: pomdp_py.Agent) -> Choice:
    """The action that a search has visited most; of several, the one of the highest value."""
    children = agent.tree.children
    best: Choice = max(children, key=lambda choice: (children[choice].num_visits, children[choice].value))
    return best


def agent(belief: pomdp_py.Particles, horizon: int, policy: Choices) -> pomdp_py.Agent:
    """pomdp-py's agent, with the models above."""
    return pomdp_py.Agent(belief, policy, SuccessorModel(horizon), SeenModel(), EarnedModel())


def particles(rows: Tensor, contexts: Tensor, time: int, log_posterior: Tensor) -> pomdp_py.Particles:
    """States `[N, K]`, contexts `[N]` and what each says about contexts, `[N, C]`, as pomdp-py's belief."""
    columns = zip(rows.tolist(), contexts.tolist(), log_posterior.tolist(), strict=True)
    return pomdp_py.Particles([Augmented(x, c, time, log_posterior=known) for x, c, known in columns])
