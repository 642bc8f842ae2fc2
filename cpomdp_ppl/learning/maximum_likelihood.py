"""Constants of a model by maximum likelihood, and how well episodes tell them."""

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
from cpomdp_ppl.inference import ParticleFilter, as_backend
from cpomdp_ppl.learning.fisher_scoring import inverse_of, settle
from cpomdp_ppl.learning.likelihood import Objective
from cpomdp_ppl.learning.parameters import Unconstrained, learnable, with_parameters
from cpomdp_ppl.rng import fresh_seed, isolated, require_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP

STEP = 1e-2
"""Of the differences of gradients that make the information matrix, on the unconstrained scale."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """What maximum likelihood found.

    Attributes:
        model: A copy of the model with the values for constants; see `with_parameters`.
        values: By parameter, on its own scale, float64.
        standard_errors: Of those, by the observed information and the delta method; NaN where the
            log-likelihood is flat or not at a maximum, so that episodes do not tell the value. Of `"smc"`, by
            the squares of scores, with what is left of the noise; NaN where noise is half of them.
        log_likelihood: By iteration, from the start on, of the run that ended highest. Of `"smc"`, estimates:
            too high as long as random numbers are kept, as the climb makes the best of them, too.
        converged: Whether that run ended because nothing was left to gain, or noise alone.
        ends: Where each start led to: the last log-likelihood of each.
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
        iterations: At most so many, of each start.
        learning_rate: The longest step on the unconstrained scale; 1 changes a positive parameter by a
            factor of e at most.
        tolerance: It has converged if a further step promises less than this gain in log-likelihood.
        starts: How many times to climb: from the model's own values first, then from others about them, at
            distances drawn from a standard normal on the unconstrained scale. Contexts may be mistaken for
            each other, and that is a maximum, too.
        initial: Values to start from, instead of the model's own, for some or all parameters.
        use_contexts: Whether to condition on contexts that are known; see `log_likelihood`.
        seed: Of the further starts, and of the random numbers of `"smc"`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the model has no `PyroParam`, or the backend has no gradient, or on other arguments
            that make no sense.
        DegenerateWeightsError: If no context can have produced an episode, at the start.
        DensityError: If the log-likelihood is not finite at the start.

    Example:
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
    noisy = isinstance(as_backend(likelihood), ParticleFilter)
    number = fresh_seed(seed) if noisy else 0
    objective = Objective(model, episodes, likelihood, use_contexts=use_contexts, seed=number)

    def climbed(u: Tensor) -> tuple[float, Tensor]:
        """The log-likelihood at u and its gradient, `[P]`."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            values = space.values(u)
            value, slopes = objective.value_and_gradient(values)
            surrogate = torch.stack([(values[name] * slopes[name]).sum() for name in values]).sum()
            (gradient,) = torch.autograd.grad(surrogate, u)
        return float(value), gradient

    def scores(u: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The log-likelihoods of the episodes at u, `[B]`, and their gradients, `[B, P]`."""
        values, by_value = objective.scores(space.values(u), seed)
        jacobian: Any = torch.autograd.functional.jacobian(space.vector, u)
        return values, by_value @ jacobian

    with isolated(seed):
        others = [space.start + torch.randn(len(space), dtype=torch.float64) for _ in range(starts - 1)]
    runs = []
    with tqdm(total=iterations * (starts + noisy), disable=not progress, desc="maximum likelihood") as bar:
        for which, u in enumerate([space.start, *others]):
            try:
                runs.append(_climb(climbed, u, iterations, learning_rate, tolerance, bar))
            except (DegenerateWeightsError, DensityError):
                if which == 0:  # whoever draws a start at random has to live with bad ones
                    raise
        u, series, converged = max(runs, key=lambda run: run[1][-1])
        if noisy:
            u, at, more, converged = settle(scores, u, iterations, learning_rate, tolerance, number, bar)
            series = series + more
    covariance = at.covariance() if noisy else _covariance(climbed, u)
    jacobian: Any = torch.autograd.functional.jacobian(space.vector, u)
    error = (jacobian @ covariance @ jacobian.mT).diagonal().sqrt()
    values = {name: value.detach() for name, value in space.values(u).items()}
    sizes = [value.numel() for value in values.values()]
    errors = dict(zip(values, error.split(sizes), strict=True))
    return Estimate(
        with_parameters(model, values),
        values,
        {name: part.reshape(values[name].shape) for name, part in errors.items()},
        torch.tensor(series, dtype=torch.float64),
        converged,
        torch.tensor([run[1][-1] for run in runs], dtype=torch.float64),
        u,
        covariance,
        tuple(space.labels),
    )


