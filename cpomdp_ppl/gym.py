"""A CPOMDP as a Gymnasium environment: one episode at a time, or a batch of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from cpomdp_ppl.arrays import as_indices
from cpomdp_ppl.errors import ModelError, invalid, require, require_count, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rollout import blind
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpomdp_ppl.inference import Backend, OnlineFilter
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept
    from cpomdp_ppl.signature import ObservationSite

__all__ = ["CPOMDPEnv", "CPOMDPVectorEnv", "SpaceEncoding"]


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Observation: TypeAlias = Array | dict[str, Any]
"""A vector if `flat`, or arrays by name."""

LARGEST = float(np.finfo(np.float32).max)
"""The bound of values that have none: Gymnasium takes an infinite one for a mistake."""


class SpaceEncoding:
    """What an agent learns in a step, and nothing else, as an element of a Gymnasium space.

    By name, for every observation site its value (zero where it was not seen), and as `<site>_seen` whether
    it was seen; `previous_action`, which is A before the first; and `time`, from 0 at the first step to 1
    at the end. Values are `MultiBinary` where the program says that they are bits, `Discrete`
    (`MultiDiscrete`) and counted from 0 where they are one of a few integers, and a `Box` otherwise. A single
    number has an axis of length 1, unless it is `Discrete`: many a library cannot do with less.

    If `flat`, all of this is one vector: the previous action, one-hot; the time; and for each site the flags
    and the values, one-hot where they are `Discrete`, and zero throughout where nothing was seen.

    Args:
        model: The model whose percepts are encoded.
        flat: Whether to make a single vector of it.

    Attributes:
        space: Where the observation of one episode lies.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> sorted(SpaceEncoding(LineGrid()).space)
        ['previous_action', 'side', 'side_seen', 'time']
        >>> SpaceEncoding(LineGrid(), flat=True).space.shape
        (7,)
    """

    def __init__(self, model: CPOMDP, *, flat: bool = False) -> None:
        require_model(model)
        self.num_actions = model.num_actions
        self.horizon = model.horizon
        self.flat = flat
        self.sites = dict(signature(model).observations)
        self.space: spaces.Space[Any] = self._vector_space() if flat else self._dict_space()

    def encode(self, percept: Percept, time: int) -> Observation:
        """Encode what B agents learned in the step that led to `time`, with B as the first axis."""
        flags = {name: numpy_copy(percept.observed[name]) for name in self.sites}
        values = {name: numpy_copy(percept.observations[name]) for name in self.sites}
        B = len(next(iter(flags.values())))
        action = np.full(B, self.num_actions) if percept.action is None else numpy_copy(percept.action)
        at = np.full((B, 1), time / self.horizon, np.float32)
        if self.flat:
            return self._vector(action, at, flags, values)
        encoded = {"previous_action": action, "time": at}
        for name, site in self.sites.items():
            encoded[name] = _value(site, values[name], flags[name])
            encoded[f"{name}_seen"] = flags[name].reshape(B, *(site.plates or (1,))).astype(np.int8)
        return encoded

    def _dict_space(self) -> spaces.Dict:
        parts: dict[str, spaces.Space[Any]] = {
            "previous_action": spaces.Discrete(self.num_actions + 1),
            "time": spaces.Box(0.0, 1.0, (1,), np.float32),
        }
        for name, site in self.sites.items():
            both = {name: _value_space(site), f"{name}_seen": spaces.MultiBinary(site.plates or (1,))}
            taken = sorted(both.keys() & parts.keys())
            found = f"an observation site that makes {taken}"
            require(not taken, "model", found, "sites of other names, or flat=True")
            parts |= both
        return spaces.Dict(parts)

    def _vector_space(self) -> spaces.Box:
        low, high = [np.zeros(self.num_actions + 2)], [np.ones(self.num_actions + 2)]
        for site in self.sites.values():
            width, bounded = _width(site), site.classes is not None
            low += [np.zeros(site.plates.numel()), np.full(width, 0.0 if bounded else -LARGEST)]
            high += [np.ones(site.plates.numel()), np.full(width, 1.0 if bounded else LARGEST)]
        low_, high_ = (np.concatenate(bounds).astype(np.float32) for bounds in (low, high))
        return spaces.Box(low_, high_, dtype=np.float32)

    def _vector(
        self, action: Array, at: Array, flags: Mapping[str, Array], values: Mapping[str, Array]
    ) -> Array:
        B = len(at)
        parts = [np.eye(self.num_actions + 1, dtype=np.float32)[action], at]
        for name, site in self.sites.items():
            value, seen = _value(site, values[name], flags[name]), flags[name]
            if _is_index(site):
                _, n = site.classes or (0, 0)
                one_hot = np.eye(n, dtype=np.float32)[value]  # [B, …, n]
                value = one_hot * seen.reshape(seen.shape + (1,) * (one_hot.ndim - seen.ndim))
            parts += [seen.reshape(B, -1), value.reshape(B, -1)]
        return np.concatenate(parts, 1, dtype=np.float32)


def _is_index(site: ObservationSite) -> bool:
    """Whether values are one of a few integers; bits are numbers already."""
    return site.classes not in (None, (0, 2))


def _width(site: ObservationSite) -> int:
    _, n = site.classes or (0, 1)
    return site.shape.numel() * (n if _is_index(site) else 1)


def _value_space(site: ObservationSite) -> spaces.Space[Any]:
    classes = site.classes
    if classes is None:
        return spaces.Box(-LARGEST, LARGEST, site.shape or (1,), np.float32)
    if not _is_index(site):
        return spaces.MultiBinary(site.shape or (1,))
    return (
        spaces.MultiDiscrete(np.full(site.shape, classes[1])) if site.shape else spaces.Discrete(classes[1])
    )


def _value(site: ObservationSite, value: Array, seen: Array) -> Array:
    """Values `[B, …]` as elements of the site's space."""
    classes = site.classes
    shape = (len(value), *(site.shape or (1,)))
    if classes is None:  # float64 may lie beyond float32
        return np.clip(value, -LARGEST, LARGEST).astype(np.float32).reshape(shape)
    if not _is_index(site):
        return value.astype(np.int8).reshape(shape)
    from_zero = value.astype(np.int64) - classes[0]
    return np.where(seen.reshape(seen.shape + (1,) * (value.ndim - seen.ndim)), from_zero, 0)


