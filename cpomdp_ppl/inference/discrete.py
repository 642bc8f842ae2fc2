"""Filtering and smoothing over finitely many states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import DensityError
from cpomdp_ppl.handlers import base_of, is_deterministic, mask_of
from cpomdp_ppl.inference.backend import Recursion
from cpomdp_ppl.inference.enumeration import ENGINE_AXES
from cpomdp_ppl.inference.filtering import Smoothing, moments_in_time, trajectories_in_time
from cpomdp_ppl.inference.observed import Observed, axes
from cpomdp_ppl.inference.precision import double_precision, in_double_precision
from cpomdp_ppl.inference.sampling import choose
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.inference.site_parameters import (
    fault,
    parameters_of,
    require_proper_parameters,
    torch_errors_as_model_errors,
)
from cpomdp_ppl.rollout import as_reward

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.state import State

MEMORY = 2**28
"""Bytes that the likelihoods of one step may take, or that smoothing may keep of a batch."""

NEGLIGIBLE = 1e-12
"""A state of lower probability may give a site parameters that make no sense."""

PAIRS_AT_ONCE = 2**22
"""Pairs of a trajectory and a state that it may come from that are handled together."""


@dataclass(frozen=True)
class DiscreteBelief:
    """Probabilities of N states.

    Attributes:
        probabilities: `P(s_t = s | o_{1:t}, a_{0:t-1}, c)`, float64 `[C, B, N]`.
    """

    probabilities: Tensor


class DiscreteRecursion(Recursion):
    """The forward recursion over N states, or N points that stand for cells of a continuum.

    Attributes:
        dim: Dimension of the cells; 0 for states that are nothing but themselves.
        initial: `P(s_0 = s | c)`, `[C, N]`.
        rewards: `r_c(s, a)`, `[C, A, N]`; of models that pay on arrival, the expectation over the next state.
        goes_on: With what probability an episode does not end in the state an action led to, `[C, A, N]`.
    """

    dim: int
    initial: Tensor
    rewards: Tensor
    goes_on: Any

    def __init__(self, model: CPOMDP) -> None:
        given, model = model, in_double_precision(model)
        require_proper_parameters(model)
        with torch_errors_as_model_errors(model):
            super().__init__(model, given)

    @abstractmethod
    def predict(self, p: Tensor, action: Tensor) -> Tensor:
        """`Σ_s p(s) T(s, s')`, `[C, B, N]`."""

    @abstractmethod
    def expect(self, values: Tensor, action: Tensor) -> Tensor:
        """`Σ_s' T(s, s') f(s')` of values f, `[C, B, N]`."""

    @abstractmethod
    def origins(self, p: Tensor, action: Tensor, later: Tensor) -> Tensor:
        """`p(s) T(s, s')` of all states s for each of the states s' in `later [C, B, M]`: `[C, B, M, N]`."""

    @abstractmethod
    def as_states(self, index: Tensor, place: Tensor) -> State:
        """States by their numbers `index [C, B, M]`, at places `[C, B, M, dim]` in the unit cell."""

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
            posterior, increment = self._posterior(p, seen)
            return DiscreteBelief(posterior), increment
        posterior, log_normaliser = self._posterior(p[:, rows], seen.select(rows))
        return (
            DiscreteBelief(p.index_copy(1, rows, posterior)),
            increment.index_copy(1, rows, log_normaliser),
        )

    def _posterior(self, p: Tensor, seen: Observed) -> tuple[Tensor, Tensor]:
        """Bayes' rule; raises if a state that is possible gives a site parameters that make no sense."""
        with ImproperSites("observation", self.plate_axes) as improper:
            log_likelihood = self.log_likelihood(seen)
        if improper.wrong is not None:
            wrong = (improper.wrong & (p > NEGLIGIBLE)).flatten(2).any(-1)  # [C, B]
            if bool(wrong.any()):
                c, b = wrong.nonzero()[0].tolist()
                raise DensityError(
                    f"{improper.message} at time {seen.time} of episode {seen.episode(b)} "
                    f"in context '{self.model.context_names[c]}'"
                )
            log_likelihood = torch.where(improper.wrong, -torch.inf, log_likelihood)
        posterior, increment = bayes(p, log_likelihood)
        if bool(increment.isnan().any()):
            ignored = log_likelihood.isnan() & (p <= NEGLIGIBLE)
            posterior, increment = bayes(p, torch.where(ignored, -torch.inf, log_likelihood))
        return posterior, increment

    @double_precision()
    def move(self, belief: DiscreteBelief, action: Tensor) -> DiscreteBelief:
        """The belief about the next state."""
        return DiscreteBelief(self.predict(belief.probabilities, action))

    @double_precision()
    def goes_on_at(self, states: Any, number: int) -> Tensor:
        """With what probability episodes do not end in N states that actions led to, `[C, A, N]`."""
        C, A = self.model.num_contexts, self.model.num_actions
        if not self.model.can_end:
            return torch.ones(C, A, number, dtype=torch.float64, device=self.model.device)
        actions = axes(torch.arange(A, device=self.model.device), self.plate_axes)
        chance = as_reward(self.model.ends(states, actions, self.context))
        return 1 - chance.expand(C, A, number, *[1] * self.plate_axes).reshape(C, A, number).double()

    def expected_reward(self, belief: DiscreteBelief, action: Tensor) -> Tensor:
        """`Σ_s p(s) r_c(s, a)`, `[C, B]`."""
        of_all = belief.probabilities @ self.rewards.mT  # [C, B, A]: quicker than to gather tables
        return of_all.gather(-1, action[None, :, None].expand(len(of_all), -1, 1)).squeeze(-1)

    def draw(self, belief: DiscreteBelief, num_draws: int) -> State:
        """Draw states by their probabilities, then places in their cells."""
        index = choose(belief.probabilities, num_draws)
        return self.at(index, self.places(index))

    def places(self, index: Tensor) -> Tensor:
        """Draw places in the cells `index [C, B, M]` uniformly, `[C, B, M, dim]`."""
        return torch.rand(*index.shape, self.dim, dtype=torch.float64, device=index.device)

    def at(self, index: Tensor, place: Tensor) -> State:
        """As `as_states`, in the types of the model."""
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
        """Smooth by the forward–backward recursion and backward sampling."""
        return forward_backward(self, episodes, num_trajectories, offset)


