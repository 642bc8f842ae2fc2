"""A model tabulated on a grid: where its programs lead, and what is seen and earned at every point."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import DensityError
from cpomdp_ppl.inference.cells import (
    SCAN_POINTS,
    SHARERS,
    Band,
    BandedTransition,
    CellGrid,
    jump_along,
    jumps_of,
    nonnegative,
)
from cpomdp_ppl.inference.discrete import DiscreteBelief, DiscreteRecursion, by_action
from cpomdp_ppl.inference.enumeration import ENGINE_AXES, Enumerated, Nodes
from cpomdp_ppl.inference.observed import Observed, axes, log_density_of_seen
from cpomdp_ppl.inference.precision import double_precision
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cpomdp_ppl.inference.grid import GridFilter
    from cpomdp_ppl.inference.grid_checks import Probes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

BLOCK_POINTS = 64
"""Points whose transitions are stored and multiplied together."""

PROGRAM_NUMBERS = 2**22
"""Numbers that one run of a program may produce while tables are built."""

REWARD_NODES = 257
"""At how many points of the noise of a step, at the least, rewards on arrival are looked at."""


class GridTables(DiscreteRecursion):
    """The forward recursion over the points of one grid, by tables of the model's programs.

    Attributes:
        grid: The cells whose centres are the G points.
        tail_factor: Factor by which the tails of noise are followed further than the settings say.
        shortest_reach: Standard deviations at which the tails of some noise are cut; infinity if there is no
            noise.
        jumps: Numbers of the cells inside which the density of an observation jumps.
        reward_jumps: Numbers of the cells inside which the reward jumps.
    """

    def __init__(self, model: CPOMDP, settings: GridFilter) -> None:
        super().__init__(model)
        self.settings = settings
        self.tail_factor, self.shortest_reach = 1.0, math.inf
        self._transitions: dict[int, BandedTransition] = {}

    def lay(self, grid: CellGrid, probes: Probes | None) -> None:
        """Fit a grid to where densities and rewards jump, and tabulate everything but transitions."""
        self.grid = grid
        self._refine(None if probes is None else probes.seen)
        self.states = self.as_state(self.grid.points[None, None])
        self.initial = self._initial()
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
        expected = by_action(lambda a, rows: self.transition(a).expect(rows), values, action)
        return expected.clamp_(min=0)  # where motion without noise ends between points, weights have signs

    def origins(self, p: Tensor, action: Tensor, later: Tensor) -> Tensor:
        """`p(x) T(x, x')` of all points x for each of the points x' in `later [C, B, M]`, `[C, B, M, G]`."""
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

    def log_likelihood(self, seen: Observed) -> Tensor:
        """`log p(o | x, a, c)` at the points, and its mean over cells in which it jumps, `[C, B, G]`."""
        at_points = self.log_density_at(self.states, self.grid.size, seen)
        if not len(self.jumps):
            return at_points
        x = self.grid.subpoints(self.jumps, self._parts)  # [J, M, d]
        with poutine.block():  # from those who look at what happens at the points
            states = self.as_state(x.flatten(0, 1)[None, None])
            inside = self.log_density_at(states, x.shape[0] * x.shape[1], seen)
        means = inside.unflatten(-1, x.shape[:2]).logsumexp(-1) - math.log(x.shape[1])
        return at_points.index_copy(-1, self.jumps, means)

    def moments(self, belief: DiscreteBelief) -> tuple[State, State]:
        """Mean and variance of the state."""
        x, p = self.grid.points, belief.probabilities
        mean = p @ x
        variance = (p @ x**2 - mean**2).clamp(min=0)
        return self.as_state(mean), self.as_state(variance)

    @double_precision()
    def transition(self, a: int) -> BandedTransition:
        """The transitions of action `a`, which are tabulated when they are first asked for."""
        if a not in self._transitions:
            self._transitions[a] = self._transition(a)
        return self._transitions[a]

    @cached_property
    def _parts(self) -> int:
        """Parts of a cell along each axis, as many in all in one dimension as in two."""
        return self.settings.subpoints if self.dim == 1 else max(2, round(self.settings.subpoints**0.5))

    def log_density_at(self, states: Any, number: int, seen: Observed) -> Tensor:
        """`log p(o | x, a, c)` at a number G of states, `[C, B, G]`."""
        density = log_density_of_seen(self.model, self.signature, states, self.context, seen).double()
        B = len(next(iter(seen.observations.values())))
        return density.expand(len(self.context), B, number)

    def _push(
        self, program: str, x: Tensor | None, a: int, nodes: Nodes
    ) -> tuple[Tensor, Tensor, Enumerated]:
        """Push points `[P, d]` through a program. Returns where to, `[K, C, P, d]`, and weights `[K, C, P]`.

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
        """As many quadrature nodes as it takes for them to end no further apart than grid points."""
        _, _, pilot = self._push(program, x, a, Nodes(3))
        dims = len(pilot.noise_axes)
        if not dims:
            return Nodes(3)
        reach = self.tail_factor * (self.settings.reach or (8.5 if dims == 1 else 6.0))
        self.shortest_reach = min(self.shortest_reach, reach)
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
        """Share out what arrives at `where [K, C, P, d]` among the grid's points, `[C, P, G]`."""
        index, share = self.grid.shares(where)  # [K, C, P, m**d]
        share = share * weights[..., None]
        table = torch.zeros(*where.shape[1:3], self.grid.size)
        return table.scatter_add_(-1, _last(index), _last(share))

    def _initial(self) -> Tensor:
        """`P(s_0 = x | c)` at the points, `[C, G]`."""
        dims = len(self._push("initial", None, 0, Nodes(3))[2].noise_axes)
        nodes = self._nodes("initial", None, 0)
        if dims in (1, 2):  # a single point to push: nodes are cheap
            many = 16_385 if dims == 1 else 385
            nodes = Nodes(max(many, len(nodes)), self.tail_factor * max(12.0, self.settings.reach or 0.0))
        table = self._deposit(*self._push("initial", None, 0, nodes)[:2])[:, 0]
        return nonnegative(table[:, None], self.grid.shape)[:, 0].expand(len(self.context), -1)

    def _transition(self, a: int) -> BandedTransition:
        """Tabulate the transitions of action `a`, block by block."""
        x = self.grid.points
        nodes = self._nodes("transition", x[:: max(1, len(x) // 64)], a)
        K, C = self._push("transition", x[:1], a, nodes)[0].shape[:2]
        bands, identity, signed, alike = [], True, False, True
        for start, table in self._blocks(a, nodes, K * C):
            table[(table < 0) & (table > -1e-6)] = 0.0
            band = Band.of(start, table)
            P = table.shape[1]
            stays = (
                band.low == start and band.high == start + P and bool((band.weights == torch.eye(P)).all())
            )
            identity = identity and stays
            signed = signed or bool((band.weights < 0).any())
            alike = alike and bool((band.weights == band.weights[:1]).all())
            bands.append(band)
        if alike:
            bands = [replace(band, weights=band.weights[:1]) for band in bands]
        return BandedTransition(bands, identity, signed, self.grid.shape)

    def _blocks(self, a: int, nodes: Nodes, copies: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of rows of the table of transitions, by their first; every point is pushed to `copies`."""
        x = self.grid.points
        size = min(BLOCK_POINTS, how_many_fit(PROGRAM_NUMBERS, copies * SHARERS**self.dim))
        for start in range(0, len(x), BLOCK_POINTS):
            parts = x[start : start + BLOCK_POINTS].split(size)
            pushed = (self._push("transition", part, a, nodes) for part in parts)
            yield start, torch.cat([self._deposit(where, weights) for where, weights, _ in pushed], 1)

    def _refine(self, probes: Observed | None) -> None:
        """Find out where densities and rewards jump, and fit the grid to that."""
        functions: list[Callable[[Tensor], Tensor]] = [partial(self.rewards_at, roughly=True)]
        if probes is not None:
            functions.insert(0, partial(self._density_at, probes))
        if self.dim == 2:
            found = [self._cells_with_jumps(function) for function in functions]
            self.jumps = found[0] if probes is not None else found[0][:0]
            self.reward_jumps = found[-1]
            return
        if self._is_smoothed():
            functions.pop()
        places = [jumps_of(function, self.grid) for function in functions]
        self.grid = self.grid.refined([x for some in places for x in some])
        self.jumps = self.grid.containing(places[0] if probes is not None else [])
        self.reward_jumps = self.grid.containing([] if self._is_smoothed() else places[-1])

    def _is_smoothed(self) -> bool:
        """Whether rewards are for arrival, and noise comes before it: then no jump of theirs is left."""
        if not self.model.pays_on_arrival:
            return False
        actions = range(self.model.num_actions)
        pushed = (self._push("transition", self.grid.points[:1], a, Nodes(3)) for a in actions)
        return all(pilot.noise_axes for _, _, pilot in pushed)

    def _density_at(self, probes: Observed, x: Tensor) -> Tensor:
        """Log-densities of some observations at points `[P, d]`, `[C, B, P]`."""
        return self.log_density_at(self.as_state(x[None, None]), len(x), probes).clamp(min=-1e3)

    @double_precision()
    def rewards_at(self, x: Tensor, *, roughly: bool = False) -> Tensor:
        """Rewards of all actions at points `[P, d]`, `[C, A, P]`.

        If arrival pays, they are expectations over the noise of the transition; roughly, hardly any of it is
        looked at, so that what jumps there does so here.
        """
        C, A = len(self.context), self.model.num_actions
        if self.model.pays_on_arrival:
            nodes = [Nodes(3) if roughly else self._reward_nodes(a) for a in range(A)]
            return torch.stack([self._expected_rewards(x, a, nodes[a]) for a in range(A)], 1)
        return self.reward(self.as_state(x[None, None]), torch.arange(A), (C, A, len(x))).double()

    def _expected_rewards(self, x: Tensor, a: int, nodes: Nodes) -> Tensor:
        """`E[r_c(x, a, x')]` over the noise of the transition at points `[P, d]`, `[C, P]`."""
        K, C = self._push("transition", x[:1], a, nodes)[0].shape[0], len(self.context)
        expected = []
        for part in x.split(how_many_fit(PROGRAM_NUMBERS, K * C)):
            where, weights, _ = self._push("transition", part, a, nodes)  # [K, C, P, d], [K, C, P]
            where = where.expand(-1, C, -1, -1)
            state, after = self.as_state(part[None, None, None]), self.as_state(where[:, :, None])
            rewards = self.reward(state, torch.tensor([a]), (K, C, 1, len(part)), after)[:, :, 0].double()
            possible = torch.where(weights > 0, rewards, 0.0)
            expected.append((weights * possible).sum(0) / weights.sum(0))
        return torch.cat(expected, -1)

    def _reward_nodes(self, a: int) -> Nodes:
        """Nodes for the noise of a transition that lie closer than those that tables need."""
        pilot = self._push("transition", self.grid.points[:1], a, Nodes(3))[2]
        dims = len(pilot.noise_axes)
        each = math.ceil(REWARD_NODES ** (1 / dims)) if dims else 3
        return Nodes(max(each, 17), self.tail_factor * (self.settings.reach or 8.5))

    def _rewards(self) -> Tensor:
        """`r_c(x, a)` at the points, and its mean over cells in which it jumps, `[C, A, G]`."""
        return self._averaged(self.rewards_at, self.reward_jumps)

    @cached_property
    def goes_on(self) -> Tensor:
        """With what probability an episode does not end at the point an action led to, `[C, A, G]`."""
        return self._averaged(lambda x: self.goes_on_at(self.as_state(x[None, None]), len(x)), self.jumps)

    def _averaged(self, function: Callable[[Tensor], Tensor], cells: Tensor) -> Tensor:
        """A function at the points, and its mean over some cells, in which it jumps, `[C, A, G]`."""
        values = function(self.grid.points).contiguous()
        if not len(cells):
            return values
        x = self.grid.subpoints(cells, self._parts)  # [J, M, d]
        means = function(x.flatten(0, 1)).unflatten(-1, x.shape[:2]).mean(-1)
        return values.index_copy(-1, cells, means)

    def _cells_with_jumps(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The cells of a two-dimensional grid inside which a function jumps."""
        found = []
        for cells in torch.arange(self.grid.size).split(how_many_fit(SCAN_POINTS, self._parts**2)):
            x = self.grid.subpoints(cells, self._parts)
            values = function(x.flatten(0, 1)).unflatten(-1, (len(cells), self._parts, self._parts))
            found.append(cells[jump_along(values, -1) | jump_along(values, -2)])
        return torch.cat(found)


def _last(tensor: Tensor) -> Tensor:
    """`[K, C, P, W]` as `[C, P, K · W]`."""
    return tensor.permute(1, 2, 0, 3).flatten(2)
