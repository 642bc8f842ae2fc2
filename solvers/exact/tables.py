"""A finite CPOMDP as tables: everything its programs can do, with its probability."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpomdp_ppl.actions import require_finite_actions
from cpomdp_ppl.errors import ModelError, ObservationError, require_model
from cpomdp_ppl.handlers import Recorded, mask_of
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.enumeration import Enumerated
from cpomdp_ppl.inference.finite import FiniteRecursion
from cpomdp_ppl.inference.observed import axes
from cpomdp_ppl.inference.precision import double_precision
from cpomdp_ppl.inference.site_parameters import torch_errors_as_model_errors
from cpomdp_ppl.policy import Percept
from cpomdp_ppl.prior import one_prior
from cpomdp_ppl.signature import ENDED, signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import ObservationSite

Reals: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

MAX_CELLS = 2**24
"""How many values of all sites, in every context, after every action and in every state, are enumerated."""

DECIMALS = 9
"""Decimals to which observed values agree: numbers that a program computes from states differ by rounding."""

ROUNDING = 1e-4
"""Relative difference between single precision, in which episodes are drawn, and double."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """All that may be seen in one step, the outcomes of action 0 first, then those of action 1, and so on."""

    action: Indices  # the action that each of the K outcomes may follow, [K]; zero before the first
    symbols: Reals  # by site all its values, zero where it is masked, then all its flags, [K, D]
    likelihood: Reals  # P(o | s', a, c), of the state after the move, [K, C, N]
    ended: Flags  # whether the episode is over with it, [K]

    @property
    def starts(self) -> Indices:
        """Where the outcomes of each action begin, `[A]`; every action has one at least."""
        return np.unique(self.action, return_index=True)[1].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Finite:
    """A finite model's tables, float64.

    Examples:
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> tables = finite(ContextualTiger())
        >>> tables.outcomes.action  # four after listening, nothing after opening a door
        array([0, 0, 0, 0, 1, 2])
    """

    sites: Mapping[str, ObservationSite]
    prior: Reals  # the model's, over contexts, [C]
    initial: Reals  # P(s_0 | c), [C, N]
    transition: Reals  # P(s' | s, a, c), [C, A, N, N]
    rewards: Reals  # r_c(s, a), expected over the next state if arrival pays, [C, A, N]
    discount: float
    before: Outcomes  # before the first action; a single empty one without an initial observation
    outcomes: Outcomes  # after an action

    def predict(self, p: Reals) -> Reals:
        """Measures `[n, C, N]` over context and state after every action, `[n, A, C, N]`."""
        n, C, N = p.shape
        A = self.transition.shape[1]
        by_context = self.transition.transpose(0, 2, 1, 3).reshape(C, N, A * N)
        moved = np.matmul(p.transpose(1, 0, 2), by_context)  # [C, n, A × N]
        return np.ascontiguousarray(moved.reshape(C, n, A, N).transpose(1, 2, 0, 3))

    def prior_or(self, prior: Sequence[float] | Tensor | None, model: CPOMDP) -> Reals:
        """A prior over contexts `[C]`, checked; the model's if there is none."""
        if prior is None:
            return self.prior
        given: Reals = one_prior(prior, model).detach().cpu().numpy()
        return given

    def numbers(self, percept: Percept, time: int, over: Flags | None = None) -> Indices:
        """Which outcome each of B episodes met, `[B]`; -1 for those that were `over` before.

        Raises:
            ObservationError: If one met something that the model never shows.
        """
        found, action = self._symbols(percept), percept.action
        B = len(found)
        known = self.before if action is None else self.outcomes
        taken = np.zeros(B, dtype=np.int64) if action is None else action.cpu().numpy()
        numbers = np.full(B, -1, dtype=np.int64)
        taken = taken if over is None else np.where(over, -1, taken)
        for a in np.unique(taken[taken >= 0]).tolist():
            rows, candidates = np.flatnonzero(taken == a), np.flatnonzero(known.action == a)
            symbols = torch.as_tensor(known.symbols[candidates])
            distance, nearest = torch.cdist(found[rows], symbols, p=torch.inf).min(1)
            strange = distance > ROUNDING * (1 + found[rows].abs().amax(1))
            if bool(strange.any()):
                b = rows[int(strange.nonzero()[0])]
                seen = {site: values[b].tolist() for site, values in percept.observations.items()}
                after = "before the first action" if action is None else f"after action {a}"
                raise ObservationError(f"episode {b} saw {seen} at time {time} {after}: the model never does")
            numbers[rows] = candidates[nearest.numpy()]
        return numbers

    def _symbols(self, percept: Percept) -> Tensor:
        seen, flags = percept.observations, percept.observed
        columns = [
            _columns(spec, seen[site].cpu(), flags[site].cpu(), seen[site].shape[:1])
            for site, spec in self.sites.items()
        ]
        return torch.cat(columns, 1)

    def percept(self, numbers: Indices, action: Tensor | None, device: torch.device) -> Percept:
        """The other way round: what was seen, where the outcomes `[B]` were met."""
        known = self.before if action is None else self.outcomes
        symbols = torch.as_tensor(known.symbols[numbers], device=device)  # [B, D]
        observations, observed, first = {}, {}, 0
        for site, spec in self.sites.items():
            values, flags = math.prod(spec.shape), math.prod(spec.plates)
            v, f = symbols[:, first : first + values], symbols[:, first + values : first + values + flags]
            observations[site] = v.reshape(-1, *spec.shape).to(spec.dtype)
            observed[site] = f.reshape(-1, *spec.plates) > 0.5
            first += values + flags
        return Percept(action, observations, observed)


