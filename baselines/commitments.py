"""What commitments are worth: actions laid down beforehand, played from states drawn from a belief.

States come as leaves `[C, R, M, …]`: M of equal weight for every context and each of R beliefs. Returns are
discounted from where play begins. What comes after a chance to end counts by how likely the episode is to go
on, so that ends bring no noise of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from baselines.simple import Action, as_action
from cpomdp_ppl.actions import probes
from cpomdp_ppl.errors import require
from cpomdp_ppl.inference.observed import axes
from cpomdp_ppl.rollout import as_reward
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.inference import SMC
    from cpomdp_ppl.model import CPOMDP

Commitment: TypeAlias = Action | Callable[[int], Action]
"""An action to repeat until the end, or a function from the time to one."""


def plans(model: CPOMDP, commitments: Sequence[Commitment] | None) -> Tensor:
    """Commitments as the action at each time, `[G, T]`, or `[G, T, D]` of continuous ones.

    If None, each action for ever; of a box, each of its `probes`.
    """
    T = model.horizon
    if commitments is None:
        every = probes(model)
        return every[:, None].expand(len(every), T, *every.shape[1:])
    many = isinstance(commitments, Sequence) and not isinstance(commitments, str) and len(commitments) > 0
    require(many, "commitments", commitments, "a sequence of actions, or of functions from the time to one")

    rows = [[g(t) if callable(g) else g for t in range(T)] for g in commitments]
    return torch.stack([torch.stack([as_action("commitments", model, one) for one in row]) for row in rows])


def returns_of(
    plans: Tensor, programs: SMC, states: Any, time: Tensor, alive: Tensor | None = None
) -> Tensor:
    """What plans `[G, T, …]` earn in every context from times `[R]` to the end, on average: `[C, R, G]`.

    `alive [C, R, M]` is how likely the episodes have not ended yet; left out, they have not.
    """
    G = len(plans)
    copies = map_state(lambda leaf: leaf.repeat_interleave(G, 1), states)  # [C, R·G, M, …]
    which = torch.arange(G, device=time.device).repeat(len(time))
    alive = None if alive is None else alive.repeat_interleave(G, 1)
    returns = play(programs, copies, time.repeat_interleave(G), lambda t: plans[which, t], alive)
    return returns.view(-1, len(time), G)


def returns_after(plans: Tensor, programs: SMC, states: Any, time: Tensor) -> Tensor:
    """What every action earns at times `[R]` if each plan `[G, T]` is kept to after it: `[C, R, A, G]`.

    For models with finitely many actions.
    """
    A, (_, some) = programs.model.num_actions, next(leaves(states))
    C, R, M = some.shape[:3]
    shape = torch.Size((C, R * A, M))
    copies = map_state(lambda leaf: leaf.repeat_interleave(A, 1), states)  # [C, R·A, M, …]
    action = torch.arange(A, device=time.device).repeat(R)
    after = programs.move_states(copies, action)
    reward = programs.reward(copies, action, shape, after).mean(2)  # [C, R·A]
    alive = going_on(programs, after, action)
    to_come = returns_of(plans, programs, after, (time + 1).repeat_interleave(A), alive)  # [C, R·A, G]
    return (reward[..., None] + programs.model.discount * to_come).view(C, R, A, -1)


def play(
    programs: SMC,
    states: Any,
    time: Tensor,
    action_at: Callable[[Tensor], Tensor],
    alive: Tensor | None = None,
) -> Tensor:
    """The mean return of open-loop play in every context from times `[R]` on, `[C, R]`; `alive` as above."""
    model, (_, some) = programs.model, next(leaves(states))
    T, shape, worth = model.horizon, some.shape[:3], 1.0
    total = torch.zeros(shape[:2], device=time.device)
    last = T - 1 - int(time.min())
    for ahead in range(last + 1):
        t = time + ahead
        action = action_at(t.clamp(max=T - 1))
        moves = ahead < last or model.pays_on_arrival
        after = programs.move_states(states, action) if moves else None
        reward = programs.reward(states, action, shape, after)
        if alive is not None:  # a state after the end may be anything, and so may its reward
            reward = torch.where(alive > 0, alive * reward, 0.0)
        total += torch.where(t < T, worth * reward.mean(2), 0.0)  # the rest are over
        if ahead < last:
            on = going_on(programs, after, action)
            alive = on if alive is None or on is None else alive * on
            states, worth = after, worth * model.discount
    return total


def going_on(programs: SMC, states: Any, action: Tensor) -> Tensor | None:
    """How likely episodes go on in states `[C, B, M, …]` that actions `[B, …]` led to, `[C, B, M]`.

    None for models that cannot end.
    """
    model = programs.model
    if not model.can_end:
        return None
    (_, some), own = next(leaves(states)), [1] * programs.plate_axes
    shape = some.shape[:3]
    ends = as_reward(model.ends(states, axes(action, programs.plate_axes), programs.context))
    return 1 - ends.expand(*shape, *own).reshape(shape)
