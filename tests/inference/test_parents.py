"""Observation sites that depend on sites which were not observed: summed over, drawn, or refused by name.

The truth is a sum over the values of the hidden site, by scipy.
"""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import bernoulli, multivariate_normal, norm, poisson

from cpomdp_ppl import CPOMDP, Episodes, evaluate
from cpomdp_ppl.errors import ModelError, UnsupportedModelError
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import ParticleFilter, PerceptDensity, as_backend, inference_scope
from cpomdp_ppl.policy import Percept
from solvers import exact
from tests.programs import Still, Walk

Z = np.array([0.1, -3.0, 9.0, -20.0])


class Noisy(Still):
    """A real number that is of no account, or a single state."""

    actions = 2

    def __init__(self, finite=False):
        super().__init__()
        self.states = 1 if finite else None

    def initial(self, context):
        return super().initial(context) if self.states else pyro.sample("x", dist.Normal(0.0, 1.0))


class Outliers(Noisy):
    """Now and then the sensor has twenty times its noise, and does not say so."""

    p = 0.1

    def observation(self, state, action, context):
        outlier = pyro.sample("outlier", dist.Bernoulli(self.p).mask(False))
        pyro.sample("z", dist.Normal(context.float(), torch.where(outlier == 1, 8.0, 0.4)))

    def truth(self, z, c, a):
        return logsumexp([norm.logpdf(z, c, 0.4), norm.logpdf(z, c, 8.0)], b=[1 - self.p, self.p])


class Glitches(Noisy):
    """A rare event that shifts what is seen."""

    def observation(self, state, action, context):
        glitch = pyro.sample("glitch", dist.Bernoulli(1e-3).mask(False))
        pyro.sample("z", dist.Normal(context + 10.0 * glitch, 1.0))

    def truth(self, z, c, a):
        return logsumexp([norm.logpdf(z, c, 1), norm.logpdf(z, c + 10, 1)], b=[0.999, 0.001])


class OnlyAfterOne(Noisy):
    """A parent that matters in one context, after one action."""

    def observation(self, state, action, context):
        slip = pyro.sample("slip", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])).mask(False))
        matters = (context == 1) & (action == 1)
        pyro.sample("z", dist.Normal(torch.where(matters, 4.0 * slip, 0.0), 1.0))

    def truth(self, z, c, a):
        shift = 4 * (c == 1) * (a == 1)
        return logsumexp([norm.logpdf(z, shift * k, 1) for k in range(3)], b=[0.5, 0.3, 0.2])


class Blend(Noisy):
    """The weights of a mixture depend on a site that is hidden, its components do not."""

    def observation(self, state, action, context):
        k = pyro.sample("k", dist.Bernoulli(0.3).mask(False))
        weights = dist.Categorical(torch.stack([0.2 + 0.5 * k, 0.8 - 0.5 * k], -1))
        pyro.sample("z", dist.MixtureSameFamily(weights, dist.Normal(torch.tensor([0.0, 4.0]), 1.0)))

    def truth(self, z, c, a):
        first = 0.7 * 0.2 + 0.3 * 0.7
        return logsumexp([norm.logpdf(z, 0, 1), norm.logpdf(z, 4, 1)], b=[first, 1 - first])


def seen(z, action=0, **hidden):
    """An episode for every z, in each of which some sites were not observed."""
    B = len(z)
    values = {"z": torch.tensor(z, dtype=torch.float32)[:, None]}
    flags = {"z": torch.ones(B, 1, dtype=torch.bool)}
    for site, dtype in hidden.items():
        values[site], flags[site] = torch.zeros(B, 1, dtype=dtype), torch.zeros(B, 1, dtype=torch.bool)
    return Episodes(torch.full((B, 1), action), values, flags)


DISCRETE = [
    (Outliers, "outlier", torch.float32),
    (Glitches, "glitch", torch.float32),
    (OnlyAfterOne, "slip", torch.long),
    (Blend, "k", torch.float32),
]


@pytest.mark.slow
@pytest.mark.parametrize("action", [0, 1])
@pytest.mark.parametrize(("kind", "site", "dtype"), DISCRETE)
@pytest.mark.parametrize("backend", ["exact", "grid", "systematic", "multinomial"])
def test_a_discrete_parent_is_summed_over(backend, kind, site, dtype, action):
    """To single precision, in which `smc` computes; that has no error at all, as all particles sum alike."""
    model = kind(finite=backend == "exact")
    smc = backend in ("systematic", "multinomial")
    filtering = (ParticleFilter(16, backend) if smc else as_backend(backend)).run(
        model, seen(Z, action, **{site: dtype}), seed=0
    )
    truth = [[model.truth(z, c, action) for c in range(2)] for z in Z]
    np.testing.assert_allclose(filtering.log_likelihood, truth, rtol=1e-5)


