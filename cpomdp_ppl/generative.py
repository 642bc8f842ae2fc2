"""A model as a planner wants it: one step at a time, from any state, many side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.errors import require_model
from cpomdp_ppl.handlers import Batched, Recorded
from cpomdp_ppl.rollout import as_reward, by_episode, percept_of, require_chances
from cpomdp_ppl.signature import read_signature

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.state import State


@dataclass(frozen=True)
class Move:
    """Where N independent actions led.

    Attributes:
        state: `s_{t+1}`, leaves `[N, …]`.
        reward: `r_c(s_t, a_t)`, or `r_c(s_t, a_t, s_{t+1})`, `[N]`.
        ended: Which of them were the last of their episode, bool `[N]`; None for models that cannot end.
    """

    state: State
    reward: Tensor
    ended: Tensor | None


@dataclass(frozen=True)
class Step(Move):
    """What N independent steps led to.

    Attributes:
        percept: The actions, and what was seen after them.
    """

    percept: Percept


class Tally:
    """The returns of N episodes on their way: discounted, and with nothing after the end.

    Attributes:
        returns: What they have earned so far, as it is worth at the start, float64 `[N]`.
        alive: Which of them are still going on, bool `[N]`.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> tally = Tally(LineGrid(), torch.zeros(3))
        >>> tally.add(Move(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, False])))
        >>> tally.add(Move(torch.zeros(3), torch.ones(3), None))
        >>> tally.returns
        tensor([1., 3., 4.], dtype=torch.float64)
    """

    def __init__(self, model: CPOMDP, like: Tensor) -> None:
        self.discount = model.discount
        self.returns = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        self.alive = torch.ones(len(like), dtype=torch.bool, device=like.device)
        self._worth = 1.0

    def add(self, move: Move) -> None:
        """Take in one more step of every episode."""
        self.returns = self.returns + torch.where(self.alive, self._worth * move.reward.double(), 0.0)
        self._worth *= self.discount
        if move.ended is not None:
            self.alive = self.alive & ~move.ended


class Generative:
    """The programs of a model on N states at once, each with a context and an action of its own.

    To be made and used inside `cpomdp_ppl.inference.inference_scope`, which sees to seeds and gradients.
    """

    def __init__(self, model: CPOMDP) -> None:
        require_model(model)
        self.model = model
        self.signature = read_signature(model)
        self._own = (1,) * model.max_plate_nesting

    def initial(self, context: Tensor) -> State:
        """Draw first states in contexts `[N]`."""
        with self._batched(context):
            return self.signature.broadcast(self.model.initial(self._column(context)), context.shape)

    def observe(self, state: Any, context: Tensor, action: Tensor | None = None) -> Percept:
        """Draw what is seen in states with leaves `[N, …]` after actions `[N]`; None is before the first."""
        a = None if action is None else self._column(action)
        with self._batched(context), Recorded() as seen:
            self.model.percept(state, a, self._column(context))
        return percept_of(self.signature, seen, action, context.shape)

    def move(self, state: Any, action: Tensor, context: Tensor) -> Move:
        """Draw where actions `[N]` lead from states with leaves `[N, …]`, and whether that was the end."""
        after, reward = self._moved(state, action, context)
        return Move(after, reward, self.ends(after, action, context))

    def step(self, state: Any, action: Tensor, context: Tensor) -> Step:
        """Move, and draw what is seen there."""
        after, reward = self._moved(state, action, context)
        percept = self.observe(after, context, action)
        return Step(after, reward, percept.ended if self.model.can_end else None, percept)

    def _moved(self, state: Any, action: Tensor, context: Tensor) -> tuple[State, Tensor]:
        early = None if self.model.pays_on_arrival else self.reward(state, action, context)
        with self._batched(context):
            moved = self.model.transition(state, self._column(action), self._column(context))
            after = self.signature.broadcast(moved, context.shape)
        return after, self.reward(state, action, context, after) if early is None else early

    def reward(self, state: Any, action: Tensor, context: Tensor, after: Any = None) -> Tensor:
        """Rewards of actions `[N]` in states with leaves `[N, …]`, `[N]`; `after` are the next states.

        Where a model pays on arrival, next states that are not given are drawn.
        """
        S, a, c = context.shape, self._column(action), self._column(context)
        arrival: tuple[Any, ...] = ()
        if self.model.pays_on_arrival:
            arrival = (self._moved(state, action, context)[0] if after is None else after,)
        with self._batched(context):
            return by_episode(as_reward(self.model.reward(state, a, c, *arrival)), S, self._own).reshape(S)

    def ends(self, state: Any, action: Tensor, context: Tensor) -> Tensor | None:
        """Draw whether episodes end in states that actions led to, bool `[N]`; None if they cannot."""
        if not self.model.can_end:
            return None
        with self._batched(context):
            chance = self.model.ends(state, self._column(action), self._column(context))
            chance = by_episode(as_reward(chance), context.shape, self._own).reshape(context.shape)
            require_chances(self.model, chance)
            return torch.rand(context.shape, dtype=chance.dtype, device=chance.device) < chance

    def _batched(self, context: Tensor) -> Batched:
        return Batched(tuple(context.shape), self.model.max_plate_nesting)

    def _column(self, values: Tensor) -> Tensor:
        """Indices `[N]`, or actions `[N, D]`, with room for the programs' own plates."""
        return values.reshape(values.shape[:1] + self._own + values.shape[1:])
