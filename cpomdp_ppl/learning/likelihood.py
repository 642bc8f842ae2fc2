"""The likelihood of recorded episodes whose contexts are unknown, and its gradient."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.arrays import pieces
from cpomdp_ppl.errors import DegenerateWeightsError, DensityError, require
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.inference.backend import require_same_sites
from cpomdp_ppl.inference.precision import double_precision, in_double_precision
from cpomdp_ppl.inference.scan import scan
from cpomdp_ppl.learning.differentiable import differentiable, episodes_with_graph
from cpomdp_ppl.learning.parameters import constant_copy, learnable, set_constants
from cpomdp_ppl.rng import isolated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cpomdp_ppl.episodes import Episodes
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
        seed: Seed of the random numbers of `"smc"`; None takes fresh ones, as stochastic gradients would.

    Returns:
        A scalar, float64, that can be differentiated once.

    Raises:
        ValueError: If the model has no `PyroParam`, or the backend has no gradient.
        UnsupportedModelError: If the backend cannot serve the model.
        ObservationError: If the episodes are not of this model.
        DegenerateWeightsError: If no context can have produced an episode.
        DensityError: If a density is not a number, or the gradient is not.

    Examples:
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
    objective = LogLikelihood(model, episodes, likelihood, use_contexts=use_contexts, seed=seed)
    values = {one.name: one.value for one in parameters}
    at = {name: value.detach().double() for name, value in values.items()}
    if not torch.is_grad_enabled():
        return objective.value(at)
    value, gradient = objective.value_and_gradient(at)
    # A linear function with this value and gradient: the graphs of batches of episodes are gone by now.
    for name, parameter in values.items():
        value = value + ((parameter.double() - at[name]) * gradient[name]).sum()
    return value


class LogLikelihood:
    """The log-likelihood of episodes as a function of the parameters of (a copy of) a model."""

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
        """The log-likelihood at parameters in float64, and its gradient by each of them."""
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
                scores.append(_score_of_each(value, list(at.values())))
                values.append(value.detach())
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
        """Yield the log-likelihoods of batches of episodes, `[B]`, with their graph."""
        set_constants(self.copy, at)
        with _computing(self.copy, seed):
            recursion = differentiable(self.backend, self.copy)
            require_same_sites(recursion.model, recursion.signature, self.episodes)
            size = episodes_with_graph(recursion, self.episodes.horizon)
            log_prior = self.copy.prior().log()  # [C]
            for rows in pieces(len(self.episodes), size):
                some = self.episodes[rows] if size < len(self.episodes) else self.episodes
                known = None if self.contexts is None else self.contexts[rows]
                per_context = log_likelihoods(recursion, some, rows.start)  # [B, C]
                yield marginal(per_context, log_prior, known, rows.start)


@contextmanager
def _computing(model: CPOMDP, seed: int | None) -> Iterator[None]:
    with isolated(seed), poutine.block(), model.running(), double_precision(), warnings.catch_warnings():
        # Backends look at numbers to find out whether something is wrong, graph or not.
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
        yield


def log_likelihoods(recursion: Recursion, episodes: Episodes, offset: int = 0) -> Tensor:
    """`log p(o | a, c)` of a batch of episodes, `[B, C]`, with a graph if the recursion has one."""
    increments = [step.increment for step in scan(recursion, episodes, offset) if step.observed.observations]
    return torch.stack(increments).sum(0).T


def marginal(per_context: Tensor, log_prior: Tensor, known: Tensor | None, offset: int = 0) -> Tensor:
    """`log Σ_c P(c) p(o | a, c)` of every episode, `[B]`, out of `log p(o | a, c)`, `[B, C]`.

    Contexts that are known, `[B]`, are −1 where they are not. Raises if no context is left.
    """
    joint = per_context + log_prior.double()
    total = joint.logsumexp(-1)
    if known is not None:
        of_known = joint.gather(-1, known.clamp(min=0)[:, None])[:, 0]
        total = torch.where(known >= 0, of_known, total)
    impossible = ~torch.isfinite(total)
    if bool(impossible.any()):
        b = int(impossible.nonzero()[0]) + offset
        raise DegenerateWeightsError(
            f"episode {b}: no context that the prior, or what is known of it, allows can have produced it"
        )
    return total


def known_contexts(model: CPOMDP, episodes: Episodes) -> Tensor:
    """The contexts of episodes, `[B]`, negative where unknown; raises if there are none."""
    contexts = episodes.contexts
    require(contexts is not None, "use_contexts", True, "False, as the episodes' contexts are not known")
    assert contexts is not None
    highest = model.num_contexts - 1
    inside = bool((contexts <= highest).all())
    require(inside, "episodes.contexts", int(contexts.max()), f"0 to {highest}, or negative for unknown")
    return contexts


def _score_of_each(values: Tensor, parameters: list[Tensor]) -> Tensor:
    """Gradients `[B, P]` of values `[B]` by parameters with P numbers in all."""
    weights = torch.ones_like(values).requires_grad_()
    found = torch.autograd.grad(values, parameters, weights, create_graph=True, materialize_grads=True)
    # The weighted gradient is linear in the weights: its derivatives by them are the gradients of each value.
    totals = torch.cat([x.reshape(-1) for x in found])  # [P]
    columns = [
        torch.autograd.grad(total, weights, retain_graph=True, materialize_grads=True)[0] for total in totals
    ]
    return torch.stack(columns, -1)