@pytest.mark.parametrize(("kind", "site", "dtype"), DISCRETE)
def test_planners_sum_over_a_discrete_parent(kind, site, dtype):
    model = kind()
    values = {"z": torch.tensor(Z, dtype=torch.float32), site: torch.zeros(len(Z), dtype=dtype)}
    flags = {"z": torch.ones(len(Z), dtype=torch.bool), site: torch.zeros(len(Z), dtype=torch.bool)}
    with inference_scope(model, seed=0):
        density = PerceptDensity(Generative(model))(
            torch.zeros(len(Z)), Percept(torch.ones(len(Z)).long(), values, flags)
        )
    np.testing.assert_allclose(density, [[model.truth(z, c, 1) for c in range(2)] for z in Z], rtol=1e-5)


@pytest.mark.parametrize("backend", ["ekf", "ukf"])
def test_kalman_filters_refuse_a_hidden_discrete_parent(backend):
    with pytest.raises(UnsupportedModelError, match="'outlier'"):
        as_backend(backend).run(Outliers(), seen(Z, outlier=torch.float32))


class Counted(Noisy):
    """A count that may be anything adds to what is seen."""

    def observation(self, state, action, context):
        flashes = pyro.sample("flashes", dist.Poisson(1.0 + context).mask(False))
        pyro.sample("z", dist.Normal(flashes, 1.0))

    def truth(self, z, c):
        k = np.arange(60)
        return logsumexp(norm.logpdf(z, k, 1), b=poisson.pmf(k, 1 + c))


def test_every_particle_draws_a_parent_of_too_many_values():
    """The mean likelihood of 400 filters of 64 particles, within four of its standard errors."""
    z = np.array([0.5, 3.0])
    filtering = ParticleFilter(64, common_random_numbers=False).run(
        Counted(), seen(np.tile(z, 400), flashes=torch.float32), seed=0
    )
    truth = [[Counted().truth(each, c) for c in range(2)] for each in z]
    ratio = np.exp(filtering.log_likelihood.numpy().reshape(400, 2, 2) - truth)
    assert (np.abs(ratio.mean(0) - 1) < 4 * ratio.std(0, ddof=1) / math.sqrt(400)).all()
    with pytest.raises(UnsupportedModelError, match="'flashes'"):
        as_backend("exact").run(Counted(finite=True), seen(z, flashes=torch.float32))


class Detector(Walk):
    """Detected, then a position: the second is seen only if the first is 1."""

    contexts, actions, horizon = 2, 1, 1

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        detected = pyro.sample("detected", dist.Bernoulli(torch.where(context == 0, 0.2, 0.9)))
        pyro.sample("z", dist.Normal(state + context, 0.5).mask(detected == 1))


@pytest.mark.parametrize("backend", ["ekf", "ukf", "grid"])
def test_a_value_that_decides_whether_another_is_seen(backend):
    z = torch.tensor([[0.4], [-1.0], [0.0]])
    flags = torch.tensor([[True], [True], [False]])
    episodes = Episodes(
        torch.zeros(3, 1).long(),
        {"detected": flags.float(), "z": z},
        {"detected": torch.ones_like(flags), "z": flags},
    )
    p = np.array([0.2, 0.9])
    truth = [np.log(p) + norm.logpdf(each, [0, 1], math.sqrt(1.25)) for each in (0.4, -1.0)] + [np.log(1 - p)]
    found = as_backend(backend).run(Detector(), episodes).log_likelihood
    np.testing.assert_allclose(found, np.array(truth), rtol=1e-4)


class Foggy(CPOMDP):
    """Fog hides what tells the contexts apart, but only in a state in which no episode begins."""

    contexts, actions, horizon, states = 2, 1, 2, 2

    def initial(self, context):
        return torch.zeros((), dtype=torch.long)

    def transition(self, state, action, context):
        return torch.ones_like(state)

    def observation(self, state, action, context):
        fog = pyro.sample("fog", dist.Bernoulli(0.5).mask(False))
        clear = torch.where(context == 0, 0.05, 0.95)
        pyro.sample("o", dist.Bernoulli(torch.where((state == 1) & (fog == 1), 0.5, clear)))

    def reward(self, state, action, context):
        return torch.zeros(())


def foggy_entropy():
    """`H(C | Y)` of two looks, in bits: by a list of the four histories."""
    p = np.array([0.5 * 0.5 + 0.5 * 0.05, 0.5 * 0.5 + 0.5 * 0.95])
    likelihoods = np.array([bernoulli.pmf(a, p) * bernoulli.pmf(b, p) for a in (0, 1) for b in (0, 1)])
    posterior = likelihoods / likelihoods.sum(1, keepdims=True)
    return float(-(likelihoods / 2 * np.log2(posterior)).sum())


