"""The posterior of a model's constants by particle marginal Metropolis–Hastings."""

from __future__ import annotations

import math
import secrets
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.diagnostics.inference_data import variable, wrapped
from cpomdp_ppl.errors import rejected, require, require_count
from cpomdp_ppl.inference import ParticleFilter, as_backend
from cpomdp_ppl.isolation import isolated, require_seed, seed_for
from cpomdp_ppl.learning.likelihood import Estimator
from cpomdp_ppl.learning.parameters import Unconstrained, learnable, require_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from arviz import InferenceData

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP

WALK, ESTIMATE, REPLICATE = range(3)
"""What random numbers are for."""

REPLICATES = 20
"""Estimates at the mode whose spread tells how noisy they are."""

TARGET = 0.25
"""Acceptance rate that warm-up steers to."""

NOISY = 1.7
"""Standard deviation of the estimate above which chains stick."""


def particle_marginal_metropolis_hastings(
    model: CPOMDP,
    episodes: Episodes,
    prior: Mapping[str, Any],
    *,
    num_particles: int = 256,
    likelihood: Backend | str | None = None,
    chains: int = 4,
    draws: int = 500,
    warm_up: int = 250,
    initial: Mapping[str, Any] | None = None,
    covariance: Tensor | None = None,
    use_contexts: bool = False,
    seed: int | None = None,
    progress: bool = True,
) -> InferenceData | xr.DataTree:
    """Draw the `PyroParam`s of a model from their posterior, contexts and states integrated out.

    A random walk on the unconstrained scale that estimates the likelihood anew by particle filters at every
    proposal. Their estimate `p̂(o | a, c)` is unbiased; so is `Σ_c P(c) p̂(o | a, c)`, and so is the product
    over episodes, whose random numbers are independent. Hence the chain has exactly the posterior of the
    model for its target, whatever the number of particles (Andrieu, Doucet and Holenstein, 2010); but with
    too few it sticks. The shape of the walk is adapted in warm-up only (Haario, Saksman and Tamminen, 2001).

    The noise grows with the number of episodes. The attribute `log_likelihood_sd` is the standard deviation
    of the estimate at the highest draw, `advice` says what follows for `num_particles` (1 to 1.7 is best:
    Doucet et al., 2015), and a warning is given if it is above 1.7.

    Groups: `posterior`, with every parameter on its own scale, `[chain, draw, …]`; `sample_stats`, with `lp`
    (log of prior and estimated likelihood, as a density on the parameters' own scale), `accepted`,
    `acceptance_rate` (the probability of it) and `log_likelihood` (the estimate), `[chain, draw]`.

    Args:
        model: The CPOMDP, which is left alone, as is Pyro's param store.
        episodes: What was done and seen.
        prior: A distribution for every parameter, on its own scale. One for a single number serves all
            numbers of a parameter, independently.
        num_particles: For every episode and context.
        likelihood: A backend to take in place of the bootstrap filter with `num_particles`: a guided one, or
            one without noise, which makes this plain Metropolis–Hastings.
        chains: Independent, and one after the other.
        draws: Of each chain, after warm-up.
        warm_up: Steps of each chain that are not kept.
        initial: Values to start about, in place of the model's own.
        covariance: Of the posterior on the unconstrained scale, `[P, P]`, as far as it is known:
            `Estimate.covariance`. Chains start at draws of twice its spread; without it, at draws with
            standard deviations of 0.2.
        use_contexts: Whether to condition on contexts that are known; see `log_likelihood`.
        seed: Of everything random; left out, one is taken from fresh entropy. The attribute `seed` notes it.
        progress: Whether to show a progress bar.

    Returns:
        An `InferenceData`; a `DataTree` of the same groups if ArviZ is 1.0 or later.

    Raises:
        ValueError: If the model has no `PyroParam`, a parameter has no prior, or a prior no parameter; if
            the posterior density is zero at the start; and on other arguments that make no sense.
        ObservationError: If the episodes are not of this model.
        DensityError: If a program leaves the reals.

    Example:
        >>> import pyro.distributions as dist
        >>> from pyro.nn import PyroParam
        >>> from torch.distributions import constraints
        >>> from cpomdp_ppl import RandomPolicy, simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark(5, dark_variance=PyroParam(torch.tensor(5.0), constraints.positive))
        >>> episodes = simulate(LightDark(5), RandomPolicy(3), 5, seed=0)
        >>> data = particle_marginal_metropolis_hastings(
        ...     model, episodes, {"dark_variance": dist.LogNormal(1.5, 1.0)},
        ...     num_particles=64, chains=2, draws=10, warm_up=10, seed=0, progress=False,
        ... )
        >>> data.posterior["dark_variance"].dims
        ('chain', 'draw')
    """
    for name, value in [("num_particles", num_particles), ("chains", chains), ("draws", draws)]:
        require_count(name, value)
    require_count("warm_up", warm_up)
    require_seed(seed)
    number = secrets.randbits(32) if seed is None else int(seed)
    backend = ParticleFilter(num_particles=num_particles) if likelihood is None else as_backend(likelihood)
    space = Unconstrained(learnable(model), initial)
    _require_prior(prior, space)
    if covariance is not None:
        P = len(space)
        fits = isinstance(covariance, Tensor) and covariance.shape == (P, P)
        fits = fits and bool(torch.isfinite(covariance).all())
        fits = fits and int(torch.linalg.cholesky_ex(covariance.double())[1]) == 0
        require(fits, "covariance", covariance, f"a positive definite matrix [{P}, {P}]")
    target = _Target(space, prior, Estimator(model, episodes, backend, use_contexts=use_contexts))
    runs = []
    with tqdm(total=chains * (warm_up + draws), disable=not progress, desc="PMMH") as bar:
        for chain in range(chains):
            walk = _Walk(target, covariance, number, chain)
            walk.start()
            for _ in range(warm_up):
                walk.step(adapt=True)
                bar.update()
            walk.refresh()
            steps = []
            for _ in range(draws):
                steps.append(walk.step(adapt=False))
                bar.update()
            runs.append(steps)
            accepted = float(np.mean([step.accepted for step in steps]))
            bar.set_postfix(accepted=f"{accepted:.2f}")
    return wrapped(_groups(target, runs, number, backend, warm_up))


