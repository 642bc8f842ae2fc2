"""The exact likelihood of finite models, by the observable operators `A_{o|a} = T_a diag(p(o|·, a))`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cpomdp_ppl.actions import require_finite_actions
from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.inference.backend import Backend, Recursion
from cpomdp_ppl.inference.discrete import (
    MEMORY,
    DiscreteBelief,
    DiscreteRecursion,
    by_action,
    smoothed_at_once,
)
from cpomdp_ppl.inference.enumeration import Enumerated
from cpomdp_ppl.inference.observed import Observed, axes, log_density_of_seen
from cpomdp_ppl.inference.precision import double_precision
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Leaf
    from cpomdp_ppl.state import State


@dataclass(frozen=True)
class ObservableOperator(Backend):
    """The exact forward recursion for finite models.

    Every sample site of `initial` and `transition` is enumerated, which gives the tables of the model;
    everything is computed in float64.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import ContextualTiger
        >>> model = ContextualTiger()
        >>> episodes = simulate(model, RandomPolicy(model.num_actions), 5, seed=0)
        >>> ObservableOperator().run(model, episodes).log_likelihood.shape
        torch.Size([5, 3])
    """

    name: ClassVar[str] = "exact"
    draws: ClassVar[bool] = False

    @double_precision()
    def recursion(self, model: CPOMDP) -> FiniteRecursion:
        """Tabulate a model."""
        return FiniteRecursion(model)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep one step's likelihoods `[…, C, B, N]` within `MEMORY`."""
        assert model.states is not None
        values = recursion.signature.dependencies.combinations
        return how_many_fit(MEMORY, 8 * model.num_contexts * model.states * values)

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """As many as keep beliefs and trajectories of all times within `MEMORY`."""
        assert isinstance(recursion, DiscreteRecursion)
        return smoothed_at_once(recursion, horizon, num_trajectories)


