"""Recurrent PPO, where its library is installed."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.models import LineGrid

pytest.importorskip("sb3_contrib")
from baselines import recurrent_ppo


@pytest.mark.slow
def test_its_policy_decides_as_the_library_does():
    model = LineGrid()
    learned = recurrent_ppo.fit(model, 1, progress=False)  # that is, one round
    seen = []

    class Watched(recurrent_ppo.RecurrentPPOPolicy):
        def act(self, history, memory):
            decision, memory = super().act(history, memory)
            seen.append((self.encoding.encode(history.latest, history.time), decision.logits.argmax(-1)))
            return decision, memory

    simulate(model, Watched(model, learned.policy.learner), 50, seed=0)
    state, starts = None, np.ones(50, bool)
    for observations, likeliest in seen:
        actions, state = learned.policy.learner.predict(observations, state, starts, deterministic=True)
        assert actions.tolist() == likeliest.tolist()
        starts = np.zeros(50, bool)


@pytest.mark.slow
def test_its_history_is_of_whole_batches():
    learned = recurrent_ppo.fit(LineGrid(), 300)  # with its progress bar
    episodes = learned.history.episodes.values
    assert episodes.tolist() == list(range(64, 64 * 9, 64))  # 300 rounded up to whole rounds
    assert np.isfinite(learned.history.training_return.values).all()
    assert learned.finished


class Climb(CPOMDP):
    """Up by what one pulls, and over above 2; every step earns the height that it led to."""

    contexts, actions, horizon, discount = 1, Box(0.0, 2.0), 5, 0.5

    def initial(self, context):
        return torch.zeros(())

    def transition(self, state, action, context):
        return state + action[..., 0]

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.1))

    def ends(self, state, action, context):
        return state > 2.0

    def reward(self, state, action, context, next_state):
        return next_state


def test_episodes_end_one_by_one():
    """By hand: pulled by 2, 1 and 0.4 a step, heights are 2 4, 1 2 3 and 0.4 … 2, which is the horizon."""
    envs = recurrent_ppo.EpisodesForSB3(Climb(), 3)
    envs.seed(0)
    envs.reset()
    assert (envs.action_space.low, envs.action_space.high) == (-1, 1)
    pulls, earned, over, last = np.array([[1.0], [0.0], [-0.6]], np.float32), [], [], []
    for _ in range(6):
        _, rewards, done, infos = envs.step(pulls)
        earned.append(rewards)
        over.append(done)
        last.append(["terminal_observation" in info for info in infos])
        assert not any("TimeLimit.truncated" in info for info in infos)
    once, twice, thrice = [0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]
    np.testing.assert_array_equal(np.array(over).T, np.array([once, twice, thrice], bool))
    np.testing.assert_array_equal(over, last)
    expected = [[2, 4] * 3, [1, 2, 3] * 2, [0.4, 0.8, 1.2, 1.6, 2, 0.4]]
    np.testing.assert_allclose(np.array(earned).T, expected, atol=1e-5)
    of_each = [2 + 4 / 2, 1 + 2 / 2 + 3 / 4, sum(0.4 * (t + 1) * 0.5**t for t in range(5))]
    by_time = [of_each[b] for b in (0, 1, 0, 2, 0, 1)]  # as they are over
    np.testing.assert_allclose(envs.returns, by_time, atol=1e-5)


@pytest.mark.slow
def test_it_learns_with_continuous_actions_from_episodes_that_end():
    learned = recurrent_ppo.fit(Climb(), 300, progress=False)
    episodes, learner = simulate(Climb(), learned.policy, 200, seed=0), learned.policy.learner
    assert learner.gamma == 0.5
    assert learner.n_steps == 4 * 3  # by hand, random pulls of 0 to 2 are above 2 after 2.7 steps or so
    assert len(learned.history.episodes) >= 4
    pulls = episodes.actions[episodes.alive]
    assert pulls.min() >= 0
    assert pulls.max() <= 2
    # Without the noise, they are the library's decisions, on its scale.
    learner.policy.log_std.data.fill_(-20.0)
    history = []
    simulate(Climb(), lambda h: history.append(h) or torch.ones(50, 1), 50, seed=1)
    ours, _ = learned.policy.act(history[0], learned.policy.start(torch.ones(50, 1)))
    observations = learned.policy.encoding.encode(history[0].latest, 0)
    theirs, _ = learner.predict(observations, None, np.ones(50, bool), deterministic=True)
    np.testing.assert_allclose(ours.detach(), theirs + 1, atol=1e-5)