@dataclass(frozen=True)
class _Point:
    """A place of the walk.

    Attributes:
        u: On the unconstrained scale, `[P]`.
        log_prior: Density there, on the parameters' own scale.
        log_jacobian: What makes it one on the unconstrained scale.
        log_likelihood: The estimate.
    """

    u: Tensor
    log_prior: float
    log_jacobian: float
    log_likelihood: float

    @property
    def log_density(self) -> float:
        """On the unconstrained scale, but for a constant."""
        return self.log_prior + self.log_jacobian + self.log_likelihood


@dataclass(frozen=True)
class _Step:
    point: _Point
    accepted: bool
    probability: float


class _Target:
    """The posterior density, estimated."""

    def __init__(self, space: Unconstrained, prior: Mapping[str, Any], estimator: Estimator) -> None:
        self.space, self.prior, self.estimator = space, prior, estimator

    def at(self, u: Tensor, seed: int) -> _Point:
        """Estimate it; where the prior is zero there is no need to."""
        with torch.no_grad(), isolated(0):
            values = self.space.values(u)
            log_prior = sum(_log_prior(self.prior[name], value) for name, value in values.items())
            log_jacobian = float(self.space.log_jacobian(u))
        finite = all(bool(torch.isfinite(value).all()) for value in values.values())
        if not finite or not math.isfinite(log_prior) or not math.isfinite(log_jacobian):
            return _Point(u, -math.inf, 0.0, 0.0)
        return _Point(u, log_prior, log_jacobian, self.estimator(values, seed))


def _log_prior(prior: Any, value: Tensor) -> float:
    inside = bool(prior.support.check(value).all())
    return float(prior.log_prob(value).sum()) if inside else -math.inf


class _Walk:
    """One chain."""

    def __init__(self, target: _Target, covariance: Tensor | None, seed: int, chain: int) -> None:
        self.target, self.seed, self.chain = target, seed, chain
        self.P, self.count = len(target.space), 0
        known = covariance is not None
        self.covariance = covariance.double() if covariance is not None else 0.04 * torch.eye(self.P).double()
        self.log_scale = math.log(2.38 / math.sqrt(self.P))
        self.mean, self.scatter, self.weight = (
            torch.zeros(self.P).double(),
            torch.zeros_like(self.covariance),
            0,
        )
        self.spread = 2.0 if known else 1.0
        self.given = self.covariance
        # On the way in from afar all is accepted, which says nothing about the right scale.
        self.most = self.log_scale + (0.5 if known else 2.0)
        self.trust = (100 if known else 10) * self.P  # how many steps what was given counts for
        self._generator = torch.Generator().manual_seed(seed_for(seed, WALK, chain))

    def _normal(self) -> Tensor:
        return torch.randn(self.P, generator=self._generator, dtype=torch.float64)

    def _estimated(self, u: Tensor) -> _Point:
        self.count += 1
        return self.target.at(u, seed_for(self.seed, ESTIMATE, self.chain, self.count))

    def start(self) -> None:
        """A place that is possible, about the initial values."""
        centre, root = self.target.space.start, torch.linalg.cholesky(self.covariance)
        middle = self._estimated(centre)
        if not math.isfinite(middle.log_density):
            values = {name: value.tolist() for name, value in self.target.space.values(centre).items()}
            what = "prior" if not math.isfinite(middle.log_prior) else "estimated likelihood"
            raise rejected("initial", values, f"values at which the {what} is not zero")
        self.point = middle
        for _ in range(10):
            point = self._estimated(centre + self.spread * root @ self._normal())
            if math.isfinite(point.log_density):
                self.point = point
                return

    def refresh(self) -> None:
        """Estimate the likelihood anew where the walk is: a lucky estimate of warm-up is not to last."""
        again = self._estimated(self.point.u)
        self.point = again if math.isfinite(again.log_density) else self.point

    def step(self, adapt: bool) -> _Step:
        """Propose, and accept or not."""
        root = torch.linalg.cholesky(self.covariance)
        proposed = self._estimated(self.point.u + math.exp(self.log_scale) * root @ self._normal())
        ratio = proposed.log_density - self.point.log_density
        probability = math.exp(min(0.0, ratio))
        accepted = float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability
        self.point = proposed if accepted else self.point
        if adapt:
            self._adapt(probability)
        return _Step(self.point, accepted, probability)

    def _adapt(self, probability: float) -> None:
        """The scale by the acceptance rate, the shape by the places so far, the later the more."""
        n = self.weight = self.weight + 1
        self.log_scale = min(self.log_scale + 2 * (probability - TARGET) / (n + 10) ** 0.6, self.most)
        rate = 1 / n**0.8  # forgets the way in from the start
        away = self.point.u - self.mean
        self.mean = self.mean + rate * away
        self.scatter = (1 - rate) * (self.scatter + rate * torch.outer(away, away))
        if n % 10 == 0:
            self.refresh()  # or a lucky estimate holds the walk, and it learns nothing
            share = n / (n + self.trust)
            self.covariance = (1 - share) * self.given + share * self.scatter


