"""Episodes that have begun and wait for actions, each at a time of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.errors import ModelError, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.policy import Percept
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rollout import blind
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.inference import Backend, OnlineFilter
    from cpomdp_ppl.model import CPOMDP


@dataclass
class Cohort:
    """Episodes that began together, which one filter follows.

    Attributes:
        filter: The filter, of n episodes.
        rows: Which n of the B episodes these are, or were.
        present: Which of the n are still followed; the others have made room for new ones, bool `[n]`.
    """

    filter: OnlineFilter
    rows: Tensor
    present: Tensor

    def observe(self, percept: Percept, stepped: Tensor) -> None:
        """Take in a step of those still here, out of what B episodes saw; `stepped` is bool `[B]`."""
        here = self.present & stepped[self.rows]
        if bool(here.any()):
            action = None if percept.action is None else percept.action[self.rows]
            observations = {site: values[self.rows] for site, values in percept.observations.items()}
            observed = {
                site: flags[self.rows] & on_the_right(here, flags) for site, flags in percept.observed.items()
            }
            self.filter.observe(action, observations, observed)

    def leave(self, left: Tensor) -> None:
        """Some of the B episodes, bool `[B]`, are followed no more."""
        self.present = self.present & ~left[self.rows]


class OngoingEpisodes:
    """B episodes that have begun, and wait for actions. Any of them may begin anew, while others go on.

    Args:
        model: The CPOMDP.
        num_episodes: How many episodes B.
        prior: Prior over contexts, `[C]` or `[B, C]`; the model's if left out.
        likelihood: Filter that keeps track of the contexts; left out, there is none.

    Attributes:
        contexts: The true contexts, `[B]`.
        state: The true states, leaves `[B, …]`.
        percept: What was seen last; where `time` is 0, its action means nothing.
        time: How many steps each has taken, `[B]`.
        ended: Which of them the model has ended, bool `[B]`.
        returns: What they have earned, as it is worth at the start, float64 `[B]`.
    """

    contexts: Tensor
    state: Any
    percept: Percept

    def __init__(
        self,
        model: CPOMDP,
        num_episodes: int,
        prior: Sequence[float] | Tensor | None,
        likelihood: str | Backend | None,
    ) -> None:
        require_model(model)
        self.model = model
        self.B = B = num_episodes
        with inference_scope(model, 0):
            self._programs = Generative(model)
        self._given = None if prior is None else as_prior(prior, model.num_contexts, B)
        self._backend = None if likelihood is None else backend_for(model, likelihood)
        self._cohorts: list[Cohort] = []
        self._everyone = torch.arange(B, device=model.device)
        self.time = torch.zeros(B, dtype=torch.long, device=model.device)
        self.ended = torch.zeros(B, dtype=torch.bool, device=model.device)
        self.returns = torch.zeros(B, dtype=torch.float64, device=model.device)
        # A trial, so that what is wrong with the model, or with the filter for it, shows here.
        self.begun = False
        self.start(np.random.default_rng(0))
        self.begun = False

    @property
    def over(self) -> Tensor:
        """Which episodes are over, as the model has ended them or the horizon is reached, bool `[B]`."""
        return self.ended | (self.time >= self.model.horizon)

    def start(
        self, generator: np.random.Generator, contexts: Tensor | None = None, rows: Tensor | None = None
    ) -> None:
        """Begin episodes `rows`, `[n]`, or all: in contexts `[n]`, or in those that are drawn."""
        model, rows = self.model, self._everyone if rows is None else rows
        n = len(rows)
        seed, filter_seed = (int(n) for n in generator.integers(2**32, size=2))  # with a filter and without
        with inference_scope(model, seed):
            prior = (
                as_prior(model.prior(), model.num_contexts, self.B) if self._given is None else self._given
            )
            prior = prior.expand(self.B, -1)[rows.to(prior.device)]
            if contexts is None:
                contexts = torch.multinomial(prior, 1).squeeze(1)
            contexts = contexts.to(model.device)
            state = self._programs.initial(contexts)
            percept = blind(self._programs.signature, n, model.device)
            if model.initial_observation:
                percept = self._programs.observe(state, contexts)
        self._require_finite(torch.zeros(n), initial=state, observation=percept.observations)
        if not self.begun or n == self.B:
            self.contexts, self.state, self.percept = contexts, state, percept
        else:
            self.contexts = self.contexts.index_copy(0, rows, contexts)
            self.state = self._put(self.state, state, rows)
            self.percept = self._seen(self.percept.action, percept, rows)
        for values in (self.time, self.ended, self.returns):
            values[rows] = 0
        self._follow(prior, filter_seed, rows)
        self.begun = True

    def step(self, generator: np.random.Generator, actions: Tensor, rows: Tensor | None = None) -> Tensor:
        """Take actions `[B]`, or `[B, D]`, in episodes `rows`, `[n]`, or all; the rewards, float64 `[B]`."""
        rows = self._everyone if rows is None else rows
        actions = actions.to(self.model.device)[rows]
        with inference_scope(self.model, int(generator.integers(2**32))):
            state = map_state(lambda leaf: leaf[rows], self.state)
            step = self._programs.step(state, actions, self.contexts[rows])
        time = self.time[rows]
        self._require_finite(time, reward={"reward": step.reward})
        self._require_finite(time + 1, transition=step.state, observation=step.percept.observations)

        percept = self._seen(self._put(self.percept.action, step.percept.action, rows), step.percept, rows)
        stepped = torch.zeros_like(self.ended).index_fill(0, rows, True)
        for cohort in self._cohorts:
            cohort.observe(percept, stepped)
        self.percept = percept
        self.state = self._put(self.state, step.state, rows)
        reward = torch.zeros_like(self.returns).index_copy(0, rows, step.reward.double())
        self.returns += reward * self.model.discount ** self.time.double()
        self.time[rows] += 1
        if step.ended is not None:
            self.ended[rows] = step.ended
        return reward

    @property
    def posterior(self) -> Tensor | None:
        """`P(c | h_t)`, float64 `[B, C]`, of each at its own time; None if there is no filter."""
        if self._backend is None:
            return None
        posterior = torch.zeros(
            self.B, self.model.num_contexts, dtype=torch.float64, device=self.model.device
        )
        for cohort in self._cohorts:
            posterior[cohort.rows[cohort.present]] = cohort.filter.posterior[cohort.present]
        return posterior

    def _follow(self, prior: Tensor, seed: int, rows: Tensor) -> None:
        """Have a new filter follow episodes that begin."""
        if self._backend is None:
            return
        left = torch.zeros_like(self.ended).index_fill(0, rows, True)
        for cohort in self._cohorts:
            cohort.leave(left)
        followed = [cohort for cohort in self._cohorts if bool(cohort.present.any())]
        online = self._backend.online(self.model, len(rows), prior=prior, seed=seed)
        if self.model.initial_observation:
            seen = {site: values[rows] for site, values in self.percept.observations.items()}
            flags = {site: flags[rows] for site, flags in self.percept.observed.items()}
            online.observe(None, seen, flags)
        self._cohorts = [*followed, Cohort(online, rows, torch.ones_like(rows, dtype=torch.bool))]

    def _seen(self, actions: Tensor | None, percept: Percept, rows: Tensor) -> Percept:
        """The latest percept, of which `percept` is that of episodes `rows`, and `actions` are of all."""
        observations = self._put(self.percept.observations, percept.observations, rows)
        return Percept(actions, observations, self._put(self.percept.observed, percept.observed, rows))

    def _put(self, old: Any, new: Any, rows: Tensor) -> Any:
        """Leaves `[B, …]` with those of episodes `rows` replaced by `[n, …]`."""
        if len(rows) == self.B:
            return new
        return map_state(lambda all_of_them, some: all_of_them.index_copy(0, rows, some), old, new)

    def _require_finite(self, time: Tensor, **produced: Any) -> None:
        """Raise if a program produced a number that is not finite; `time` is that of each episode, `[n]`."""
        faults = []
        for program, tensors in produced.items():
            for name, tensor in leaves(tensors):
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    n = int((~torch.isfinite(tensor)).nonzero()[0, 0])
                    faults.append(f"{program}: '{name}' is not finite at time {int(time[n])}")
        if faults:
            raise ModelError(type(self.model).__name__, faults)
