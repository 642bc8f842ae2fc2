"""A CPOMDP as pomdp-py wants it, and many of pomdp-py's planners side by side.

pomdp-py asks for one successor of one state at a time, which is the dearest way to run a Pyro program. So the
planner of every episode runs in a greenlet of its own: where it asks for a successor, or for a rollout, it is
put to sleep, and once all of them sleep, one call of the programs serves all that ask for the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import pomdp_py
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from cpomdp_ppl.errors import require, require_count
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.generative import Generative
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import ObservationSite, Signature

Rollout = Literal["commitment", "blind", "random"]
Scheme = Literal["uniform", "quantile"]
Limits: TypeAlias = "tuple[float, float] | Mapping[str, tuple[float, float]]"

UNSEEN = -math.inf
"""Stands in a symbol for what was not seen; whatever was seen is finite."""

TAIL = 0.005
"""Share of the observations beyond either end of limits that are read off episodes."""


class Augmented(pomdp_py.State):
    """A state, its context and the time, with what the step that led there gave.

    One is like another only if it is the same: pomdp-py hashes and copies states far too often to do more.

    Attributes:
        row: The state's numbers, `[K]`.
        context: The context c.
        time: The time t.
        reward: Of the step that led here.
        seen: What was seen in it.
        log_posterior: Over contexts, given what was seen on the way here, up to a constant, `[C]`; kept up to
            date only for rollouts that go by it.
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

    def __reduce__(self) -> Any:  # pomdp-py's own would leave the index behind
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


@dataclass(frozen=True)
class Binning:
    """How observations become symbols that can be met again.

    A symbol has one number for every number of every site, in order: the bin it is in, the value itself if
    the site is discrete or not binned, or `UNSEEN`. The first and the last bin are open outwards.

    Attributes:
        sites: The observation sites.
        edges: Between the bins of a site, `[k, bins - 1]` for its k numbers; None for one not binned.
    """

    sites: Mapping[str, ObservationSite]
    edges: Mapping[str, Tensor | None]

    @staticmethod
    def of(
        sites: Mapping[str, ObservationSite],
        episodes: Episodes,
        bins: int | None = 10,
        limits: Limits | None = None,
        scheme: Scheme = "uniform",
    ) -> Binning:
        """Bin all continuous sites.

        Args:
            sites: The observation sites of a model.
            episodes: Where limits and quantiles are read off.
            bins: How many bins for each number; None leaves observations as they are.
            limits: Where the bins begin and end, for all sites, or by site; left out (or for sites left out),
                all that the episodes saw but a percent.
            scheme: `"uniform"` for bins of equal width; `"quantile"` for bins seen equally often.
        """
        if bins is not None:
            bins = require_count("bins", bins)
        require(scheme in get_args(Scheme), "scheme", scheme, f"one of {get_args(Scheme)}")
        require(limits is None or bins is not None, "limits", limits, "None, as nothing is binned")
        require(limits is None or scheme == "uniform", "limits", limits, 'None, as scheme is not "uniform"')
        by_site = _limits_by_site(limits, sites)
        edges = {}
        for name, spec in sites.items():
            seen = _seen_numbers(spec, episodes, name)
            edges[name] = (
                None if bins is None or spec.is_discrete else _edges(seen, bins, by_site.get(name), scheme)
            )
        return Binning(sites, edges)

    def symbols(self, percept: Percept, rows: Tensor | None = None) -> list[Symbol]:
        """What was seen in each of the N steps of a percept, or in those of its `rows`."""
        columns = []
        for name, spec in self.sites.items():
            values, flags = percept.observations[name], percept.observed[name]
            if rows is not None:
                values, flags = values[rows], flags[rows]
            columns.append(self._numbers(name, values.reshape(len(values), -1), _flags(spec, flags)))
        return [Symbol(tuple(row)) for row in torch.cat(columns, 1).tolist()]

    def _numbers(self, name: str, values: Tensor, flags: Tensor) -> Tensor:
        """Values and flags `[N, k]` as numbers that can be met again, float64 `[N, k]`."""
        edges = self.edges[name]
        if edges is not None:
            values = torch.searchsorted(edges, values.T.to(edges).contiguous(), right=True).T
        return torch.where(flags, values.double(), UNSEEN)


