"""What commitments are worth: actions laid down beforehand, played from states drawn from a belief.

States come as leaves `[C, R, M, …]`: M of equal weight for every context and each of R beliefs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from cpomdp_ppl.arrays import as_indices
from cpomdp_ppl.errors import require
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.inference import SMC
    from cpomdp_ppl.model import CPOMDP

Commitment: TypeAlias = int | str | Callable[[int], int | str]
"""An action to repeat until the end, by index or name, or a function from the time to one."""


def plans(model: CPOMDP, commitments: Sequence[Commitment] | None) -> Tensor:
    """Commitments as the action at each time, `[G, T]`; if None, each action for ever."""
    names, T = model.action_names, model.horizon
    if commitments is None:
        return torch.arange(len(names))[:, None].expand(-1, T)
    many = isinstance(commitments, Sequence) and not isinstance(commitments, str) and len(commitments) > 0
    require(many, "commitments", commitments, "a sequence of actions, or of functions from the time to one")

    def action(given: Any) -> Tensor:
        index = as_indices("commitments", given, names)
        inside = index.dim() == 0 and 0 <= int(index) < len(names)
        require(inside, "commitments", given, f"actions 0 to {len(names) - 1}, or names")
        return index

    rows = [[action(g(t) if callable(g) else g) for t in range(T)] for g in commitments]
    return torch.stack([torch.stack(row) for row in rows])


def returns_of(plans: Tensor, programs: SMC, states: Any, time: Tensor) -> Tensor:
    """What plans `[G, T]` earn in every context from times `[R]` to the horizon, on average: `[C, R, G]`."""
    G = len(plans)
    copies = map_state(lambda leaf: leaf.repeat_interleave(G, 1), states)  # [C, R·G, M, …]
    which = torch.arange(G, device=time.device).repeat(len(time))
    returns = play(programs, copies, time.repeat_interleave(G), lambda t: plans[which, t])
    return returns.view(-1, len(time), G)


def returns_after(plans: Tensor, programs: SMC, states: Any, time: Tensor) -> Tensor:
    """What every action earns at times `[R]` if each plan `[G, T]` is kept to after it: `[C, R, A, G]`."""
    A, (_, some) = programs.model.num_actions, next(leaves(states))
    C, R, M = some.shape[:3]
    shape = torch.Size((C, R * A, M))
    copies = map_state(lambda leaf: leaf.repeat_interleave(A, 1), states)  # [C, R·A, M, …]
    action = torch.arange(A, device=time.device).repeat(R)
    reward = programs.reward(copies, action, shape).mean(2)  # [C, R·A]
    after = programs.move_states(copies, action)
    to_come = returns_of(plans, programs, after, (time + 1).repeat_interleave(A))  # [C, R·A, G]
    return (reward[..., None] + to_come).view(C, R, A, -1)


def play(programs: SMC, states: Any, time: Tensor, action_at: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean return of open-loop play in every context from times `[R]` on, `[C, R]`."""
    T, (_, some) = programs.model.horizon, next(leaves(states))
    shape = some.shape[:3]
    total = torch.zeros(shape[:2], device=time.device)
    last = T - 1 - int(time.min())
    for ahead in range(last + 1):
        t = time + ahead
        action = action_at(t.clamp(max=T - 1))
        total += torch.where(t < T, programs.reward(states, action, shape).mean(2), 0.0)  # the rest are over
        if ahead < last:
            states = programs.move_states(states, action)
    return total
