"""The likelihood of models with one or two real numbers for a state, on a grid of points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError, UnsupportedModelError, require, require_count
from cpomdp_ppl.inference.backend import Backend, Recursion
from cpomdp_ppl.inference.cells import SCAN, Grid, jump_along, jumps_of
from cpomdp_ppl.inference.enumeration import (
    ENGINE_AXES,
    Enumerated,
    Nodes,
    double_precision,
    drawing,
)
from cpomdp_ppl.inference.observable_operator import DiscreteBelief, DiscreteRecursion, smoothed_at_once
from cpomdp_ppl.inference.scoring import Seen, axes, log_density_of_seen
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.simulate import simulate
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History
    from cpomdp_ppl.state import State

Bounds = Sequence[float] | Sequence[Sequence[float]]

BLOCK = 64
"""Points whose transitions are stored and multiplied together."""

AT_ONCE = 2**22
"""Numbers that one run of a program may produce while tables are built."""

MEMORY = 2**22
"""Bytes that a batch of beliefs may take: more are not faster, as they leave the cache."""

BOUNDARY_MASS = 1e-3
"""Probability on the boundary from which on the bounds are too tight."""

FARTHEST = 1e300
"""How far apart bounds may be: beyond, the spacing of the grid would overflow."""


EMPTY = 1e-34
"""Points of less probability do not move on."""


@dataclass(frozen=True)
class GridFilter(Backend):
    """A filter for one- and two-dimensional states that is exact up to the spacing of a grid.

    Transitions are found by pushing every grid point through the program, with quadrature nodes for its
    noise, and sharing out what arrives among the grid points around it such that moments up to the third
    are kept: the grid adds no diffusion. It can be refined at will, which makes it the truth in tests.

    The points are centres of cells. Cells that the bounds do not fix have round edges, since there the
    thresholds of programs tend to be; if a density or reward jumps inside a cell, it is averaged there.

    Args:
        num_points: About how many points in all.
        bounds: `(low, high)` of the state, or one such pair for each of its two numbers. Left out, they are
            found by simulating the model under each constant action and under random ones.
        subpoints: In how many parts a cell is cut, along each axis, to average over a jump.
        reach: How many standard deviations of a single noise of `transition` are followed; its tails beyond
            are cut. None takes 8.5, and 6 if a transition has several noises. One or two noises of `initial`
            are followed for 12 at least. An observation that only a rarer event explains has too low a
            likelihood. What is drawn from other distributions than normal ones is cut at quantiles of 2⁻⁵⁰.
    """

    num_points: int = 1200
    bounds: Bounds | None = None
    subpoints: int = 16
    reach: float | None = None

    name: ClassVar[str] = "grid"
    draws: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_count("num_points", self.num_points)
        require_count("subpoints", self.subpoints)
        require(self.num_points >= 16, "num_points", self.num_points, "at least 16")
        if self.bounds is not None:
            expected = "(low, high) with low < high, or a pair of these"
            require(_pairs(self.bounds) is not None, "bounds", self.bounds, expected)
        if self.reach is not None:
            proper = isinstance(self.reach, Real) and 2 <= self.reach <= 30
            require(proper, "reach", self.reach, "None or a number from 2 to 30")

    @double_precision()
    def recursion(self, model: CPOMDP) -> GridRecursion:
        """The grid of a model, and the tables on it."""
        return GridRecursion(model, self)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep a belief `[C, B, G]` within `MEMORY`."""
        assert isinstance(recursion, GridRecursion)
        return max(1, MEMORY // (8 * model.num_contexts * recursion.grid.size))

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """As many as the exact backend would, with as many states."""
        assert isinstance(recursion, GridRecursion)
        return smoothed_at_once(recursion, horizon, num_trajectories)


@dataclass(frozen=True)
class Band:
    """Transitions from the points `start … start + P - 1` to `low … high - 1`.

    Attributes:
        weights: `[C, P, high - low]`; `[1, …]` if all contexts are alike.
    """

    start: int
    low: int
    high: int
    weights: Tensor


@dataclass(frozen=True)
class Transition:
    """Where one action leads to.

    Attributes:
        bands: The table's blocks of rows, each with the columns that are not zero.
        identity: Whether every point stays where it is.
        signed: Whether some weights are negative: where motion without noise ends between grid points.
    """

    bands: Sequence[Band]
    identity: bool
    signed: bool

    def __call__(self, p: Tensor) -> Tensor:
        """Move beliefs `[C, R, G]`."""
        if self.identity:
            return p
        moved = torch.zeros_like(p)
        for c, (source, target) in enumerate(zip(p, moved, strict=True)):
            highest = source.amax(0).tolist()  # empty stretches of the grid are skipped
            for band in self.bands:
                stop = band.start + band.weights.shape[1]
                if max(highest[band.start : stop]) > EMPTY:
                    weights = band.weights[c if len(band.weights) > 1 else 0]
                    target[:, band.low : band.high].addmm_(source[:, band.start : stop], weights)
        if self.signed:
            moved = moved.clamp_(min=0)
            moved = moved / moved.sum(-1, keepdim=True)
        return moved

    def expect(self, values: Tensor) -> Tensor:
        """Means of functions `[C, R, G]` of the point arrived at, for every point to start from."""
        if self.identity:
            return values
        expected = torch.empty_like(values)
        for band in self.bands:
            stop = band.start + band.weights.shape[1]
            expected[..., band.start : stop] = values[..., band.low : band.high] @ band.weights.mT
        return expected

    def origins(self, later: Tensor) -> Tensor:
        """Weights of all points to start from, for points arrived at, `[C, R, M]`: `[C, R, M, G]`.

        Weights that are negative are taken for zero, as they are none of a distribution. That leaves the mean
        right, but adds about half a cell's width of spread.
        """
        last = self.bands[-1]
        G = last.start + last.weights.shape[1]
        found = torch.zeros(*later.shape, G, dtype=last.weights.dtype)
        for c, (arrived, target) in enumerate(zip(later.flatten(1), found.flatten(1, 2), strict=True)):
            for band in self.bands:
                rows = ((arrived >= band.low) & (arrived < band.high)).nonzero()[:, 0]
                weights = band.weights[c if len(band.weights) > 1 else 0].T[arrived[rows] - band.low]
                target[rows, band.start : band.start + band.weights.shape[1]] = weights
        return found.clamp_(min=0) if self.signed else found


class GridRecursion(DiscreteRecursion):
    """The forward recursion over the points of a grid.

    Attributes:
        grid: The G points.
        jumps: Numbers of the cells inside which the density of an observation jumps.
        reward_jumps: Numbers of the cells inside which the reward does.
    """

    def __init__(self, model: CPOMDP, settings: GridFilter) -> None:
        _require_continuous(model)
        super().__init__(model)
        model = self.model
        self.settings = settings
        self.dim = _require_few_numbers(type(model).__name__, self.signature.state)
        self._transitions: dict[int, Transition] = {}
        trials = _trials(self.model)
        if settings.bounds is None:
            bounds = _reached(self.model, trials, self.coordinates)
            self.grid = Grid.around(bounds, settings.num_points)
        else:
            pairs = _pairs(settings.bounds)
            require(
                pairs is not None and len(pairs) == self.dim,
                "bounds",
                settings.bounds,
                f"{self.dim} pair(s), one for each number",
            )
            assert pairs is not None
            self.grid = Grid.between(pairs, settings.num_points)
        self._refine(_probes(trials[-1]))
        self.states = self.as_state(self.grid.points[None, None])
        self.initial = self._initial()
        self._require_inside(self.initial[:, None], None)
        self.rewards = self._rewards()

    def as_state(self, x: Tensor) -> Any:
        """Points `[..., d]` as states with leaves `[..., *shape]`."""
        flat, done = x, 0

        def take(leaf: Any) -> Tensor:
            nonlocal done
            size = math.prod(leaf.shape)
            part, done = flat[..., done : done + size], done + size
            return part.reshape(*flat.shape[:-1], *leaf.shape)

        return map_state(take, self.signature.state)

    def coordinates(self, state: Any, shape: torch.Size) -> Tensor:
        """States with the batch `shape` (or less) as points `[*shape, d]`."""
        full = self.signature.broadcast(state, shape)
        return torch.cat([leaf.reshape(*shape, -1) for _, leaf in leaves(full)], -1).double()

    def predict(self, p: Tensor, action: Tensor) -> Tensor:
        """Move beliefs `[C, B, G]` by their actions."""
        present = action.unique().tolist()
        moving = [a for a in present if not self.transition(a).identity]
        if not moving:
            return p
        if len(present) == 1:
            return self.transition(present[0])(p)
        predicted = p.clone() if len(moving) < len(present) else torch.empty_like(p)
        for a in moving:
            rows = (action == a).nonzero()[:, 0]
            predicted.index_copy_(1, rows, self.transition(a)(p[:, rows]))
        return predicted

    def expect(self, values: Tensor, action: Tensor) -> Tensor:
        """Means of functions `[C, B, G]` of the next state, at every point."""
        expected = torch.empty_like(values)
        for a in action.unique().tolist():
            rows = (action == a).nonzero()[:, 0]
            expected.index_copy_(1, rows, self.transition(a).expect(values[:, rows]))
        return expected.clamp_(min=0)  # where motion without noise ends between points, weights have signs

    def origins(self, p: Tensor, action: Tensor, later: Tensor) -> Tensor:
        """`p(x) T(x, x')` of all points x for each of the points x' in `later [C, B, M]`: `[C, B, M, G]`."""
        found = p.new_empty(*later.shape, self.grid.size)
        for a in action.unique().tolist():
            rows = (action == a).nonzero()[:, 0]
            found.index_copy_(1, rows, p[:, rows, None] * self.transition(a).origins(later[:, rows]))
        return found

    def stays(self, action: Tensor) -> Tensor:
        """Which of the actions `[B]` leave every point where it is, bool `[B]`."""
        return torch.tensor([self.transition(a).identity for a in action.tolist()])

    def as_states(self, index: Tensor, place: Tensor) -> State:
        """Places `[C, B, M, d]` from 0 to 1 in the cells `index [C, B, M]`, as states."""
        states: State = self.as_state(self.grid.points[index] + (place - 0.5) * self.grid.widths[index])
        return states

    @double_precision()
    def step(self, belief: DiscreteBelief, seen: Seen) -> tuple[DiscreteBelief, Tensor]:
        """Move by `seen.action`, then condition on what was seen."""
        assert seen.action is not None
        predicted = self.predict(belief.probabilities, seen.action)
        self._require_inside(predicted, seen)
        return self.look(DiscreteBelief(predicted), seen)

    def look(self, belief: DiscreteBelief, seen: Seen) -> tuple[DiscreteBelief, Tensor]:
        """Condition on what was seen."""
        posterior, increment = super().look(belief, seen)
        if posterior is not belief:
            self._require_inside(posterior.probabilities, seen)
        return posterior, increment

    def log_likelihood(self, seen: Seen) -> Tensor:
        """`log p(o | x, a, c)` at the points, and its mean over cells in which it jumps, `[C, B, G]`."""
        at_points = self._log_density(self.states, self.grid.size, seen)
        if not len(self.jumps):
            return at_points
        x = self.grid.subpoints(self.jumps, self._parts)  # [J, M, d]
        with poutine.block():  # from those who look at what happens at the points
            states = self.as_state(x.flatten(0, 1)[None, None])
            inside = self._log_density(states, x.shape[0] * x.shape[1], seen)
        means = inside.unflatten(-1, x.shape[:2]).logsumexp(-1) - math.log(x.shape[1])
        return at_points.index_copy(-1, self.jumps, means)

    def moments(self, belief: DiscreteBelief) -> tuple[State, State]:
        """Mean and variance of the state."""
        x, p = self.grid.points, belief.probabilities
        mean = p @ x
        variance = (p @ x**2 - mean**2).clamp(min=0)
        return self.as_state(mean), self.as_state(variance)

    @double_precision()
    def transition(self, a: int) -> Transition:
        """Where action `a` leads to; found when first asked for."""
        if a not in self._transitions:
            self._transitions[a] = self._transition(a)
        return self._transitions[a]

    @cached_property
    def _parts(self) -> int:
        """Parts of a cell along each axis: a power as many in two dimensions."""
        return self.settings.subpoints if self.dim == 1 else max(2, round(self.settings.subpoints**0.5))

    def _log_density(self, states: Any, number: int, seen: Seen) -> Tensor:
        density = log_density_of_seen(self.model, self.signature, states, self.context, seen).double()
        B = len(next(iter(seen.observations.values())))
        return density.expand(len(self.context), B, number)

    def _push(
        self, program: str, x: Tensor | None, a: int, nodes: Nodes
    ) -> tuple[Tensor, Tensor, Enumerated]:
        """Push points `[P, d]` through a program: where to, `[K, C, P, d]`, and the weights `[K, C, P]`."""
        C, P = len(self.context), 1 if x is None else len(x)
        with Enumerated(program, len(self.own), nodes) as enumerated:
            if x is None:
                state = self.model.initial(self.context)
            else:
                state = self.model.transition(
                    self.as_state(x[None, None]), axes(torch.tensor([a]), len(self.own)), self.context
                )
        added = enumerated.weights.shape[:-ENGINE_AXES]
        where = self.coordinates(state, torch.Size((*added, C, 1, P)))
        weights = enumerated.weights.expand(*added, C, 1, P)
        if not bool(torch.isfinite(where).all()):
            c = int((~torch.isfinite(where)).nonzero()[0, len(added)])
            raise DensityError(
                f"{program}: the state is not finite somewhere within the grid's bounds {self.grid} "
                f"in context '{self.model.context_names[c]}'"
            )
        return where.reshape(-1, C, P, self.dim), weights.reshape(-1, C, P), enumerated

    def _nodes(self, program: str, x: Tensor | None, a: int) -> Nodes:
        """So many nodes that they come to lie no further apart than grid points."""
        _, _, pilot = self._push(program, x, a, Nodes(3))
        dims = len(pilot.noise_axes)
        if not dims:
            return Nodes(3)
        reach = self.settings.reach or (8.5 if dims == 1 else 6.0)
        number = 2 * math.ceil((2.4 if dims == 1 else 0.8) * reach) + 1
        nodes = Nodes(number, reach)
        where, _, pilot = self._push(program, x, a, nodes)
        added = pilot.weights.shape[:-ENGINE_AXES]
        where = where.reshape(*added, *where.shape[1:]) / self.grid.finest
        tail = int((nodes.epsilon < -1.7).sum())  # may be stretched, but hardly counts
        furthest = 1.0
        for axis in pilot.noise_axes:
            gaps = where.movedim(len(added) - 1 - axis, 0)[tail:-tail].diff(dim=0)
            furthest = max(furthest, float(gaps.abs().max()))
        most = 2049 if dims == 1 else max(9, int(66_000 ** (1 / dims)))
        wanted = math.ceil((number - 1) * furthest / (0.75 if dims == 1 else 1.5)) + 1
        return Nodes(max(number, min(wanted, most)), reach)

    def _deposit(self, where: Tensor, weights: Tensor) -> Tensor:
        """Share out `[K, C, P, d]` among the grid's points, `[C, P, G]`."""
        index, share = self.grid.shares(where)  # [K, C, P, 4**d]
        share = share * weights[..., None]
        table = torch.zeros(*where.shape[1:3], self.grid.size)
        return table.scatter_add_(-1, _last(index), _last(share))

    def _initial(self) -> Tensor:
        dims = len(self._push("initial", None, 0, Nodes(3))[2].noise_axes)
        nodes = self._nodes("initial", None, 0)
        if dims in (1, 2):  # a single point to push: nodes are cheap
            many = 16_385 if dims == 1 else 385
            nodes = Nodes(max(many, len(nodes)), max(12.0, self.settings.reach or 0.0))
        table = self._deposit(*self._push("initial", None, 0, nodes)[:2])[:, 0]
        table = table.clamp(min=0)
        return table / table.sum(-1, keepdim=True)

    def _transition(self, a: int) -> Transition:
        x, C = self.grid.points, len(self.context)
        nodes = self._nodes("transition", x[:: max(1, len(x) // 64)], a)
        K = len(self._push("transition", x[:1], a, nodes)[0])
        size = max(1, min(BLOCK, AT_ONCE // (K * C * 4**self.dim)))
        bands, identity, signed, alike = [], True, False, True
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK]
            rows = [
                self._deposit(*self._push("transition", part, a, nodes)[:2]) for part in block.split(size)
            ]
            table = torch.cat(rows, 1)  # [C, P, G]
            table[(table < 0) & (table > -1e-6)] = 0.0
            table /= table.sum(-1, keepdim=True)
            columns = (table != 0).any(0).any(0).nonzero()[:, 0]
            low, high = int(columns[0]), int(columns[-1]) + 1
            table = table[..., low:high].clone()
            P = len(block)
            identity = identity and low == start and high == start + P and bool((table == torch.eye(P)).all())
            signed = signed or bool((table < 0).any())
            alike = alike and bool((table == table[:1]).all())
            bands.append(Band(start, low, high, table))
        if alike:
            bands = [Band(band.start, band.low, band.high, band.weights[:1]) for band in bands]
        return Transition(bands, identity, signed)

    def _refine(self, probes: Seen | None) -> None:
        """Find out where densities and rewards jump, and make the grid fit."""
        functions: list[Callable[[Tensor], Tensor]] = [self._reward_at]
        if probes is not None:
            functions.insert(0, partial(self._density_at, probes))
        if self.dim == 2:
            found = [self._cells_with_jumps(function) for function in functions]
            self.jumps = found[0] if probes is not None else found[0][:0]
            self.reward_jumps = found[-1]
            return
        places = [jumps_of(function, self.grid) for function in functions]
        self.grid = self.grid.refined([x for some in places for x in some])
        self.jumps = self.grid.containing(places[0] if probes is not None else [])
        self.reward_jumps = self.grid.containing(places[-1])

    def _density_at(self, probes: Seen, x: Tensor) -> Tensor:
        """Log-densities of some observations at points `[P, d]`, `[C, B, P]`."""
        return self._log_density(self.as_state(x[None, None]), len(x), probes).clamp(min=-1e3)

    def _reward_at(self, x: Tensor) -> Tensor:
        """Rewards of all actions at points `[P, d]`, `[C, A, P]`."""
        C, A = len(self.context), self.model.num_actions
        return self.reward(self.as_state(x[None, None]), torch.arange(A), (C, A, len(x))).double()

    def _rewards(self) -> Tensor:
        """`r_c(x, a)` at the points, and its mean over cells in which it jumps, `[C, A, G]`."""
        rewards = self._reward_at(self.grid.points)
        x = self.grid.subpoints(self.reward_jumps, self._parts)  # [J, M, d]
        means = self._reward_at(x.flatten(0, 1)).unflatten(-1, x.shape[:2]).mean(-1)
        return rewards.index_copy(-1, self.reward_jumps, means)

    def _cells_with_jumps(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The cells of a two-dimensional grid inside which a function jumps."""
        found = []
        for cells in torch.arange(self.grid.size).split(max(1, SCAN // self._parts**2)):
            x = self.grid.subpoints(cells, self._parts)
            values = function(x.flatten(0, 1)).unflatten(-1, (len(cells), self._parts, self._parts))
            found.append(cells[jump_along(values, -1) | jump_along(values, -2)])
        return torch.cat(found)

    def _require_inside(self, p: Tensor, seen: Seen | None) -> None:
        at_boundary = p[..., self.grid.boundary].sum(-1)  # [C, B]
        if bool((at_boundary > BOUNDARY_MASS).any()):
            c, b = (at_boundary > BOUNDARY_MASS).nonzero()[0].tolist()
            when = "at the start" if seen is None else f"at time {seen.time} of episode {seen.episode(b)}"
            raise DensityError(
                f"grid: the state leaves the bounds {self.grid} {when} in context "
                f"'{self.model.context_names[c]}' (probability {float(at_boundary[c, b]):.2g}); "
                "give wider `bounds`"
            )


def _last(tensor: Tensor) -> Tensor:
    """`[K, C, P, W]` as `[C, P, K · W]`."""
    return tensor.permute(1, 2, 0, 3).flatten(2)


def _trials(model: CPOMDP) -> list[Episodes]:
    """Episodes under each constant action, then under random ones."""
    B = 128 * model.num_contexts

    def always(a: int) -> Callable[[History], Tensor]:
        return lambda history: torch.full((B,), a, device=model.device)

    policies: list[Any] = [*map(always, range(model.num_actions)), RandomPolicy(model.num_actions)]
    with drawing(model):
        return [simulate(model, policy, B, contexts="balanced", seed=0) for policy in policies]


def _reached(
    model: CPOMDP, trials: Sequence[Episodes], coordinates: Callable[[Any, torch.Size], Tensor]
) -> list[tuple[float, float]]:
    """Bounds of where episodes get to: several standard deviations around the mean, at any time."""
    lows, highs = [], []
    for trial in trials:
        x = coordinates(trial.states, torch.Size((len(trial), trial.horizon + 1)))
        x = x.unflatten(0, (-1, model.num_contexts))  # balanced contexts: [B / C, C, T+1, d]
        mean, reach = x.mean(0), (7.0 if x.shape[-1] == 1 else 5.5) * x.std(0)  # in a plane, points are dear
        lows.append(torch.minimum(mean - reach, x.amin(0)).flatten(0, 1).amin(0))
        highs.append(torch.maximum(mean + reach, x.amax(0)).flatten(0, 1).amax(0))
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    if not bool((high - low < FARTHEST).all()):  # NaN, if any is
        raise DensityError(
            f"grid: states of {type(model).__name__} get from {low.tolist()} to {high.tolist()}, "
            "which no grid can cover; give `bounds`, or mend `transition`"
        )
    still = high - low <= 1e-9 * torch.maximum(low.abs(), high.abs())  # whatever the unit of measurement
    low, high = torch.where(still, low - 0.5, low), torch.where(still, high + 0.5, high)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _probes(trial: Episodes, number: int = 64) -> Seen | None:
    """Some steps of simulated episodes in which something was observed."""
    seen = trial.observed.values()
    flags = torch.stack([flags.flatten(2).any(2) if flags.dim() > 2 else flags for flags in seen])
    where = flags.any(0).nonzero()  # [steps, 2]
    if not len(where):
        return None
    b, t = where[torch.linspace(0, len(where) - 1, min(number, len(where))).long()].unbind(1)
    return Seen(
        1,
        trial.actions[b, t],
        {site: value[b, t] for site, value in trial.observations.items()},
        {site: flags[b, t] for site, flags in trial.observed.items()},
    )


def _require_continuous(model: CPOMDP) -> None:
    if model.states is not None:
        raise UnsupportedModelError(
            f"grid: {type(model).__name__} is finite (`states = {model.states}`); "
            'the backend "exact" serves it'
        )


def _require_few_numbers(model: str, state: Any) -> int:
    sizes: dict[str, int] = {name: math.prod(leaf.shape) for name, leaf in leaves(state)}
    for name, leaf in leaves(state):
        if not leaf.dtype.is_floating_point:
            raise UnsupportedModelError(f"grid: '{name}' of {model} is {leaf.dtype}, not a real number")
    total = sum(sizes.values())
    if total not in (1, 2):
        shown = ", ".join(f"'{name}': {size}" for name, size in sizes.items())
        raise UnsupportedModelError(f"grid: the state of {model} has {total} numbers ({shown}), not 1 or 2")
    return total


def _pairs(bounds: Any) -> list[tuple[float, float]] | None:
    """One or two pairs `(low, high)`, of whatever kind of numbers; None if bounds are not like that."""
    try:
        pairs = [tuple(bounds)] if isinstance(bounds[0], Real) else [tuple(pair) for pair in bounds]
        found = [(float(low), float(high)) for low, high in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        return None
    proper = len(found) in (1, 2) and all(-math.inf < low < high < math.inf for low, high in found)
    return found if proper else None
