"""The exact likelihood of finite models, by the observable operators `A_{o|a} = T_a diag(p(o|·, a))`."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cpomdp_ppl.errors import DensityError, UnsupportedModelError
from cpomdp_ppl.inference.backend import Backend, Recursion
from cpomdp_ppl.inference.discrete_smoother import smooth
from cpomdp_ppl.inference.enumeration import (
    Enumerated,
    Sensible,
    double_precision,
    drawing,
    in_double_precision,
    require_sensible,
)
from cpomdp_ppl.inference.observed import Observed, axes, log_density_of_seen
from cpomdp_ppl.inference.resampling import choose
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.smoothing import Smoothing
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Leaf
    from cpomdp_ppl.state import State

MEMORY = 2**28
"""Bytes that the likelihoods of one step may take, or all that smoothing keeps of a batch."""

NEGLIGIBLE = 1e-12
"""A state of such a probability may have an observation that makes no sense."""


@dataclass(frozen=True)
class DiscreteBelief:
    """What is known about the state, one of N.

    Attributes:
        probabilities: `P(s_t = s | o_{1:t}, a_{0:t-1}, c)`, float64 `[C, B, N]`.
    """

    probabilities: Tensor


@dataclass(frozen=True)
class ObservableOperator(Backend):
    """The exact forward recursion for finite models.

    Every sample site of `initial` and `transition` is enumerated, which gives the tables of the model;
    everything is computed in float64.

    Example:
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
        """The tables of a model, and how to use them."""
        return FiniteRecursion(model)

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """As many as keep one step's likelihoods `[…, C, B, N]` within `MEMORY`."""
        assert model.states is not None
        values = recursion.signature.dependencies.combinations
        return max(1, MEMORY // (8 * model.num_contexts * model.states * values))

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """As many as keep beliefs and trajectories of all times within `MEMORY`."""
        assert isinstance(recursion, DiscreteRecursion)
        return smoothed_at_once(recursion, horizon, num_trajectories)


class DiscreteRecursion(Recursion):
    """The forward recursion over N states, or N points that stand for cells of a continuum.

    Attributes:
        dim: Of the cells: 0 for states that are nothing but themselves.
        initial: `P(s_0 = s | c)`, `[C, N]`.
        rewards: `r_c(s, a)`, `[C, A, N]`.
    """

    dim: int
    initial: Tensor
    rewards: Tensor

    def __init__(self, model: CPOMDP) -> None:
        given, model = model, in_double_precision(model)
        require_sensible(model)
        with drawing(model):
            super().__init__(model, given)

    @abstractmethod
    def predict(self, p: Tensor, action: Tensor) -> Tensor:
        """`Σ_s p(s) T(s, s')`, `[C, B, N]`."""

    @abstractmethod
    def expect(self, values: Tensor, action: Tensor) -> Tensor:
        """`Σ_s' T(s, s') f(s')` of values f, `[C, B, N]`."""

    @abstractmethod
    def origins(self, p: Tensor, action: Tensor, later: Tensor) -> Tensor:
        """`p(s) T(s, s')` of all s for each of the states s' in `later [C, B, M]`: `[C, B, M, N]`."""

    @abstractmethod
    def as_states(self, index: Tensor, place: Tensor) -> State:
        """The states numbered `index [C, B, M]`, at places `[C, B, M, dim]` from 0 to 1 in their cells."""

    @abstractmethod
    def log_likelihood(self, seen: Observed) -> Tensor:
        """`log p(o | s, a, c)`, broadcasts to `[C, B, N]`."""

    def start(self, num_episodes: int) -> DiscreteBelief:
        """`P(s_0)`."""
        return DiscreteBelief(self.initial[:, None].expand(-1, num_episodes, -1).contiguous())

    @double_precision()
    def condition(self, belief: DiscreteBelief, seen: Observed) -> tuple[DiscreteBelief, Tensor]:
        """Multiply by `p(o | s, a, c)` and normalise."""
        p = belief.probabilities
        increment = p.new_zeros(p.shape[:2])
        rows = seen.rows
        if rows is not None and not len(rows):
            return belief, increment
        if rows is None:
            posterior, increment = self._condition(p, seen)
            return DiscreteBelief(posterior), increment
        posterior, log_normaliser = self._condition(p[:, rows], seen.select(rows))
        return (
            DiscreteBelief(p.index_copy(1, rows, posterior)),
            increment.index_copy(1, rows, log_normaliser),
        )

    def _condition(self, p: Tensor, seen: Observed) -> tuple[Tensor, Tensor]:
        """Bayes' rule, except where a state that is possible gives a site parameters that make no sense."""
        with Sensible("observation", self.plate_axes) as sensible:
            log_likelihood = self.log_likelihood(seen)
        if sensible.wrong is not None:
            wrong = (sensible.wrong & (p > NEGLIGIBLE)).flatten(2).any(-1)  # [C, B]
            if bool(wrong.any()):
                c, b = wrong.nonzero()[0].tolist()
                raise DensityError(
                    f"{sensible.message} at time {seen.time} of episode {seen.episode(b)} "
                    f"in context '{self.model.context_names[c]}'"
                )
            log_likelihood = torch.where(sensible.wrong, -torch.inf, log_likelihood)
        posterior, increment = bayes(p, log_likelihood)
        if bool(increment.isnan().any()):
            ignored = log_likelihood.isnan() & (p <= NEGLIGIBLE)
            posterior, increment = bayes(p, torch.where(ignored, -torch.inf, log_likelihood))
        return posterior, increment

    @double_precision()
    def step(self, belief: DiscreteBelief, seen: Observed) -> tuple[DiscreteBelief, Tensor]:
        """One observable operator: move, then condition."""
        assert seen.action is not None
        return self.condition(DiscreteBelief(self.predict(belief.probabilities, seen.action)), seen)

    def expected_reward(self, belief: DiscreteBelief, action: Tensor) -> Tensor:
        """`Σ_s p(s) r_c(s, a)`, `[C, B]`."""
        of_all = belief.probabilities @ self.rewards.mT  # [C, B, A]: quicker than to gather tables
        return of_all.gather(-1, action[None, :, None].expand(len(of_all), -1, 1)).squeeze(-1)

    def draw(self, belief: DiscreteBelief, num_draws: int) -> State:
        """A state by its probability, then anywhere in its cell."""
        index = choose(belief.probabilities, num_draws)
        return self.at(index, self.places(index))

    def places(self, index: Tensor) -> Tensor:
        """Draw places in cells `[C, B, M]`, uniformly: `[C, B, M, dim]`."""
        return torch.rand(*index.shape, self.dim, dtype=torch.float64, device=index.device)

    def at(self, index: Tensor, place: Tensor) -> State:
        """As `as_states`, in the model's own types."""
        return self.in_own_types(self.as_states(index, place))

    def stays(self, action: Tensor) -> Tensor:
        """Which of the actions `[B]` are known to leave every state where it is, bool `[B]`."""
        return torch.zeros_like(action, dtype=torch.bool)

    def back(self, p: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """The smoothed belief at t from the filtered one there and the smoothed one at t + 1, `[C, B, N]`."""
        predicted = self.predict(p, action)
        ratio = torch.where(predicted > 0, after / predicted, 0.0)
        smoothed = p * self.expect(ratio, action)
        return smoothed / smoothed.sum(-1, keepdim=True)

    def smooth(self, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
        """By the forward–backward recursion, and backward sampling."""
        return smooth(self, episodes, num_trajectories, offset)


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
        self.rewards = self.reward(self.states, actions, (C, A, N)).double()

    def log_likelihood(self, seen: Observed) -> Tensor:
        """`log p(o | s, a, c)`, broadcasts to `[C, B, N]`."""
        return log_density_of_seen(self.model, self.signature, self.states, self.context, seen).double()

    def predict(self, p: Tensor, action: Tensor) -> Tensor:
        """`Σ_s p(s) T(s, s')`, `[C, B, N]`."""
        predicted = torch.empty_like(p)
        for a in action.unique().tolist():
            rows = (action == a).nonzero()[:, 0]
            predicted.index_copy_(1, rows, p[:, rows] @ self.transition[:, a])
        return predicted

    def expect(self, values: Tensor, action: Tensor) -> Tensor:
        """`Σ_s' T(s, s') f(s')` of values f, `[C, B, N]`."""
        expected = torch.empty_like(values)
        for a in action.unique().tolist():
            rows = (action == a).nonzero()[:, 0]
            expected.index_copy_(1, rows, values[:, rows] @ self.transition[:, a].mT)
        return expected

    def origins(self, p: Tensor, action: Tensor, later: Tensor) -> Tensor:
        """`p(s) T(s, s')` of all s for each of the states s' in `later [C, B, M]`: `[C, B, M, N]`."""
        context = torch.arange(len(p), device=p.device)[:, None, None]
        return p[:, :, None] * self.transition.mT[context, action[:, None], later]

    def as_states(self, index: Tensor, place: Tensor) -> State:
        """The states with numbers `index [C, B, M]`."""
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
        """Where a program leads to from every state by every action, `[C, A, N, N]`."""
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


def bayes(prior: Tensor, log_likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """Condition `prior [C, B, N]` on a likelihood that broadcasts with it.

    Returns:
        The posterior, and the logarithm of the normaliser `[C, B]`. Where nothing is possible that is `-inf`,
        and the posterior is the prior: such a row must not spoil others, nor become NaN.
    """
    # Where the prior is zero the likelihood is of no account, however large or ill-defined.
    log_likelihood = torch.where(prior > 0, log_likelihood, -torch.inf)
    highest = log_likelihood.amax(-1, keepdim=True)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    joint = prior * (log_likelihood - highest).exp()
    normaliser = joint.sum(-1, keepdim=True)
    posterior = torch.where(normaliser > 0, joint / normaliser, prior)
    return posterior, (highest + normaliser.log()).squeeze(-1)


def smoothed_at_once(recursion: DiscreteRecursion, horizon: int, num_trajectories: int) -> int:
    """How many episodes keep within `MEMORY` what smoothing needs of all times."""
    C, N = recursion.initial.shape
    numbers = 3 * (horizon + 1) * C * (N + num_trajectories * (recursion.dim + 1))  # both ways, and stacked
    return max(1, MEMORY // (8 * numbers))
