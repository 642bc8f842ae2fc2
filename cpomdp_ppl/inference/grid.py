"""The likelihood of models with one or two real numbers for a state, on a grid of points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import DensityError, ResolutionError, UnsupportedModelError, require, require_count
from cpomdp_ppl.inference.backend import Backend, Recursion
from cpomdp_ppl.inference.cells import SCAN, SHARERS, Grid, jump_along, jumps_of
from cpomdp_ppl.inference.enumeration import (
    ENGINE_AXES,
    Enumerated,
    Nodes,
    double_precision,
)
from cpomdp_ppl.inference.finite import DiscreteBelief, DiscreteRecursion, smoothed_at_once
from cpomdp_ppl.inference.observed import Observed, axes, log_density_of_seen
from cpomdp_ppl.inference.trials import Probes, made_up, probes_of, reached, require_real_numbers, simulated
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.inference.smoothing import Smoothing
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

Bounds = Sequence[float] | Sequence[Sequence[float]]
Result = TypeVar("Result")

BLOCK = 64
"""Points whose transitions are stored and multiplied together."""

AT_ONCE = 2**22
"""Numbers that one run of a program may produce while tables are built."""

MEMORY = 2**22
"""Bytes that a batch of beliefs may take: more are not faster, as they leave the cache."""

BOUNDARY_MASS = 1e-3
"""Probability on the boundary from which on the bounds are too tight."""

EMPTY = 1e-34
"""Points of less probability do not move on."""

FEWEST, MOST = 1200, 10_000
"""About how many points a grid has that chooses for itself: at least, and at most."""

COARSER, LONGER, SAFETY = 1.5, 4 / 3, 2.0
"""How much wider the cells of the grid to compare with are, how much further it follows tails, and by what to
multiply the difference."""

LONGEST = 10.0
"""Standard deviations that are followed if the usual ones do not suffice."""

PROBES = 64
"""About how many observations are made up in a step, to see over what length their densities vary."""

CELLS_PER_SCALE = 1.25
"""How many cells there are to be in the length over which the density of an observation varies."""

RARE = 1e-12
"""A less probable point may be one at the end of what is followed of a distribution's tail."""

BEHIND = 36.0
"""Of contexts that lie further behind the likeliest, in nats, no accuracy is asked: tails are cut."""


class OutOfReachError(DensityError):
    """Only tails that were cut explain an observation."""


