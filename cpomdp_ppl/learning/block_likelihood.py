"""Likelihoods of blocks of episodes, estimated with random numbers that can be kept: for random walks."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference.backend import inference_scope, require_same_sites
from cpomdp_ppl.learning.likelihood import known_contexts, log_likelihoods, marginal
from cpomdp_ppl.learning.parameters import constant_copy, learnable, set_constants
from cpomdp_ppl.rng import isolated, seed_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference import ParticleFilter
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.model import CPOMDP


class BlockLikelihood:
    """The log-likelihood of blocks of episodes, estimated by any backend, as a function of parameters.

    Every block has its own random numbers, so that some can be renewed without others.

    Args:
        model: The CPOMDP, of which a copy is made.
        episodes: What was done and seen.
        backend: A backend whose likelihoods are unbiased estimates, or exact.
        use_contexts: Whether to condition on contexts that are known.
        blocks: Number of blocks; there are no more than episodes.

    Attributes:
        impossible: Explanation of the last estimate that was minus infinity.
    """

    def __init__(
        self, model: CPOMDP, episodes: Episodes, backend: Backend, *, use_contexts: bool, blocks: int = 1
    ) -> None:
        self.backend, self.episodes = backend, episodes
        parameters = learnable(model)
        self.types = {one.name: one.value.dtype for one in parameters}
        self.copy = constant_copy(model, list(self.types))
        self.contexts = known_contexts(model, episodes) if use_contexts else None
        B = len(episodes)
        G = min(blocks, B)
        self.bounds = [(g * B // G, (g + 1) * B // G) for g in range(G)]
        self.impossible = ""
        self._size: int | None = None

    def with_particles(self, num_particles: int) -> BlockLikelihood:
        """The same by a particle filter with another number of particles."""
        other = copy(self)
        other.backend = replace(cast("ParticleFilter", self.backend), num_particles=num_particles)
        other._size = None
        return other

    def __call__(self, at: Mapping[str, Tensor], seed: int) -> float:
        """The estimate for all episodes; minus infinity if no particle can have produced one of them."""
        return sum(self.per_block(at, {g: seed_for(seed, g) for g in range(len(self.bounds))}).values())

    def per_block(self, at: Mapping[str, Tensor], seeds: Mapping[int, int]) -> dict[int, float]:
        """Estimates for some blocks, each with the random numbers that follow from its seed."""
        set_constants(self.copy, {name: value.detach().to(self.types[name]) for name, value in at.items()})
        estimates = {}
        with inference_scope(self.copy, 0):
            recursion = self.backend.recursion(self.copy)
            if self._size is None:
                require_same_sites(recursion, self.episodes)
                self._size = self.backend.episodes_at_once(self.copy, recursion)
            log_prior = self.copy.prior().log()
            for g, seed in seeds.items():
                with isolated(seed):
                    estimates[g] = self._block(recursion, log_prior, *self.bounds[g], self._size)
        return estimates

    def _block(self, recursion: Recursion, log_prior: Tensor, first: int, end: int, size: int) -> float:
        total = 0.0
        for start in range(first, end, size):
            part = slice(start, min(start + size, end))
            known = None if self.contexts is None else self.contexts[part]
            try:
                per_context = log_likelihoods(recursion, self.episodes[part], start)
                total += float(marginal(per_context, log_prior, known, start).sum())
            except DegenerateWeightsError as error:
                self.impossible = str(error)
                return -float("inf")
        return total
