"""A CPOMDP as pomdp-py wants it, and many of its planners side by side.

pomdp-py asks for one successor of one state at a time, which is the dearest way to run a Pyro program. So the
planner of every episode runs in a greenlet: where it asks for a successor, or for a rollout, it is put to
sleep, and once all of them sleep, one call of the programs serves all that ask for the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pomdp_py
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from cpomdp_ppl.generative import Tally
from cpomdp_ppl.inference import PerceptDensity
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from baselines.binning import Binning
    from cpomdp_ppl.generative import Generative
    from cpomdp_ppl.signature import Signature


class Augmented(pomdp_py.State):
    """A state, its context and the time, with what the step that led there gave.

    The time of a state with which the episode ended is the horizon: there is nothing to come.
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
        """Draw `(s, c, t)` one step later; after the end nothing happens any more."""
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
    """Leaves rollouts to `LockStep`; those of pomdp-py would wake the planner for each step.

    They are worth nothing in the states whose time is the horizon.
    """

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


Rollout = Literal["commitment", "blind", "random"]


@dataclass(frozen=True)
class Rows:
    """States as rows of numbers, and back: what a planner carries about must be small."""

    signature: Signature
    device: torch.device

    def of(self, state: Any) -> Tensor:
        """A state with leaves `[N, …]` as float64 `[N, K]`."""
        columns = [leaf.reshape(len(leaf), -1).double() for _, leaf in leaves(state)]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def state(self, rows: Tensor) -> Any:
        """Rows `[N, K]` as a state with leaves `[N, …]`."""
        first = 0

        def take(leaf: Any) -> Tensor:
            nonlocal first
            last = first + math.prod(leaf.shape)
            columns, first = rows[:, first:last], last
            return columns.reshape(len(rows), *leaf.shape).to(leaf.dtype)

        return map_state(take, self.signature.state)


