"""The likelihood of recorded episodes whose contexts are unknown, and its gradient."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.errors import DegenerateWeightsError, DensityError, require
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.inference.backend import inference_scope, require_same_sites
from cpomdp_ppl.inference.precision import double_precision, in_double_precision
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.learning.differentiable import differentiable, episodes_with_graph
from cpomdp_ppl.learning.parameters import constant_copy, learnable, set_constants
from cpomdp_ppl.rng import isolated, seed_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference import ParticleFilter
    from cpomdp_ppl.inference.backend import Backend, Recursion
    from cpomdp_ppl.model import CPOMDP


def log_likelihood(
    model: CPOMDP,
    episodes: Episodes,
    likelihood: str | Backend = "ekf",
    *,
    use_contexts: bool = False,
    seed: int | None = 0,
) -> Tensor:
    """`Σ_b log Σ_c P(c) p(o_b | a_b, c)`, with a gradient by the model's `PyroParam`s.

    How the actions were chosen does not matter, as long as it was from what had been seen. Everything is
    computed in float64. With autograd off, there is no gradient and less memory is needed.

    The grid of `"grid"` is placed anew for every value of the parameters, unless `bounds` are given and
    densities jump nowhere; the gradient is that on the grid as it is. Kalman filters look at single points:
    where a program jumps (at the edge of the light, say), their likelihood jumps with parameters that move
    states, and the gradient does not know.

    `"smc"` serves any model, by Fisher's identity: its value is the particle filter's unbiased estimate, its
    gradient an estimate of the score, biased by O(1/N), whose noise grows with the square of the length of
    episodes; it is not the gradient of the value, which jumps. Sample sites are held where they were drawn,
    and states are functions of these and of the parameters. Where a program jumps in something that depends
    on parameters at fixed sites (an edge that is to be learned, or a state moved by a parameter outside of
    any site), the gradient does not know; jumps in the values of sites do no harm. Sites whose possible
    values depend on parameters (`Uniform(0, width)`) are refused, and so are guides.

    Args:
        model: The CPOMDP.
        episodes: What was done and seen.
        likelihood: `"ekf"`, `"ukf"`, `"exact"`, `"grid"`, `"smc"`, or a backend of these kinds.
        use_contexts: Whether to take `log P(c_b) p(o_b | a_b, c_b)` for the episodes whose context is known:
            `episodes.contexts`, in which a negative number stands for one that is not.
        seed: Of the random numbers of `"smc"`; None takes fresh ones, as stochastic gradients would.

    Returns:
        A scalar, float64, that can be differentiated once.

    Raises:
        ValueError: If the model has no `PyroParam`, or the backend has no gradient.
        UnsupportedModelError: If the backend cannot serve the model.
        ObservationError: If the episodes are not of this model.
        DegenerateWeightsError: If no context can have produced an episode.
        DensityError: If a density is not a number, or the gradient is not.

    Example:
        >>> from pyro.nn import PyroParam
        >>> from torch.distributions import constraints
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark(dark_variance=PyroParam(torch.tensor(5.0), constraints.positive))
        >>> episodes = simulate(LightDark(), RandomPolicy(3), 20, seed=0)
        >>> log_likelihood(model, episodes).backward()
        >>> bool(model.dark_variance_unconstrained.grad > 0)  # it was 8
        True
    """
    parameters = learnable(model)
    objective = Objective(model, episodes, likelihood, use_contexts=use_contexts, seed=seed)
    values = {one.name: one.value for one in parameters}
    at = {name: value.detach().double() for name, value in values.items()}
    if not torch.is_grad_enabled():
        return objective.value(at)
    value, gradient = objective.value_and_gradient(at)
    # A linear function with this value and gradient: the graphs of batches of episodes are gone by now.
    for name, parameter in values.items():
        value = value + ((parameter.double() - at[name]) * gradient[name]).sum()
    return value


class Objective:
    """The log-likelihood of episodes as a function of a model's parameters.

    Args:
        model: The CPOMDP, of which a copy is made.
        episodes: What was done and seen.
        likelihood: A backend that can be differentiated, or its name.
        use_contexts: Whether to condition on contexts that are known.
        seed: Of random numbers.
    """

    def __init__(
        self,
        model: CPOMDP,
        episodes: Episodes,
        likelihood: str | Backend,
        *,
        use_contexts: bool,
        seed: int | None = 0,
    ) -> None:
        self.backend = as_backend(likelihood)
        self.seed = seed
        self.names = [one.name for one in learnable(model)]
        self.copy = in_double_precision(constant_copy(model, self.names))
        self.episodes = episodes
        self.contexts = known_contexts(model, episodes) if use_contexts else None

    def value(self, at: Mapping[str, Tensor]) -> Tensor:
        """The log-likelihood at parameters in float64."""
        with torch.no_grad():
            return self._sum(at)[0]

    def value_and_gradient(self, at: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The same, and its gradient by each of them."""
        with torch.enable_grad():
            value, gradient = self._sum({name: x.detach().clone().requires_grad_() for name, x in at.items()})
        self._require_finite(at, gradient)
        return value, gradient

    def scores(self, at: Mapping[str, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        """The log-likelihood of every episode, `[B]`, and its gradient by all parameters, `[B, P]`."""
        at = {name: x.detach().clone().requires_grad_() for name, x in at.items()}
        values, scores = [], []
        with torch.enable_grad():
            for value in self._batches(at, seed):
                weights = torch.ones_like(value).requires_grad_()
                found = torch.autograd.grad(
                    value, list(at.values()), weights, create_graph=True, materialize_grads=True
                )
                # Linear in the weights: its derivatives by them are those of the episodes.
                totals = torch.cat([x.reshape(-1) for x in found])  # [P]
                columns = [
                    torch.autograd.grad(total, weights, retain_graph=True, materialize_grads=True)[0]
                    for total in totals
                ]
                values.append(value.detach())
                scores.append(torch.stack(columns, -1))
        columns = torch.cat(scores).split([x.numel() for x in at.values()], -1)
        self._require_finite(at, dict(zip(at, columns, strict=True)))
        return torch.cat(values), torch.cat(scores)

    def _require_finite(self, at: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> None:
        for name, slope in gradient.items():
            if not bool(torch.isfinite(slope).all()):
                raise DensityError(
                    f"{self.backend.name}: the log-likelihood has no finite gradient by '{name}' "
                    f"at {at[name].tolist()} (a root or logarithm of 0 in a program, perhaps)"
                )

    def _sum(self, at: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = [x for x in at.values() if x.requires_grad]
        total = torch.zeros((), dtype=torch.float64)
        gradients = [torch.zeros_like(x) for x in leaves]
        for values in self._batches(at, self.seed):
            value = values.sum()
            if leaves and value.requires_grad:
                found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
                for gradient, one in zip(gradients, found, strict=True):
                    if one is not None:
                        gradient += one
            total += value.detach()
        return total, dict(zip(at, gradients, strict=True)) if leaves else {}

    def _batches(self, at: Mapping[str, Tensor], seed: int | None) -> Iterator[Tensor]:
        """The log-likelihoods of some episodes after others, with their graph."""
        set_constants(self.copy, at)
        with _computing(self.copy, seed):
            recursion = differentiable(self.backend, self.copy)
            require_same_sites(recursion, self.episodes)
            size = episodes_with_graph(recursion, self.episodes.horizon)
            log_prior = self.copy.prior().log()  # [C]
            for start in range(0, len(self.episodes), size):
                some = self.episodes[start : start + size] if size < len(self.episodes) else self.episodes
                known = None if self.contexts is None else self.contexts[start : start + size]
                per_context = log_likelihoods(recursion, some, start)  # [B, C]
                yield marginal(per_context, log_prior, known, start)


@contextmanager
def _computing(model: CPOMDP, seed: int | None) -> Iterator[None]:
    with isolated(seed), poutine.block(), model.running(), double_precision(), warnings.catch_warnings():
        # Backends look at numbers to find out whether something is wrong, graph or not.
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
        yield


def log_likelihoods(recursion: Recursion, episodes: Episodes, offset: int = 0) -> Tensor:
    """`log p(o | a, c)` of a batch of episodes, `[B, C]`: a fold over time that keeps nothing else.

    Raises:
        DegenerateWeightsError: If no context can have produced an episode.
        DensityError: If a density is not a number.
    """
    increments = [step.increment for step in scan(recursion, episodes, offset) if step.observed.observations]
    return torch.stack(increments).sum(0).T


def marginal(per_context: Tensor, log_prior: Tensor, known: Tensor | None, offset: int = 0) -> Tensor:
    """`log Σ_c P(c) p(o | a, c)` of `[B, C]`; of the known contexts alone, where they are (`[B]`, or −1)."""
    joint = per_context + log_prior.double()
    total = joint.logsumexp(-1)
    if known is not None:
        told = joint.gather(-1, known.clamp(min=0)[:, None])[:, 0]
        total = torch.where(known >= 0, told, total)
    impossible = ~torch.isfinite(total)
    if bool(impossible.any()):
        b = int(impossible.nonzero()[0]) + offset
        raise DegenerateWeightsError(
            f"episode {b}: no context that the prior, or what is known of it, allows can have produced it"
        )
    return total


def known_contexts(model: CPOMDP, episodes: Episodes) -> Tensor:
    """The contexts of episodes, `[B]`, negative where unknown.

    Raises:
        ValueError: If there are none, or not of this model.
    """
    contexts = episodes.contexts
    require(contexts is not None, "use_contexts", True, "False, as the episodes' contexts are not known")
    assert contexts is not None
    highest = model.num_contexts - 1
    inside = bool((contexts <= highest).all())
    require(inside, "episodes.contexts", int(contexts.max()), f"0 to {highest}, or negative for unknown")
    return contexts


class Estimator:
    """An estimate of the log-likelihood by any backend, at parameters that may change: for random walks.

    Episodes are in blocks, each with random numbers of its own, so that some can be renewed without others.

    Args:
        model: The CPOMDP, of which a copy is made.
        episodes: What was done and seen.
        backend: Its estimate of each likelihood is unbiased, or exact.
        use_contexts: Whether to condition on contexts that are known.
        blocks: How many; not more than there are episodes.

    Attributes:
        impossible: Why the last estimate that was minus infinity was, in words.
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

    def with_particles(self, num_particles: int) -> Estimator:
        """The same by a particle filter with so many particles."""
        other = copy(self)
        other.backend = replace(cast("ParticleFilter", self.backend), num_particles=num_particles)
        other._size = None
        return other

    def __call__(self, at: Mapping[str, Tensor], seed: int) -> float:
        """An estimate of it all; minus infinity if no particle of an episode is where it was."""
        return sum(self.per_block(at, {g: seed_for(seed, g) for g in range(len(self.bounds))}).values())

    def per_block(self, at: Mapping[str, Tensor], seeds: Mapping[int, int]) -> dict[int, float]:
        """An estimate for each of some blocks, with the random numbers that follow from its seed."""
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
