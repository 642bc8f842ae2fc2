"""A model as a planner wants it: one step at a time, from any state, many side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.errors import require_model
from cpomdp_ppl.handlers import Batched, Recorded
from cpomdp_ppl.rollout import as_reward, by_episode, percept_of
from cpomdp_ppl.signature import read_signature

if TYPE_CHECKING:
    from torch import Tensor

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.state import State


@dataclass(frozen=True)
class Step:
    """What N independent steps led to.

    Attributes:
        state: `s_{t+1}`, leaves `[N, …]`.
        percept: The actions, and what was seen after them.
        reward: `r_c(s_t, a_t)`, `[N]`.
    """

    state: State
    percept: Percept
    reward: Tensor


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
            self.model.observation(state, a, self._column(context))
        return percept_of(self.signature, seen, action, context.shape)

    def move(self, state: Any, action: Tensor, context: Tensor) -> tuple[State, Tensor]:
        """Draw where actions `[N]` lead from states with leaves `[N, …]`; that, and the rewards `[N]`."""
        a, c = self._column(action), self._column(context)
        reward = self.reward(state, action, context)
        with self._batched(context):
            return self.signature.broadcast(self.model.transition(state, a, c), context.shape), reward

    def reward(self, state: Any, action: Tensor, context: Tensor) -> Tensor:
        """Rewards `r_c(s, a)` of actions `[N]` in states with leaves `[N, …]`, `[N]`."""
        S, a, c = context.shape, self._column(action), self._column(context)
        with self._batched(context):
            return by_episode(as_reward(self.model.reward(state, a, c)), S, self._own).reshape(S)

    def step(self, state: Any, action: Tensor, context: Tensor) -> Step:
        """Move, and draw what is seen there."""
        after, reward = self.move(state, action, context)
        return Step(after, self.observe(after, context, action), reward)

    def _batched(self, context: Tensor) -> Batched:
        return Batched(tuple(context.shape), self.model.max_plate_nesting)

    def _column(self, index: Tensor) -> Tensor:
        """Indices `[N]` with room for the programs' own plates."""
        return index.reshape(index.shape + self._own)