@dataclass(frozen=True)
class GridFilter(Backend):
    """A filter for one- and two-dimensional states that is right to within a tolerance, or refuses.

    Transitions are found by pushing every grid point through the program, with quadrature nodes for its
    noise, and sharing out what arrives among the grid points around it such that moments up to the fifth
    are kept: the grid adds no diffusion. It can be refined at will, which makes it the truth in tests.

    The points are centres of cells. Cells that the bounds do not fix have round edges, since there the
    thresholds of programs tend to be; if a density or reward jumps inside a cell, it is averaged there.

    A second grid with wider cells is taken along, on which tails are followed a third further. Twice of what
    the increments on both differ by, added up over the steps of an episode, is the estimated error of its
    log-likelihood: many times too much where beliefs are smooth, since errors there fall with the sixth power
    of the cells' width. Wherever it exceeds the tolerance, the result is a `ResolutionError` that says how
    many points it would take, or a `DensityError` where the tails that were cut are to blame.

    Both grids would miss alike what is much narrower than a cell. So in every step observations are made up
    at states drawn from the beliefs, and a density that varies too fast around those is refused as well. A
    sensor that is that narrow less often than every twentieth time may pass unnoticed.

    Args:
        num_points: About how many points in all. None takes 1,200, or as many as the densities of simulated
            observations need; `run` and `smooth` take more until the tolerance is kept, up to 10,000.
        bounds: `(low, high)` of the state, or one such pair for each of its two numbers. Left out, they are
            found by simulating the model under each constant action and under random ones.
        subpoints: In how many parts a cell is cut, along each axis, to average over a jump.
        reach: How many standard deviations of a single noise of `transition` are followed; its tails beyond
            are cut. None takes 8.5, and 6 if a transition has several noises; `run` and `smooth` take 10 if
            that does not suffice. One or two noises of `initial` are followed for 12 at least. An observation
            that only a rarer event explains is refused. What is drawn from other distributions than normal
            ones is cut at quantiles of 2⁻⁵⁰, on both grids alike.
        tolerance: The largest estimated error of an episode's log-likelihood, in nats. Of a context that is d
            nats behind the likeliest, `d · tolerance` is asked for instead if that is more, and nothing if d
            is beyond 36, where the tails that were cut matter. Infinity asks for nothing at all.
    """

    num_points: int | None = None
    bounds: Bounds | None = None
    subpoints: int = 16
    reach: float | None = None
    tolerance: float = 0.1

    name: ClassVar[str] = "grid"
    draws: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_points is not None:
            require_count("num_points", self.num_points)
            require(self.num_points >= 16, "num_points", self.num_points, "at least 16")
        require_count("subpoints", self.subpoints)
        if self.bounds is not None:
            expected = "(low, high) with low < high, or a pair of these"
            require(_pairs(self.bounds) is not None, "bounds", self.bounds, expected)
        if self.reach is not None:
            proper = isinstance(self.reach, Real) and 2 <= self.reach <= 30
            require(proper, "reach", self.reach, "None or a number from 2 to 30")
        proper = isinstance(self.tolerance, Real) and self.tolerance > 0
        require(proper, "tolerance", self.tolerance, "a positive number of nats")

    @double_precision()
    def recursion(self, model: CPOMDP) -> GridRecursion:
        """The grid of a model, and the tables on it."""
        return GridRecursion(model, self)

    def run(
        self, model: CPOMDP, episodes: Episodes, *, seed: int | None = None, moments: bool = True
    ) -> Filtering:
        """As the base, with more points where that is left to us and these episodes need them.

        Raises:
            ResolutionError: If the tolerance is not kept.
        """
        return self._refined(
            lambda backend: Backend.run(backend, model, episodes, seed=seed, moments=moments)
        )

    def smooth(
        self, model: CPOMDP, episodes: Episodes, num_trajectories: int = 100, *, seed: int | None = None
    ) -> Smoothing:
        """As the base, with more points where that is left to us and these episodes need them.

        Raises:
            ResolutionError: If the tolerance is not kept.
        """
        return self._refined(
            lambda backend: Backend.smooth(backend, model, episodes, num_trajectories, seed=seed)
        )

    def _refined(self, result: Callable[[GridFilter], Result]) -> Result:
        """A result on a grid that is fine enough and reaches far enough, if that is ours to choose."""
        backend = self
        while True:
            try:
                return result(backend)
            except ResolutionError as error:
                if self.num_points is not None or error.num_points > MOST:
                    raise
                backend = replace(backend, num_points=error.num_points)
            except OutOfReachError:
                if backend.reach is not None:
                    raise
                backend = replace(backend, reach=LONGEST)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep a belief `[C, B, G]` within `MEMORY`."""
        assert isinstance(recursion, GridRecursion)
        values = recursion.signature.dependencies.combinations
        return max(1, MEMORY // (8 * model.num_contexts * recursion.grid.size * values))

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """As many as the exact backend would, with as many states."""
        assert isinstance(recursion, GridRecursion)
        return smoothed_at_once(recursion, horizon, num_trajectories)


@dataclass(frozen=True)
class GridBelief(DiscreteBelief):
    """What is known about the state, on a grid and on a coarser one.

    Attributes:
        probabilities: Of the points, float64 `[C, B, G]`.
        coarse: Of the coarser grid's points, `[C, B, G']`; None, like the rest, without such a grid.
        log_likelihoods: Of everything seen so far, on the one and the other, `[C, B, 2]`.
        error: Of the log-likelihood, estimated by how much increments on the two have differed, `[C, B]`.
    """

    coarse: Tensor | None = None
    log_likelihoods: Tensor | None = None
    error: Tensor | None = None


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
        shape: Of the grid.
    """

    bands: Sequence[Band]
    identity: bool
    signed: bool
    shape: Sequence[int]

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
        return nonnegative(moved, self.shape) if self.signed else moved

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


def nonnegative(p: Tensor, shape: Sequence[int]) -> Tensor:
    """Beliefs `[C, R, G]` on a grid of this shape, whose negative masses their neighbours have paid for.

    To cut them off and normalise would move probability between places that are far from each other: what
    comes to lie between two points is shared out as -1, 9, 9, -1 sixteenths, and would gain an eighth.
    """
    moved = p.unflatten(-1, tuple(shape))
    for axis in [*range(-len(shape), 0)] * 3:  # what a neighbour cannot pay, the next one may
        debt = moved.clamp(max=0)
        if not bool(debt.any()):
            break
        means = moved.clamp(min=0)
        before, after = _shifted(means, 1, axis), _shifted(means, -1, axis)
        rate = debt / (before + after).clamp(min=1e-300)
        solvent = before + after > 0
        rate, left = torch.where(solvent, rate, 0.0), torch.where(solvent, 0.0, debt)
        moved = means * (1 + _shifted(rate, 1, axis) + _shifted(rate, -1, axis)) + left
    positive: Tensor = moved.flatten(-len(shape)).clamp(min=0)
    return positive / positive.sum(-1, keepdim=True)


def _shifted(x: Tensor, by: int, axis: int) -> Tensor:
    """What stands one place before (1) or after (-1) along an axis; zero at the ends."""
    n = x.shape[axis]
    shifted = x.roll(by, axis)
    at_end = torch.arange(n) == (0 if by > 0 else n - 1)
    return torch.where(at_end.reshape(-1, *[1] * (-axis - 1)), 0.0, shifted)


class GridRecursion(DiscreteRecursion):
    """The forward recursion over the points of a grid.

    Attributes:
        grid: The G points.
        coarse: The same on a coarser grid, to compare with; None if there is no tolerance to keep.
        extent: The length of the bounds, along each axis.
        scale: The length over which the densities of simulated observations vary, along each axis.
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
        trials = simulated(self.model)
        require_real_numbers(self.model, trials[:-1])  # under constant actions
        if settings.bounds is None:
            pairs = reached(self.model, trials, self.coordinates)
        else:
            found = _pairs(settings.bounds)
            fits = found is not None and len(found) == self.dim
            require(fits, "bounds", settings.bounds, f"{self.dim} pair(s), one for each number")
            assert found is not None
            pairs = found
        self.extent = [high - low for low, high in pairs]
        probes = probes_of(Episodes.concatenate(trials), self.coordinates)
        self.scale = [math.inf] * self.dim if probes is None else self._scale(probes)
        self._wanted = self._cells(self.scale)
        self._n = n = self._per_axis()
        lay = Grid.around if settings.bounds is None else Grid.between
        grid = lay(pairs, [length / n for length in self.extent])
        self._longer, self._reach = 1.0, math.inf  # by what tails are prolonged, and where they are cut
        self.coarse: GridRecursion | None = None
        if settings.tolerance < math.inf:
            self.coarse = copy(self)
            self.coarse._longer = LONGER
            self.coarse._transitions = {}
            self.coarse._lay(lay(pairs, (COARSER * grid.finest).tolist()), probes)
        self._lay(grid, probes)
        self._require_inside(self.initial[:, None], None)

    def _lay(self, grid: Grid, probes: Probes | None) -> None:
        """Fit a grid to where densities and rewards jump, and tabulate what does not depend on actions."""
        self.grid = grid
        self._refine(None if probes is None else probes.seen)
        self.states = self.as_state(self.grid.points[None, None])
        self.initial = self._initial()
        self.rewards = self._rewards()

    def _cells(self, scale: Sequence[float]) -> float:
        """How many cells along an axis it takes if densities vary over lengths of `scale`."""
        return max(CELLS_PER_SCALE * length / s for length, s in zip(self.extent, scale, strict=True))

    def _per_axis(self) -> int:
        """Cells along each axis: as many as asked for, or as the scale of the densities needs."""
        given, tolerant = self.settings.num_points, self.settings.tolerance == math.inf
        number = _rounded_up(self._wanted**self.dim)
        n = _per_axis(max(FEWEST, number) if given is None else given, self.dim)
        if (given is None and number > MOST) or (2 * n < self._wanted and not tolerant):
            raise self._too_narrow(self.scale)
        return n

    def _too_narrow(self, scale: Sequence[float]) -> ResolutionError:
        number = _rounded_up(self._cells(scale) ** self.dim)
        return ResolutionError(
            f"grid: densities of observations of {type(self.model).__name__} vary over lengths of "
            f"{', '.join(f'{length:.2g}' for length in scale)}, and states over "
            f"{', '.join(f'{length:.2g}' for length in self.extent)}; "
            f"it would take about {number:,} points (`num_points`), or closer `bounds`",
            number,
        )

    def _scale(self, probes: Probes) -> list[float]:
        """Over what length the densities of observations vary around the states that they were made in.

        That is where the mean of the log-densities at a distance, both ways, has moved by 1/2: the standard
        deviation of a normal sensor. Where that happens by a jump, it is no scale. Of all lengths, nearly the
        smallest: some may be due to chance.
        """
        steps = 2.0 ** (-torch.arange(4, 100) / 2).flip(0)  # [K], ascending
        found = []
        for axis, length in enumerate(self.extent):
            away = torch.zeros(2 * len(steps) + 1, self.dim)  # [2 K + 1, d]
            away[:, axis] = length * torch.cat([torch.zeros(1), steps, -steps])
            x = probes.x[:, None] + away
            density = self._log_density(self.as_state(x[None]), x.shape[1], probes.seen)  # [C, B, 2 K + 1]
            density = density[probes.context, torch.arange(len(x))]
            here, up, down = density.split([1, len(steps), len(steps)], -1)
            change = ((up + down) / 2 - here).abs()  # [B, K]
            within = (change <= 0.5).long().cumprod(-1)
            k = within.sum(-1).clamp(1, len(steps) - 1)[:, None]  # the first beyond
            jumps = change.gather(-1, k - 1) < 0.1 * change.gather(-1, k)
            beyond = ~jumps[:, 0] & (within[:, 0] > 0) & (within[:, -1] == 0)
            scale = torch.where(beyond, length * steps[k[:, 0] - 1], torch.inf)
            found.append(float(scale.kthvalue(1 + len(scale) // 20).values))
        return found

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

    def start(self, num_episodes: int) -> GridBelief:
        """`P(s_0)`."""
        p = super().start(num_episodes).probabilities
        if self.coarse is None:
            return GridBelief(p)
        with torch.no_grad():
            coarse = DiscreteRecursion.start(self.coarse, num_episodes).probabilities
        return GridBelief(p, coarse, p.new_zeros(*p.shape[:2], 2), p.new_zeros(p.shape[:2]))

    @double_precision()
    def step(self, belief: DiscreteBelief, seen: Observed) -> tuple[GridBelief, Tensor]:
        """Move by `seen.action`, then condition on what was seen."""
        assert seen.action is not None
        assert isinstance(belief, GridBelief)
        predicted = self.predict(belief.probabilities, seen.action)
        self._require_inside(predicted, seen)
        coarse = belief.coarse
        if self.coarse is not None and coarse is not None:
            with torch.no_grad():
                coarse = self.coarse.predict(coarse, seen.action)
        return self.condition(replace(belief, probabilities=predicted, coarse=coarse), seen)

    def condition(self, belief: DiscreteBelief, seen: Observed) -> tuple[GridBelief, Tensor]:
        """Condition on what was seen.

        Raises:
            ResolutionError: If what follows on a coarser grid differs by more than the tolerance, or where
                the beliefs are, densities vary over less than a cell.
            OutOfReachError: If it differs because tails were cut.
        """
        assert isinstance(belief, GridBelief)
        if seen.rows is not None and not len(seen.rows):
            return belief, belief.probabilities.new_zeros(belief.probabilities.shape[:2])
        posterior, increment = super().condition(DiscreteBelief(belief.probabilities), seen)
        self._require_inside(posterior.probabilities, seen)
        found = replace(belief, probabilities=posterior.probabilities)
        if self.coarse is not None:
            assert belief.coarse is not None
            assert belief.log_likelihoods is not None
            assert belief.error is not None
            with torch.no_grad():
                self._require_wide(belief, seen)
                other, roughly = DiscreteRecursion.condition(self.coarse, DiscreteBelief(belief.coarse), seen)
                both = torch.stack([increment.detach(), roughly], -1)
                # Impossible on both is no difference.
                error = SAFETY * (both[..., 0] - both[..., 1]).abs().nan_to_num(0.0, posinf=torch.inf)
                found = replace(
                    found,
                    coarse=other.probabilities,
                    log_likelihoods=belief.log_likelihoods + both,
                    error=belief.error + error,
                )
                self._require_resolved(belief, found, seen)
        return found, increment

    def log_likelihood(self, seen: Observed) -> Tensor:
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

    def _log_density(self, states: Any, number: int, seen: Observed) -> Tensor:
        density = log_density_of_seen(self.model, self.signature, states, self.context, seen).double()
        B = len(next(iter(seen.observations.values())))
        return density.expand(len(self.context), B, number)

    def _push(
        self, program: str, x: Tensor | None, a: int, nodes: Nodes
    ) -> tuple[Tensor, Tensor, Enumerated]:
        """Push points `[P, d]` through a program: where to, `[K, C, P, d]`, and the weights `[K, C, P]`.

        If the context makes no difference, its axis has the length 1.
        """
        P = 1 if x is None else len(x)
        with Enumerated(program, self.plate_axes, nodes) as enumerated:
            if x is None:
                state = self.model.initial(self.context)
            else:
                state = self.model.transition(
                    self.as_state(x[None, None]), axes(torch.tensor([a]), self.plate_axes), self.context
                )
        added = enumerated.weights.shape[:-ENGINE_AXES]
        C = max(enumerated.weights.shape[-ENGINE_AXES], self._num_contexts(state))
        where = self.coordinates(state, torch.Size((*added, C, 1, P)))
        weights = enumerated.weights.expand(*added, C, 1, P)
        if not bool(torch.isfinite(where).all()):
            c = int((~torch.isfinite(where)).nonzero()[0, len(added)])
            raise DensityError(
                f"{program}: the state is not finite somewhere within the grid's bounds {self.grid} "
                f"in context '{self.model.context_names[c]}'"
            )
        return where.reshape(-1, C, P, self.dim), weights.reshape(-1, C, P), enumerated

    def _num_contexts(self, state: Any) -> int:
        """The length of a state's axis for contexts: 1 if the program did not look at them."""
        pairs = zip(leaves(state), leaves(self.signature.state), strict=True)
        axes = [(leaf.shape, -ENGINE_AXES - len(spec.shape)) for (_, leaf), (_, spec) in pairs]
        return max(shape[axis] if len(shape) >= -axis else 1 for shape, axis in axes)

    def _nodes(self, program: str, x: Tensor | None, a: int) -> Nodes:
        """So many nodes that they come to lie no further apart than grid points."""
        _, _, pilot = self._push(program, x, a, Nodes(3))
        dims = len(pilot.noise_axes)
        if not dims:
            return Nodes(3)
        reach = self._longer * (self.settings.reach or (8.5 if dims == 1 else 6.0))
        self._reach = min(self._reach, reach)
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
        index, share = self.grid.shares(where)  # [K, C, P, m**d]
        share = share * weights[..., None]
        table = torch.zeros(*where.shape[1:3], self.grid.size)
        return table.scatter_add_(-1, _last(index), _last(share))

    def _initial(self) -> Tensor:
        dims = len(self._push("initial", None, 0, Nodes(3))[2].noise_axes)
        nodes = self._nodes("initial", None, 0)
        if dims in (1, 2):  # a single point to push: nodes are cheap
            many = 16_385 if dims == 1 else 385
            nodes = Nodes(max(many, len(nodes)), self._longer * max(12.0, self.settings.reach or 0.0))
        table = self._deposit(*self._push("initial", None, 0, nodes)[:2])[:, 0]
        return nonnegative(table[:, None], self.grid.shape)[:, 0].expand(len(self.context), -1)

    def _transition(self, a: int) -> Transition:
        x = self.grid.points
        nodes = self._nodes("transition", x[:: max(1, len(x) // 64)], a)
        K, C = self._push("transition", x[:1], a, nodes)[0].shape[:2]
        size = max(1, min(BLOCK, AT_ONCE // (K * C * SHARERS**self.dim)))
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
        return Transition(bands, identity, signed, self.grid.shape)

    def _refine(self, probes: Observed | None) -> None:
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

    def _density_at(self, probes: Observed, x: Tensor) -> Tensor:
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

    def _require_resolved(self, predicted: GridBelief, belief: GridBelief, seen: Observed) -> None:
        """Raise where an observation is out of reach, or the two grids differ.

        Contexts that are far behind the likeliest need not be right, nor episodes that are over.
        """
        assert belief.log_likelihoods is not None
        assert belief.error is not None
        best = belief.log_likelihoods[..., 0].amax(0)  # [B]
        behind = best - belief.log_likelihoods.amax(-1)  # [C, B]
        counts = behind <= BEHIND if seen.alive is None else (behind <= BEHIND) & seen.alive
        allowed = self.settings.tolerance * behind.clamp(min=1.0)
        excess = torch.where(counts, belief.error / allowed, 0.0)
        self._require_followed(predicted.probabilities, belief, counts, excess > 1, seen)
        vague = counts & (2.0**-52 * best.abs() > self.settings.tolerance)  # all states are as far off
        for c, b in vague.nonzero()[:1].tolist():
            raise self._out_of_reach(c, b, seen)
        c, b = divmod(int(excess.argmax()), excess.shape[1])
        worst = float(excess[c, b])
        if worst <= 1:
            return
        # Errors fall with the fifth power at least; those of later steps are not known, and may be larger.
        wanted = max(self._n * min(worst, 1e6) ** 0.2, self._wanted) ** self.dim
        number = _rounded_up(max(wanted, 2 * self._n**self.dim))
        raise ResolutionError(
            f"grid: {self.grid.size:,} points are too few, as {self._place(c, b, seen)} the log-likelihood "
            f"may be off by {float(belief.error[c, b]):.2g} nats, more than {float(allowed[c, b]):.2g} "
            f"(`tolerance`); it would take about {number:,} or more (`num_points`)",
            number,
        )

    def _require_followed(
        self, predicted: Tensor, belief: GridBelief, counts: Tensor, differs: Tensor, seen: Observed
    ) -> None:
        """Raise if an observation moves a belief to where a tail was cut: there, its density is too low.

        That is at the end of what is possible, or, if noises add up, before it: there the other grid, which
        follows tails further, finds more.
        """
        assert belief.log_likelihoods is not None
        peak = belief.probabilities.argmax(-1, keepdim=True)  # [C, B, 1]
        there = predicted.gather(-1, peak)[..., 0]
        end = (
            100 * math.exp(-0.5 * self._reach**2) * predicted.amax(-1)
        )  # about as rare as where tails are cut
        cut = differs & (belief.log_likelihoods.diff()[..., 0] > 0) & (there < end)
        for c, b in cut.nonzero()[:1].tolist():
            raise self._out_of_reach(c, b, seen)
        for c, b in (counts & (there < RARE)).nonzero().tolist():
            possible = (predicted[c, b] > 0).nonzero()[:, 0]
            cells = torch.stack(torch.unravel_index(torch.cat([peak[c, b], possible]), self.grid.shape))
            at, low, high = cells[:, 0], cells[:, 1:].amin(1), cells[:, 1:].amax(1)
            if bool(((at <= low + 1) | (at >= high - 1)).any()):
                raise self._out_of_reach(c, b, seen)

    @double_precision()
    def _require_wide(self, belief: GridBelief, seen: Observed) -> None:
        """Raise if, where the beliefs are, densities of what might be seen vary over less than a cell."""
        probes = self._made_up(belief, seen)
        if probes is not None and self._cells(scale := self._scale(probes)) > 2 * self._n:
            raise self._too_narrow(scale)

    def _made_up(self, belief: GridBelief, seen: Observed) -> Probes | None:
        """Observations at states drawn from the beliefs about some of the episodes, if they can be any."""
        assert belief.log_likelihoods is not None
        C, B, _ = belief.probabilities.shape
        rows = torch.arange(B) if seen.rows is None else seen.rows
        b = rows[torch.linspace(0, len(rows) - 1, max(1, PROBES // C)).long()]  # [R]
        level = (0.618 * (1 + seen.time + torch.arange(len(b)))) % 1  # of a distribution function
        total = belief.probabilities[:, b].cumsum(-1)  # [C, R, G]
        index = torch.searchsorted(total, level[None, :, None] * total[..., -1:]).clamp(
            max=self.grid.size - 1
        )
        likelihood = belief.log_likelihoods[:, b, 0]  # [C, R]
        counts = likelihood >= likelihood.amax(0) - BEHIND
        counts = counts if seen.alive is None else counts & seen.alive[b]
        c, r = counts.nonzero().unbind(1)
        if not len(c):
            return None
        x = self.grid.points[index[c, r, 0]]  # [B, d]
        return made_up(self.model, self.signature, self.as_state(x), x, c, seen.select(b[r]))

    def _out_of_reach(self, c: int, b: int, seen: Observed) -> OutOfReachError:
        return OutOfReachError(
            f"grid: what was seen {self._place(c, b, seen)} is out of reach: only a state in the tails "
            "that were cut explains it; give a larger `reach`, or see whether the data are the model's"
        )

    def _place(self, c: int, b: int, seen: Observed) -> str:
        return f"at time {seen.time} of episode {seen.episode(b)} in context '{self.model.context_names[c]}'"

    def _require_inside(self, p: Tensor, seen: Observed | None) -> None:
        at_boundary = p[..., self.grid.boundary].sum(-1)  # [C, B]
        if bool((at_boundary > BOUNDARY_MASS).any()):
            c, b = (at_boundary > BOUNDARY_MASS).nonzero()[0].tolist()
            context = f"'{self.model.context_names[c]}'"
            where = f"at the start in context {context}" if seen is None else self._place(c, b, seen)
            raise DensityError(
                f"grid: the state leaves the bounds {self.grid} {where} "
                f"(probability {float(at_boundary[c, b]):.2g}); give wider `bounds`"
            )


def _last(tensor: Tensor) -> Tensor:
    """`[K, C, P, W]` as `[C, P, K · W]`."""
    return tensor.permute(1, 2, 0, 3).flatten(2)


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


def _per_axis(num_points: int, dim: int) -> int:
    return max(4, round(float(num_points ** (1 / dim))))


def _rounded_up(number: float) -> int:
    """To two digits, for people."""
    unit = 10.0 ** max(0, math.floor(math.log10(max(1.0, number))) - 1)
    return int(math.ceil(number / unit - 1e-9) * unit)


def _pairs(bounds: Any) -> list[tuple[float, float]] | None:
    """One or two pairs `(low, high)`, of whatever kind of numbers; None if bounds are not like that."""
    try:
        pairs = [tuple(bounds)] if isinstance(bounds[0], Real) else [tuple(pair) for pair in bounds]
        found = [(float(low), float(high)) for low, high in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        return None
    proper = len(found) in (1, 2) and all(-math.inf < low < high < math.inf for low, high in found)
    return found if proper else None
