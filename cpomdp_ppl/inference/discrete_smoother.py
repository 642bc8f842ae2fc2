"""Smoothing over finitely many states: filter forwards; on the way back reweight, and draw trajectories."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.inference.sampling import choose
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.inference.smoothing import Smoothing, moments_in_time, trajectories_in_time

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.discrete import DiscreteRecursion

PAIRS_AT_ONCE = 2**22
"""Pairs of a trajectory and a state that it may come from that are handled together."""


def forward_backward(
    recursion: DiscreteRecursion, episodes: Episodes, num_trajectories: int, offset: int
) -> Smoothing:
    """Moments by the forward–backward recursion, trajectories by backward sampling.

    A point that stands for a cell is drawn first, then a place in the cell; what does not move keeps both.
    """
    beliefs = [step.after for step in scan(recursion, episodes, offset)]  # at times 0 … T
    belief = beliefs[-1]
    index = choose(belief.probabilities, num_trajectories)  # [C, B, M]
    place = recursion.places(index)  # [C, B, M, d]
    smoothed, draws = [belief], [recursion.at(index, place)]
    moments = [recursion.moments(belief)]
    for t in reversed(range(episodes.horizon)):
        action, before = episodes.actions[:, t], beliefs[t].probabilities
        going = t < episodes.lengths  # [B]
        back = recursion.back(before, action, belief.probabilities)
        belief = replace(belief, probabilities=torch.where(going[:, None], back, belief.probabilities))
        moves = (going & ~recursion.stays(action))[:, None]  # [B, 1]
        index = torch.where(moves, _origins(recursion, before, action, index), index)
        place = torch.where(moves[..., None], recursion.places(index), place)
        moments.append(recursion.moments(belief))
        draws.append(recursion.at(index, place))
        if recursion.dim == 0:
            smoothed.append(belief)
    probabilities = None
    if recursion.dim == 0:  # of a grid's points, they would fill the memory
        probabilities = torch.stack([one.probabilities for one in reversed(smoothed)]).permute(2, 0, 1, 3)
    return Smoothing(
        "forward-backward",
        *moments_in_time(moments[::-1]),
        trajectories_in_time(draws[::-1]),
        probabilities,  # [B, T + 1, C, N]
    )


def _origins(recursion: DiscreteRecursion, p: Tensor, action: Tensor, later: Tensor) -> Tensor:
    """Draw states at time t, `[C, B, M]`, for trajectories that are at `later [C, B, M]` at t + 1.

    Args:
        recursion: The recursion over N states.
        p: Filtered probabilities at time t, `[C, B, N]`.
        action: The actions taken there, `[B]`.
        later: Numbers of the states at t + 1.
    """
    pieces = later.split(how_many_fit(PAIRS_AT_ONCE, p.numel()), 2)
    return torch.cat([choose(recursion.origins(p, action, piece), 1).squeeze(-1) for piece in pieces], 2)
