"""Whether a grid is fine, wide and far-reaching enough, as simulated episodes and beliefs tell."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError, ResolutionError, UnsupportedModelError
from cpomdp_ppl.handlers import Batched, Recorded
from cpomdp_ppl.inference.observed import Observed
from cpomdp_ppl.inference.precision import double_precision
from cpomdp_ppl.inference.site_parameters import torch_errors_as_model_errors
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rng import first_above, isolated
from cpomdp_ppl.rollout import percept_of, simulate
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.grid import GridBelief, GridRecursion
    from cpomdp_ppl.inference.grid_tables import GridTables
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History
    from cpomdp_ppl.signature import Signature

FARTHEST = 1e300
"""How far apart bounds may be: beyond that, the spacing of the grid would overflow."""

FEW_VALUES = 32
"""Number of values up to which thousands of draws are not those of a real number."""

BOUNDARY_MASS = 1e-3
"""Probability on the boundary from which on the bounds are too tight."""

NUM_PROBES = 64
"""About how many observations are imagined in a step, to see over what length their densities vary."""

CELLS_PER_SCALE = 1.25
"""Number of cells that are needed in the length over which the density of an observation varies."""

RARE_PROBABILITY = 1e-12
"""Probability below which a point may be one at the end of what is followed of a distribution's tail."""

NATS_BEHIND = 36.0
"""Nats behind the likeliest context beyond which a context need not be right, since tails are cut."""


def simulated(model: CPOMDP) -> list[Episodes]:
    """Simulate episodes under each constant action, then under random actions."""
    B = 128 * model.num_contexts

    def always(a: int) -> Callable[[History], Tensor]:
        return lambda history: torch.full((B,), a, device=model.device)

    policies: list[Any] = [*map(always, range(model.num_actions)), RandomPolicy(model.num_actions)]
    with torch_errors_as_model_errors(model):
        return [simulate(model, policy, B, contexts="balanced", seed=0) for policy in policies]


def reached(
    model: CPOMDP, trials: Sequence[Episodes], coordinates: Callable[[Any, torch.Size], Tensor]
) -> list[tuple[float, float]]:
    """Bounds of the states that episodes reach: several standard deviations around the mean, at any time."""
    lows, highs = [], []
    for trial in trials:
        x = coordinates(trial.lasting_states, torch.Size((len(trial), trial.horizon + 1)))
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


@dataclass(frozen=True)
class Probes:
    """Some steps of simulated episodes in which something was observed.

    Attributes:
        seen: What was done and observed in B steps.
        x: The states in which it was observed, `[B, d]`.
        context: The contexts of the episodes, `[B]`.
    """

    seen: Observed
    x: Tensor
    context: Tensor


def probes_of(
    trial: Episodes, coordinates: Callable[[Any, torch.Size], Tensor], number: int = 64
) -> Probes | None:
    """Some steps of simulated episodes in which something was observed; None if nothing ever was."""
    seen = trial.observed.values()
    flags = torch.stack([flags.flatten(2).any(2) if flags.dim() > 2 else flags for flags in seen])
    where = flags.any(0).nonzero()  # [steps, 2]
    if not len(where):
        return None
    b, t = where[torch.linspace(0, len(where) - 1, min(number, len(where))).long()].unbind(1)
    assert trial.contexts is not None
    return Probes(
        Observed(
            1,
            trial.actions[b, t],
            {site: value[b, t] for site, value in trial.observations.items()},
            {site: flags[b, t] for site, flags in trial.observed.items()},
        ),
        coordinates(trial.states, torch.Size((len(trial), trial.horizon + 1)))[b, t + 1],
        trial.contexts[b],
    )


def imagined(
    model: CPOMDP, signature: Signature, state: Any, x: Tensor, context: Tensor, seen: Observed
) -> Probes | None:
    """Draw what might have been observed in a step, if anything, in other states, which are the points x.

    What was not observed in that step is not observed here.
    """
    S, plates = context.shape, (1,) * model.max_plate_nesting
    action = None if seen.action is None else seen.action.reshape(S + plates)
    with (
        isolated(seen.time),
        poutine.block(),
        torch_errors_as_model_errors(model),
        Batched(S, len(plates)),
        Recorded(0) as visited,
    ):
        model.percept(state, action, context.reshape(S + plates))
    percept = percept_of(signature, visited, seen.action, S)
    observed = {site: flags & seen.observed[site] for site, flags in percept.observed.items()}
    b = torch.stack([flags.reshape(len(x), -1).any(1) for flags in observed.values()]).any(0).nonzero()[:, 0]
    if not len(b):
        return None
    # A gate may hide here what was observed there.
    step = replace(seen, observations=percept.observations, observed=observed, complete=False)
    return Probes(step.select(b), x[b], context[b])


