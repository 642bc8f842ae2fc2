"""A filter inside a policy: what an agent knows, step by step, as a memory that a policy can carry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.inference.belief import map_belief, where_alive
from cpomdp_ppl.inference.observed import Observed
from cpomdp_ppl.inference.persistence import Persistent, Track

if TYPE_CHECKING:
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What is known about B episodes, each at a time of its own.

    Nothing here is ever changed: `after` returns the knowledge one step later. All of it is to be called
    inside `inference_scope`, where random numbers come from.

    Attributes:
        recursion: The filter at work.
        persistent: As it begins again in episodes whose particles have all died; None to note them as lost.
        track: The belief `[C, B, …]`, and log-likelihoods `[C, B]` of all that was seen since the prior.
        prior: Prior over contexts, float64 `[B, C]`.
        time: How many actions have been taken, int64 `[B]`.
        lost: Episodes that no context can have produced any more, as all particles died, bool `[B]`. They
            keep their posterior.
        ended: Episodes that are over, bool `[B]`. They keep everything, and earn nothing more.

    Examples:
        >>> from cpomdp_ppl.inference import ParticleFilter
        >>> from cpomdp_ppl.inference.backend import inference_scope
        >>> from cpomdp_ppl.models import LightDark
        >>> with inference_scope(LightDark(), seed=0):
        ...     known = Knowledge.first(ParticleFilter(64), LightDark(), torch.full((10, 2), 0.5))
        ...     known.log_posterior.shape, known.expected_rewards.shape
        (torch.Size([10, 2]), torch.Size([10, 2, 3]))
    """

    recursion: Recursion
    persistent: Persistent | None
    track: Track
    prior: Tensor
    time: Tensor
    lost: Tensor
    ended: Tensor

    @staticmethod
    def first(backend: Backend, model: CPOMDP, prior: Tensor, *, persistent: bool = False) -> Knowledge:
        """Before anything was seen, from priors `[B, C]`."""
        p, recursion = prior.double(), backend.recursion(model)
        filter_ = Persistent(backend, recursion, p)
        time = torch.zeros(len(p), dtype=torch.long, device=p.device)
        track = filter_.start(len(p))
        return Knowledge(recursion, filter_ if persistent else None, track, p, time, time.bool(), time.bool())

    @property
    def model(self) -> CPOMDP:
        """The model that is filtered."""
        return self.recursion.model

    @property
    def contexts(self) -> Tensor:
        """All contexts, int64 `[B, C]`."""
        B, C = self.prior.shape
        return torch.arange(C, device=self.prior.device).expand(B, C)

    @cached_property
    def log_posterior(self) -> Tensor:
        """`log P(c | h)`, float64 `[B, C]`."""
        return (self.prior.log() + self.track.log_likelihood.T).log_softmax(1)

    @cached_property
    def moments(self) -> tuple[Any, Any]:
        """Means and variances of the state under every context, leaves `[C, B, …]`."""
        return self.recursion.moments(self.track.belief)

    @cached_property
    def expected_rewards(self) -> Tensor:
        """`E[r_c(s, a) | h, c]` of every action, if they are finitely many, `[B, C, A]`."""
        actions = (torch.full_like(self.time, a) for a in range(self.model.num_actions))
        return torch.stack([self.expected_reward(action) for action in actions], -1)

    def expected_reward(self, action: Tensor) -> Tensor:
        """`E[r_c(s, a) | h, c]` of one action in each episode, `[B]` or `[B, D]`; `[B, C]`.

        Of models that pay on arrival, over the next state, too.
        """
        reward = self.recursion.expected_reward(self.track.belief, action).T
        return torch.where(self.ended[:, None], 0.0, reward) if self.model.can_end else reward

    @cached_property
    def probabilities(self) -> Tensor | None:
        """Probabilities of finitely many states under every context, `[C, B, S]`; None if they are not."""
        return self.recursion.probabilities(self.track.belief)

    @property
    def ess(self) -> Tensor | None:
        """Effective number of particles under every context, `[B, C]`; None if there are none."""
        ess = self.recursion.ess(self.track.belief)
        return None if ess is None else ess.T

    def after(self, percept: Percept) -> Knowledge:
        """After a step, or after an initial observation, whose percept has no action.

        Raises:
            DegenerateWeightsError: If no context can have produced an episode, however many particles; not
                if such episodes are noted as lost.
        """
        alive = ~self.ended if bool(self.ended.any()) else None
        time = self.time if percept.action is None else self.time + ~self.ended
        seen = Observed.at(
            int(time.max()), percept.action, percept.observations, percept.observed, alive=alive
        )
        ended = self.ended | percept.ended if self.model.can_end else self.ended
        moves = seen.action is not None
        if self.persistent is not None:
            take_in = self.persistent.step if moves else self.persistent.condition
            return replace(self, track=take_in(self.track, seen)[0], time=time, ended=ended)
        belief, increment = (self.recursion.step if moves else self.recursion.condition)(
            self.track.belief, seen
        )
        if alive is not None:
            belief = where_alive(alive, belief, self.track.belief)
            increment = torch.where(alive, increment, 0.0)
        total = self.track.log_likelihood + increment
        lost = self.lost | ((self.prior.T.log() + total).amax(0) == -torch.inf)  # [B]
        track = Track(belief, torch.where(lost, self.track.log_likelihood, total))
        return replace(self, track=track, time=time, lost=lost, ended=ended)

    def rows(self, index: Tensor) -> Knowledge:
        """What is known about some of the episodes."""
        belief = map_belief(lambda leaf: leaf.index_select(1, index), self.track.belief)
        track = Track(belief, self.track.log_likelihood.index_select(1, index))
        time, lost, ended = self.time[index], self.lost[index], self.ended[index]
        return Knowledge(self.recursion, None, track, self.prior[index], time, lost, ended)