def bayes(prior: Tensor, log_likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior of `prior [C, B, N]` and a likelihood, and the log of the normaliser `[C, B]`.

    Where nothing is possible that is `-inf`, and the posterior is the prior: such a row must not spoil
    others, nor become NaN.
    """
    # Where the prior is zero the likelihood is of no account, however large or ill-defined.
    log_likelihood = torch.where(prior > 0, log_likelihood, -torch.inf)
    highest = log_likelihood.amax(-1, keepdim=True)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    joint = prior * (log_likelihood - highest).exp()
    normaliser = joint.sum(-1, keepdim=True)
    posterior = torch.where(normaliser > 0, joint / normaliser, prior)
    return posterior, (highest + normaliser.log()).squeeze(-1)


def by_action(function: Callable[[int, Tensor], Tensor], values: Tensor, action: Tensor) -> Tensor:
    """Apply a function of an action and of rows `[C, R, N]` to the rows of every action, `[C, B, N]`."""
    result = torch.empty_like(values)
    for a in action.unique().tolist():
        rows = (action == a).nonzero()[:, 0]
        result.index_copy_(1, rows, function(a, values[:, rows]))
    return result


def smoothed_at_once(recursion: DiscreteRecursion, horizon: int, num_trajectories: int) -> int:
    """Number of episodes for which what smoothing keeps of all times is within `MEMORY`."""
    C, N = recursion.initial.shape
    numbers = 3 * (horizon + 1) * C * (N + num_trajectories * (recursion.dim + 1))  # both ways, and stacked
    return how_many_fit(MEMORY, 8 * numbers)


class ImproperSites(Messenger):
    """Notes where the parameters of a program's sites make no sense, though a density comes out.

    A normal density says so by itself: it is NaN then.

    Attributes:
        wrong: Where that is, bool; broadcasts to `[context, episode, particle]`; None if nowhere.
        message: A description of the first such site.
    """

    def __init__(self, program: str, max_plate_nesting: int) -> None:
        super().__init__()
        self.program = program
        self.plate_axes = max_plate_nesting
        self.wrong: Tensor | None = None
        self.message = ""

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg) or isinstance(base_of(msg["fn"]), dist.Normal):
            return
        fn, depth = msg["fn"], ENGINE_AXES + self.plate_axes
        for parameter, value, proper in parameters_of(base_of(fn)):
            if bool(proper.all()):
                continue
            # Below an event, any wrong component will do; so will any value of a hidden site.
            event = max(0, proper.dim() - len(fn.batch_shape))
            wrong = (~proper).flatten(-event).any(-1) if event else ~proper
            mask = mask_of(msg)
            wrong = wrong & mask if isinstance(mask, Tensor) else wrong
            wrong = wrong.reshape((1,) * (depth - wrong.dim()) + wrong.shape)
            wrong = wrong.flatten(0, wrong.dim() - depth - 1).any(0) if wrong.dim() > depth else wrong
            wrong = wrong.flatten(ENGINE_AXES).any(-1) if self.plate_axes else wrong
            self.wrong = wrong if self.wrong is None else self.wrong | wrong
            self.message = self.message or fault(self.program, msg["name"], fn, parameter, value, proper)


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
    """Draw states at time t, `[C, B, M]`, for trajectories that are at `later [C, B, M]` at t + 1."""
    pieces = later.split(how_many_fit(PAIRS_AT_ONCE, p.numel()), 2)
    return torch.cat([choose(recursion.origins(p, action, piece), 1).squeeze(-1) for piece in pieces], 2)