def require_real_numbers(model: CPOMDP, trials: Sequence[Episodes]) -> None:
    """Raise if part of the state takes one of a few values by chance: it is discrete, whatever its type."""
    every = [leaves(trial.lasting_states) for trial in trials]
    for leaf in zip(*every, strict=True):
        name = leaf[0][0]
        flat = [value.reshape(*value.shape[:2], -1) for _, value in leaf]  # [B, T + 1, size]
        values = torch.stack(flat).unflatten(1, (-1, model.num_contexts))  # [trials, B / C, C, …]
        by_chance = (values != values[:, :1]).flatten(0, -2).any(0)  # [size]: all else is alike
        for k in by_chance.nonzero()[:, 0].tolist():
            distinct = values[..., k].unique()
            if len(distinct) <= FEW_VALUES:
                part = f"'{name}'" if values.shape[-1] == 1 else f"number {k} of '{name}'"
                shown = ", ".join(f"{value:g}" for value in distinct.tolist())
                raise UnsupportedModelError(
                    f"grid: {part} of {type(model).__name__} takes the values {shown} only, so it is "
                    'discrete, and a grid is for real numbers; "smc" serves such a state'
                )


class OutOfReachError(DensityError):
    """Only tails that were cut explain an observation."""


def require_inside(recursion: GridTables, p: Tensor, seen: Observed | None) -> None:
    """Raise if beliefs `[C, B, G]` reach the boundary of the grid; `seen` is None for those at the start."""
    at_boundary = p[..., recursion.grid.boundary].sum(-1)  # [C, B]
    if seen is not None and seen.alive is not None:
        at_boundary = at_boundary * seen.alive
    if bool((at_boundary > BOUNDARY_MASS).any()):
        c, b = (at_boundary > BOUNDARY_MASS).nonzero()[0].tolist()
        context = f"'{recursion.model.context_names[c]}'"
        where = f"at the start in context {context}" if seen is None else _place(recursion, c, b, seen)
        raise DensityError(
            f"grid: the state leaves the bounds {recursion.grid} {where} "
            f"(probability {float(at_boundary[c, b]):.2g}); give wider `bounds`"
        )


def require_resolved(
    recursion: GridRecursion, predicted: GridBelief, belief: GridBelief, seen: Observed
) -> None:
    """Raise if an observation is out of reach, or if the two grids differ.

    Contexts that are far behind the likeliest need not be right, nor episodes that are over.
    """
    assert belief.log_likelihoods is not None
    assert belief.error is not None
    best = belief.log_likelihoods[..., 0].amax(0)  # [B]
    behind = best - belief.log_likelihoods.amax(-1)  # [C, B]
    counts = behind <= NATS_BEHIND if seen.alive is None else (behind <= NATS_BEHIND) & seen.alive
    allowed = recursion.settings.tolerance * behind.clamp(min=1.0)
    excess = torch.where(counts, belief.error / allowed, 0.0)
    _require_followed(recursion, predicted.probabilities, belief, counts, excess > 1, seen)
    vague = counts & (2.0**-52 * best.abs() > recursion.settings.tolerance)  # all states are as far off
    for c, b in vague.nonzero()[:1].tolist():
        raise _out_of_reach(recursion, c, b, seen)
    c, b = divmod(int(excess.argmax()), excess.shape[1])
    worst = float(excess[c, b])
    if worst <= 1:
        return
    # Errors fall with the fifth power at least; those of later steps are not known, and may be larger.
    wanted = max(recursion.cells_per_axis * min(worst, 1e6) ** 0.2, recursion.cells_wanted) ** recursion.dim
    number = rounded_up(max(wanted, 2 * recursion.cells_per_axis**recursion.dim))
    raise ResolutionError(
        f"grid: {recursion.grid.size:,} points are too few, as {_place(recursion, c, b, seen)} the "
        f"log-likelihood may be off by {float(belief.error[c, b]):.2g} nats, more than "
        f"{float(allowed[c, b]):.2g} (`tolerance`); it would take about {number:,} or more (`num_points`)",
        number,
    )


def _require_followed(
    recursion: GridRecursion,
    predicted: Tensor,
    belief: GridBelief,
    counts: Tensor,
    differs: Tensor,
    seen: Observed,
) -> None:
    """Raise if an observation moves a belief to where a tail was cut: there, its density is too low.

    That is at the end of what is possible, or, if noises add up, before it: there the other grid, which
    follows tails further, finds more.
    """
    assert belief.log_likelihoods is not None
    peak = belief.probabilities.argmax(-1, keepdim=True)  # [C, B, 1]
    there = predicted.gather(-1, peak)[..., 0]
    # About as rare as where tails are cut.
    end = 100 * math.exp(-0.5 * recursion.shortest_reach**2) * predicted.amax(-1)
    cut = differs & (belief.log_likelihoods.diff()[..., 0] > 0) & (there < end)
    for c, b in cut.nonzero()[:1].tolist():
        raise _out_of_reach(recursion, c, b, seen)
    for c, b in (counts & (there < RARE_PROBABILITY)).nonzero().tolist():
        possible = (predicted[c, b] > 0).nonzero()[:, 0]
        cells = torch.stack(torch.unravel_index(torch.cat([peak[c, b], possible]), recursion.grid.shape))
        at, low, high = cells[:, 0], cells[:, 1:].amin(1), cells[:, 1:].amax(1)
        if bool(((at <= low + 1) | (at >= high - 1)).any()):
            raise _out_of_reach(recursion, c, b, seen)