def numpy_copy(tensor: Tensor) -> Array:
    """A copy: what is handed out must not change with a program's tensors, nor they with it."""
    return tensor.detach().cpu().numpy().copy()


class OngoingEpisodes:
    """B episodes that have begun, and wait for actions."""

    def __init__(
        self,
        model: CPOMDP,
        num_episodes: int,
        prior: Sequence[float] | Tensor | None,
        likelihood: str | Backend | None,
    ) -> None:
        require_model(model)
        self.model = model
        self.B = num_episodes
        with inference_scope(model, 0):
            self._programs = Generative(model)
        self._given = None if prior is None else as_prior(prior, model.num_contexts, self.B)
        self._backend = None if likelihood is None else backend_for(model, likelihood)
        self._filter: OnlineFilter | None = None
        self.time: int | None = None  # before the first episode
        # A trial, so that what is wrong with the model, or with the filter for it, shows here.
        self.start(np.random.default_rng(0), None)
        self.time = None

    def start(self, generator: np.random.Generator, contexts: Tensor | None) -> None:
        """Begin all episodes, in the given contexts `[B]` or in those that are drawn."""
        model, B = self.model, self.B
        seed, filter_seed = (int(n) for n in generator.integers(2**32, size=2))  # with a filter and without
        with inference_scope(model, seed):
            prior = as_prior(model.prior(), model.num_contexts, B) if self._given is None else self._given
            if contexts is None:
                contexts = torch.multinomial(prior.expand(B, -1), 1).squeeze(1)
            contexts = contexts.to(model.device)
            state = self._programs.initial(contexts)
            percept = blind(self._programs.signature, B, model.device)
            if model.initial_observation:
                percept = self._programs.observe(state, contexts)
        self._require_finite(0, initial=state, observation=percept.observations)
        self.contexts, self.state, self.percept, self.time = contexts, state, percept, 0
        if self._backend is not None:
            self._filter = self._backend.online(model, B, prior=prior, seed=filter_seed)
            if model.initial_observation:
                self._filter.observe(None, percept.observations, percept.observed)

    def step(self, generator: np.random.Generator, actions: Tensor) -> Array:
        """Take actions `[B]`; returns the rewards, float64 `[B]`."""
        if self.time is None or self.time >= self.model.horizon:
            over = "" if self.time is None else f"the episode is over after {self.time} steps; "
            raise ResetNeeded(f"{over}call reset() before step()")
        with inference_scope(self.model, int(generator.integers(2**32))):
            step = self._programs.step(self.state, actions.to(self.model.device), self.contexts)
        self._require_finite(self.time, reward={"reward": step.reward})
        self._require_finite(self.time + 1, transition=step.state, observation=step.percept.observations)
        if self._filter is not None:
            self._filter.observe(step.percept.action, step.percept.observations, step.percept.observed)
        self.state, self.percept, self.time = step.state, step.percept, self.time + 1
        return numpy_copy(step.reward.double())

    @property
    def over(self) -> bool:
        """Whether the episodes, which are all of the same length, have ended."""
        return self.time == self.model.horizon

    def info(self) -> dict[str, Any]:
        """The truth, and the posterior of a filter if there is one, all with B as the first axis."""
        contexts = numpy_copy(self.contexts)
        info = {
            "context": contexts,
            "context_name": np.array(self.model.context_names, object)[contexts],
            "state": map_state(numpy_copy, self.state),
        }
        if self._filter is not None:
            info["posterior"] = numpy_copy(self._filter.posterior)  # [B, C]
        return info

    def _require_finite(self, time: int, **produced: Any) -> None:
        """Raise if a program produced a number that is not finite."""
        faults = [
            f"{program}: '{name}' is not finite at time {time}"
            for program, tensors in produced.items()
            for name, tensor in leaves(tensors)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
        ]
        if faults:
            raise ModelError(type(self.model).__name__, faults)