def stay(history):
    return torch.zeros(history.num_episodes, dtype=torch.long)


@pytest.mark.parametrize("likelihood", ["exact", "smc"])
def test_a_parent_that_matters_only_in_some_states(likelihood):
    """Within four standard errors of 2,000 episodes; `solvers.exact` to rounding."""
    result = evaluate(Foggy(), stay, 2000, likelihood=likelihood, seed=0)
    truth = foggy_entropy()
    assert abs(result.entropy.mean - truth) < 4 * result.entropy.standard_error
    information = exact.evaluate(Foggy(), stay).information / math.log(2)
    assert 1 - information == pytest.approx(truth, abs=1e-6)


class Biased(Noisy):
    """Two sensors with the same unknown bias, and a wider one in the second context."""

    def observation(self, state, action, context):
        bias = pyro.sample("bias", dist.Normal(0.0, 1.0).mask(False))
        pyro.sample("z", dist.Normal(context + bias, 0.5))
        pyro.sample("w", dist.Normal(2.0 * bias, 1.0 + context))

    def truth(self, z, w, c):
        return multivariate_normal([c, 0], [[1.25, 2], [2, 4 + (1 + c) ** 2]]).logpdf([z, w])


PAIRS = np.array([[0.3, 1.0], [-1.5, -2.0], [1.0, -1.0]])


def seen_pairs(repeats=1):
    pairs = torch.tensor(PAIRS, dtype=torch.float32).repeat(repeats, 1)
    yes = torch.ones(len(pairs), 1, dtype=torch.bool)
    values = {"bias": torch.zeros(len(pairs), 1), "z": pairs[:, :1], "w": pairs[:, 1:]}
    return Episodes(torch.zeros(len(pairs), 1).long(), values, {"bias": ~yes, "z": yes, "w": yes})


def pair_truth():
    return np.array([[Biased().truth(z, w, c) for c in range(2)] for z, w in PAIRS])


@pytest.mark.parametrize(
    "backend", [ParticleFilter(64), ParticleFilter(64, "residual", guide="ekf")], ids=["smc", "look-ahead"]
)
def test_every_particle_draws_a_continuous_parent(backend):
    """The mean likelihood of 400 filters is within four of its standard errors, in all six cells."""
    filtering = backend.run(Biased(), seen_pairs(400), seed=0)
    ratio = np.exp(filtering.log_likelihood.numpy().reshape(400, 3, 2) - pair_truth())
    error = ratio.std(0, ddof=1) / math.sqrt(400)
    assert (error > 1e-4).all()  # episodes and contexts have draws of their own
    assert (np.abs(ratio.mean(0) - 1) < 4 * error).all()


def test_planners_draw_a_continuous_parent_for_every_state():
    """As above, of 3 × 4,000 single draws."""
    episodes = seen_pairs(4000)
    percept = Percept(
        episodes.actions[:, 0],
        {site: values[:, 0] for site, values in episodes.observations.items()},
        {site: flags[:, 0] for site, flags in episodes.observed.items()},
    )
    with inference_scope(Biased(), seed=0):
        density = PerceptDensity(Generative(Biased()))(torch.zeros(len(episodes)), percept)
    ratio = np.exp(density.double().numpy().reshape(4000, 3, 2) - pair_truth())
    error = ratio.std(0, ddof=1) / math.sqrt(4000)
    assert (error > 1e-4).all()
    assert (np.abs(ratio.mean(0) - 1) < 4 * error).all()


@pytest.mark.parametrize("backend", ["ekf", "ukf"])
def test_a_gaussian_parent_is_noise_to_kalman_filters(backend):
    filtering = as_backend(backend).run(Biased(), seen_pairs())
    np.testing.assert_allclose(filtering.log_likelihood, pair_truth(), rtol=1e-5)


@pytest.mark.parametrize("backend", ["exact", "grid"])
def test_sums_refuse_a_hidden_continuous_parent(backend):
    with pytest.raises(UnsupportedModelError, match="'bias'"):
        as_backend(backend).run(Biased(finite=backend == "exact"), seen_pairs())


class LookedAt(Foggy):
    """As its base, but the program looks at how many states are foggy ones: none, at first."""

    def observation(self, state, action, context):
        fog = pyro.sample("fog", dist.Bernoulli(0.5).mask(False))
        p = torch.where(context == 0, 0.05, 0.95)
        if len(state[state == 1]):
            p = torch.where((state == 1) & (fog == 1), 0.5, p)
        pyro.sample("o", dist.Bernoulli(p))


