"""A learner that knows nothing of CPOMDPs: sb3-contrib's recurrent PPO, trained through Gymnasium.

Needs the extra `rl`. It stands for any library that learns from Gymnasium environments: what is needed beside
`cpomdp_ppl.gym` are the two classes below, which say it in the library's own terms.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
import xarray as xr
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from baselines.learned import Learned
from cpomdp_ppl.errors import require_count, require_model
from cpomdp_ppl.gym import CPOMDPVectorEnv, SpaceEncoding
from cpomdp_ppl.progress import bar
from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    import numpy as np

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, History
    from cpomdp_ppl.progress import Bar, Progress

EPISODES = 64
"""Played side by side."""

ROUND = 4
"""Episodes of each, between updates."""


def fit(
    model: CPOMDP,
    num_episodes: int = 10_000,
    *,
    seed: int | None = 0,
    progress: Progress = True,
    **settings: Any,
) -> Learned:
    """Learn a policy by recurrent PPO.

    Episodes are whole, rewards undiscounted, and scaled to what a critic starts from. The policy is learned
    for the model's own prior over contexts, and ignores any other it is started with.

    Args:
        model: The CPOMDP.
        num_episodes: How many episodes to learn from, rounded up to whole rounds of 256.
        seed: The same seed gives the same policy; None takes fresh entropy.
        progress: Whether to show a progress bar; or a function that is told now and then how far it has got,
            and how long it will take.
        settings: Of `sb3_contrib.RecurrentPPO`, instead of ours.

    Example:
        >>> from cpomdp_ppl import evaluate
        >>> from cpomdp_ppl.models import LineGrid
        >>> learned = fit(LineGrid(), 256, progress=False)
        >>> evaluate(LineGrid(), learned.policy, 50).returns.num_episodes
        50
    """
    require_model(model)
    total = require_count("num_episodes", num_episodes)
    chosen = {
        "n_steps": ROUND * model.horizon,
        "batch_size": EPISODES * model.horizon,
        "n_epochs": 5,
        "learning_rate": 1e-3,
        "gamma": 1.0,
        "ent_coef": 0.01,
        "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": []},
        "device": "cpu",
        **settings,
    }
    began, finished = time.perf_counter(), True
    with isolated(seed):
        batch = Batch(model, EPISODES)
        scaled = VecNormalize(batch, norm_obs=False, clip_reward=math.inf, gamma=chosen["gamma"])
        learner = RecurrentPPO("MlpLstmPolicy", scaled, seed=seed, **chosen)
        with bar(progress, total, "recurrent PPO", "episodes") as drawn:
            try:
                learner.learn(total * model.horizon, callback=lambda *_: shown(drawn, batch))
            except KeyboardInterrupt:
                finished = False
                drawn.write(f"stopped after {drawn.n} of {total} episodes; this is what was learned so far")
    returns = torch.tensor(batch.returns)
    history = xr.Dataset(
        {"training_return": ("episodes", returns.numpy())},
        {"episodes": EPISODES * (1 + torch.arange(len(returns)).numpy())},
    )
    return Learned(RecurrentPolicy(model, learner), history, time.perf_counter() - began, finished)


def shown(bar: Bar, batch: Batch) -> bool:
    """Move a progress bar to where learning is; true, for it to go on."""
    played = EPISODES * len(batch.returns)
    if played > bar.n:
        bar.set_postfix_str(f"return {batch.returns[-1]:.2f}", refresh=False)
        bar.update(int(played - bar.n))
    return True


class Batch(VecEnv):
    """A batch of episodes in the form that Stable-Baselines3 wants, which is not Gymnasium's.

    Args:
        model: The CPOMDP.
        num_envs: How many episodes are played side by side.

    Attributes:
        returns: The mean return of every batch of episodes so far.
    """

    def __init__(self, model: CPOMDP, num_envs: int) -> None:
        self.envs = CPOMDPVectorEnv(model, num_envs, flat=True, autoreset_mode="SameStep")
        self.returns: list[float] = []
        self._earned = 0.0
        super().__init__(num_envs, self.envs.single_observation_space, self.envs.single_action_space)

    def reset(self) -> Any:
        """Begin all episodes, with the seed that was set last."""
        observations, _ = self.envs.reset(seed=self._seeds[0])
        self._reset_seeds()
        return observations

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        """Nothing happens until the results are asked for."""
        self._actions = actions

    def step_wait(self) -> Any:
        """One step of all episodes; at the end, the first observations of new ones."""
        observations, rewards, terminated, _, info = self.envs.step(self._actions)
        self._earned += float(rewards.mean())
        if terminated.all():  # all of them end at the horizon
            self.returns.append(self._earned)
            self._earned = 0.0
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for entry, last in zip(infos, info.get("final_obs", ()), strict=False):
            entry["terminal_observation"] = last
        return observations, rewards, terminated, infos

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same for every episode."""
        return [getattr(self.envs, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Episodes have no attributes of their own."""
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Episodes have no methods of their own."""
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """There are no wrappers around single episodes."""
        return [False] * self.num_envs

    def close(self) -> None:
        """Nothing is held open."""


class RecurrentPolicy:
    """What was trained, as a `Policy`: its memory is the LSTM's.

    Args:
        model: The CPOMDP.
        learner: Who was trained.
    """

    def __init__(self, model: CPOMDP, learner: RecurrentPPO) -> None:
        self.encoding = SpaceEncoding(model, flat=True)
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
        """Read the latest percept, and decide."""
        observations = torch.as_tensor(self.encoding.encode(history.latest, history.time))  # [B, F]
        starts = torch.zeros(len(observations))  # `start` has cleared the memory already
        decision, memory = self.network.get_distribution(observations, memory, starts)
        return dist.Categorical(logits=decision.distribution.logits), memory
