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

from cpomdp_ppl.actions import as_actions, require_actions
from cpomdp_ppl.arrays import as_array, as_indices
from cpomdp_ppl.errors import invalid, require, require_count, require_model
from cpomdp_ppl.ongoing import OngoingEpisodes
from cpomdp_ppl.signature import ENDED, signature
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpomdp_ppl.inference import Backend
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
    it was seen; `previous_action`, which is A before the first, or zeros if actions are continuous; and
    `time`, from 0 at the first step to 1 at the horizon. The site `ended` is left out. Values are
    `MultiBinary` where the program says that they are bits, `Discrete` (`MultiDiscrete`) and counted from 0
    where they are one of a few integers, and a `Box` otherwise. A single number has an axis of length 1,
    unless it is `Discrete`: many a library cannot do with less.

    If `flat`, all of this is one vector: the previous action, one-hot (or as numbers from -1 to 1, and
    whether there was none); the time; and for each site the flags and the values, one-hot where they are
    `Discrete`, and zero throughout where nothing was seen.

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
        self.box = model.box
        self.width = model.num_actions if self.box is None else self.box.dim
        self.horizon = model.horizon
        self.flat = flat
        self.sites = {name: site for name, site in signature(model).observations.items() if name != ENDED}
        self.space: spaces.Space[Any] = self._vector_space() if flat else self._dict_space()

    def encode(self, percept: Percept, time: int | Array) -> Observation:
        """Encode what B agents learned in the step that led to `time`, one or `[B]`; B is the first axis."""
        flags = {name: numpy_copy(seen) for name, seen in percept.observed.items()}
        values = {name: numpy_copy(percept.observations[name]) for name in self.sites}
        B = len(next(iter(flags.values())))
        times = np.broadcast_to(time, B)
        action = self._previous(percept, times)
        at = (times[:, None] / self.horizon).astype(np.float32)
        if self.flat:
            return self._vector(action, times, at, flags, values)
        encoded = {"previous_action": action, "time": at}
        for name, site in self.sites.items():
            encoded[name] = _value(site, values[name], flags[name])
            encoded[f"{name}_seen"] = flags[name].reshape(B, *(site.plates or (1,))).astype(np.int8)
        return encoded

    def _previous(self, percept: Percept, times: Array) -> Array:
        """The previous actions, `[B]` or `[B, D]`, with something in their place before the first."""
        none = np.zeros((len(times), self.width)) if self.box else np.full(len(times), self.width)
        action = none if percept.action is None else numpy_copy(percept.action)
        before = (times == 0).reshape(-1, *[1] * (action.ndim - 1))
        return np.where(before, none, action).astype(np.float32 if self.box else np.int64)

    def _dict_space(self) -> spaces.Dict:
        previous: spaces.Space[Any] = spaces.Discrete(self.width + 1)
        if self.box is not None:
            low, high = (np.asarray(bound, np.float32) for bound in (self.box.low, self.box.high))
            previous = spaces.Box(np.minimum(low, 0), np.maximum(high, 0), dtype=np.float32)
        parts: dict[str, spaces.Space[Any]] = {
            "previous_action": previous,
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
        least = np.concatenate([np.full(self.width, -1.0 if self.box else 0.0), np.zeros(2)])
        low, high = [least], [np.ones(self.width + 2)]
        for site in self.sites.values():
            width, bounded = _width(site), site.classes is not None
            low += [np.zeros(site.plates.numel()), np.full(width, 0.0 if bounded else -LARGEST)]
            high += [np.ones(site.plates.numel()), np.full(width, 1.0 if bounded else LARGEST)]
        low_, high_ = (np.concatenate(bounds).astype(np.float32) for bounds in (low, high))
        return spaces.Box(low_, high_, dtype=np.float32)

    def _vector(
        self,
        action: Array,
        times: Array,
        at: Array,
        flags: Mapping[str, Array],
        values: Mapping[str, Array],
    ) -> Array:
        B = len(at)
        parts = [*self._numbers(action, times), at]
        for name, site in self.sites.items():
            value, seen = _value(site, values[name], flags[name]), flags[name]
            if _is_index(site):
                _, n = site.classes or (0, 0)
                one_hot = np.eye(n, dtype=np.float32)[value]  # [B, …, n]
                value = one_hot * seen.reshape(seen.shape + (1,) * (one_hot.ndim - seen.ndim))
            parts += [seen.reshape(B, -1), value.reshape(B, -1)]
        return np.concatenate(parts, 1, dtype=np.float32)

    def _numbers(self, action: Array, times: Array) -> list[Array]:
        """The previous actions as parts of a vector, `[B, …]`."""
        if self.box is None:
            return [np.eye(self.width + 1, dtype=np.float32)[action]]
        low, high = np.array(self.box.low), np.array(self.box.high)
        none = (times == 0)[:, None]
        return [np.where(none, 0.0, ((2 * action - low - high) / (high - low)).clip(-1, 1)), none]


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


class CPOMDPEnv(gymnasium.Env[Any, Any]):
    """One episode of a CPOMDP at a time, as a Gymnasium environment.

    An observation holds all that an agent learns in a step, and nothing that it may not know; see
    `SpaceEncoding`. It does not hold earlier steps, so that a policy needs a memory, or observations that are
    stacked. An episode terminates where the model ends it, or at the horizon, and is never truncated: the
    horizon is part of the problem, and there is nothing to be earned beyond it. Rewards are as the model has
    them: whoever learns from them sees to the `discount`. `info` is for analysis, not for agents: the true
    `context` (an index), `context_name`, `state` (an array, or a dict of arrays), whether the model has
    `ended` the episode (and not the horizon), the `return` so far, as it is worth at the start, the
    `discount` of the model, and with a `likelihood` the `posterior` of the context given what was seen,
    `[C]`.

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
        self.action_space = _action_space(model)
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
        return self._observation(), _first(_info(self._episodes))

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take an action, by index or name, or as D numbers.

        Returns:
            The observation, the reward of this step, whether it was the last one, False, and `info`.

        Raises:
            ValueError: If there is no such action.
            ResetNeeded: If there is no episode, or it is over.
        """
        actions = _actions("action", action, self.model, ())
        _require_ongoing(self._episodes)
        (reward,) = numpy_copy(self._episodes.step(self.np_random, actions[None]))
        over = bool(self._episodes.over)
        return self._observation(), float(reward), over, False, _first(_info(self._episodes))

    def _observation(self) -> Observation:
        encoded = _encoded(self.encoding, self._episodes)
        # A `Discrete` is a scalar here, unlike the arrays of `info`.
        return {name: part[0] for name, part in encoded.items()} if isinstance(encoded, dict) else encoded[0]


class CPOMDPVectorEnv(VectorEnv[Any, Any, Array]):
    """Many episodes of a CPOMDP at a time, each program called once for all of them.

    As `CPOMDPEnv`, for a batch: everything has `num_envs` for its first axis, also in `info`, which has
    Gymnasium's masks (`_context` for `context`) as well. What happens when an episode is over is the
    autoreset mode, with Gymnasium's meaning: the next call of `step` begins a new one in its place, whatever
    the action; or the same call does, and has the last observation in `info["final_obs"]`, the last `info` in
    `info["final_info"]`; or it is left to the caller. The contexts of new episodes are drawn from the prior.

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
        self.single_action_space = _action_space(model)
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
            options: `{"context": …}`, one for all or for each `[num_envs]`, by index or name; and
                `{"reset_mask": …}`, bool `[num_envs]`, for only some of them to begin anew.
        """
        super().reset(seed=seed)
        B, given = self.num_envs, dict(options or {})
        begun = _mask(given.pop("reset_mask", None), B)
        contexts = _contexts(self.model, given, B)
        ready = self._episodes.begun or bool(begun.all())
        require(ready, "options['reset_mask']", begun.tolist(), "a reset of all episodes first")
        rows = begun.nonzero().squeeze(1).to(self.model.device)
        self._episodes.start(self.np_random, None if contexts is None else contexts[rows], rows)
        return self._observations(), _masked(_info(self._episodes), numpy_copy(begun))

    def step(self, actions: Any) -> tuple[Observation, Array, Array, Array, dict[str, Any]]:
        """Take an action in each episode, by index or name, `[num_envs]`, or as `[num_envs, D]`.

        Returns:
            Observations, rewards, whether each is over, whether each was truncated (none is), and `info`.

        Raises:
            ValueError: If there is no such action.
            ResetNeeded: If there are no episodes, or they are over and not begun anew.
        """
        B, episodes = self.num_envs, self._episodes
        taken = _actions("actions", actions, self.model, (B,))
        anew = episodes.over & (self.autoreset_mode is AutoresetMode.NEXT_STEP)
        _require_ongoing(episodes, ~anew)
        rewards = np.zeros(B)
        if not bool(anew.all()):
            going_on = (~anew).nonzero().squeeze(1)
            rewards = numpy_copy(episodes.step(self.np_random, taken, going_on))
        if bool(anew.any()):
            episodes.start(self.np_random, rows=anew.nonzero().squeeze(1))
        over, last = episodes.over, {}
        done = numpy_copy(over)
        if self.autoreset_mode is AutoresetMode.SAME_STEP and done.any():
            final = self._one_by_one(self._observations(), done)
            last = {"final_obs": final, "final_info": _masked(_info(episodes), done)}
            last |= {f"_{key}": done.copy() for key in last}
            episodes.start(self.np_random, rows=over.nonzero().squeeze(1))
        info = _masked(_info(episodes), np.ones(B, np.bool_)) | last
        return self._observations(), rewards, done, np.zeros(B, np.bool_), info

    def _observations(self) -> Observation:
        return _encoded(self.encoding, self._episodes)

    def _one_by_one(self, observations: Observation, done: Array) -> Array:
        """One observation for each episode that is over, `[B]`, in Gymnasium's form for final ones."""
        each = np.full(self.num_envs, None, object)
        for b in done.nonzero()[0]:
            if isinstance(observations, dict):
                each[b] = {name: part[b] for name, part in observations.items()}
            else:
                each[b] = observations[b]
        return each


def _action_space(model: CPOMDP) -> spaces.Space[Any]:
    """Where one action lies."""
    box = model.box
    if box is None:
        return spaces.Discrete(model.num_actions)
    low, high = (numpy_copy(bound) for bound in box.bounds(torch.zeros(())))
    return spaces.Box(low, high, dtype=low.dtype.type)


def _encoded(encoding: SpaceEncoding, episodes: OngoingEpisodes) -> Observation:
    """What B episodes have seen last, each at its own time."""
    return encoding.encode(episodes.percept, numpy_copy(episodes.time))


def _require_ongoing(episodes: OngoingEpisodes, which: Tensor | None = None) -> None:
    """Raise unless episodes have begun and, of those that count, bool `[B]`, none is over."""
    over = episodes.over if which is None else episodes.over & which
    if not episodes.begun or bool(over.any()):
        steps = f"the episode is over after {int(episodes.time[over][0])} steps; " if episodes.begun else ""
        raise ResetNeeded(f"{steps}call reset() before step()")


def _info(episodes: OngoingEpisodes) -> dict[str, Any]:
    """The truth, and the posterior of a filter if there is one, all with B as the first axis."""
    contexts, posterior = numpy_copy(episodes.contexts), episodes.posterior
    info = {
        "context": contexts,
        "context_name": np.array(episodes.model.context_names, object)[contexts],
        "state": map_state(numpy_copy, episodes.state),
        "ended": numpy_copy(episodes.ended),
        "return": numpy_copy(episodes.returns),
        "discount": np.full(len(contexts), float(episodes.model.discount)),
    }
    return info if posterior is None else info | {"posterior": numpy_copy(posterior)}


def _first(info: dict[str, Any]) -> dict[str, Any]:
    """What is known about the only episode, out of a batch of one."""
    one: dict[str, Any] = map_state(lambda array: array[0, ...], info)
    kinds = {"context": int, "context_name": str, "ended": bool, "return": float, "discount": float}
    return one | {name: kind(one[name]) for name, kind in kinds.items()}


def _masked(info: Mapping[str, Any], which: Array) -> dict[str, Any]:
    """Gymnasium's form for a batch: entries of some episodes, bool `[B]`, and masks that say which."""
    masked: dict[str, Any] = {}
    for name, entry in info.items():
        if isinstance(entry, Mapping):
            masked[name] = _masked(entry, which)
        else:
            masked[name] = entry.copy()
            masked[name][~which] = None if entry.dtype == object else 0
        masked[f"_{name}"] = which.copy()
    return masked


def _mask(mask: Any, B: int) -> Tensor:
    """Which episodes a reset asks for, bool `[B]`: all, if it does not say."""
    if mask is None:
        return torch.ones(B, dtype=torch.bool)
    flags = as_array("options['reset_mask']", mask)
    proper = flags.shape == (B,) and flags.dtype == np.bool_ and bool(flags.any())
    require(proper, "options['reset_mask']", mask, f"booleans of shape [{B}], at least one of them true")
    return torch.from_numpy(flags)


def _actions(argument: str, value: Any, model: CPOMDP, shape: tuple[int, ...]) -> Tensor:
    """Actions `[*shape]`, out of indices or names, or `[*shape, D]`."""
    if model.box is None:
        return _indices(argument, value, model.action_names, shape)
    actions = as_actions(argument, value, model)
    expected = (*shape, model.box.dim)
    require(actions.shape == expected, argument, value, f"numbers of shape {list(expected)}")
    require_actions(argument, actions, model)
    return actions


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
