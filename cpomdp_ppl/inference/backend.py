"""The common shape of likelihood backends: a recursion over time, folded over a batch or fed step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.actions import require_actions
from cpomdp_ppl.arrays import how_many_fit, pieces
from cpomdp_ppl.dataflow import dependencies
from cpomdp_ppl.errors import (
    DensityError,
    ModelError,
    ObservationError,
    UnsupportedModelError,
    require,
    require_count,
    require_model,
)
from cpomdp_ppl.inference.filtering import Filtering, Smoothing
from cpomdp_ppl.inference.observed import Observed, axes
from cpomdp_ppl.inference.scan import TimeBuffer, scan
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.signature import read_signature, signature
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.online import OnlineFilter
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature
    from cpomdp_ppl.state import State


@contextmanager
def inference_scope(model: CPOMDP, seed: int | None = None) -> Iterator[None]:
    """Where recursions run: seeded, without gradients or outer handlers, leaving no trace in the caller."""
    with isolated(seed), torch.no_grad(), poutine.block(), model.running():
        yield


class Recursion(ABC):
    """One backend at work on one model: how a belief changes in a step.

    A belief is a dataclass of tensors whose first axes are `[C, B]`. No method changes a belief that it is
    given. All are called inside `inference_scope`.

    Args:
        model: The model that it computes with.
        given: The model as the caller gave it, if `model` is a copy of it in another precision.
        signature: The model's signature, with dependencies, if it is known already.
    """

    def __init__(
        self, model: CPOMDP, given: CPOMDP | None = None, signature: Signature | None = None
    ) -> None:
        self.model = model
        self._given = model if given is None else given
        self.signature = read_with_dependencies(model) if signature is None else signature
        self.plate_axes = model.max_plate_nesting
        contexts = torch.arange(model.num_contexts, device=model.device)
        self.context = contexts.reshape(-1, 1, 1, *[1] * self.plate_axes)

    def in_own_types(self, state: Any) -> State:
        """A state in the types of the model as it was given."""
        cast: State = map_state(lambda leaf, own: leaf.to(own.dtype), state, self._own_types)
        return cast

    @cached_property
    def _own_types(self) -> Any:
        """A `Leaf` for every tensor of the state."""
        return signature(self._given).state

    @abstractmethod
    def start(self, num_episodes: int) -> Any:
        """The belief about `s_0`."""

    @abstractmethod
    def move(self, belief: Any, action: Tensor) -> Any:
        """The belief after actions `[B]`, before anything is observed."""

    @abstractmethod
    def condition(self, belief: Any, observed: Observed) -> tuple[Any, Tensor]:
        """Condition on what was observed, without moving. Returns the belief and the increment `[C, B]`."""

    def step(self, belief: Any, observed: Observed) -> tuple[Any, Tensor]:
        """Move by the action, then condition on what was observed. Returns belief and increment `[C, B]`."""
        assert observed.action is not None
        return self.condition(self.move(belief, observed.action), observed)

    @abstractmethod
    def expected_reward(self, belief: Any, action: Tensor) -> Tensor:
        """`E[r_c(s_t, a_t)]` under the belief, `[C, B]`."""

    @abstractmethod
    def moments(self, belief: Any) -> tuple[Any, Any]:
        """Mean and variance of the state, leaves `[C, B, …]`."""

    @abstractmethod
    def draw(self, belief: Any, num_draws: int) -> State:
        """States drawn independently from the belief, leaves `[C, B, M, …]` of the model's own types."""

    @abstractmethod
    def smooth(self, episodes: Episodes, num_trajectories: int, offset: int) -> Smoothing:
        """The states of a batch of episodes in hindsight; see `Backend.smooth`.

        Args:
            episodes: What was done and seen, in B episodes.
            num_trajectories: How many trajectories M to draw for every episode and context.
            offset: Number of the first of these episodes, for messages.
        """

    def ess(self, belief: Any) -> Tensor | None:
        """Effective sample size, `[C, B]`, of beliefs that have one."""
        return None

    def resampled(self, belief: Any, observed: Observed) -> Tensor | None:
        """Whether particles were resampled in the step, bool `[C, B]`, for beliefs that have them."""
        return None

    def probabilities(self, belief: Any) -> Tensor | None:
        """The probabilities of finitely many states, `[C, B, states]`, for beliefs that consist of them."""
        return None

    def standard_error(self, belief: Any) -> Tensor | None:
        """The standard error of the log-likelihood, `[C, B]`, if that is an estimate."""
        return None

    def reward(self, state: Any, action: Tensor, shape: tuple[int, ...], after: Any = None) -> Tensor:
        """`r_c(s, a)` at states `[C, B, N, …]`, broadcast to `shape = [C, B, N]`.

        For models that pay on arrival, `r_c(s, a, s')` with the next states `after`.

        Raises:
            ModelError: If the program returns anything else.
            UnsupportedModelError: If next states are needed, and not given.
        """
        arrival = (after,) if self.model.pays_on_arrival else ()
        if arrival == (None,):
            name = type(self.model).__name__
            raise UnsupportedModelError(f"{name} pays on arrival: its rewards need the next states, `after`")
        reward: Any = self.model.reward(state, axes(action, self.plate_axes), self.context, *arrival)
        full = (*shape, *[1] * self.plate_axes)
        found = f"a {type(reward).__name__}"
        if isinstance(reward, Tensor):
            values: Tensor = reward if reward.is_floating_point() else reward.to(torch.get_default_dtype())
            try:
                return values.expand(full).reshape(shape)
            except RuntimeError:
                found = f"shape {list(reward.shape)}"
        fault = f"reward: returns {found}, but expected a tensor that broadcasts to {list(full)}"
        raise ModelError(type(self.model).__name__, [fault])