class Bent(Noisy):
    """The child's distribution keeps its parameters in functions, as Pyro's conditional transforms do."""

    def __init__(self, finite=False):
        super().__init__(finite)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.bend = dist.transforms.conditional_spline(1, 1, hidden_dims=[4])

    def given(self, gust):
        base = dist.Normal(torch.zeros(*gust.shape, 1), 1.0).to_event(1)
        return dist.ConditionalTransformedDistribution(base, [self.bend]).condition(gust[..., None])

    def observation(self, state, action, context):
        gust = pyro.sample("gust", dist.Bernoulli(0.5).mask(False))
        pyro.sample("z", self.given(3.0 * gust))

    def truth(self, z):
        with torch.no_grad():
            both = [float(self.given(torch.tensor(gust)).log_prob(torch.tensor([z]))) for gust in (0.0, 3.0)]
        return logsumexp(both, b=[0.5, 0.5])


def test_a_program_that_counts_states():
    result = evaluate(LookedAt(), stay, 2000, likelihood="exact", seed=0)
    assert abs(result.entropy.mean - foggy_entropy()) < 4 * result.entropy.standard_error


def test_a_distribution_that_keeps_its_parameters_in_functions():
    model = Bent()
    z = torch.tensor([0.2, -1.0, 2.0])
    flags = torch.ones(3, 1, dtype=torch.bool)
    values = {"gust": torch.zeros(3, 1), "z": z[:, None, None]}
    episodes = Episodes(torch.zeros(3, 1).long(), values, {"gust": ~flags, "z": flags})
    found = ParticleFilter(4).run(model, episodes, seed=0).log_likelihood
    np.testing.assert_allclose(found[:, 0], [model.truth(float(each)) for each in z], rtol=1e-4)


class Gate(Detector):
    """A detector that is missing from the record, though what it let through is there."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 0.5))

    def observation(self, state, action, context):
        detected = pyro.sample("detected", dist.Bernoulli(0.3 + 0.5 * context))
        pyro.sample("z", dist.Normal(state, 0.5).mask(detected == 1))


def test_looking_ahead_past_a_gate_that_is_missing():
    """That something was let through says that the gate was open; within 4 standard errors."""
    z = Z[:2]
    found = ParticleFilter(2000, guide="ekf").run(Gate(), seen(z, detected=torch.float32), seed=0)
    expected = np.log([0.3, 0.8]) + norm.logpdf(z[:, None], 0, math.sqrt(1.5))
    assert (np.abs(found.log_likelihood.numpy() - expected) < 4 * found.standard_error.numpy() + 1e-4).all()


@pytest.mark.parametrize("scaled", ["handler", "plate"])
def test_scaled_densities_are_refused(scaled):
    class Scaled(Noisy):
        max_plate_nesting = int(scaled == "plate")

        def observation(self, state, action, context):
            scale = pyro.plate("some", 4, 2) if scaled == "plate" else poutine.scale(scale=0.5)
            with scale:
                pyro.sample("z", dist.Normal(1.0 * context, 1.0))

    with pytest.raises(UnsupportedModelError, match="the density of site 'z' is scaled"):
        ParticleFilter().run(Scaled(), seen(Z))
    with pytest.raises(ModelError, match=r"site 'z' is scaled|outside of `pyro.sample`"):
        Scaled().check()


class Relayed(Gate):
    """What is seen is relayed by a site that is not, with noise of its own."""

    horizon = 3

    def observation(self, state, action, context):
        relay = pyro.sample("detected", dist.Normal(state, 1.5).mask(False))
        pyro.sample("z", dist.Normal(relay, 0.1))


@pytest.mark.slow
def test_looking_ahead_does_not_trust_what_a_hidden_site_relays():
    """Over 500 runs the likelihood is right, within 4 standard errors of the mean."""
    z = np.array([2.0, -1.5, 2.5])
    B = 500
    episodes = Episodes(
        torch.zeros(B, 3).long(),
        {"detected": torch.zeros(B, 3), "z": torch.tensor(z).float().expand(B, 3)},
        {"detected": torch.zeros(B, 3).bool(), "z": torch.ones(B, 3).bool()},
    )
    covariance = 1 + 0.25 * np.minimum.outer([1, 2, 3], [1, 2, 3]) + (1.5**2 + 0.1**2) * np.eye(3)
    found = ParticleFilter(512, guide="ekf").run(Relayed(), episodes, seed=0).log_likelihood[:, 0]
    ratio = np.exp(found.numpy() - multivariate_normal.logpdf(z, cov=covariance))
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(B)
    assert ratio.std() < 1