class CPOMDPEnv(gymnasium.Env[Any, Any]):
    """One episode of a CPOMDP at a time, as a Gymnasium environment.

    An observation holds all that an agent learns in a step, and nothing that it may not know; see
    `SpaceEncoding`. It does not hold earlier steps, so that a policy needs a memory, or observations that are
    stacked. An episode terminates at the model's horizon, and is never truncated: the end is part of the
    problem, and there is nothing to be earned beyond it. `info` is for analysis, not for agents: the true
    `context` (an index), `context_name`, `state` (an array, or a dict of arrays), and with a `likelihood`
    the `posterior` of the context given what was seen, `[C]`.

    The same seed and the same actions give the same episode, with a filter and without. The caller's random
    number generators, param store and validation flags stay as they were.

    Args:
        model: The CPOMDP.
        prior: Prior over contexts, `[C]`; the model's if left out.
        likelihood: Filter that keeps track of the context: a backend or its name; left out, there is none.
        flat: Whether observations are a single vector, for policies that are plain networks.
        seed: Seed of the episodes until `reset` is given another; left out, fresh entropy is taken.

    Attributes:
        encoding: How percepts become observations, to put to work elsewhere what was trained here.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> env = CPOMDPEnv(LineGrid(), likelihood="exact")
        >>> observation, info = env.reset(seed=0, options={"context": "detector left"})
        >>> observation, reward, terminated, truncated, info = env.step("sense")
        >>> observation["side_seen"], observation["previous_action"], reward
        (array([1], dtype=int8), np.int64(2), 0.0)
        >>> info["context_name"], info["posterior"].round(2)
        ('detector left', array([0.15, 0.85]))
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self,
        model: CPOMDP,
        *,
        prior: Sequence[float] | Tensor | None = None,
        likelihood: str | Backend | None = None,
        flat: bool = False,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.encoding = SpaceEncoding(model, flat=flat)
        self.action_space = spaces.Discrete(model.num_actions)
        self.observation_space = self.encoding.space
        self._episodes = OngoingEpisodes(model, 1, prior, likelihood)
        self._np_random, self._np_random_seed = seeding.np_random(seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Seed of this episode and those that follow; left out, random numbers go on.
            options: `{"context": …}`, by index or name, in place of one drawn from the prior.
        """
        super().reset(seed=seed)
        contexts = _contexts(self.model, options, 1)
        self._episodes.start(self.np_random, contexts)
        return self._observation(), _first(self._episodes.info())

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take an action, by index or name.

        Returns:
            The observation, the reward `r_c(s_t, a_t)`, whether this was the last step, False, and `info`.

        Raises:
            ValueError: If there is no such action.
            ResetNeeded: If there is no episode, or it is over.
        """
        actions = _indices("action", action, self.model.action_names, ())
        (reward,) = self._episodes.step(self.np_random, actions.reshape(1))
        return self._observation(), float(reward), self._episodes.over, False, _first(self._episodes.info())

    def _observation(self) -> Observation:
        encoded = self.encoding.encode(self._episodes.percept, self._episodes.time or 0)
        # A `Discrete` is a scalar here, unlike the arrays of `info`.
        return {name: part[0] for name, part in encoded.items()} if isinstance(encoded, dict) else encoded[0]


class CPOMDPVectorEnv(VectorEnv[Any, Any, Array]):
    """Many episodes of a CPOMDP at a time, each program called once for all of them.

    As `CPOMDPEnv`, for a batch: everything has `num_envs` for its first axis, also in `info`, which has
    Gymnasium's masks (`_context` for `context`) as well. Episodes all end together. What happens then is
    the autoreset mode, with Gymnasium's meaning: the next call of `step` begins new episodes, whatever the
    actions; or the same call does, and has the last observations in `info["final_obs"]`, the last
    `info` in `info["final_info"]`; or it is left to the caller. The contexts of new episodes are drawn from
    the prior.

    Args:
        model: The CPOMDP.
        num_envs: How many episodes.
        prior: Prior over contexts, `[C]`, or for each episode `[num_envs, C]`; the model's if left out.
        likelihood: Filter that keeps track of the contexts: a backend or its name; left out, there is none.
        flat: Whether an observation is a single vector.
        seed: Seed of the episodes until `reset` is given another; left out, fresh entropy is taken.
        autoreset_mode: What happens at the end of episodes.

    Attributes:
        encoding: How percepts become observations.

    Examples:
        >>> from cpomdp_ppl.models import LightDark
        >>> envs = CPOMDPVectorEnv(LightDark(), 64, flat=True)
        >>> observations, infos = envs.reset(seed=0)
        >>> observations, rewards, terminated, truncated, infos = envs.step(np.full(64, 2))
        >>> observations.shape, rewards.shape
        ((64, 7), (64,))
    """

    def __init__(
        self,
        model: CPOMDP,
        num_envs: int,
        *,
        prior: Sequence[float] | Tensor | None = None,
        likelihood: str | Backend | None = None,
        flat: bool = False,
        seed: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.model = model
        self.num_envs = require_count("num_envs", num_envs)
        self.encoding = SpaceEncoding(model, flat=flat)
        self.single_action_space = spaces.Discrete(model.num_actions)
        self.single_observation_space = self.encoding.space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.autoreset_mode = _mode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self._episodes = OngoingEpisodes(model, self.num_envs, prior, likelihood)
        self._np_random, self._np_random_seed = seeding.np_random(seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin new episodes.

        Args:
            seed: Seed of these episodes and those that follow; left out, random numbers go on.
            options: `{"context": …}`, one for all or for each `[num_envs]`, by index or name.
        """
        super().reset(seed=seed)
        contexts = _contexts(self.model, options, self.num_envs)
        self._episodes.start(self.np_random, contexts)
        return self._observations(), _masked(self._episodes.info(), self.num_envs)

    def step(self, actions: Any) -> tuple[Observation, Array, Array, Array, dict[str, Any]]:
        """Take an action in each episode, by index or name, `[num_envs]`.

        Returns:
            Observations, rewards, whether each has ended, whether each was truncated (none is), and `info`.

        Raises:
            ValueError: If there is no such action.
            ResetNeeded: If there are no episodes, or they are over and not begun anew.
        """
        B = self.num_envs
        taken = _indices("actions", actions, self.model.action_names, (B,))
        never = np.zeros(B, np.bool_)
        if self._episodes.over and self.autoreset_mode is AutoresetMode.NEXT_STEP:
            observations, info = self.reset()
            return observations, np.zeros(B), never, never.copy(), info
        rewards = self._episodes.step(self.np_random, taken)
        terminated = np.full(B, self._episodes.over)
        observations, info = self._observations(), _masked(self._episodes.info(), B)
        if self._episodes.over and self.autoreset_mode is AutoresetMode.SAME_STEP:
            last: dict[str, Any] = {"final_obs": self._one_by_one(observations), "final_info": info}
            observations, info = self.reset()
            info |= last | {f"_{key}": np.ones(B, np.bool_) for key in last}
        return observations, rewards, terminated, never, info

    def _observations(self) -> Observation:
        return self.encoding.encode(self._episodes.percept, self._episodes.time or 0)

    def _one_by_one(self, observations: Observation) -> Array:
        """One observation for each episode, `[B]`, the form that Gymnasium gives to final observations."""
        each = np.empty(self.num_envs, object)
        for b in range(self.num_envs):
            if isinstance(observations, dict):
                each[b] = {name: part[b] for name, part in observations.items()}
            else:
                each[b] = observations[b]
        return each