class Rollouts:
    """What the rest of an episode is worth, played without another look.

    None of them sees the context it is in. One that did would earn, after `observe` as after anything else,
    what an agent earns that knows the context: to the search, observing would look like full revelation,
    and it would only observe.

    To be made and used inside `cpomdp_ppl.inference.backend.inference_scope`.

    Args:
        programs: The programs of the model.
        kind: `"blind"` takes one action at random and keeps to it; `"random"` takes a new one at every step;
            `"commitment"` keeps to every action in turn, in all contexts, and weighs these by what the
            simulation has seen. It takes the state of the simulation for known.
    """

    def __init__(self, programs: Generative, kind: Rollout) -> None:
        self.programs = programs
        self.kind = kind
        self.informed = kind == "commitment"

    def values(self, state: Any, context: Tensor, time: Tensor, log_posterior: Tensor | None) -> Tensor:
        """What is earned from states with leaves `[R, …]`, in contexts `[R]` and at times `[R]`, on.

        With a log-posterior `[R, C]`, for `"commitment"`, what each action is worth, kept to until the end,
        `[R, A]`; otherwise what the rollout earned, `[R, 1]`.
        """
        A, C, R = self.programs.model.num_actions, self.programs.model.num_contexts, len(time)
        if log_posterior is None:
            first = torch.randint(A, (R,), device=time.device)
            returns = self.play(state, context, time, first, redraw=self.kind == "random")
            return returns[:, None]
        every = torch.arange(A * C, device=time.device).repeat(R)  # [R·A·C]
        copies = map_state(lambda leaf: leaf.repeat_interleave(A * C, 0), state)
        returns = self.play(copies, every % C, time.repeat_interleave(A * C), every // C)
        return torch.einsum("rac,rc->ra", returns.view(R, A, C), log_posterior.softmax(1))

    def play(self, state: Any, context: Tensor, time: Tensor, action: Tensor, redraw: bool = False) -> Tensor:
        """Play an action, or one drawn at every step, to the end; the return `[R]`, as it is worth now."""
        T, tally = self.programs.model.horizon, Tally(self.programs.model, time)
        for ahead in range(T - int(time.min())):
            tally.alive &= time + ahead < T
            moved = self.programs.move(state, action, context)
            tally.add(moved)
            state = moved.state
            if redraw:
                action = torch.randint_like(action, self.programs.model.num_actions)
        return tally.returns


class LockStep:
    """Runs tasks that ask for steps and rollouts, and serves all together that ask for the same.

    To be made and used inside `cpomdp_ppl.inference.backend.inference_scope`.
    """

    def __init__(self, programs: Generative, binning: Binning, rollout: Rollout = "blind") -> None:
        self.programs = programs
        self.density = PerceptDensity(programs)
        self.binning = binning
        self.rollouts = Rollouts(programs, rollout)
        self.rows = Rows(programs.signature, programs.model.device)

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all tasks to their end; return what they returned."""
        workers = [greenlet(task) for task in tasks]
        try:
            return self._run(workers)
        finally:
            for worker in workers:  # after an error, some are still asleep
                if not worker.dead:
                    worker.throw()

    def _run(self, workers: list[greenlet]) -> list[Any]:
        answers: list[Any] = [worker.switch() for worker in workers]  # requests, and in the end results
        waiting: dict[type, list[int]] = {StepRequest: [], RolloutRequest: []}
        for b, worker in enumerate(workers):
            if not worker.dead:
                waiting[type(answers[b])].append(b)
        while waiting[StepRequest] or waiting[RolloutRequest]:
            # What more of them wait for: those few who are deep in their trees must not hold up the others.
            kind = max(waiting, key=lambda each: len(waiting[each]))
            served, waiting[kind] = waiting[kind], []
            requests = [answers[b] for b in served]
            replies = self._step(requests) if kind is StepRequest else self._rest(requests)
            for b, reply in zip(served, replies, strict=True):
                answers[b] = workers[b].switch(reply)
                if not workers[b].dead:
                    waiting[type(answers[b])].append(b)
        return answers

    def _step(self, requests: list[StepRequest]) -> list[Augmented]:
        """Where actions lead."""
        state, c, log_posterior = self._columns([state for state, _ in requests])
        a = torch.tensor([action for _, action in requests], device=self.rows.device)
        step = self.programs.step(state, a, c)
        posteriors = [before.log_posterior for before, _ in requests]
        if log_posterior is not None:
            posteriors = (log_posterior + self.density(step.state, step.percept)).tolist()
        rows, symbols = self.rows.of(step.state).tolist(), self.binning.symbols(step.percept)
        times = [before.time + 1 for before, _ in requests]
        if step.ended is not None:
            last = zip(times, step.ended.tolist(), strict=True)
            times = [self.programs.model.horizon if ended else time for time, ended in last]
        return [
            Augmented(row, before.context, time, reward, symbol, posterior)
            for (before, _), row, time, reward, symbol, posterior in zip(
                requests, rows, times, step.reward.tolist(), symbols, posteriors, strict=True
            )
        ]

    def _rest(self, requests: list[RolloutRequest]) -> list[list[float]]:
        """What the rest of the episodes is worth."""
        states = [state for (state,) in requests]
        state, c, log_posterior = self._columns(states)
        time = torch.tensor([each.time for each in states], device=self.rows.device)
        values: list[list[float]] = self.rollouts.values(state, c, time, log_posterior).tolist()
        return values

    def _columns(self, states: list[Augmented]) -> tuple[Any, Tensor, Tensor | None]:
        """States with leaves `[N, …]`, contexts `[N]`, and log-posteriors `[N, C]` if rollouts want them."""
        device = self.rows.device
        x = torch.tensor([state.row for state in states], dtype=torch.float64, device=device)
        c = torch.tensor([state.context for state in states], device=device)
        if not self.rollouts.informed:
            return self.rows.state(x), c, None
        log_posterior = [state.log_posterior for state in states]
        return self.rows.state(x), c, torch.tensor(log_posterior, dtype=torch.float64, device=device)