def finite(model: CPOMDP) -> Finite:
    """Enumerate the programs of a finite model.

    Raises:
        UnsupportedModelError: If it is not finite, naming the program and the site.
        ModelError: If a reward is not a number, in a state that an episode may get to.
    """
    require_model(model)
    require_finite_actions(model, "solvers.exact")
    sites = signature(model).observations
    with inference_scope(model, seed=0), double_precision():
        recursion = FiniteRecursion(model)
        with torch_errors_as_model_errors(model):
            outcomes = _outcomes(recursion, sites, torch.arange(model.num_actions, device=model.device))
            before = _outcomes(recursion, sites, None) if model.initial_observation else None
            rewards = _rewards(recursion)
        prior = recursion.model.prior().detach().double().cpu().numpy()
    if before is None:
        C, N = recursion.initial.shape
        nothing = np.zeros((1, outcomes.symbols.shape[1]))
        before = Outcomes(np.zeros(1, dtype=np.int64), nothing, np.ones((1, C, N)), np.zeros(1, dtype=bool))
    return Finite(
        sites,
        prior / prior.sum(),
        recursion.initial.cpu().numpy(),
        recursion.transition.cpu().numpy(),
        rewards.cpu().numpy(),
        float(model.discount),
        before,
        outcomes,
    )


def _rewards(recursion: FiniteRecursion) -> Tensor:
    """Rewards `[C, A, N]`, zero in states that no episode gets to: what is written there may be anything."""
    model = recursion.model
    moves = recursion.transition > 0  # [C, A, N, N]
    if model.can_end:
        moves = moves & (recursion.goes_on > 0)[:, :, None]
    there = recursion.initial > 0  # [C, N]
    for _ in range(min(model.horizon - 1, recursion.N)):
        there = there | (there[:, None, :, None] & moves).any(2).any(1)
    bad = ~recursion.rewards.isfinite() & there[:, None]
    if bool(bad.any()):
        c, a, s = bad.nonzero()[0].tolist()
        where = f"for action '{model.action_names[a]}' in context '{model.context_names[c]}'"
        fault = f"reward: is {recursion.rewards[c, a, s]:g} in state {s} {where}; it must be finite"
        raise ModelError(type(model).__name__, [fault])
    return torch.where(there[:, None], recursion.rewards, 0.0)


class _LimitedEnumeration(Enumerated):
    """As `Enumerated`, but refuses to go through more than `MAX_CELLS` values, naming the site."""

    def __init__(self, max_plate_nesting: int, cells: int) -> None:
        super().__init__("observation", max_plate_nesting)
        self.cells = cells

    def _enumerated(self, fn: Any, base: Any, name: str) -> Tensor:
        try:
            size = len(base.enumerate_support(expand=False))
        except NotImplementedError:
            raise self._unsupported(fn, name, "cannot be enumerated") from None
        independent = fn.event_dim - base.event_dim
        many = size ** math.prod((*self._plates(fn), *fn.event_shape[:independent]))
        self.cells *= many
        if self.cells > MAX_CELLS:
            raise self._unsupported(fn, name, f"takes {many} values together, too many to go through all")
        return super()._enumerated(fn, base, name)


