"""What planners know: particles for every context, and the posterior over contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpomdp_ppl.actions import some_action
from cpomdp_ppl.inference import Cloud, Observed, ParticleFilter, Recursion, inference_scope
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.persistence import Persistent, Track
from cpomdp_ppl.policy import History
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import seed_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Percept


@dataclass(frozen=True)
class Memory:
    """What a planner remembers: the belief it has come to."""

    belief: Cloud  # leaves [C, B, …]
    prior: Tensor  # over contexts, float64 [B, C]
    log_likelihood: Tensor  # of everything seen, under every context, float64 [B, C]
    path: tuple[Observed, ...] = ()  # all steps, should it be necessary to go through them again

    @property
    def log_posterior(self) -> Tensor:
        """`log P(c | h)`, float64 `[B, C]`; raises if the prior excludes every possible context."""
        joint = self.prior.log() + self.log_likelihood
        return log_normalised(joint[:, None], self.path[-1].time if self.path else 0).squeeze(1)

    @staticmethod
    def first(model: CPOMDP, prior: Tensor, num_particles: int, seed: int | None) -> Memory:
        """Before anything was seen, from a prior over contexts `[B, C]`."""
        B = len(prior)
        p = as_prior(prior, model.num_contexts, B).expand(B, -1)
        with inference_scope(model, seed):
            belief = ParticleFilter(num_particles).recursion(model).start(B)
        p = p.double().to(model.device)
        return Memory(belief, p, torch.zeros_like(p))

    def after(
        self, model: CPOMDP, percept: Percept, time: int, seed: int | None, alive: Tensor | None = None
    ) -> Memory:
        """After a step (or an initial observation); the memory before stays as it was.

        `alive` is which episodes took it, bool `[B]`, None for all: of others, the belief stays as it was.
        """
        seen = Observed.at(time, percept.action, percept.observations, percept.observed, alive=alive)
        with inference_scope(model, seed):
            backend = ParticleFilter(self.belief.shape[2])
            persistent = Persistent(backend, backend.recursion(model), self.prior)
            take_in = persistent.condition if percept.action is None else persistent.step
            track, _ = take_in(Track(self.belief, self.log_likelihood.T, self.path), seen)
        return Memory(track.belief, self.prior, track.log_likelihood.T, track.path)

    def caught_up(self, model: CPOMDP, history: History, seed: int | None) -> Memory:
        """After the newest percept of a history; as it is, at time 0 of a model that sees nothing there."""
        t = history.time
        if t == 0 and not model.initial_observation:
            return self
        alive = History(history.percepts[:-1]).alive if t else None
        return self.after(model, history.latest, t, seed_for(seed, 1, t), alive)

    def expected_reward(self, programs: Recursion, actions: Tensor) -> Tensor:
        """What actions `[B, …]` earn, `[B]`, on average over contexts and particles."""
        return (self.log_posterior.exp() * programs.expected_reward(self.belief, actions).T).sum(1)

    def rows(self, index: Tensor | None) -> Memory:
        """The memories of some of the episodes; None for all."""
        if index is None:
            return self
        belief = map_belief(lambda leaf: leaf.index_select(1, index), self.belief)
        return Memory(belief, self.prior[index], self.log_likelihood[index])

    def parts(self, size: int) -> Iterator[Memory]:
        """The memories of so many episodes at a time."""
        for i in range(0, len(self.log_posterior), size):
            rows = slice(i, i + size)
            belief = map_belief(lambda leaf, rows=rows: leaf[:, rows], self.belief)
            yield Memory(belief, self.prior[rows], self.log_likelihood[rows])


def decided(model: CPOMDP, history: History, decide: Callable[[Tensor | None], Tensor]) -> Tensor:
    """What is decided in the episodes that go on, `[B, …]`; in those that are over, it means nothing.

    `decide` takes the numbers of n episodes, `[n]`, or None for all, and returns their actions, `[n, …]`.
    """
    alive = history.alive
    if alive is None:
        return decide(None)
    actions = some_action(model, alive.shape).clone()
    rows = alive.nonzero()[:, 0]
    if len(rows):
        actions[rows] = decide(rows)
    return actions


def conditioned(log_posterior: Tensor, increment: Tensor) -> Tensor:
    """`log P(c | h, o)`, `[R, C]`, from log-densities of o.

    It stays as it was if o is impossible in every context. That may be, for all that o was drawn from the
    belief: the filter moves its particles anew.
    """
    joint = log_posterior + increment
    possible = joint.amax(1, keepdim=True) > -torch.inf
    return torch.where(possible, joint, log_posterior).log_softmax(1)
