"""What simulated episodes tell about a model: where its states get to, and what is observed there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError, UnsupportedModelError
from cpomdp_ppl.handlers import Batched, Recorded
from cpomdp_ppl.inference.observed import Observed
from cpomdp_ppl.inference.site_parameters import torch_errors_as_model_errors
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.rollout import percept_of, simulate
from cpomdp_ppl.state import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History
    from cpomdp_ppl.signature import Signature

FARTHEST = 1e300
"""How far apart bounds may be: beyond that, the spacing of the grid would overflow."""

FEW_VALUES = 32
"""Number of values up to which thousands of draws are not those of a real number."""


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
    """Draw what might have been observed in a step, if anything, in other states.

    Args:
        model: The CPOMDP.
        signature: The signature of the model.
        state: The states, leaves `[B, …]`.
        x: The same states as points `[B, d]`.
        context: The contexts, `[B]`.
        seen: The step; what was not observed there is not observed here.
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
        model.observation(state, action, context.reshape(S + plates))
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
    every = [leaves(trial.states) for trial in trials]
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
