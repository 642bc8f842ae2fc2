"""The posterior of a model's constants by particle marginal Metropolis–Hastings."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from cpomdp_ppl.diagnostics.export import variable
from cpomdp_ppl.diagnostics.inference_data import wrapped
from cpomdp_ppl.errors import require, require_count, require_number
from cpomdp_ppl.experiments.execute import one_thread, require_workers
from cpomdp_ppl.inference import ParticleFilter, as_backend
from cpomdp_ppl.learning.metropolis import MetropolisStep, Walk, advance
from cpomdp_ppl.learning.parameters import Unconstrained, learnable, require_names
from cpomdp_ppl.learning.posterior import FOR_REPLICATE, BlockLikelihood, Posterior
from cpomdp_ppl.rng import fresh_seed, seed_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from arviz import InferenceData

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP

NUM_REPLICATES = 20
"""Number of estimates at the mode whose spread tells how noisy they are."""

LARGE_NOISE = 1.7
"""Standard deviation of the estimate of a block above which chains stick."""


class SamplingInterrupted(KeyboardInterrupt):
    """Ctrl-C while draws are made.

    Attributes:
        data: The draws so far, as `particle_marginal_metropolis_hastings` returns them.
    """

    def __init__(self, message: str, data: InferenceData | xr.DataTree) -> None:
        super().__init__(message)
        self.data = data


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
    jumps: float = 0.5,
    blocks: int = 4,
    workers: int | None = 1,
    use_contexts: bool = False,
    seed: int | None = None,
    progress: bool = True,
) -> InferenceData | xr.DataTree:
    """Draw the `PyroParam`s of a model from their posterior, contexts and states integrated out.

    Metropolis–Hastings on the unconstrained scale, with the likelihood estimated by particle filters. Their
    estimate `p̂(o | a, c)` is unbiased; so is `Σ_c P(c) p̂(o | a, c)`, and so is the product over episodes,
    whose random numbers are independent. Hence the chain has exactly the posterior of the model for its
    target, whatever the number of particles (Andrieu, Doucet and Holenstein, 2010); but with too few it
    sticks.

    Episodes are in blocks. A step proposes parameters and keeps the random numbers of the filters, so that
    most of the noise is in both estimates and cancels; then it proposes new random numbers for one block
    (Tran et al., 2016). Particles are needed for a block's noise, not for that of all episodes.

    Proposals are of two kinds: steps nearby, and jumps to anywhere, from a Student t distribution. Centre,
    shape and scale are adapted in warm-up only (Haario, Saksman and Tamminen, 2001). Many episodes make a
    posterior nearly normal on that scale, and a jump that knows centre and shape is then accepted as often
    as noise allows: draws forget where they came from in a few steps, not in dozens. Where a posterior looks
    otherwise, jumps are in vain, and the steps nearby do the work.

    The noise grows with the number of episodes. The attribute `log_likelihood_sd` is the standard deviation
    of the whole estimate at the highest draw, `block_sd` what that is for a block, and `advice` says what
    follows for `num_particles` (1 to 1.7 for a block is best: Doucet et al., 2015); a warning is given if it
    is above 1.7. `renewal` is how often new random numbers were accepted, by chain.

    As soon as every chain has a draw, Ctrl-C raises `SamplingInterrupted`, a `KeyboardInterrupt` whose `data`
    has the draws so far, as many of each chain. With several workers the last few seconds are lost.

    Groups: `posterior`, with every parameter on its own scale, `[chain, draw, …]`; `sample_stats`, with `lp`
    (log of prior and estimated likelihood, as a density on the parameters' own scale), `accepted`,
    `acceptance_rate` (the probability of it) and `log_likelihood` (the estimate), `[chain, draw]`.

    Args:
        model: The CPOMDP, which is left alone, as is Pyro's param store.
        episodes: What was done and seen.
        prior: A distribution for every parameter, on its own scale. One for a single number serves all
            numbers of a parameter, independently.
        num_particles: Number of particles for every episode and context.
        likelihood: A backend to take in place of the bootstrap filter with `num_particles`: a guided one, or
            one without noise, which makes this plain Metropolis–Hastings.
        chains: Number of chains, which are independent of each other.
        draws: Number of draws of each chain, after warm-up.
        warm_up: Number of steps of each chain that are not kept.
        initial: Values to start around, in place of the model's. A chain that finds an estimate of zero
            there starts at a draw from the prior at which it is not.
        covariance: Covariance of the posterior on the unconstrained scale, `[P, P]`, as far as it is known,
            such as `Estimate.covariance`. Chains start at draws of twice its spread; without it, at draws
            with standard deviations of 0.2.
        jumps: Share of proposals that are jumps, from 0 (a random walk) to 1. Before the end of warm-up there
            are none unless a `covariance` is given.
        blocks: Number of blocks of episodes, whose random numbers are renewed in turn. More of them need
            fewer particles, but take longer to go round. A backend without noise has no use for them.
        workers: Number of processes in which chains run; more than one needs the extra `parallel`. None
            leaves it to joblib's configuration; see `cpomdp_ppl.experiments.execute`. The result is the same.
        use_contexts: Whether to condition on contexts that are known; see `log_likelihood`.
        seed: Seed of all random numbers; None takes a fresh one, which the attribute `seed` records.
        progress: Whether to show a progress bar.

    Returns:
        An `InferenceData`; a `DataTree` of the same groups if ArviZ is 1.0 or later.

    Raises:
        ValueError: If the model has no `PyroParam`, a parameter has no prior, or a prior no parameter; if
            the prior is zero at the start; if no start is found at which the estimated likelihood is not,
            saying what to pass instead; and on other arguments that make no sense.
        ObservationError: If the episodes are not of this model.
        DensityError: If a program leaves the reals.
        SamplingInterrupted: On Ctrl-C, with the draws so far.

    Examples:
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
    require_workers(workers)
    require_count("blocks", blocks)
    require_number("jumps", jumps, "a share from 0 to 1")
    require(jumps <= 1, "jumps", jumps, "a share from 0 to 1")
    number = fresh_seed(seed)
    backend = ParticleFilter(num_particles=num_particles) if likelihood is None else as_backend(likelihood)
    space = Unconstrained(learnable(model), initial)
    _require_prior(prior, space)
    _require_covariance(covariance, len(space))
    estimates = BlockLikelihood(
        model, episodes, backend, use_contexts=use_contexts, blocks=blocks if backend.draws else 1
    )
    posterior = Posterior(space, prior, estimates, noisy=backend.draws)
    walks = [Walk(space.start, covariance, jumps, warm_up, number, chain) for chain in range(chains)]
    with tqdm(total=chains * (warm_up + draws), disable=not progress, desc="PMMH") as bar:
        runs, finished = advance(posterior, walks, warm_up, draws, workers, bar)
    noise = _noise(posterior, runs, number)
    if noise["block_sd"] > LARGE_NOISE:
        warnings.warn(f"particle_marginal_metropolis_hastings: {noise['advice']}", stacklevel=2)
    attributes = {
        "inference_library": "cpomdp_ppl",
        "seed": number,
        "warm_up": warm_up,
        "interrupted": int(not finished),
        "likelihood": repr(backend),
        "acceptance": [float(np.mean([step.accepted for step in run])) for run in runs],
        "renewal": [float(np.mean([step.renewed for step in run])) for run in runs],
        **noise,
    }
    data = wrapped(_groups(space, runs, attributes))
    if not finished:
        raise SamplingInterrupted(f"stopped after {len(runs[0])} of {draws} draws of each chain", data)
    return data


def _require_covariance(covariance: Any, P: int) -> None:
    if covariance is None:
        return
    fits = isinstance(covariance, Tensor) and covariance.shape == (P, P)
    fits = fits and bool(torch.isfinite(covariance).all())
    fits = fits and int(torch.linalg.cholesky_ex(covariance.double())[1]) == 0
    require(fits, "covariance", covariance, f"a positive definite matrix [{P}, {P}]")


def _require_prior(prior: Any, space: Unconstrained) -> None:
    known = {one.name: one for one in space.parameters}
    require_names("prior", prior, known)
    for name, one in known.items():
        require(name in prior, "prior", sorted(prior), f"a distribution for parameter '{name}', too")
        given = prior[name]
        proper = isinstance(given, torch.distributions.Distribution)
        require(proper, f"prior['{name}']", given, "a distribution")
        shape, expected = given.batch_shape + given.event_shape, one.value.shape
        try:
            fits = torch.broadcast_shapes(shape, expected) == expected
        except RuntimeError:
            fits = False
        kind = f"a distribution of shape {list(expected)}, or a single one"
        require(fits, f"prior['{name}']", list(shape), kind)


def _groups(
    space: Unconstrained, runs: list[list[MetropolisStep]], attributes: dict[str, Any]
) -> dict[str, xr.Dataset]:
    """The draws, and what is known about each step."""
    posterior = {}
    for name in space.values(space.start):
        drawn = torch.stack([torch.stack([space.values(s.point.u)[name] for s in run]) for run in runs])
        safe = variable(name, "parameter")
        axes = ("chain", "draw", *[f"{safe}_dim_{k}" for k in range(drawn.dim() - 2)])
        posterior[safe] = axes, drawn.numpy()

    def series(function: Any) -> tuple[tuple[str, str], np.ndarray[Any, Any]]:
        return ("chain", "draw"), np.array([[function(step) for step in run] for run in runs])

    stats = {
        "lp": series(lambda s: s.point.log_prior + s.point.log_likelihood),
        "accepted": series(lambda s: s.accepted),
        "acceptance_rate": series(lambda s: s.probability),
        "log_likelihood": series(lambda s: s.point.log_likelihood),
    }
    coordinates = {"chain": np.arange(len(runs)), "draw": np.arange(len(runs[0]))}
    return {
        "posterior": xr.Dataset(posterior, coordinates, attributes),
        "sample_stats": xr.Dataset(stats, coordinates, attributes),
    }


def _noise(posterior: Posterior, runs: list[list[MetropolisStep]], seed: int) -> dict[str, Any]:
    """How noisy the estimates of the likelihood are at the mode, and what that means."""
    likelihood = posterior.likelihood
    mode = max(
        (step.point for run in runs for step in run), key=lambda point: point.log_prior + point.log_likelihood
    )
    values = posterior.space.values(mode.u)
    with one_thread():
        replicates = [likelihood(values, seed_for(seed, FOR_REPLICATE, k)) for k in range(NUM_REPLICATES)]
    sd = float(np.std(replicates, ddof=1)) if np.isfinite(replicates).all() else math.inf
    block_sd = sd / len(likelihood.bounds) ** 0.5
    advice = _advice(block_sd, likelihood.backend)
    return {"log_likelihood_sd": sd, "block_sd": block_sd, "advice": advice}


def _advice(sd: float, backend: Backend) -> str:
    """Say what the noise of the estimate means for the number of particles N: its variance goes as 1 / N."""
    if not isinstance(backend, ParticleFilter):
        return f"the estimate of the log-likelihood has a standard deviation of {sd:.2g}"
    N = backend.num_particles
    said = f"with num_particles = {N}, the log-likelihood of a block has a standard deviation of {sd:.2g}"
    if not math.isfinite(sd):
        return f"{said}: take many more"
    wanted = max(1, round(N * (sd / 1.3) ** 2))
    if sd > LARGE_NOISE:
        return f"{said}, and chains stick: take about {wanted}"
    return f"{said}: about {wanted} would do" if sd < 0.9 else f"{said}, which is about right"