def _require_prior(prior: Any, space: Unconstrained) -> None:
    known = {one.name: one for one in space.parameters}
    require_names("prior", prior, known)
    for name, one in known.items():
        require(name in prior, "prior", sorted(prior), f"a distribution for parameter '{name}', too")
        given = prior[name]
        proper = isinstance(given, torch.distributions.Distribution)
        require(proper, f"prior['{name}']", given, "a distribution")
        shape, own = given.batch_shape + given.event_shape, one.value.shape
        try:
            fits = torch.broadcast_shapes(shape, own) == own
        except RuntimeError:
            fits = False
        require(
            fits, f"prior['{name}']", list(shape), f"a distribution of shape {list(own)}, or a single one"
        )


def _groups(
    target: _Target, runs: list[list[_Step]], seed: int, backend: Backend, warm_up: int
) -> dict[str, xr.Dataset]:
    space = target.space
    posterior = {}
    for name in space.values(space.start):
        drawn = torch.stack([torch.stack([space.values(s.point.u)[name] for s in run]) for run in runs])
        safe = variable(name, "parameter")
        posterior[safe] = (
            ("chain", "draw", *[f"{safe}_dim_{k}" for k in range(drawn.dim() - 2)]),
            drawn.numpy(),
        )

    def series(function: Any) -> tuple[tuple[str, str], np.ndarray[Any, Any]]:
        return ("chain", "draw"), np.array([[function(step) for step in run] for run in runs])

    stats = {
        "lp": series(lambda s: s.point.log_prior + s.point.log_likelihood),
        "accepted": series(lambda s: s.accepted),
        "acceptance_rate": series(lambda s: s.probability),
        "log_likelihood": series(lambda s: s.point.log_likelihood),
    }
    mode = max(
        (step.point for run in runs for step in run), key=lambda point: point.log_prior + point.log_likelihood
    )
    values = space.values(mode.u)
    replicates = [target.estimator(values, seed_for(seed, REPLICATE, k)) for k in range(REPLICATES)]
    sd = float(np.std(replicates, ddof=1)) if np.isfinite(replicates).all() else math.inf
    advice = _advice(sd, backend)
    if sd > NOISY:
        warnings.warn(f"particle_marginal_metropolis_hastings: {advice}", stacklevel=3)
    attributes = {
        "inference_library": "cpomdp_ppl",
        "seed": seed,
        "warm_up": warm_up,
        "likelihood": repr(backend),
        "acceptance": [float(np.mean([step.accepted for step in run])) for run in runs],
        "log_likelihood_sd": sd,
        "advice": advice,
    }
    coordinates = {"chain": np.arange(len(runs)), "draw": np.arange(len(runs[0]))}
    return {
        "posterior": xr.Dataset(posterior, coordinates, attributes),
        "sample_stats": xr.Dataset(stats, coordinates, attributes),
    }


def _advice(sd: float, backend: Backend) -> str:
    """What the noise of the estimate means for the number of particles: its variance goes as 1 / N."""
    if not isinstance(backend, ParticleFilter):
        return f"the estimate of the log-likelihood has a standard deviation of {sd:.2g}"
    N = backend.num_particles
    said = f"with num_particles = {N}, the log-likelihood has a standard deviation of {sd:.2g} at the mode"
    if not math.isfinite(sd):
        return f"{said}: take many more"
    wanted = max(1, round(N * (sd / 1.3) ** 2))
    if sd > NOISY:
        return f"{said}, and chains stick: take about {wanted}"
    return f"{said}: about {wanted} would do" if sd < 0.9 else f"{said}, which is about right"
