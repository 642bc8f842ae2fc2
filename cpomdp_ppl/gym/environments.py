"""A CPOMDP as a Gymnasium environment: one episode at a time, or a batch of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from cpomdp_ppl.arrays import as_indices
from cpomdp_ppl.errors import invalid, require, require_count
from cpomdp_ppl.gym.encoding import Array, Observation, SpaceEncoding
from cpomdp_ppl.gym.ongoing import OngoingEpisodes
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpomdp_ppl.inference import Backend
    from cpomdp_ppl.model import CPOMDP


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
