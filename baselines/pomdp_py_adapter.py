"""A CPOMDP as pomdp-py wants it, and many of pomdp-py's planners side by side.

pomdp-py asks for one successor of one state at a time, which is the dearest way to run a Pyro program. So the
planner of every episode runs in a greenlet of its own: where it asks for a successor it is put to sleep, and
once all of them sleep, one call of the programs serves them all.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import pomdp_py
import torch
from greenlet import getcurrent, greenlet
from numpy.typing import NDArray
from torch import Tensor

from cpomdp_ppl.errors import rejected, require, require_count
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.generative import Generative
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import ObservationSite, Signature

Reals: TypeAlias = NDArray[np.float64]
Rollout = Literal["blind", "random"]
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
    """

    __slots__ = ("context", "reward", "row", "seen", "time")

    def __init__(
        self, row: list[float], context: int, time: int, reward: float = 0.0, seen: Symbol | None = None
    ) -> None:
        self.row = row
        self.context = context
        self.time = time
        self.reward = reward
        self.seen = seen

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
            seen = _seen_numbers(spec, episodes.observations[name], episodes.observed[name])
            ends = by_site.get(name)
            edges[name] = None if bins is None or is_discrete(spec) else _edges(seen, bins, ends, scheme)
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


def is_discrete(spec: ObservationSite) -> bool:
    """Whether the values of a site are met again by themselves."""
    return not spec.dtype.is_floating_point or (spec.support is not None and spec.support.is_discrete)


def _flags(spec: ObservationSite, flags: Tensor) -> Tensor:
    """Flags `[N, *plates]` for every number of a site, `[N, k]`."""
    event = (1,) * (len(spec.shape) - len(spec.plates))
    return flags.reshape(flags.shape + event).expand(len(flags), *spec.shape).reshape(len(flags), -1)


def _seen_numbers(spec: ObservationSite, values: Tensor, flags: Tensor) -> list[Tensor]:
    """What episodes `[B, T, …]` saw, for each of the k numbers of a site."""
    v = values.flatten(0, 1).reshape(-1, math.prod(spec.shape))  # [B·T, k]
    f = _flags(spec, flags.flatten(0, 1))
    return [v[f[:, i], i].double() for i in range(v.shape[1])]


def _limits_by_site(limits: Any, sites: Mapping[str, ObservationSite]) -> dict[str, tuple[float, float]]:
    if limits is None:
        return {}
    given = limits if hasattr(limits, "items") else dict.fromkeys(sites, limits)
    unknown = sorted(set(given) - set(sites))
    require(not unknown, "limits", unknown, f"sites out of {sorted(sites)}")
    for ends in given.values():
        proper = len(ends) == 2 and -math.inf < ends[0] < ends[1] < math.inf
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

    @property
    def size(self) -> int:
        """How many numbers K a state has."""
        return sum(math.prod(leaf.shape) for _, leaf in leaves(self.signature.state))

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
        return ask(state, action.index, 1)


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


def ask(state: Augmented, action: int, num_steps: int) -> Augmented:
    """Fall asleep until `LockStep` has played an action for some steps from a state; return where that led.

    The reward is the sum over the steps. In more steps than one, a `LockStep` with random rollouts draws the
    later actions anew.
    """
    reply: Augmented = getcurrent().parent.switch((state, action, num_steps))
    return reply


class RolloutsAsked:
    """Has `LockStep` play whole rollouts; pomdp-py's own would wake the planner for each step of one.

    Nothing depends on what is seen in a rollout, nor on its context: one that knew the context would make it
    look as if every observation revealed the context, and the planner would do nothing but observe.
    """

    _policy: Choices
    _horizon: int

    def _rollout(self, state: Augmented, history: Any, root: Any, depth: int) -> float:
        steps = self._horizon - state.time
        if steps <= 0:
            return 0.0
        return ask(state, random.choice(self._policy.choices).index, steps).reward


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
    made._policy, made._horizon = policy, horizon
    return made


def agent(belief: pomdp_py.Particles, horizon: int, policy: Choices) -> pomdp_py.Agent:
    """pomdp-py's agent, with the models above."""
    return pomdp_py.Agent(belief, policy, Transition(horizon), Observation(), Reward())


