"""Simulated episodes on which backends are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError, UnsupportedModelError
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.rollout import simulate

if TYPE_CHECKING:
    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.filtering import Filtering
    from cpomdp_ppl.model import CPOMDP

REFUSALS = (UnsupportedModelError, DensityError, DegenerateWeightsError)
"""Errors by which a backend refuses a model or its episodes."""

NUM_TRIALS = 16
"""About how many episodes are simulated for a trial."""


def random_trials(model: CPOMDP) -> Episodes:
    """Simulate a few episodes in every context under random actions."""
    return _simulated(model, RandomPolicy(model.num_actions))


def constant_trials(model: CPOMDP, action: int) -> Episodes:
    """Simulate a few episodes in every context under a single action."""
    return _simulated(model, lambda history: torch.full((history.num_episodes,), action, device=model.device))


def _simulated(model: CPOMDP, policy: Any) -> Episodes:
    number = model.num_contexts * max(2, -(-NUM_TRIALS // model.num_contexts))
    return simulate(model, policy, number, contexts="balanced", seed=0)


def evenly_spaced(episodes: Episodes, most: int) -> Episodes:
    """The episodes, or so many of them that are evenly spaced, if there are more."""
    return episodes[torch.linspace(0, len(episodes) - 1, min(len(episodes), most)).long()]


def result_or_none(backend: Backend, model: CPOMDP, episodes: Episodes) -> Filtering | None:
    """Filter episodes by a backend; None if it refuses."""
    try:
        return backend.run(model, episodes, seed=0, moments=False)
    except REFUSALS:
        return None
