"""Adding a baseline: the action that pays most at once, whatever may be learned from others.

Of continuous actions, it knows the middle of their box and either end of every axis. Episodes that are over
need no thought: their decisions count for nothing.

python -m examples.extending.baseline
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, History, Policy, RandomPolicy, compare
from cpomdp_ppl.actions import probes
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.models import ContextualTiger

if TYPE_CHECKING:
    from cpomdp_ppl.inference import Backend, OnlineFilter


class Myopic:
    """A policy: `start` makes the memory of B episodes, and `act` decides for all of them at once.

    What it knows of the episodes is in the memory and never on `self`, so that it can play several batches,
    or the same one again.

    Args:
        model: The CPOMDP.
        likelihood: The filter: a backend or its name.
        seed: Seed of the filter.
    """

    def __init__(self, model: CPOMDP, likelihood: str | Backend = "smc", seed: int = 0) -> None:
        self.model, self.backend, self.seed = model, as_backend(likelihood), seed

    def start(self, prior: Tensor) -> OnlineFilter:
        """A filter that has seen nothing yet, for priors `[B, C]`."""
        return self.backend.online(self.model, len(prior), prior=prior, seed=self.seed)

    def act(self, history: History, memory: OnlineFilter) -> tuple[Tensor, OnlineFilter]:
        """Condition the filter on what is new, and take the action of the highest expected reward."""
        online, latest = copy(memory), history.latest
        if history.time or self.model.initial_observation:
            online.observe(latest.action, latest.observations, latest.observed)
        actions = probes(self.model)  # [A], or [A, D]
        rewards = [online.expected_reward(action) for action in actions]  # A of [B, C]
        expected = (torch.stack(rewards) * online.posterior).sum(-1)  # [A, B]
        return actions[expected.argmax(0)], online


def main() -> None:
    """Compare with actions at random, on the same tigers and growls."""
    model = ContextualTiger()
    policies: dict[str, Policy] = {
        "myopic": Myopic(model, "exact"),
        "random": RandomPolicy(model.num_actions),
    }
    print(compare(model, policies, 500))


if __name__ == "__main__":
    main()
