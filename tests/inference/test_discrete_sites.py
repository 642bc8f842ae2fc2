"""Gaussian beliefs conditioned on discrete observations, against quadrature."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.errors import DensityError, UnsupportedModelError
from tests.inference.test_kalman import FILTERS
from tests.programs import Walk

ONCE = Episodes(torch.zeros(1, 1).long(), {"n": torch.ones(1, 1)}, {"n": torch.ones(1, 1).bool()})
"""One episode of one step, in which `n` was 1."""


@pytest.fixture(params=FILTERS)
def backend(request):
    return FILTERS[request.param]


class Gated(Walk):
    """Detected or not, which depends on where one is; and where, if so."""

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 2.0))

    def observation(self, state, action, context):
        odds = 3.0 - 2.0 * (state - context).abs()
        detected = pyro.sample("detected", dist.Bernoulli(logits=odds))
        pyro.sample("z", dist.Normal(state, 0.3).mask(detected == 1))


class Clicks(Walk):
    """A counter that clicks the faster the further right one is, and nothing else."""

    def observation(self, state, action, context):
        pyro.sample("clicks", dist.Poisson((2.0 + 0.5 * state + 0.3 * context).exp()))


def density_of_first(model, action, seen, c):
    """`log p(o_1)` by adding up 8,000 points of a line."""
    variance = (2.0 if isinstance(model, Gated) else 1.0) ** 2 + (1.0 + c) ** 2
    x = np.linspace(-25.0, 25.0, 8001)
    prior = scipy.stats.norm.pdf(x, action, variance**0.5) * (x[1] - x[0])
    if isinstance(model, Clicks):
        return np.log(prior @ scipy.stats.poisson.pmf(seen["clicks"], np.exp(2.0 + 0.5 * x + 0.3 * c)))
    probability = 1 / (1 + np.exp(-(3.0 - 2.0 * np.abs(x - c))))
    if seen["detected"]:
        return np.log(prior @ (probability * scipy.stats.norm.pdf(seen["z"], x, 0.3)))
    return np.log(prior @ (1 - probability))


@pytest.mark.parametrize("model", [Gated(), Clicks()])
def test_discrete_sites_are_weighed_at_points_of_the_belief(backend, model):
    model.check()
    episodes = simulate(model, RandomPolicy(2), 40, contexts="balanced", seed=1)
    found = backend.run(model, episodes)
    for b in range(40):
        seen = {site: float(values[b, 0]) for site, values in episodes.observations.items()}
        for c in (0, 1):
            truth = density_of_first(model, float(episodes.actions[b, 0]), seen, c)
            assert abs(found.increments[b, 0, c] - truth) < 2e-3
    assert bool(torch.isfinite(found.log_likelihood).all())


def test_a_discrete_site_that_says_nothing_about_the_state_changes_nothing_but_the_likelihood(backend):
    class Coin(Walk):
        def observation(self, state, action, context):
            super().observation(state, action, context)
            pyro.sample("heads", dist.Bernoulli(0.2 + 0.5 * context))

    episodes = simulate(Coin(), RandomPolicy(2), 10, seed=0)
    walk = replace(
        episodes,
        observations={"z": episodes.observations["z"]},
        observed={"z": episodes.observed["z"]},
    )
    found, without = backend.run(Coin(), episodes), backend.run(Walk(), walk)
    assert torch.equal(found.state_mean, without.state_mean)
    assert torch.equal(found.state_variance, without.state_variance)
    heads = episodes.observations["heads"][..., None]
    coin = dist.Bernoulli(torch.tensor([0.2, 0.7])).log_prob(heads)
    assert torch.allclose(found.increments - without.increments, coin.double(), atol=1e-6)


def test_a_discrete_site_that_was_not_seen_is_refused_if_gaussian_ones_depend_on_it(backend):
    class Outlier(Walk):
        def observation(self, state, action, context):
            outlier = pyro.sample("outlier", dist.Bernoulli(0.1).mask(torch.tensor(False)))
            pyro.sample("z", dist.Normal(state, 1.0 + 7.0 * outlier))

    episodes = simulate(Outlier(), RandomPolicy(2), 2, seed=0)
    with pytest.raises(UnsupportedModelError, match="depend on site 'outlier'"):
        backend.run(Outlier(), episodes)


class Counter(CPOMDP):
    """A count that depends on the sum of D numbers, which is standard normal."""

    contexts, actions, horizon = 1, 1, 1

    def __init__(self, D, slope):
        super().__init__()
        self.D, self.slope = D, slope

    def initial(self, context):
        return pyro.sample("x", dist.Normal(torch.zeros(self.D), 1.0).to_event(1))

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("n", dist.Poisson((self.slope * state.sum(-1) / self.D**0.5).exp()))

    def reward(self, state, action, context):
        return state.sum(-1)


@pytest.mark.parametrize("D", [1, 2, 4, 6])
def test_counts_in_many_dimensions(backend, D):
    """However many numbers there are, it depends on one direction; the truth is quadrature along it."""
    counts = np.array([0, 1, 20, 300])
    episodes = Episodes(
        torch.zeros(4, 1).long(), {"n": torch.tensor(counts)[:, None].float()}, {"n": torch.ones(4, 1).bool()}
    )
    found = backend.run(Counter(D, 3.0), episodes)
    x = np.linspace(-9, 9, 20_001)
    weight = scipy.stats.norm.pdf(x) * scipy.stats.poisson.pmf(counts[:, None], np.exp(3 * x))  # [4, X]
    total = weight.sum(1)
    mean = (weight * x).sum(1) / total
    variance = (weight * x**2).sum(1) / total - mean**2
    np.testing.assert_allclose(found.log_likelihood[:, 0], np.log(total * (x[1] - x[0])), atol=1e-3)
    after = found.state_mean[:, -1, 0].double()
    np.testing.assert_allclose(after.sum(-1) / D**0.5, mean, atol=5e-3)
    # Each number has what is left of the sum's variance, and all of what is not in the sum.
    spread = found.state_variance[:, -1, 0].double().sum(-1)
    np.testing.assert_allclose(spread, D - 1 + variance, atol=5e-3)


class Comb(Counter):
    """A light that comes and goes over distances much smaller than the belief."""

    def observation(self, state, action, context):
        pyro.sample("n", dist.Bernoulli(torch.exp(40 * (torch.sin(50 * state) - 1).sum(-1))))


def test_what_points_do_not_settle_is_refused(backend):
    episodes = ONCE
    with pytest.raises(DensityError, match="do not settle how likely site 'n' was"):
        backend.run(Comb(4, 1.0), episodes)


class Alarm(Counter):
    """Goes off beyond a threshold, or by chance."""

    contexts = 2

    def observation(self, state, action, context):
        beyond = (state.sum(-1) / self.D**0.5 > self.slope).to(state.dtype)
        pyro.sample("n", dist.Bernoulli(torch.where(context == 0, beyond, 1e-5)))


@pytest.mark.parametrize("threshold", [1.0, 3.5, 4.5])
def test_a_rare_alarm_is_not_impossible(backend, threshold):
    episodes = ONCE
    found = backend.run(Alarm(1, threshold), episodes).log_likelihood[0]
    np.testing.assert_allclose(found, [scipy.stats.norm.logsf(threshold), math.log(1e-5)], atol=0.01)


def test_an_alarm_that_cannot_go_off_is(backend):
    episodes = ONCE
    found = backend.run(Alarm(1, 1e6), episodes).log_likelihood[0]
    assert found[0] == -math.inf
    assert found[1] == pytest.approx(math.log(1e-5))


class Tagged(Walk):
    """What is detected may be tagged, and shows where it is."""

    def observation(self, state, action, context):
        detected = pyro.sample("detected", dist.Bernoulli(torch.sigmoid(state)))
        pyro.sample("tagged", dist.Bernoulli(0.3 + 0.4 * context).mask(detected == 1))


def test_a_gate_that_is_missing_from_the_record(backend):
    """That it was tagged says that it was detected."""
    ones = torch.ones(2, 1)
    episodes = Episodes(
        torch.zeros(2, 1).long(),
        {"detected": 0 * ones, "tagged": ones},
        {"detected": torch.zeros(2, 1).bool(), "tagged": ones.bool()},
    )

    class Once(Tagged):
        horizon = 1

    found = backend.run(Once(), episodes).log_likelihood
    known = Episodes(
        episodes.actions, {"detected": ones, "tagged": ones}, {"detected": ones.bool(), "tagged": ones.bool()}
    )
    np.testing.assert_allclose(found, backend.run(Once(), known).log_likelihood, atol=1e-6)