@double_precision()
def require_wide_densities(recursion: GridRecursion, belief: GridBelief, seen: Observed) -> None:
    """Raise if, where the beliefs are, densities of what might be seen vary over less than a cell."""
    probes = _imagined_observations(recursion, belief, seen)
    if probes is None:
        return
    scale = density_scale(recursion, recursion.extent, probes)
    if cells_needed(recursion.extent, scale) > 2 * recursion.cells_per_axis:
        raise too_narrow(recursion, recursion.extent, scale)


def _imagined_observations(recursion: GridRecursion, belief: GridBelief, seen: Observed) -> Probes | None:
    """Observations at states drawn from the beliefs about some of the episodes; None if there are none."""
    assert belief.log_likelihoods is not None
    C, B, _ = belief.probabilities.shape
    rows = torch.arange(B) if seen.rows is None else seen.rows
    b = rows[torch.linspace(0, len(rows) - 1, max(1, NUM_PROBES // C)).long()]  # [R]
    level = (0.618 * (1 + seen.time + torch.arange(len(b)))) % 1  # of a distribution function
    total = belief.probabilities[:, b].cumsum(-1)  # [C, R, G]
    index = first_above(total, level[None, :, None] * total[..., -1:])
    likelihood = belief.log_likelihoods[:, b, 0]  # [C, R]
    counts = likelihood >= likelihood.amax(0) - NATS_BEHIND
    counts = counts if seen.alive is None else counts & seen.alive[b]
    c, r = counts.nonzero().unbind(1)
    if not len(c):
        return None
    x = recursion.grid.points[index[c, r, 0]]  # [B, d]
    return imagined(recursion.model, recursion.signature, recursion.as_state(x), x, c, seen.select(b[r]))


def density_scale(recursion: GridTables, extent: Sequence[float], probes: Probes) -> list[float]:
    """The lengths over which densities of observations vary around the states they were made in, per axis.

    A density varies over the distance at which the mean of its logarithms both ways has moved by 1/2: the
    standard deviation of a normal sensor. Where that happens by a jump, it is no scale. Of all lengths,
    nearly the smallest is taken, since some may be due to chance.
    """
    steps = 2.0 ** (-torch.arange(4, 100) / 2).flip(0)  # [K], ascending
    found = []
    for axis, length in enumerate(extent):
        away = torch.zeros(2 * len(steps) + 1, recursion.dim)  # [2 K + 1, d]
        away[:, axis] = length * torch.cat([torch.zeros(1), steps, -steps])
        x = probes.x[:, None] + away
        density = recursion.log_density_at(
            recursion.as_state(x[None]), x.shape[1], probes.seen
        )  # [C, B, 2 K + 1]
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


def cells_needed(extent: Sequence[float], scale: Sequence[float]) -> float:
    """Number of cells along an axis that it takes if densities vary over lengths of `scale`."""
    return max(CELLS_PER_SCALE * length / s for length, s in zip(extent, scale, strict=True))


def too_narrow(recursion: GridTables, extent: Sequence[float], scale: Sequence[float]) -> ResolutionError:
    """The error that densities vary over less than a cell."""
    number = rounded_up(cells_needed(extent, scale) ** recursion.dim)
    return ResolutionError(
        f"grid: densities of observations of {type(recursion.model).__name__} vary over lengths of "
        f"{', '.join(f'{length:.2g}' for length in scale)}, and states over "
        f"{', '.join(f'{length:.2g}' for length in extent)}; "
        f"it would take about {number:,} points (`num_points`), or closer `bounds`",
        number,
    )


def _out_of_reach(recursion: GridTables, c: int, b: int, seen: Observed) -> OutOfReachError:
    return OutOfReachError(
        f"grid: what was seen {_place(recursion, c, b, seen)} is out of reach: only a state in the tails "
        "that were cut explains it; give a larger `reach`, or see whether the data are the model's"
    )


def _place(recursion: GridTables, c: int, b: int, seen: Observed) -> str:
    return f"at time {seen.time} of episode {seen.episode(b)} in context '{recursion.model.context_names[c]}'"


def rounded_up(number: float) -> int:
    """A number rounded up to two digits, for messages."""
    unit = 10.0 ** max(0, math.floor(math.log10(max(1.0, number))) - 1)
    return int(math.ceil(number / unit - 1e-9) * unit)