def _climb(
    function: Callable[[Tensor], tuple[float, Tensor]],
    u: Tensor,
    iterations: int,
    longest: float,
    tolerance: float,
    bar: Any,
) -> tuple[Tensor, list[float], bool]:
    """BFGS with steps of bounded length. Returns the highest point, values by iteration, and convergence."""
    value, g = function(u)
    series, eye = [value], torch.eye(len(u), dtype=u.dtype)
    H = eye / max(1.0, float(g.norm()))  # inverse of the negative Hessian, as far as is known
    fresh = True
    for done in range(iterations):
        direction = H @ g
        promised = 0.5 * float(g @ direction)  # what a quadratic function has left to gain
        if promised < tolerance and not fresh:
            return _ended(u, series, True, bar, iterations - done)
        if float(g.norm()) == 0.0:
            return _ended(u, series, True, bar, iterations - done)
        direction = direction * min(1.0, longest / float(direction.norm()))
        found = _line_search(function, u, value, g, direction)
        if found is None:
            if fresh:  # along the gradient itself nothing is to be gained
                return _ended(u, series, promised < tolerance, bar, iterations - done)
            H, fresh = eye / max(1.0, float(g.norm())), True
            bar.update()
            series.append(value)
            continue
        after, value, g_after = found
        s, y = after - u, g - g_after  # the function is climbed, so y is along s
        curvature = float(s @ y)
        if curvature > 1e-10 * float(s.norm() * y.norm()):
            if fresh:
                H = eye * curvature / float(y @ y)
            left = eye - torch.outer(s, y) / curvature
            H = left @ H @ left.mT + torch.outer(s, s) / curvature
            fresh = False
        u, g = after, g_after
        series.append(value)
        bar.update()
        bar.set_postfix(log_likelihood=f"{value:.3f}")
    return u, series, False


def _ended(
    u: Tensor, series: list[float], converged: bool, bar: Any, left: int
) -> tuple[Tensor, list[float], bool]:
    bar.update(left)
    return u, series, converged


def _line_search(
    function: Callable[[Tensor], tuple[float, Tensor]], u: Tensor, value: float, g: Tensor, direction: Tensor
) -> tuple[Tensor, float, Tensor] | None:
    """Halve a step until it gains enough; None if none does."""
    promised = float(g @ direction)
    for _ in range(12):
        try:
            after, gradient = function(u + direction)
        except (DegenerateWeightsError, DensityError):
            after = -math.inf
        if after >= value + 1e-4 * promised:
            return u + direction, after, gradient
        direction, promised = direction / 2, promised / 2
    return None


def _covariance(function: Callable[[Tensor], tuple[float, Tensor]], u: Tensor) -> Tensor:
    """The inverse of the observed information at u, by central differences of gradients; NaN if none."""
    unit = torch.eye(len(u), dtype=u.dtype) * STEP
    try:
        rows = [(function(u - e)[1] - function(u + e)[1]) / (2 * STEP) for e in unit]
    except (DegenerateWeightsError, DensityError):
        return torch.full_like(unit, torch.nan)
    information = torch.stack(rows)
    return inverse_of((information + information.mT) / 2)
