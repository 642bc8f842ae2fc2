"""A learner that knows nothing of CPOMDPs: sb3-contrib's recurrent PPO, trained through Gymnasium.

Needs the extra `rl`. It stands for any library that learns from Gymnasium environments: what is needed beside
`cpomdp_ppl.gym` are the two classes below, which say it in terms of the library.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.distributions as dist
import torch
import xarray as xr
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from baselines.learned import Learned, LearningInterrupted
from cpomdp_ppl.errors import require_count, require_model
from cpomdp_ppl.gym import CPOMDPVectorEnv, SpaceEncoding
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History
    from cpomdp_ppl.progress import Bar, Progress

SIDE_BY_SIDE = 64
"""Number of episodes that are played side by side."""

EPISODES_PER_UPDATE = 4
"""How many of each are played between updates."""


def fit(
    model: CPOMDP,
    num_episodes: int = 10_000,
    *,
    seed: int | None = 0,
    progress: Progress = True,
    **settings: Any,
) -> Learned:
    """Learn a policy by recurrent PPO.

    Updates see four episodes from start to end in each of 64 places, or as many steps as those of random
    actions have that end earlier. Rewards are discounted as the model says, and scaled to what a critic
    starts from. After an end, and after the horizon, nothing is to come. Continuous actions are drawn from a
    Gaussian on a scale where their box reaches from -1 to 1, and clipped there, as Stable-Baselines3 has it.
    The policy is learned for the model's prior over contexts, and ignores any other it is started with.

    Args:
        model: The CPOMDP.
        num_episodes: How many episodes to learn from; the last update is finished. Where none ends before the
            horizon, that rounds them up to a multiple of 256.
        seed: The same seed gives the same policy; None takes fresh entropy.
        progress: Whether to show a progress bar; or a function that is given a line of text now and then,
            about how far it has got and how long it will take.
        settings: Settings of `sb3_contrib.RecurrentPPO`, instead of ours.

    Raises:
        LearningInterrupted: On Ctrl-C; it carries what was learned so far.

    Examples:
        >>> from cpomdp_ppl import evaluate
        >>> from cpomdp_ppl.models import LineGrid
        >>> learned = fit(LineGrid(), 256, progress=False)
        >>> evaluate(LineGrid(), learned.policy, 50).returns.num_episodes
        50
    """
    require_model(model)
    total = require_count("num_episodes", num_episodes)
    length = _length(model)
    chosen = {
        "n_steps": EPISODES_PER_UPDATE * length,
        "batch_size": SIDE_BY_SIDE * length,
        "n_epochs": 5,
        "learning_rate": 1e-3,
        "gamma": float(model.discount),
        "ent_coef": 0.01,
        "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": []},
        "device": "cpu",
        **settings,
    }
    began, finished = time.perf_counter(), False
    with isolated(seed):
        episodes = EpisodesForSB3(model, SIDE_BY_SIDE)
        scaled = VecNormalize(episodes, norm_obs=False, clip_reward=math.inf, gamma=chosen["gamma"])
        learner = RecurrentPPO("MlpLstmPolicy", scaled, seed=seed, **chosen)
        with bar(progress, total, "recurrent PPO", "episodes") as shown, suppress(KeyboardInterrupt):

            def goes_on(steps: dict[str, Any], _: Any) -> bool:
                _show(shown, episodes)
                begun = steps["n_steps"] > 0  # to stop amid steps would lose an update
                return begun or len(episodes.returns) < total

            learner.learn(total * model.horizon, callback=goes_on)
            finished = True
    history = _history(episodes.returns)
    policy = RecurrentPPOPolicy(model, learner)
    learned = Learned(policy, history, time.perf_counter() - began, finished)
    if not finished:
        raise LearningInterrupted(learned)
    return learned


def _length(model: CPOMDP) -> int:
    """How many steps episodes of random actions have, rounded up: horizons may be far beyond the end."""
    if not model.can_end:
        return model.horizon
    episodes = simulate(model, RandomPolicy(model.actions), SIDE_BY_SIDE * EPISODES_PER_UPDATE, seed=0)
    return math.ceil(float(episodes.lengths.double().mean()))


def _show(bar: Bar, episodes: EpisodesForSB3) -> None:
    """Move a progress bar to where learning is."""
    played = len(episodes.returns)
    if played >= bar.n + SIDE_BY_SIDE:
        latest = sum(episodes.returns[-SIDE_BY_SIDE:]) / SIDE_BY_SIDE
        bar.set_postfix_str(f"return {latest:.2f}", refresh=False)
        bar.update(int(played - bar.n))


def _history(returns: list[float]) -> xr.Dataset:
    """Mean returns of every 64 episodes that were over one after the other."""
    rows = len(returns) // SIDE_BY_SIDE
    means = np.reshape(returns[: rows * SIDE_BY_SIDE], (rows, SIDE_BY_SIDE)).mean(1)
    played = SIDE_BY_SIDE * np.arange(1, rows + 1)
    return xr.Dataset({"training_return": ("episodes", means)}, {"episodes": played})


class EpisodesForSB3(VecEnv):
    """A batch of episodes in the form that Stable-Baselines3 wants, which is not Gymnasium's.

    Its continuous actions are from -1 to 1, as the library's Gaussian starts out about as wide.
    """

    def __init__(self, model: CPOMDP, num_envs: int) -> None:
        self.envs = CPOMDPVectorEnv(model, num_envs, flat=True, autoreset_mode="SameStep")
        self.box = model.box
        self.returns: list[float] = []  # of episodes, as they are over
        space = self.envs.single_action_space if self.box is None else spaces.Box(-1, 1, (self.box.dim,))
        super().__init__(num_envs, self.envs.single_observation_space, space)

    def reset(self) -> Any:
        """Begin all episodes, with the seed that was set last."""
        observations, _ = self.envs.reset(seed=self._seeds[0])
        self._reset_seeds()
        return observations

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        """Nothing happens until the results are asked for."""
        self._actions = actions if self.box is None else self.box.from_units(torch.as_tensor(actions))

    def step_wait(self) -> Any:
        """One step of all episodes; of those that are over with it, the first observations of new ones.

        The horizon is an end like any other: no time limit of the library's, after which there were more.
        """
        observations, rewards, over, _, info = self.envs.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for b in over.nonzero()[0]:
            infos[b]["terminal_observation"] = info["final_obs"][b]
            self.returns.append(float(info["final_info"]["return"][b]))
        return observations, rewards, over, infos

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same for every episode."""
        return [getattr(self.envs, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Single episodes have no attributes."""
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Single episodes have no methods."""
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """There are no wrappers around single episodes."""
        return [False] * self.num_envs

    def close(self) -> None:
        """Nothing is held open."""


class RecurrentPPOPolicy:
    """What was trained, as a `Policy`: its memory is the LSTM's."""

    def __init__(self, model: CPOMDP, learner: RecurrentPPO) -> None:
        self.encoding = SpaceEncoding(model, flat=True)
        self.box = model.box
        self.learner = learner
        self.network = learner.policy

    def start(self, prior: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden and cell states, `[layers, B, H]` each."""
        lstm = self.network.lstm_actor
        zeros = torch.zeros(lstm.num_layers, len(prior), lstm.hidden_size)
        return zeros, zeros

    def act(
        self, history: History, memory: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[Decision, tuple[torch.Tensor, torch.Tensor]]:
        """Read the latest percept, and decide; a continuous action is a draw, clipped."""
        observations = torch.as_tensor(self.encoding.encode(history.latest, history.time))  # [B, F]
        starts = torch.zeros(len(observations))  # `start` has cleared the memory already
        decision, memory = self.network.get_distribution(observations, memory, starts)
        if self.box is not None:
            return self.box.from_units(decision.sample()), memory
        return dist.Categorical(logits=decision.distribution.logits), memory