def read_with_dependencies(model: CPOMDP) -> Signature:
    """The signature of a model, with how its observation sites depend on each other."""
    read = read_signature(model)
    return replace(read, dependencies=dependencies(model, read))


@dataclass(frozen=True)
class Backend(ABC):
    """A way to compute `log p(o | a, c)` for every context from a model's programs.

    Subclasses are small frozen dataclasses of settings.
    """

    name: ClassVar[str]
    draws: ClassVar[bool] = True
    """Whether `run` depends on its seed. A class that says it does not says so of itself alone."""

    @property
    def label(self) -> str:
        """What it is, in a few words."""
        return self.name

    @abstractmethod
    def recursion(self, model: CPOMDP) -> Recursion:
        """The backend at work on a model.

        Raises:
            UnsupportedModelError: If it cannot serve the model, saying why.
        """

    def episodes_at_once(self, model: CPOMDP, recursion: Recursion) -> int:
        """How many episodes fit in memory together."""
        return 1_000_000

    def episodes_smoothed_at_once(
        self, model: CPOMDP, recursion: Recursion, horizon: int, num_trajectories: int
    ) -> int:
        """How many episodes fit in memory together when they are smoothed."""
        return how_many_fit(self.episodes_at_once(model, recursion), num_trajectories + 1)

    def run(
        self, model: CPOMDP, episodes: Episodes, *, seed: int | None = None, moments: bool = True
    ) -> Filtering:
        """Filter a batch of episodes under every context.

        Args:
            model: The CPOMDP.
            episodes: What was done and seen; nothing else of them is looked at.
            seed: Seed of the random numbers, for backends that draw any.
            moments: Whether to compute filtered means and variances of the state, too.

        Raises:
            UnsupportedModelError: If this backend cannot serve the model.
            ObservationError: If the episodes are not of this model.
            DegenerateWeightsError: If no context can have produced an episode.
            DensityError: If a program left the reals.
        """
        return self._run(model, episodes, seed, moments, allow_lost=False)

    def attempt(
        self, model: CPOMDP, episodes: Episodes, *, seed: int | None = None, moments: bool = True
    ) -> Filtering:
        """As `Backend.run`, but an episode that no context can have produced is not an error.

        Its log-likelihoods are `-inf` under every context; see `Filtering.lost`.
        """
        return self._run(model, episodes, seed, moments, allow_lost=True)

    def _run(
        self, model: CPOMDP, episodes: Episodes, seed: int | None, moments: bool, allow_lost: bool
    ) -> Filtering:
        require_model(model)
        with inference_scope(model, seed):
            recursion = self.recursion(model)
            require_same_sites(model, recursion.signature, episodes)
            size = self.episodes_at_once(model, recursion)
            if size >= len(episodes):  # to slice them would be to check them again
                return fold(recursion, episodes, moments, offset=0, allow_lost=allow_lost)
            parts = pieces(len(episodes), size)
            return Filtering.concatenate(
                [fold(recursion, episodes[i], moments, i.start, allow_lost) for i in parts]
            )

    def smooth(
        self, model: CPOMDP, episodes: Episodes, num_trajectories: int = 100, *, seed: int | None = None
    ) -> Smoothing:
        """The states in hindsight: moments, and draws of whole trajectories, given all that was observed.

        Each episode is smoothed from its own end; past it, everything stays what it is there. For a context
        that cannot have produced an episode, an impossible observation is left out.

        Args:
            model: The CPOMDP.
            episodes: What was done and seen.
            num_trajectories: How many trajectories M to draw for every episode and context.
            seed: Seed of the random numbers.

        Raises:
            UnsupportedModelError: If this backend cannot serve the model.
            ObservationError: If the episodes are not of this model.
            DegenerateWeightsError: If no context can have produced an episode.
            DensityError: If a program left the reals.
        """
        require_model(model)
        require_count("num_trajectories", num_trajectories)
        with inference_scope(model, seed):
            recursion = self.recursion(model)
            require_same_sites(model, recursion.signature, episodes)
            size = self.episodes_smoothed_at_once(model, recursion, episodes.horizon, num_trajectories)
            parts = pieces(len(episodes), size)
            return Smoothing.concatenate(
                [recursion.smooth(episodes[i], num_trajectories, i.start) for i in parts]
            )

    def larger(self) -> Backend | None:
        """What may follow an episode that this one has lost; None if nothing of its kind can."""
        return None

    def online(
        self,
        model: CPOMDP,
        num_episodes: int = 1,
        *,
        prior: Sequence[float] | Tensor | None = None,
        seed: int | None = None,
    ) -> OnlineFilter:
        """The same filter, fed one step at a time; see `OnlineFilter`."""
        from cpomdp_ppl.inference.online import OnlineFilter

        return OnlineFilter(self, model, num_episodes, prior=prior, seed=seed)


