"""Recurrent PPO, where its library is installed."""

from __future__ import annotations

import numpy as np
import pytest

from cpomdp_ppl import simulate
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
