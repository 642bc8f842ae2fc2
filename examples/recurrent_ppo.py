"""A solver that knows nothing of CPOMDPs: sb3-contrib's recurrent PPO, trained through Gymnasium.

pip install -c constraints.txt -e ".[rl]"
python examples/recurrent_ppo.py --model LineGrid --steps 200000
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from cpomdp_ppl import models
from cpomdp_ppl.evaluation import evaluate
from cpomdp_ppl.gym import CPOMDPVectorEnv, Encoding

if TYPE_CHECKING:
    import numpy as np

    from cpomdp_ppl import CPOMDP, History
    from cpomdp_ppl.policy import Decision

EPISODES = 64  # side by side


class Batch(VecEnv):
    """A batch of episodes in the form that Stable-Baselines3 wants, which is not Gymnasium's."""

    def __init__(self, model: CPOMDP, num_envs: int) -> None:
        self.envs = CPOMDPVectorEnv(model, num_envs, flat=True, autoreset_mode="SameStep")
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


class Recurrent:
    """What was trained, as a `Policy`: its memory is the LSTM's.

    Args:
        model: The CPOMDP.
        trained: The learner.
    """

    def __init__(self, model: CPOMDP, trained: RecurrentPPO) -> None:
        self.encoding = Encoding(model, flat=True)
        self.network = trained.policy

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


def train(model: CPOMDP, steps: int, seed: int) -> RecurrentPPO:
    """Whole episodes, undiscounted; rewards are scaled to what a critic starts from."""
    batch = VecNormalize(Batch(model, EPISODES), norm_obs=False, gamma=1.0)
    learner = RecurrentPPO(
        "MlpLstmPolicy",
        batch,
        n_steps=4 * model.horizon,
        batch_size=EPISODES * model.horizon,
        n_epochs=5,
        learning_rate=1e-3,
        gamma=1.0,
        ent_coef=0.01,
        policy_kwargs={"lstm_hidden_size": 64, "net_arch": []},
        seed=seed,
        device="cpu",
    )
    return learner.learn(steps)


def main() -> None:
    """Train, and evaluate as any other policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.__all__, default="LineGrid")
    parser.add_argument("--steps", type=int, default=200_000, help="of all episodes together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model: CPOMDP = getattr(models, options.model)()
    learner = train(model, options.steps, options.seed)
    print(f"{options.model}, recurrent PPO after {learner.num_timesteps:,} steps, seed {options.seed}\n")
    print(evaluate(model, Recurrent(model, learner)))


if __name__ == "__main__":
    main()
