"""Constants of a model by maximum likelihood, with standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.errors import (
    DegenerateWeightsError,
    DensityError,
    require_count,
    require_number,
)
from cpomdp_ppl.inference import as_backend
from cpomdp_ppl.learning.ascent import climb, climb_by_scores, inverse_of
from cpomdp_ppl.learning.likelihood import LogLikelihood
from cpomdp_ppl.learning.parameters import Unconstrained, learnable, with_parameters
from cpomdp_ppl.rng import fresh_seed, isolated, require_seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.learning.ascent import ValueAndGradient
    from cpomdp_ppl.model import CPOMDP

DIFFERENCE_STEP = 1e-2
"""Step of the differences of gradients that make the information matrix, on the unconstrained scale."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """Constants of a model as estimated by maximum likelihood.

    Attributes:
        model: A copy of the model with the values for constants; see `with_parameters`.
        values: Estimates by parameter, on its own scale, float64.
        standard_errors: Standard errors of those, by the observed information and the delta method; NaN where
            the log-likelihood is flat or not at a maximum, so that episodes do not tell the value. Those of
            `"smc"` are by the squares of scores, with what is left of the noise; NaN where noise is half of
            them.
        log_likelihood: Log-likelihood by iteration, from the start on, of the run that ended highest. With
            `"smc"` these are estimates, which are too high as long as random numbers are kept, since the
            climb makes the best of them, too.
        converged: Whether that run ended because nothing was left to gain, or noise alone.
        ends: The last log-likelihood of each start.
        unconstrained: The maximum u on the unconstrained scale, `[P]`.
        covariance: The inverse of the information there, `[P, P]`; NaN if there is none.
        labels: A name for every number, in the order in which values follow each other.
    """

    model: CPOMDP
    values: dict[str, Tensor]
    standard_errors: dict[str, Tensor]
    log_likelihood: Tensor
    converged: bool
    ends: Tensor
    unconstrained: Tensor
    covariance: Tensor
    labels: tuple[str, ...]

    def __str__(self) -> str:
        value = torch.cat([x.reshape(-1) for x in self.values.values()]).tolist()
        error = torch.cat([x.reshape(-1) for x in self.standard_errors.values()]).tolist()
        width = max(len(label) for label in (*self.labels, "parameter"))
        lines = [f"{'parameter':<{width}}  {'estimate':>12}  {'std. error':>12}"]
        for label, x, e in zip(self.labels, value, error, strict=True):
            lines.append(f"{label:<{width}}  {x:>12.5g}  {e:>12.3g}")
        end = (
            "converged"
            if self.converged
            else "not converged (more iterations or particles, or a likelihood that jumps)"
        )
        count = len(self.log_likelihood) - 1
        lines.append(f"log-likelihood {float(self.log_likelihood[-1]):.3f} after {count} iterations, {end}")
        if any(math.isnan(e) for e in error):
            lines.append("no standard errors: the log-likelihood is flat there, or rises in some direction")
        return "\n".join(lines)


def maximum_likelihood(
    model: CPOMDP,
    episodes: Episodes,
    likelihood: str | Backend = "ekf",
    *,
    iterations: int = 100,
    learning_rate: float = 1.0,
    tolerance: float = 1e-4,
    starts: int = 1,
    initial: Mapping[str, Any] | None = None,
    use_contexts: bool = False,
    seed: int | None = None,
    progress: bool = True,
) -> Estimate:
    """Fit the `PyroParam`s of a model to episodes whose contexts are unknown.

    Climbs `Σ_b log Σ_c P(c) p(o_b | a_b, c)` by BFGS on the unconstrained scale. A backend that
    approximates has a maximum of its own: the estimate is as biased as its likelihood. Where programs jump,
    so does the likelihood of Kalman filters; the climb may then end early, which `converged` tells, and
    `"grid"` is the better choice.

    For models with a discrete site in `transition` there is `"smc"`, by Fisher's identity: see
    `log_likelihood` for what its gradient does not see. The climb is that of the others with the random
    numbers kept, and then goes on with fresh ones, by Fisher scoring: steps are judged against their noise,
    and filters are added until noise is a small part of the standard errors. These are by the squares of the
    episodes' scores, which takes many more episodes than parameters, and a model that is true. Too few
    particles bias the score by O(1/N) for N of all filters together; after many steps few of the first
    ancestors are left, and the noise grows with the square of the length of episodes. So compare with the
    estimate of twice the particles.

    Args:
        model: The CPOMDP, which is left alone, as is Pyro's param store.
        episodes: What was done and seen.
        likelihood: A backend that can be differentiated, or its name; see `log_likelihood`.
        iterations: Number of iterations of each start, at the most.
        learning_rate: Length of the longest step on the unconstrained scale; 1 changes a positive parameter
            by a factor of e at most.
        tolerance: Gain in log-likelihood below which a further step is not worth while.
        starts: Number of times to climb: first from the model's values, then from others around them, at
            distances drawn from a standard normal on the unconstrained scale. Contexts may be mistaken for
            each other, and that is a maximum, too.
        initial: Values to start from, instead of the model's, for some or all parameters.
        use_contexts: Whether to condition on contexts that are known; see `log_likelihood`.
        seed: Seed of the further starts, and of the random numbers of `"smc"`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the model has no `PyroParam`, or the backend has no gradient, or on other arguments
            that make no sense.
        DegenerateWeightsError: If no context can have produced an episode, at the start.
        DensityError: If the log-likelihood is not finite at the start.

    Examples:
        >>> from pyro.nn import PyroParam
        >>> from torch.distributions import constraints
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark(process_variance=PyroParam(torch.tensor(0.5), constraints.positive))
        >>> episodes = simulate(LightDark(), RandomPolicy(3), 20, seed=0)
        >>> estimate = maximum_likelihood(model, episodes, iterations=3, progress=False)
        >>> sorted(estimate.values)
        ['process_variance']
    """
    require_count("iterations", iterations)
    require_count("starts", starts)
    require_number("learning_rate", learning_rate, "a positive number", above=0)
    require_number("tolerance", tolerance, "a positive number", above=0)
    require_seed(seed)
    space = Unconstrained(learnable(model), initial)
    noisy = as_backend(likelihood).draws
    number = fresh_seed(seed) if noisy else 0
    likelihood_of = _UnconstrainedLikelihood(
        LogLikelihood(model, episodes, likelihood, use_contexts=use_contexts, seed=number), space
    )
    with isolated(seed):
        others = [space.start + torch.randn(len(space), dtype=torch.float64) for _ in range(starts - 1)]
    runs = []
    with tqdm(total=iterations * (starts + noisy), disable=not progress, desc="maximum likelihood") as bar:
        for which, u in enumerate([space.start, *others]):
            try:
                runs.append(climb(likelihood_of, u, iterations, learning_rate, tolerance, bar))
            except (DegenerateWeightsError, DensityError):
                if which == 0:  # starts that are drawn at random may be bad ones
                    raise
        u, series, converged = max(runs, key=lambda run: run[1][-1])
        if noisy:
            u, score, more, converged = climb_by_scores(
                likelihood_of.scores, u, iterations, learning_rate, tolerance, number, bar
            )
            series = series + more
    covariance = score.covariance() if noisy else _covariance(likelihood_of, u)
    values = {name: value.detach() for name, value in space.values(u).items()}
    return Estimate(
        with_parameters(model, values),
        values,
        _standard_errors(space, u, covariance),
        torch.tensor(series, dtype=torch.float64),
        converged,
        torch.tensor([run[1][-1] for run in runs], dtype=torch.float64),
        u,
        covariance,
        tuple(space.labels),
    )


class _UnconstrainedLikelihood:
    """The log-likelihood as a function of unconstrained parameters u `[P]`."""

    def __init__(self, likelihood: LogLikelihood, space: Unconstrained) -> None:
        self.likelihood, self.space = likelihood, space

    def __call__(self, u: Tensor) -> tuple[float, Tensor]:
        """The log-likelihood at u and its gradient, `[P]`."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            values = self.space.values(u)
            value, slopes = self.likelihood.value_and_gradient(values)
            surrogate = torch.stack([(values[name] * slopes[name]).sum() for name in values]).sum()
            (gradient,) = torch.autograd.grad(surrogate, u)
        return float(value), gradient

    def scores(self, u: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The log-likelihoods of the episodes at u, `[B]`, and their gradients, `[B, P]`."""
        values, by_value = self.likelihood.scores(self.space.values(u), seed)
        return values, by_value @ _jacobian(self.space, u)


def _covariance(function: ValueAndGradient, u: Tensor) -> Tensor:
    """The inverse of the observed information at u, by central differences of gradients; NaN if none."""
    steps = torch.eye(len(u), dtype=u.dtype) * DIFFERENCE_STEP
    try:
        rows = [(function(u - e)[1] - function(u + e)[1]) / (2 * DIFFERENCE_STEP) for e in steps]
    except (DegenerateWeightsError, DensityError):
        return torch.full_like(steps, torch.nan)
    information = torch.stack(rows)
    return inverse_of((information + information.mT) / 2)


def _standard_errors(space: Unconstrained, u: Tensor, covariance: Tensor) -> dict[str, Tensor]:
    """Standard errors of all parameters on their own scales, by the delta method."""
    jacobian = _jacobian(space, u)
    error = (jacobian @ covariance @ jacobian.mT).diagonal().sqrt()
    values = space.values(u)
    parts = error.split([value.numel() for value in values.values()])
    return {name: part.reshape(values[name].shape) for name, part in zip(values, parts, strict=True)}


def _jacobian(space: Unconstrained, u: Tensor) -> Tensor:
    """Derivatives of all parameters by u."""
    jacobian: Tensor = torch.autograd.functional.jacobian(space.vector, u)
    return jacobian