def _first(info: dict[str, Any]) -> dict[str, Any]:
    """What is known about the only episode, out of a batch of one."""
    one: dict[str, Any] = map_state(lambda array: array[0, ...], info)
    return one | {"context": int(one["context"]), "context_name": str(one["context_name"])}


def _masked(info: dict[str, Any], B: int) -> dict[str, Any]:
    """Gymnasium's form for a batch: beside each entry, which episodes have it; here, all."""
    masks = {f"_{key}": np.ones(B, np.bool_) for key in info}
    return {k: _masked(v, B) if isinstance(v, Mapping) else v for k, v in info.items()} | masks  # type: ignore[arg-type]


def _contexts(model: CPOMDP, options: Mapping[str, Any] | None, B: int) -> Tensor | None:
    """The contexts that the options of a reset ask for, `[B]`; None if they do not."""
    options = {} if options is None else options
    unknown = sorted(map(str, options.keys() - {"context"}))
    require(not unknown, "options", unknown, "nothing but 'context'")
    if options.get("context") is None:
        return None
    names, argument = model.context_names, "options['context']"
    given = as_indices(argument, options["context"], names)
    return _indices(argument, options["context"], names, (B,) if given.dim() else ()).expand(B)


def _indices(argument: str, value: Any, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    """Indices out of names, as an int64 tensor of the given shape."""
    indices = as_indices(argument, value, names)
    among = f"0 to {len(names) - 1} ({', '.join(names)})"
    expected = f"{among}, of shape {list(shape)}" if shape else among
    inside = indices.shape == shape and bool(((indices >= 0) & (indices < len(names))).all())
    require(inside, argument, value, expected)
    return indices


def _mode(mode: AutoresetMode | str) -> AutoresetMode:
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        raise invalid("autoreset_mode", mode, f"one of {[m.value for m in AutoresetMode]}") from error
