"""Episodes that somebody else steps through: what `rollout` does, without its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.error import ResetNeeded

from cpomdp_ppl.errors import ModelError, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.gym.encoding import Array, numpy_copy
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rollout import blind
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cpomdp_ppl.inference import Backend, OnlineFilter
    from cpomdp_ppl.model import CPOMDP


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
        self._backend = None if likelihood is None else as_backend(likelihood)
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
