"""The posterior density of a model's constants, with a likelihood that is estimated block by block."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError
from cpomdp_ppl.inference.backend import inference_scope, require_same_sites
from cpomdp_ppl.learning.likelihood import known_contexts, log_likelihoods, marginal
from cpomdp_ppl.learning.parameters import constant_copy, learnable
from cpomdp_ppl.rng import isolated, seed_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference import ParticleFilter
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.learning.parameters import Unconstrained
    from cpomdp_ppl.model import CPOMDP

FOR_WALK, FOR_ESTIMATE, FOR_REPLICATE, FOR_START = range(4)
"""What random numbers are for, as the first purpose of `seed_for`."""


class BlockLikelihood:
    """The log-likelihood of blocks of episodes, estimated by any backend, as a function of parameters.

    Every block has its own random numbers, so that some can be renewed without others. The backend's
    likelihoods have to be unbiased estimates, or exact.

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
        _set_inputs(self.copy, {name: value.detach().to(self.types[name]) for name, value in at.items()})
        if self._is_compiled():
            with inference_scope(self.copy, 0):
                log_prior = self.copy.prior().log()
            return {g: self._compiled_block(log_prior, *self.bounds[g], seed) for g, seed in seeds.items()}
        estimates = {}
        with inference_scope(self.copy, 0):
            recursion = self.backend.recursion(self.copy)
            if self._size is None:
                require_same_sites(recursion.model, recursion.signature, self.episodes)
                self._size = self.backend.episodes_at_once(self.copy, recursion)
            log_prior = self.copy.prior().log()
            for g, seed in seeds.items():
                with isolated(seed):
                    estimates[g] = self._block(recursion, log_prior, *self.bounds[g], self._size)
        return estimates

    def _is_compiled(self) -> bool:
        """Whether the backend has a kernel for the model, which filters a block in one go."""
        kernel = getattr(self.backend, "kernel", None)
        return kernel is not None and kernel(self.copy) is not None

    def _compiled_block(self, log_prior: Tensor, first: int, end: int, seed: int) -> float:
        where = f"episodes[{first}:{end}]"  # messages count from the block's first
        known = None if self.contexts is None else self.contexts[first:end]
        try:
            found = self.backend.run(self.copy, self.episodes[first:end], seed=seed, moments=False)
            return float(marginal(found.log_likelihood, log_prior, known).sum())
        except DegenerateWeightsError as error:
            self.impossible = f"{where}: {error}"
            return -float("inf")
        except DensityError as error:
            raise DensityError(f"{where}: {error}") from error

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


def _set_inputs(copy: CPOMDP, values: Mapping[str, Tensor]) -> None:
    """Give a `constant_copy` values that kernels take as inputs: one kernel then serves all of them.

    What `set_constants` gives is part of a kernel, which would be made anew for every value.
    """
    for path, value in values.items():
        prefix, _, name = path.rpartition(".")
        module = copy.get_submodule(prefix)
        known = module._parameters.get(name)
        if known is None:
            # Kernels look for inputs there. Programs find it in the dict, without asking Pyro's param store.
            known = module._parameters[name] = Parameter(value.clone(), requires_grad=False)
            vars(module)[name] = known
        known.copy_(value)


@dataclass(frozen=True)
class PosteriorPoint:
    """A place in parameter space, with the posterior density as estimated there.

    Attributes:
        u: The place on the unconstrained scale, `[P]`.
        log_prior: Log-density of the prior there, on the parameters' own scale.
        log_jacobian: What turns that into a log-density on the unconstrained scale.
        log_likelihoods: The estimate for each block of episodes.
        seeds: Seed of each estimate's random numbers.
    """

    u: Tensor
    log_prior: float
    log_jacobian: float
    log_likelihoods: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def log_likelihood(self) -> float:
        """The estimate for all episodes."""
        return sum(self.log_likelihoods)

    @property
    def log_density(self) -> float:
        """Log-density of the posterior on the unconstrained scale, but for a constant."""
        return self.log_prior + self.log_jacobian + self.log_likelihood


class Posterior:
    """The posterior density, estimated; `noisy` says whether the likelihood depends on random numbers."""

    def __init__(
        self, space: Unconstrained, prior: Mapping[str, Any], likelihood: BlockLikelihood, noisy: bool
    ) -> None:
        self.space, self.prior, self.likelihood, self.noisy = space, prior, likelihood, noisy

    def at(self, u: Tensor, seeds: tuple[int, ...]) -> PosteriorPoint:
        """Estimate the density at u; where the prior is zero, the likelihood is not needed."""
        with torch.no_grad(), isolated(0):
            values = self.space.values(u)
            log_prior = sum(_log_prior(self.prior[name], value) for name, value in values.items())
            log_jacobian = float(self.space.log_jacobian(u))
        finite = all(bool(torch.isfinite(value).all()) for value in values.values())
        if not finite or not math.isfinite(log_prior) or not math.isfinite(log_jacobian):
            return PosteriorPoint(u, -math.inf, 0.0, (0.0,) * len(seeds), seeds)
        estimates = self.likelihood.per_block(values, dict(enumerate(seeds)))
        return PosteriorPoint(u, log_prior, log_jacobian, tuple(estimates.values()), seeds)

    def from_prior(self, seed: int) -> Tensor:
        """A draw from the prior, on the unconstrained scale, `[P]`; NaN where that has no such value."""
        parts = []
        with torch.no_grad(), isolated(seed):
            for one, transform in zip(self.space.parameters, self.space.transforms, strict=True):
                prior = self.prior[one.name]
                shape = one.value.shape[: one.value.dim() - len(prior.event_shape)]
                parts.append(transform.inv(prior.expand(shape).sample().double()).reshape(-1))
        return torch.cat(parts)

    def values(self, u: Tensor) -> dict[str, Any]:
        """The parameters at u as plain numbers, for messages."""
        with torch.no_grad():
            found = self.space.values(u)
        return {name: _rounded(value) for name, value in found.items()}

    def renewed(self, point: PosteriorPoint, block: int, seed: int) -> PosteriorPoint:
        """The same place with other random numbers for one block."""
        with torch.no_grad(), isolated(0):
            values = self.space.values(point.u)
        estimates, seeds = list(point.log_likelihoods), list(point.seeds)
        estimates[block], seeds[block] = self.likelihood.per_block(values, {block: seed})[block], seed
        return replace(point, log_likelihoods=tuple(estimates), seeds=tuple(seeds))


def _rounded(value: Tensor) -> Any:
    digits = [float(f"{x:.4g}") for x in value.flatten().tolist()]
    return torch.tensor(digits, dtype=torch.float64).reshape(value.shape).tolist()


def _log_prior(prior: Any, value: Tensor) -> float:
    inside = bool(prior.support.check(value).all())
    return float(prior.log_prob(value).sum()) if inside else -math.inf
