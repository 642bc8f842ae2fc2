"""The likelihood of models with one or two real numbers for a state, on a grid of points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from cpomdp_ppl.actions import require_finite_actions
from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import ResolutionError, UnsupportedModelError, require, require_count
from cpomdp_ppl.inference.backend import Backend, Recursion
from cpomdp_ppl.inference.cells import CellGrid
from cpomdp_ppl.inference.discrete import DiscreteBelief, DiscreteRecursion, smoothed_at_once
from cpomdp_ppl.inference.grid_checks import (
    OutOfReachError,
    cells_needed,
    density_scale,
    probes_of,
    reached,
    require_inside,
    require_real_numbers,
    require_resolved,
    require_wide_densities,
    rounded_up,
    simulated,
    too_narrow,
)
from cpomdp_ppl.inference.grid_tables import GridTables
from cpomdp_ppl.inference.precision import double_precision
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from cpomdp_ppl.inference.filtering import Filtering, Smoothing
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.model import CPOMDP

Bounds = Sequence[float] | Sequence[Sequence[float]]
Result = TypeVar("Result")

MEMORY = 2**22
"""Bytes that a batch of beliefs may take: more are not faster, as they leave the cache."""

FEWEST_POINTS, MOST_POINTS = 1200, 10_000
"""About how many points a grid of unspecified size has, at least and at most."""

COARSE_WIDTH_FACTOR = 1.5
"""How much wider the cells of the coarser grid are."""

COARSE_TAIL_FACTOR = 4 / 3
"""How much further tails are followed on the coarser grid."""

ERROR_FACTOR = 2.0
"""Factor of the difference between the two grids in the estimate of an error."""

LONGEST_REACH = 10.0
"""Standard deviations that are followed if the usual ones do not suffice."""


@dataclass(frozen=True)
class GridFilter(Backend):
    """A filter for one- and two-dimensional states that is right to within a tolerance, or refuses.

    Transitions are found by pushing every grid point through the program, with quadrature nodes for its
    noise, and sharing out what arrives among the grid points around it such that moments up to the fifth
    are kept: the grid adds no diffusion. It can be refined at will, which makes it the truth in tests.

    The points are centres of cells. Cells that the bounds do not fix have round edges, since there the
    thresholds of programs tend to be; if a density or reward jumps inside a cell, it is averaged there.

    A second grid with wider cells is filtered alongside, on which tails are followed a third further. Twice
    what the increments on both differ by, added up over the steps of an episode, is the estimated error of
    its log-likelihood: many times too much where beliefs are smooth, since errors there fall with the sixth
    power of the cells' width. Wherever it exceeds the tolerance, the result is a `ResolutionError` that says
    how many points it would take, or a `DensityError` where the tails that were cut are to blame.

    Both grids would miss alike what is much narrower than a cell. So in every step observations are imagined
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
            require(as_pairs(self.bounds) is not None, "bounds", self.bounds, expected)
        if self.reach is not None:
            proper = isinstance(self.reach, Real) and 2 <= self.reach <= 30
            require(proper, "reach", self.reach, "None or a number from 2 to 30")
        proper = isinstance(self.tolerance, Real) and self.tolerance > 0
        require(proper, "tolerance", self.tolerance, "a positive number of nats")

    @double_precision()
    def recursion(self, model: CPOMDP) -> GridRecursion:
        """Tabulate a model on a grid."""
        return GridRecursion(model, self)

    def run(
        self, model: CPOMDP, episodes: Episodes, *, seed: int | None = None, moments: bool = True
    ) -> Filtering:
        """As `Backend.run`, with more points if these episodes need them and `num_points` is left out.

        Raises:
            ResolutionError: If the tolerance is not kept.
        """
        return self._refined(
            lambda backend: Backend.run(backend, model, episodes, seed=seed, moments=moments)
        )

    def smooth(
        self, model: CPOMDP, episodes: Episodes, num_trajectories: int = 100, *, seed: int | None = None
    ) -> Smoothing:
        """As `Backend.smooth`, with more points if these episodes need them and `num_points` is left out.

        Raises:
            ResolutionError: If the tolerance is not kept.
        """
        return self._refined(
            lambda backend: Backend.smooth(backend, model, episodes, num_trajectories, seed=seed)
        )

    def _refined(self, result: Callable[[GridFilter], Result]) -> Result:
        """A result on a grid that is fine enough and reaches far enough, if that is not fixed."""
        backend = self
        while True:
            try:
                return result(backend)
            except ResolutionError as error:
                if self.num_points is not None or error.num_points > MOST_POINTS:
                    raise
                backend = replace(backend, num_points=error.num_points)
            except OutOfReachError:
                if backend.reach is not None:
                    raise
                backend = replace(backend, reach=LONGEST_REACH)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep a belief `[C, B, G]` within `MEMORY`."""
        assert isinstance(recursion, GridRecursion)
        values = recursion.signature.dependencies.combinations
        return how_many_fit(MEMORY, 8 * model.num_contexts * recursion.grid.size * values)

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """As many as the exact backend would smooth, with as many states."""
        assert isinstance(recursion, GridRecursion)
        return smoothed_at_once(recursion, horizon, num_trajectories)


@dataclass(frozen=True)
class GridBelief(DiscreteBelief):
    """Probabilities of the points of a grid, and of those of a coarser grid to compare with.

    Attributes:
        probabilities: Probabilities of the points, float64 `[C, B, G]`.
        coarse: Those of the coarser grid's points, `[C, B, G']`; None, like the rest, without such a grid.
        log_likelihoods: Log-likelihoods of everything seen so far, on the one and the other, `[C, B, 2]`.
        error: Error of the log-likelihood, by how much the increments on the two have differed, `[C, B]`.
    """

    coarse: Tensor | None = None
    log_likelihoods: Tensor | None = None
    error: Tensor | None = None


class GridRecursion(GridTables):
    """The forward recursion over the points of a grid, compared with that on a coarser one.

    Attributes:
        coarse: The same on a coarser grid; None if there is no tolerance to keep.
        extent: Lengths of the bounds, along each axis.
        scale: Lengths over which the densities of simulated observations vary, along each axis.
        cells_wanted: Number of cells along an axis that this scale asks for.
        cells_per_axis: Number of cells along each axis.
    """

    def __init__(self, model: CPOMDP, settings: GridFilter) -> None:
        _require_continuous(model)
        require_finite_actions(model, "grid")
        super().__init__(model, settings)
        self.dim = _require_few_numbers(type(self.model).__name__, self.signature.state)
        trials = simulated(self.model)
        require_real_numbers(self.model, trials[:-1])  # under constant actions
        bounds = self._bounds(trials)
        self.extent = [high - low for low, high in bounds]
        probes = probes_of(Episodes.concatenate(trials), self.coordinates)
        self.scale = [math.inf] * self.dim if probes is None else density_scale(self, self.extent, probes)
        self.cells_wanted = cells_needed(self.extent, self.scale)
        self.cells_per_axis = self._cells_per_axis()
        lay = CellGrid.around if settings.bounds is None else CellGrid.between
        grid = lay(bounds, [length / self.cells_per_axis for length in self.extent])
        self.coarse: GridRecursion | None = None
        if settings.tolerance < math.inf:
            self.coarse = copy(self)
            self.coarse.tail_factor = COARSE_TAIL_FACTOR
            self.coarse._transitions = {}
            self.coarse.lay(lay(bounds, (COARSE_WIDTH_FACTOR * grid.finest).tolist()), probes)
        self.lay(grid, probes)
        require_inside(self, self.initial[:, None], None)

    def _bounds(self, trials: Sequence[Episodes]) -> list[tuple[float, float]]:
        """The bounds that are given, or those of what simulated episodes reach."""
        given = self.settings.bounds
        if given is None:
            return reached(self.model, trials, self.coordinates)
        pairs = as_pairs(given)
        fits = pairs is not None and len(pairs) == self.dim
        require(fits, "bounds", given, f"{self.dim} pair(s), one for each number")
        assert pairs is not None
        return pairs

    def _cells_per_axis(self) -> int:
        """As many cells along an axis as asked for, or as the scale of the densities needs."""
        given, tolerant = self.settings.num_points, self.settings.tolerance == math.inf
        wanted = rounded_up(self.cells_wanted**self.dim)
        number = max(FEWEST_POINTS, wanted) if given is None else given
        n = max(4, round(float(number ** (1 / self.dim))))
        if (given is None and wanted > MOST_POINTS) or (2 * n < self.cells_wanted and not tolerant):
            raise too_narrow(self, self.extent, self.scale)
        return n

    def start(self, num_episodes: int) -> GridBelief:
        """`P(s_0)`."""
        p = super().start(num_episodes).probabilities
        if self.coarse is None:
            return GridBelief(p)
        with torch.no_grad():
            coarse = DiscreteRecursion.start(self.coarse, num_episodes).probabilities
        return GridBelief(p, coarse, p.new_zeros(*p.shape[:2], 2), p.new_zeros(p.shape[:2]))

    @double_precision()
    def move(self, belief: DiscreteBelief, action: Tensor) -> GridBelief:
        """The belief about the next state, on both grids."""
        assert isinstance(belief, GridBelief)
        coarse = belief.coarse
        if self.coarse is not None and coarse is not None:
            with torch.no_grad():
                coarse = self.coarse.predict(coarse, action)
        return replace(belief, probabilities=self.predict(belief.probabilities, action), coarse=coarse)

    def step(self, belief: DiscreteBelief, seen: Observed) -> tuple[GridBelief, Tensor]:
        """Move, which must not leave the grid, then condition on what was observed."""
        assert seen.action is not None
        moved = self.move(belief, seen.action)
        require_inside(self, moved.probabilities, seen)
        return self.condition(moved, seen)

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
        require_inside(self, posterior.probabilities, seen)
        found = replace(belief, probabilities=posterior.probabilities)
        if self.coarse is not None:
            assert belief.coarse is not None
            assert belief.log_likelihoods is not None
            assert belief.error is not None
            with torch.no_grad():
                require_wide_densities(self, belief, seen)
                other, roughly = DiscreteRecursion.condition(self.coarse, DiscreteBelief(belief.coarse), seen)
                both = torch.stack([increment.detach(), roughly], -1)
                # Impossible on both is no difference.
                error = ERROR_FACTOR * (both[..., 0] - both[..., 1]).abs().nan_to_num(0.0, posinf=torch.inf)
                found = replace(
                    found,
                    coarse=other.probabilities,
                    log_likelihoods=belief.log_likelihoods + both,
                    error=belief.error + error,
                )
                require_resolved(self, belief, found, seen)
        return found, increment


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


def as_pairs(bounds: Any) -> list[tuple[float, float]] | None:
    """One or two pairs `(low, high)`, of whatever kind of numbers; None if bounds are not like that."""
    try:
        pairs = [tuple(bounds)] if isinstance(bounds[0], Real) else [tuple(pair) for pair in bounds]
        found = [(float(low), float(high)) for low, high in pairs]
    except (TypeError, ValueError, IndexError, KeyError):
        return None
    proper = len(found) in (1, 2) and all(-math.inf < low < high < math.inf for low, high in found)
    return found if proper else None
