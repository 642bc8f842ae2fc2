"""What planners know: particles for every context, and the posterior over contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.observed import Observed
from cpomdp_ppl.inference.particle_filter import Cloud
from cpomdp_ppl.inference.persistence import Persistent, Track
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cpomdp_ppl.inference.particle_filter import SMC
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History, Percept

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Memory:
    """What a planner remembers: the belief it has come to.

    Attributes:
        belief: Particles, leaves `[C, B, …]`.
        prior: Over contexts, float64 `[B, C]`.
        log_likelihood: Of everything seen, under every context, float64 `[B, C]`.
        lived: All steps so far, should it be necessary to go through them again.
    """

    belief: Cloud
    prior: Tensor
    log_likelihood: Tensor
    lived: tuple[Observed, ...] = ()

    @property
    def log_posterior(self) -> Tensor:
        """`log P(c | h)`, float64 `[B, C]`.

        Raises:
            DegenerateWeightsError: If the prior excludes every context that can have produced an episode.
        """
        joint = self.prior.log() + self.log_likelihood
        return log_normalised(joint[:, None], self.lived[-1].time if self.lived else 0).squeeze(1)

    @staticmethod
    def first(model: CPOMDP, prior: Tensor, num_particles: int, seed: int | None) -> Memory:
        """Before anything was seen, from a prior over contexts `[B, C]`."""
        B = len(prior)
        p = as_prior(prior, model.num_contexts, B).expand(B, -1)
        with inference_scope(model, seed):
            belief = ParticleFilter(num_particles).recursion(model).start(B)
        p = p.double().to(model.device)
        return Memory(belief, p, torch.zeros_like(p))

    def after(self, model: CPOMDP, percept: Percept, time: int, seed: int | None) -> Memory:
        """After a step (or an initial observation); the memory before stays as it was.

        Raises:
            DegenerateWeightsError: If no context can have produced what was seen.
        """
        seen = as_seen(percept.action, percept.observations, percept.observed, time)
        with inference_scope(model, seed):
            backend = ParticleFilter(self.belief.weights.shape[2])
            persistent = Persistent(backend, backend.recursion(model), self.prior)
            belief = map_belief(torch.clone, self.belief)  # a recursion writes into what it is given
            take_in = persistent.condition if percept.action is None else persistent.step
            track, _ = take_in(Track(belief, self.log_likelihood.T, self.lived), seen)
        return Memory(track.belief, self.prior, track.log_likelihood.T, track.path)

    def caught_up(self, model: CPOMDP, history: History, seed: int | None) -> Memory:
        """After the newest percept of a history; as it is, at time 0 of a model that sees nothing there.

        Raises:
            DegenerateWeightsError: If no context can have produced what was seen.
        """
        t = history.time
        if t == 0 and not model.initial_observation:
            return self
        return self.after(model, history.latest, t, seed_for(seed, 1, t))

    def expected_reward(self, programs: SMC, action: int) -> Tensor:
        """What an action earns, `[B]`, on average over contexts and particles."""
        actions = torch.full_like(self.log_posterior[:, 0], action, dtype=torch.long)
        return (self.log_posterior.exp() * programs.expected_reward(self.belief, actions).T).sum(1)

    def parts(self, size: int) -> Iterator[Memory]:
        """The memories of so many episodes at a time."""
        for i in range(0, len(self.log_posterior), size):
            rows = slice(i, i + size)
            belief = map_belief(lambda leaf, rows=rows: leaf[:, rows], self.belief)
            yield Memory(belief, self.prior[rows], self.log_likelihood[rows])


def thinned(cloud: Cloud, M: int) -> Any:
    """M states of equal weight for every context and episode, leaves `[C, B, M, …]`; contexts share luck."""
    C, B, N = cloud.weights.shape
    device = cloud.weights.device
    points = torch.arange(M, device=device) + torch.rand(1, B, 1, dtype=torch.float64, device=device)
    picked = inverted(cloud.weights.double(), (points / M).expand(C, B, M))
    rows = torch.arange(C * B, device=picked.device).view(C, B, 1)
    flat = (rows * N + picked).view(-1)
    return map_state(
        lambda leaf: leaf.flatten(0, 2).index_select(0, flat).view(C, B, M, *leaf.shape[3:]), cloud.state
    )


def inverted(weights: Tensor, points: Tensor) -> Tensor:
    """Where points `[…, M]` in [0, 1) fall in the distribution functions of weights `[…, N]`."""
    total = weights.cumsum(-1)
    found = torch.searchsorted(total / total[..., -1:], points.contiguous(), right=True)
    return found.clamp(max=weights.shape[-1] - 1)


def evenly_weighted(states: Any, dtype: torch.dtype) -> Cloud:
    """States with leaves `[C, B, N, …]` as particles of equal weight."""
    _, some = next(leaves(states))
    C, B, N = some.shape[:3]
    return Cloud(
        states,
        torch.full((C, B, N), 1.0 / N, dtype=dtype, device=some.device),
        torch.zeros((C, B, N), dtype=torch.int32, device=some.device),
        torch.full((C, B), float(N), dtype=dtype, device=some.device),
        torch.zeros((C, B), dtype=torch.bool, device=some.device),
        torch.zeros((C, B), dtype=dtype, device=some.device),
    )


def drawn(cloud: Cloud, log_posterior: Tensor, rows: Tensor, J: int) -> tuple[Any, Tensor]:
    """Draw J states, with their contexts, from the beliefs of some rows.

    Args:
        cloud: Particles of all B rows.
        log_posterior: Over contexts, of the rows asked for, `[R, C]`.
        rows: Which those are, `[R]`.
        J: How many.

    Returns:
        States, leaves `[R·J, …]`, and contexts `[R·J]`.
    """
    (C, B, N), R, device = cloud.weights.shape, len(rows), rows.device
    # Points of a golden sequence: each is uniform, and the first few are well spread, however few.
    points = torch.rand(R, 1, dtype=torch.float64, device=device)
    points = (points + GOLDEN * torch.arange(J, dtype=torch.float64, device=device)) % 1  # [R, J]
    contexts = inverted(log_posterior.exp(), points)  # [R, J]
    weights = cloud.weights.index_select(1, rows)  # [C, R, N]
    particles = inverted(weights, torch.rand(R, J, dtype=weights.dtype, device=device).expand(C, R, J))
    particles = particles.gather(0, contexts[None])[0]  # [R, J]
    flat = ((contexts * B + rows[:, None]) * N + particles).view(-1)
    states = map_state(lambda leaf: leaf.flatten(0, 2).index_select(0, flat), cloud.state)
    return states, contexts.view(-1)


def conditioned(log_posterior: Tensor, increment: Tensor) -> Tensor:
    """`log P(c | h, o)`, `[R, C]`, from log-densities of o.

    It stays as it was if o is impossible in every context. That may be, for all that o was drawn from the
    belief: the filter moves its particles anew.
    """
    joint = log_posterior + increment
    possible = joint.amax(1, keepdim=True) > -torch.inf
    return torch.where(possible, joint, log_posterior).log_softmax(1)


def as_seen(
    action: Tensor | None, observations: Mapping[str, Tensor], observed: Mapping[str, Tensor], time: int
) -> Observed:
    """A step as filters want it."""
    return Observed.at(time, action, observations, observed)