def fold(
    recursion: Recursion, episodes: Episodes, moments: bool, offset: int, allow_lost: bool = False
) -> Filtering:
    """Run a recursion over a batch of episodes; some may be lost, if that is allowed."""
    T = episodes.horizon
    increments, rewards, ess, resampled = (TimeBuffer(T) for _ in range(4))
    means, variances = TimeBuffer(T + 1), TimeBuffer(T + 1)
    for step in scan(recursion, episodes, offset, allow_lost=allow_lost):
        observed, t = step.observed, step.observed.time
        if observed.action is None:
            initial_increment = step.increment
        else:
            reward = recursion.expected_reward(step.before, observed.action)
            rewards[t - 1] = reward if observed.alive is None else torch.where(observed.alive, reward, 0.0)
            increments[t - 1] = step.increment
            ess[t - 1] = recursion.ess(step.after)
            resampled[t - 1] = recursion.resampled(step.after, observed)
        if moments:
            means[t], variances[t] = recursion.moments(step.after)
    error = recursion.standard_error(step.after)
    result = Filtering(
        increments=increments.by_episode(),
        initial_increment=initial_increment.T,
        expected_reward=rewards.by_episode(),
        prior=recursion.model.prior(),
        state_mean=means.by_episode(),
        state_variance=variances.by_episode(),
        ess=ess.by_episode(),
        resampled=resampled.by_episode(),
        standard_error=None if error is None else error.T,
    )
    require_finite_result(recursion.model, result, offset)
    return result


def require_finite_result(model: CPOMDP, result: Filtering, offset: int = 0) -> None:
    """Nothing silently becomes NaN: a state or reward that left the reals is an error."""

    def place(b: int, t: int, c: int) -> str:
        return f"time {t} of episode {b + offset} in context '{model.context_names[c]}'"

    if result.state_mean is not None:
        require_real_moments(result.state_mean, result.state_variance, 3, place)
    require_real("reward: the expected reward", result.expected_reward, 3, place)


def require_real_moments(mean: Any, variance: Any, axes: int, place: Callable[..., str]) -> None:
    """Raise unless means are finite and variances numbers; the first `axes` of every leaf tell the place."""
    for name, leaf in leaves(mean):
        require_real(f"transition: '{name}'", leaf, axes, place)
    for name, leaf in leaves(variance):
        if bool(leaf.isnan().any()):
            require_real(f"transition: the variance of '{name}'", leaf, axes, place)


def require_real(what: str, values: Tensor, axes: int, place: Callable[..., str]) -> None:
    """Raise unless all values are finite; see `require_real_moments`."""
    if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
        where = (~torch.isfinite(values)).nonzero()[0, :axes].tolist()
        raise DensityError(f"{what} is not finite at {place(*where)}")


def require_same_sites(model: CPOMDP, signature: Signature, episodes: Episodes) -> None:
    """Raise unless the episodes can be the model's."""
    require(hasattr(episodes, "observations"), "episodes", episodes, "Episodes")
    sites = signature.observations

    def expect(condition: bool, expected: str, got: object) -> None:
        if not condition:
            raise ObservationError(f"episodes: expected {expected}, got {got}")

    found = sorted(episodes.observations)
    expect(found == sorted(sites), f"the sites {sorted(sites)}", found)
    for name, spec in sites.items():
        shape, flags = episodes.observations[name].shape[2:], episodes.observed[name].shape[2:]
        expect(shape == spec.shape, f"site '{name}' of shape {list(spec.shape)}", list(shape))
        expect(flags == spec.plates, f"flags of site '{name}' of shape {list(spec.plates)}", list(flags))
    first = episodes.initial_observations
    if model.initial_observation:
        expect(first is not None, "initial observations", None)
    else:
        expect(first is None, "no initial observations, as the model has none", "some")
    _require_actions_of(model, episodes)


def _require_actions_of(model: CPOMDP, episodes: Episodes) -> None:
    """Raise unless the model has the actions of the episodes, wherever they count."""
    actions, box = episodes.actions, model.box
    own = () if box is None else (box.dim,)
    if actions.shape[2:] != own or actions.is_floating_point() != (box is not None):
        found = f"{actions.dtype} of shape {list(actions.shape)}"
        kind = "whole numbers [B, T]" if box is None else f"real numbers [B, T, {box.dim}]"
        raise ObservationError(f"episodes: expected actions as {kind}, got {found}")
    if box is not None:
        require_actions("episodes.actions", actions, model, episodes.alive)
        return
    lowest, highest = (int(extreme) for extreme in actions.aminmax())
    if lowest < 0 or highest >= model.num_actions:
        raise ObservationError(
            f"episodes: expected actions 0 to {model.num_actions - 1}, got {lowest} to {highest}"
        )