class FiniteRecursion(DiscreteRecursion):
    """The forward recursion over a finite model's states.

    Attributes:
        N: Number of states.
        transition: `P(s' | s, a, c)`, `[C, A, N, N]`.
    """

    dim = 0

    def __init__(self, model: CPOMDP) -> None:
        N = model.states
        if N is None:
            raise UnsupportedModelError(
                f"exact: {type(model).__name__} does not say that it has finitely many states (`states = N`)"
            )
        require_finite_actions(model, "exact")
        super().__init__(model)
        model = self.model
        sizes = {name: math.prod(leaf.shape) for name, leaf in leaves(self.signature.state)}
        if list(sizes.values()) != [1]:
            raise UnsupportedModelError(
                f"exact: the state of a finite model is one index, but {type(model).__name__} has {sizes}"
            )
        C, A = model.num_contexts, model.num_actions
        self.N = N
        self.states = self._as_state(torch.arange(N, device=model.device).reshape(1, 1, N))
        self.initial = self._table("initial", (C, 1, 1)).reshape(C, N)
        self.transition = self._table("transition", (C, A, N))
        actions = torch.arange(A, device=model.device)
        if model.pays_on_arrival:
            arrivals = self.rewards_on_arrival()
            self.rewards = (self.transition * arrivals).sum(-1)
        else:
            self.rewards = self.reward(self.states, actions, (C, A, N)).double()

    def rewards_on_arrival(self) -> Tensor:
        """`r_c(s, a, s')` of a model that pays on arrival, `[C, A, N, N]`; zero of what cannot happen."""
        C, A = self.transition.shape[:2]
        actions = torch.arange(A, device=self.model.device)
        after = self._as_state(torch.arange(self.N, device=self.model.device).reshape(-1, 1, 1, 1))
        rewards = self.reward(self.states, actions, (self.N, C, A, self.N), after).double()
        return torch.where(self.transition > 0, rewards.movedim(0, -1), 0.0)

    @cached_property
    def goes_on(self) -> Tensor:
        """With what probability an episode does not end in the state an action led to, `[C, A, N]`."""
        return self.goes_on_at(self.states, self.N)

    def log_likelihood(self, seen: Observed) -> Tensor:
        """`log p(o | s, a, c)`, broadcasts to `[C, B, N]`."""
        return log_density_of_seen(self.model, self.signature, self.states, self.context, seen).double()

    def probabilities(self, belief: DiscreteBelief) -> Tensor:
        """The probabilities of the states, `[C, B, N]`."""
        return belief.probabilities

    def predict(self, p: Tensor, action: Tensor) -> Tensor:
        """`Σ_s p(s) T(s, s')`, `[C, B, N]`."""
        return by_action(lambda a, rows: rows @ self.transition[:, a], p, action)

    def expect(self, values: Tensor, action: Tensor) -> Tensor:
        """`Σ_s' T(s, s') f(s')` of values f, `[C, B, N]`."""
        return by_action(lambda a, rows: rows @ self.transition[:, a].mT, values, action)

    def origins(self, p: Tensor, action: Tensor, later: Tensor) -> Tensor:
        """`p(s) T(s, s')` of all s for each of the states s' in `later [C, B, M]`: `[C, B, M, N]`."""
        context = torch.arange(len(p), device=p.device)[:, None, None]
        return p[:, :, None] * self.transition.mT[context, action[:, None], later]

    def as_states(self, index: Tensor, place: Tensor) -> State:
        """States by their numbers `index [C, B, M]`."""
        states: State = self._as_state(index)
        return states

    def moments(self, belief: DiscreteBelief) -> tuple[State, State]:
        """Mean and variance of the state's index."""
        return self.index_moments(belief.probabilities)

    def index_moments(self, p: Tensor) -> tuple[State, State]:
        """Mean and variance of the index under `p [..., N]`, as states."""
        index = torch.arange(self.N, device=p.device, dtype=p.dtype)
        mean = p @ index
        variance = (p * (index - mean[..., None]) ** 2).sum(-1)
        return self._as_state(mean, p.dtype), self._as_state(variance, p.dtype)

    def _as_state(self, values: Tensor, dtype: torch.dtype | None = None) -> Any:
        def shaped(leaf: Leaf) -> Tensor:
            return values.reshape(values.shape + leaf.shape).to(dtype or leaf.dtype)

        return map_state(shaped, self.signature.state)

    def _table(self, program: str, shape: tuple[int, int, int]) -> Tensor:
        """Probabilities of the states that a program leads to, `[C, A, N, N]`."""
        C, A, N = shape
        with Enumerated(program, self.plate_axes) as enumerated:
            if program == "initial":
                state = self.model.initial(self.context)
            else:
                actions = axes(torch.arange(A, device=self.model.device), self.plate_axes)
                state = self.model.transition(self.states, actions, self.context)
        added = enumerated.weights.shape[: -len(shape)]
        (_, state), *_ = leaves(self.signature.broadcast(state, torch.Size((*added, *shape))))
        index = state.reshape(-1, C, A, N)
        index = index.long() if index.dtype == torch.bool else index  # False is state 0, True is state 1
        weights = enumerated.weights.expand(*added, *shape).reshape(-1, C, A, N)
        self._require_states(program, index, weights)
        index = index.long().clamp(0, self.N - 1)  # values of probability zero may be anything
        table = torch.zeros(C, A, N, self.N, dtype=torch.float64, device=weights.device)
        table.scatter_add_(-1, index.movedim(0, -1), weights.movedim(0, -1))
        return table / table.sum(-1, keepdim=True)

    def _require_states(self, program: str, state: Tensor, weights: Tensor) -> None:
        wrong = (weights > 0) & ~((state >= 0) & (state < self.N) & (state == state.round()))
        if bool(wrong.any()):
            k, c, a, s = wrong.nonzero()[0].tolist()
            moved = f" from state {s} by action '{self.model.action_names[a]}'"
            place = "" if program == "initial" else moved
            raise UnsupportedModelError(
                f"exact: {program} returns state {state[k, c, a, s].item()}{place} in context "
                f"'{self.model.context_names[c]}', but `states = {self.N}`"
            )
