"""Particle smoothing: whole trajectories in hindsight, drawn backwards through the filter's particles."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.arrays import how_many_fit, pieces
from cpomdp_ppl.handlers import Recorded
from cpomdp_ppl.inference.cloud import as_real, pick
from cpomdp_ppl.inference.density import log_density, unmasked
from cpomdp_ppl.inference.filtering import Smoothing, trajectories_in_time
from cpomdp_ppl.inference.observed import Observed, axes
from cpomdp_ppl.inference.sampling import Drawn, choose
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.cloud import Cloud
    from cpomdp_ppl.inference.particle_filter import SMC


PAIRS_AT_ONCE = 2**22
"""Pairs of trajectory and particle handled together."""


def smooth(smc: SMC, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
    """Draw trajectories from the smoothing distribution of every episode under every context."""
    # For every particle at time t + 1, its ancestor's index at time t, `[C, B, N]`; None for its own number.
    parents: list[Tensor | None] = []

    def step_noting_parents(cloud: Cloud, seen: Observed) -> tuple[Cloud, Tensor]:
        cloud, increment, parent = smc.step_with_parents(cloud, seen)
        parents.append(parent)
        return cloud, increment

    steps_taken = scan(smc, episodes, offset, step_by=step_noting_parents)
    passed = [(step.after, step.observed) for step in steps_taken]
    last, _ = passed[-1]
    # Clouds at time t, with what was done and seen at t + 1.
    steps = [(cloud, seen) for (cloud, _), (_, seen) in pairwise(passed)]
    method = "backward sampling" if states_are_sites(smc, *steps[0]) else "genealogy"
    index = choose(last.weights.values, num_trajectories)  # [C, B, M]
    chosen = [pick(last.state, index)]
    for (cloud, seen), parent in zip(reversed(steps), reversed(parents), strict=True):
        if method == "genealogy":
            index = index if parent is None else parent.gather(2, index)
        else:
            parts = pieces(num_trajectories, how_many_fit(PAIRS_AT_ONCE, cloud.shape.numel()))
            earlier = torch.cat([_backward(smc, cloud, _some(chosen[-1], part), seen) for part in parts], 2)
            # An episode that was over stood still.
            index = earlier if seen.alive is None else torch.where(seen.alive[None, :, None], earlier, index)
        chosen.append(pick(cloud.state, index))
    trajectories = trajectories_in_time(chosen[::-1])
    return Smoothing(
        method,
        map_state(lambda x: as_real(x).mean(0), trajectories),
        map_state(lambda x: as_real(x).var(0, unbiased=False), trajectories),
        trajectories,
    )


def states_are_sites(smc: SMC, cloud: Cloud, seen: Observed) -> bool:
    """Whether every part of the next state is a sample site of `transition`, and every site is one.

    Then the transition density is that of the sites. Otherwise the state is some function of them, whose
    density the program does not tell.
    """
    assert seen.action is not None
    C, B, N = cloud.shape
    with Drawn((C, B, N), smc.common, smc.plate_axes), Recorded() as program:
        state = smc.model.transition(cloud.state, axes(seen.action, smc.plate_axes), smc.context)
    values = [site["value"] for site in program.sites.values()]
    parts = [leaf for _, leaf in leaves(state)]
    return len(values) == len(parts) and all(sum(part is value for part in parts) == 1 for value in values)


def _backward(smc: SMC, cloud: Cloud, later: Any, seen: Observed) -> Tensor:
    """Draw particles at time t for trajectories that are at `later` (leaves `[C, B, M, …]`) at t + 1."""
    assert seen.action is not None
    C, B, N = cloud.shape
    M = next(leaf for _, leaf in leaves(later)).shape[2]
    # Every pair of trajectory and particle, on the particle axis.
    state = map_state(
        lambda leaf: leaf[:, :, None].expand(C, B, M, *leaf.shape[2:]).flatten(2, 3), cloud.state
    )
    target = map_state(lambda leaf: leaf.repeat_interleave(N, 2), later)
    with Drawn((C, B, M * N), smc.common, smc.plate_axes) as drawn:
        moved = smc.model.transition(state, axes(seen.action, smc.plate_axes), smc.context)
    values = {
        name: dict(leaves(target))[leaf]
        for name, (_, value) in drawn.sites.items()
        for leaf, part in leaves(moved)
        if part is value
    }
    with poutine.condition(data=values), Recorded() as program:
        smc.model.transition(state, axes(seen.action, smc.plate_axes), smc.context)
    density = torch.zeros((), device=smc.context.device)
    for name, site in program.sites.items():
        log_prob = log_density(unmasked(site["fn"]), values[name])
        density = density + (log_prob.flatten(3).sum(-1) if log_prob.dim() > 3 else log_prob)
    log_weights = cloud.weights.values.log()[:, :, None] + density.expand(C, B, M * N).reshape(C, B, M, N)
    return choose(log_weights.softmax(-1), 1).squeeze(-1)


def _some(state: Any, trajectories: slice) -> Any:
    """Some of the trajectories, leaves `[C, B, M, …]`."""
    return map_state(lambda leaf: leaf[:, :, trajectories], state)
