"""Learning from episodes that end, under real actions: against formulas and finite differences."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP, RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.inference import ExtendedKalmanFilter, GridFilter, ParticleFilter, UnscentedKalmanFilter
from cpomdp_ppl.learning import log_likelihood, maximum_likelihood, particle_marginal_metropolis_hastings
from cpomdp_ppl.signature import ENDED
from tests.solvers.machines import Mortal


class Shaken(CPOMDP):
    """How hard one shakes decides how soon that is the end, and twice as soon in the second context."""

    contexts, actions, horizon = 2, Box(0.0, 2.0), 6

    def __init__(self, rate=0.4):
        super().__init__()
        self.rate = PyroParam(torch.tensor(rate), constraints.positive)

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + action[..., 0], 0.5))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0))

    def ends(self, state, action, context):
        return 1 - torch.exp(-self.rate * (1 + context) * action[..., 0])

    def reward(self, state, action, context, next_state):
        return next_state


SHAKEN = simulate(Shaken(0.7), RandomPolicy(Shaken.actions), 40, seed=0)


def by_hand(rates):
    """`log p(ended | a)` of all episodes for rates `[R]`; what else is seen tells nothing of them."""
    a = SHAKEN.actions[..., 0].double().numpy()  # [B, T]
    ended, alive = (SHAKEN.observations[ENDED] == 1).numpy(), SHAKEN.alive.numpy()
    total = []
    for c in (0, 1):
        hazard = (1 + c) * a[..., None] * np.asarray(rates)  # [B, T, R]
        with np.errstate(divide="ignore"):
            log_p = np.where(ended[..., None], np.log(-np.expm1(-hazard)), -hazard)
        total.append(np.where(alive[..., None], log_p, 0).sum(1))
    return np.log(0.5 * np.exp(total[0]) + 0.5 * np.exp(total[1])).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [ExtendedKalmanFilter(), UnscentedKalmanFilter(), ParticleFilter(64)], ids=lambda x: x.name
)
def test_gradients_by_the_rate_of_ends(backend):
    """Ends tell nothing of the state: all filters have the exact gradient, particles up to noise in z."""
    model, h = Shaken(0.4), 1e-5
    log_likelihood(model, SHAKEN, backend).backward()
    low, high = by_hand([0.4 * np.exp(-h), 0.4 * np.exp(h)])
    tolerance = 2e-2 if isinstance(backend, ParticleFilter) else 1e-4
    assert float(model.rate_unconstrained.grad) == pytest.approx((high - low) / (2 * h), rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ekf", "smc"])
def test_the_likeliest_rate(backend):
    rates = np.linspace(0.3, 1.5, 12001)
    found = maximum_likelihood(Shaken(0.4), SHAKEN, backend, seed=0, progress=False)
    best = rates[by_hand(rates).argmax()]
    curvature = np.diff(by_hand(best * np.exp([-1e-3, 0, 1e-3])), 2)[0] / 1e-6
    error = (-curvature) ** -0.5  # on the scale of the logarithm
    assert abs(np.log(float(found.values["rate"]) / best)) < (0.01 if backend == "ekf" else 0.2) * error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:particle_marginal_metropolis_hastings")
def test_posterior_of_the_rate():
    """Mean within 5 standard errors of 160 draws, of which about one in six counts."""
    rates = np.linspace(0.01, 3, 6000)
    prior = dist.Gamma(2.0, 2.0)
    log_density = by_hand(rates) + prior.log_prob(torch.tensor(rates)).numpy()
    weights = np.exp(log_density - log_density.max())
    mean = weights @ rates / weights.sum()
    sd = (weights @ (rates - mean) ** 2 / weights.sum()) ** 0.5
    data = particle_marginal_metropolis_hastings(
        Shaken(0.6),
        SHAKEN,
        {"rate": prior},
        num_particles=32,
        draws=80,
        warm_up=30,
        chains=2,
        seed=0,
        progress=False,
    )
    draws = data.posterior["rate"].values.ravel()
    assert draws.mean() == pytest.approx(mean, abs=5 * sd / (len(draws) / 6) ** 0.5)
    assert draws.std() == pytest.approx(sd, rel=0.5)


@pytest.mark.parametrize("backend", ["exact", "grid"])
def test_tables_refuse_real_actions_by_name(backend):
    with pytest.raises(UnsupportedModelError, match=rf"{backend}: Shaken"):
        log_likelihood(Shaken(), SHAKEN, backend)


class Edge(CPOMDP):
    """A walk that ends the likelier, the further out it is; how suddenly, is to be learned."""

    contexts, actions, horizon = 2, 2, 4

    def __init__(self):
        super().__init__()
        self.steepness = PyroParam(torch.tensor(2.0), constraints.positive)
        self.noise = PyroParam(torch.tensor(0.7), constraints.positive)

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.3 * context, 0.5))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + 0.5 * (2 * action - 1), 0.4))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.noise).mask(action == 1))

    def ends(self, state, action, context):
        return torch.sigmoid(self.steepness * (state - 0.8))

    def reward(self, state, action, context):
        return state


class Worn(Mortal):
    """A finite model that ends by a share of the chances in its table, which is to be learned."""

    def __init__(self, seed):
        super().__init__(seed)
        self.share = PyroParam(torch.tensor(0.8), constraints.unit_interval)

    def ends(self, state, action, context):
        return self.share * self.tensors["end"][context, action, state]


GRID = GridFilter(200, bounds=(-7.0, 7.0), tolerance=float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend"),
    [(Edge(), "ekf"), (Edge(), "ukf"), (Edge(), GRID), (Worn(0), "exact")],
    ids=["ekf", "ukf", "grid", "exact"],
)
def test_gradients_against_finite_differences(model, backend):
    episodes = simulate(model, RandomPolicy(model.actions), 12, seed=1)
    log_likelihood(model, episodes, backend).backward()
    for parameter in model.parameters():
        found, values = float(parameter.grad), []
        for h in (-1e-3, 1e-3):
            with torch.no_grad():
                parameter += h
                values.append(float(log_likelihood(model, episodes, backend)))
                parameter -= h
        assert found == pytest.approx((values[1] - values[0]) / 2e-3, rel=2e-3, abs=1e-3)


@pytest.mark.slow
def test_scores_of_particles_are_right_on_average():
    """Fisher's identity against the grid's gradient: 30 runs, within 5 standard errors."""
    model = Edge()
    episodes = simulate(model, RandomPolicy(2), 12, seed=1)

    def gradient(backend, seed=0):
        model.zero_grad()
        log_likelihood(model, episodes, backend, seed=seed).backward()
        return torch.stack([parameter.grad.double() for parameter in model.parameters()])

    scores = torch.stack([gradient(ParticleFilter(256), seed) for seed in range(30)])
    error = scores.std(0) / 30**0.5
    assert float(((scores.mean(0) - gradient(GRID)) / error).abs().max()) < 5