def _flags(spec: ObservationSite, flags: Tensor) -> Tensor:
    """Flags `[N, *plates]` for every number of a site, `[N, k]`."""
    event = (1,) * (len(spec.shape) - len(spec.plates))
    return flags.reshape(flags.shape + event).expand(len(flags), *spec.shape).reshape(len(flags), -1)


def _seen_numbers(spec: ObservationSite, episodes: Episodes, name: str) -> list[Tensor]:
    """What episodes saw, for each of the k numbers of a site."""
    values, flags = episodes.observations[name].flatten(0, 1), episodes.observed[name].flatten(0, 1)
    if episodes.initial_observations is not None and episodes.initially_observed is not None:
        values = torch.cat([values, episodes.initial_observations[name]])
        flags = torch.cat([flags, episodes.initially_observed[name]])
    v = values.reshape(-1, math.prod(spec.shape))  # [n, k]
    f = _flags(spec, flags)
    return [v[f[:, i], i].double() for i in range(v.shape[1])]


def _limits_by_site(limits: Any, sites: Mapping[str, ObservationSite]) -> dict[str, tuple[float, float]]:
    if limits is None:
        return {}
    continuous = sorted(name for name, spec in sites.items() if not spec.is_discrete)
    given = limits if hasattr(limits, "items") else dict.fromkeys(continuous, limits)
    unknown = sorted(set(given) - set(continuous))
    require(not unknown, "limits", unknown, f"sites out of {continuous}, which are continuous")
    for ends in given.values():
        pair = isinstance(ends, tuple | list) and len(ends) == 2
        proper = pair and all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
        proper = proper and ends[0] < ends[1]
        require(proper, "limits", limits, "two numbers, the lower first, or such a pair for every site")
    return dict(given)


def _edges(seen: list[Tensor], bins: int, ends: tuple[float, float] | None, scheme: Scheme) -> Tensor:
    """The inner edges of the bins, `[k, bins - 1]`."""
    inner = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    rows = []
    for values in seen:
        v = values if len(values) else torch.zeros(1, dtype=torch.float64)  # a number that was never seen
        if scheme == "quantile":
            rows.append(v.quantile(inner))
            continue
        low, high = ends or (float(v.quantile(TAIL)), float(v.quantile(1 - TAIL)))
        rows.append(low + (high - low) * inner)
    return torch.stack(rows)


@dataclass(frozen=True)
class Rows:
    """States as rows of numbers, and back: what a planner carries about must be small.

    Attributes:
        signature: Of the model.
        device: Where its tensors live.
    """

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


class Transition(pomdp_py.TransitionModel):
    """Successors, from whoever started the greenlet that asks."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.end = Augmented([], 0, horizon, 0.0, Symbol(()))

    def sample(self, state: Augmented, action: Choice) -> Augmented:
        """Draw `(s, c, t)` one step later; after the horizon nothing happens any more."""
        if state.time >= self.horizon:
            return self.end
        return ask_step(state, action.index)


class Observation(pomdp_py.ObservationModel):
    """What was seen on the way to a state."""

    def sample(self, next_state: Augmented, action: Choice) -> Symbol | None:
        """It was drawn together with the state."""
        return next_state.seen


class Reward(pomdp_py.RewardModel):
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


class Step(NamedTuple):
    """A planner asks where an action leads."""

    state: Augmented
    action: int


class Rest(NamedTuple):
    """A planner asks what the rest of an episode is worth."""

    state: Augmented


def ask_step(state: Augmented, action: int) -> Augmented:
    """Fall asleep until `LockStep` has played an action in a state; where that led."""
    reply: Augmented = getcurrent().parent.switch(Step(state, action))
    return reply


def ask_rest(state: Augmented) -> list[float]:
    """Fall asleep until `LockStep` has played an episode to its end; what `Rollouts.values` found."""
    reply: list[float] = getcurrent().parent.switch(Rest(state))
    return reply


class RolloutsAsked:
    """Has `LockStep` play whole rollouts; pomdp-py's own would wake the planner for each step of one."""

    _horizon: int

    def _rollout(self, state: Augmented, history: Any, root: Any, depth: int) -> float:
        if state.time >= self._horizon:
            return 0.0
        values = ask_rest(state)
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
    return pomdp_py.Agent(belief, policy, Transition(horizon), Observation(), Reward())