def _outcomes(
    recursion: FiniteRecursion, sites: Mapping[str, ObservationSite], actions: Tensor | None
) -> Outcomes:
    """Run the observation program for all values of its sites, and sum over those that are not seen."""
    (C, N), A = recursion.initial.shape, 1 if actions is None else len(actions)
    a = None if actions is None else axes(actions, recursion.plate_axes)
    with _LimitedEnumeration(recursion.plate_axes, C * A * N) as enumerated, Recorded() as program:
        recursion.model.percept(recursion.states, a, recursion.context)
    if program.sites.keys() != sites.keys():
        when = "before the first action" if actions is None else "after it"
        fault = f"observation: has the sites {list(program.sites)} {when}, but {list(sites)} for action 0"
        raise ModelError(type(recursion.model).__name__, [fault])
    shape = (*enumerated.weights.shape[:-3], C, A, N)
    weights = enumerated.weights.expand(shape).reshape(-1, C, A, N).cpu().numpy()  # [V, C, A, N]
    columns = []
    for name, spec in sites.items():
        mask = torch.as_tensor(mask_of(program.sites[name]))
        columns.append(_columns(spec, program.sites[name]["value"], mask, shape))
    symbols = torch.cat(columns, -1).reshape(-1, C, A, N, sum(c.shape[-1] for c in columns)).cpu().numpy()

    of_action, seen, likelihood = [], [], []
    for i in range(A):
        v, c, s = np.nonzero(weights[:, :, i])
        met = symbols[v, c, i, s].round(DECIMALS)  # [·, D]
        first, number = distinct_rows(met, DECIMALS)
        table = np.zeros((len(first), C, N))
        np.add.at(table, (number, c, s), weights[v, c, i, s])
        of_action.append(np.full(len(first), i))
        seen.append(met[first])
        likelihood.append(table)
    shown = np.concatenate(seen)
    return Outcomes(np.concatenate(of_action), shown, np.concatenate(likelihood), _ended(sites, shown))


def _ended(sites: Mapping[str, ObservationSite], symbols: Reals) -> Flags:
    """Whether an episode is over, where something is seen, by its symbols `[K, D]`."""
    first = 0
    for site, spec in sites.items():
        if site == ENDED:
            return symbols[:, first] > 0.5
        first += math.prod(spec.shape) + math.prod(spec.plates)
    return np.zeros(len(symbols), dtype=bool)


def _columns(spec: ObservationSite, values: Tensor, mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A site's values, zero where it is masked, then its flags: `[*batch, ·]`, float64."""
    flags = mask.expand(*batch, *spec.plates)
    events = flags.reshape(flags.shape + (1,) * (len(spec.shape) - len(spec.plates)))
    seen = torch.where(events, values.double(), 0.0).expand(*batch, *spec.shape)
    parts = seen.reshape(*batch, -1), flags.reshape(*batch, -1).double()
    return torch.cat(parts, -1)


def distinct_rows(rows: Reals, decimals: int) -> tuple[Indices, Indices]:
    """Where the different rows of `[n, D]` are, `[m]`, ordered by what they say, and which each is, `[n]`."""
    _, first, number = np.unique(row_keys(rows, decimals), return_index=True, return_inverse=True)
    order = np.lexsort(rows[first].round(decimals).T[::-1])
    return first[order], np.argsort(order)[number]


def row_keys(rows: Reals, decimals: int) -> NDArray[np.uint64]:
    """A number for every row of `[n, D]`, equal for rows that agree so far, and else different.

    What is zero and what is merely small do not agree: the one is impossible, the other is not. The numbers
    have 64 bits that look random, so that among a million different rows two have the same with a chance of
    3e-8; to sort whole rows instead takes five times as long.
    """
    keys = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:
        digits = 2 * np.rint(column * 10.0**decimals).astype(np.int64) + (column != 0)
        keys = _mixed(keys + digits.view(np.uint64))
    return keys


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64: a bijection after which similar numbers have nothing in common."""
    keys = keys + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = keys ^ (keys >> np.uint64(31))
    return mixed