class LockStep:
    """Runs tasks that call `ask`, and serves those calls all together.

    To be made and used inside `cpomdp_ppl.inference.backend.inferring`.

    Args:
        programs: Of the model.
        binning: How observations become symbols.
        rollout: `"blind"` to keep to an action that is asked for several steps; `"random"` to draw a new one
            for every step but the first.
    """

    def __init__(self, programs: Generative, binning: Binning, rollout: Rollout = "blind") -> None:
        require(rollout in get_args(Rollout), "rollout", rollout, f"one of {get_args(Rollout)}")
        self.programs = programs
        self.binning = binning
        self.redraws = rollout == "random"
        self.num_actions = programs.model.num_actions
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
        B = len(workers)
        answers: list[Any] = [worker.switch() for worker in workers]  # requests, and in the end results
        table = _Table(B, self.rows.size)
        live = [b for b in range(B) if not workers[b].dead]
        table.enter(live, answers)
        while live:
            done, states = self._advance(table, np.array(live), answers)
            awake = []
            for b, state in zip(done, states, strict=True):
                answers[b] = workers[b].switch(state)
                if not workers[b].dead:
                    awake.append(b)
            if len(awake) < len(done):
                live = [b for b in live if not workers[b].dead]
            table.enter(awake, answers)
        return answers

    def _advance(
        self, table: _Table, live: NDArray[np.int64], asked: list[Any]
    ) -> tuple[list[int], Iterable[Any]]:
        """One step of every live slot: those that are through, and the states they have come to."""
        device = self.rows.device
        x, a, c = (torch.as_tensor(column[live], device=device) for column in (table.x, table.a, table.c))
        step = self.programs.step(self.rows.state(x), a, c)
        table.x[live] = self.rows.of(step.state).numpy(force=True)
        table.total[live] += step.reward.numpy(force=True)
        table.left[live] -= 1
        through = np.flatnonzero(table.left[live] == 0)
        done = live[through]
        if self.redraws and len(done) < len(live):
            table.a[live] = np.random.randint(self.num_actions, size=len(live))
        if not len(done):
            return [], []
        symbols = self.binning.symbols(step.percept, torch.as_tensor(through, device=device))
        numbers = done.tolist()
        return numbers, [
            Augmented(row, asked[b][0].context, asked[b][0].time + asked[b][2], reward, symbol)
            for b, row, reward, symbol in zip(
                numbers, table.x[done].tolist(), table.total[done].tolist(), symbols, strict=True
            )
        ]


class _Table:
    """What every slot is at: state `x [B, K]`, action, context, steps left and rewards so far `[B]`."""

    def __init__(self, B: int, K: int) -> None:
        self.x = np.zeros((B, K))
        self.a = np.zeros(B, dtype=np.int64)
        self.c = np.zeros(B, dtype=np.int64)
        self.left = np.zeros(B, dtype=np.int64)
        self.total = np.zeros(B)

    def enter(self, slots: list[int], asked: list[Any]) -> None:
        """Note what some slots now ask for."""
        if not slots:
            return
        requests = [asked[b] for b in slots]
        self.x[slots] = [state.row for state, _, _ in requests]
        self.c[slots] = [state.context for state, _, _ in requests]
        self.a[slots] = [action for _, action, _ in requests]
        self.left[slots] = [steps for _, _, steps in requests]
        self.total[slots] = 0.0


def particles(rows: Reals, contexts: NDArray[np.int64], time: int) -> pomdp_py.Particles:
    """States `[N, K]` and contexts `[N]` as a belief of pomdp-py."""
    return pomdp_py.Particles(
        [Augmented(row, c, time) for row, c in zip(rows.tolist(), contexts.tolist(), strict=True)]
    )


def require_exploration(exploration: Any) -> None:
    """Raise unless it is None or a number that can weigh exploration."""
    if exploration is not None and not (isinstance(exploration, int | float) and 0 <= exploration < math.inf):
        raise rejected("exploration", exploration, "None or a number of at least 0, on the scale of returns")