class Rollouts:
    """What the rest of an episode is worth, played without another look.

    None of them sees the context it is in. One that did would earn, after `observe` as after anything else,
    what an agent earns that is told the context: to the search, observing would look like full revelation,
    and it would only observe.

    To be made and used inside `cpomdp_ppl.inference.backend.inferring`.

    Args:
        programs: Of the model.
        kind: `"blind"` takes one action at random and keeps to it; `"random"` takes a new one at every step;
            `"commitment"` keeps to every action in turn, in all contexts, and weighs these by what the
            simulation has seen. It takes the state of the simulation for known.
    """

    def __init__(self, programs: Generative, kind: Rollout) -> None:
        self.programs = programs
        self.kind = kind
        self.informed = kind == "commitment"

    def values(self, state: Any, context: Tensor, time: Tensor, log_posterior: Tensor | None) -> Tensor:
        """What is earned from states with leaves `[R, …]` on.

        Args:
            state: Where the rest begins.
            context: In which context, `[R]`.
            time: When, `[R]`.
            log_posterior: Over contexts, `[R, C]`, for `"commitment"`.

        Returns:
            What each action is worth, kept to until the end, `[R, A]`; or what the rollout earned, `[R, 1]`.
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
        """Play an action, or one drawn at every step, to the horizon; the return `[R]`."""
        T = self.programs.model.horizon
        total = torch.zeros(len(time), dtype=torch.float64, device=time.device)
        for ahead in range(T - int(time.min())):
            state, reward = self.programs.move(state, action, context)
            total += torch.where(time + ahead < T, reward, 0.0)
            if redraw:
                action = torch.randint_like(action, self.programs.model.num_actions)
        return total


class LockStep:
    """Runs tasks that ask for steps and rollouts, and serves all together that ask for the same.

    To be made and used inside `cpomdp_ppl.inference.backend.inferring`.

    Args:
        programs: Of the model.
        binning: How observations become symbols.
        rollout: What rollouts do; see `Rollouts`.
    """

    def __init__(self, programs: Generative, binning: Binning, rollout: Rollout = "blind") -> None:
        self.programs = programs
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
        waiting: dict[type, list[int]] = {Step: [], Rest: []}
        for b, worker in enumerate(workers):
            if not worker.dead:
                waiting[type(answers[b])].append(b)
        while waiting[Step] or waiting[Rest]:
            # What more of them wait for: those few who are deep in their trees must not hold up the others.
            kind = max(waiting, key=lambda each: len(waiting[each]))
            served, waiting[kind] = waiting[kind], []
            requests = [answers[b] for b in served]
            replies = self._step(requests) if kind is Step else self._rest(requests)
            for b, reply in zip(served, replies, strict=True):
                answers[b] = workers[b].switch(reply)
                if not workers[b].dead:
                    waiting[type(answers[b])].append(b)
        return answers

    def _step(self, requests: list[Step]) -> list[Augmented]:
        """Where actions lead."""
        state, c, log_posterior = self._columns([state for state, _ in requests])
        a = torch.tensor([action for _, action in requests], device=self.rows.device)
        step = self.programs.step(state, a, c)
        posteriors = [before.log_posterior for before, _ in requests]
        if log_posterior is not None:
            posteriors = (log_posterior + self.programs.log_density(step.state, step.percept)).tolist()
        rows, symbols = self.rows.of(step.state).tolist(), self.binning.symbols(step.percept)
        return [
            Augmented(row, before.context, before.time + 1, reward, symbol, posterior)
            for (before, _), row, reward, symbol, posterior in zip(
                requests, rows, step.reward.tolist(), symbols, posteriors, strict=True
            )
        ]

    def _rest(self, requests: list[Rest]) -> list[list[float]]:
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


def particles(rows: Tensor, contexts: Tensor, time: int, log_posterior: Tensor) -> pomdp_py.Particles:
    """States `[N, K]`, contexts `[N]` and what each says about contexts, `[N, C]`, as pomdp-py's belief."""
    columns = zip(rows.tolist(), contexts.tolist(), log_posterior.tolist(), strict=True)
    return pomdp_py.Particles([Augmented(x, c, time, log_posterior=known) for x, c, known in columns])
