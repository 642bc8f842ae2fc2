"""The compiled particle filter against exact filters, plain summation, and the programs run as they are.

Fixed seeds. Estimates of a likelihood are unbiased, their logarithms are not: an episode is filtered many
times side by side, each time with random numbers of its own, and the mean of `p̂ / p` is compared with 1, that
of `p̂ / p` times the error of an estimated mean with 0, in standard errors. Where there is no exact filter,
the two engines are compared, in standard errors of the difference. A test has up to a few hundred such
numbers: none may be 5 away (one in two million each).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError, ObservationError, UnsupportedModelError
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
)
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.state import leaves
from examples.problems.clinic import Clinic
from examples.problems.machine import Machine
from examples.problems.robot import Robot
from examples.problems.well import Well
from tests import ROOT
from tests.abuse.programs import Plan, default_dtype
from tests.abuse.structure import Structured, describe, draw, episodes_of, truth
from tests.children import environment, run_python
from tests.learning import programs as learned
from tests.programs import Dice, EyesOpen, Learnable, Plates, Skewed, Walk

FAR = 5.0
"""Standard errors."""

SCHEMES = ["systematic", "stratified", "multinomial", "residual"]


def native(num_particles: int = 64, **settings) -> ParticleFilter:
    return ParticleFilter(num_particles, engine="native", **settings)


def some_episodes(model: CPOMDP, number: int = 2, steps: int = 4, seed: int = 0) -> Episodes:
    episodes = simulate(model, RandomPolicy(model.num_actions), number, seed=seed)
    return episodes.truncated(min(steps, episodes.horizon))


def times_over(episodes: Episodes, times: int) -> Episodes:
    """Every episode many times, `[times, B]` flattened: each is an independent run of the filter."""
    return episodes[torch.arange(len(episodes)).repeat(times)]


def apart(samples: torch.Tensor, expected: torch.Tensor | float) -> float:
    """How far means of independent samples `[n, …]` are from what is expected, in standard errors.

    What differs by a rounding of float32 is the same.
    """
    samples = samples.double().flatten(1)
    off = samples.mean(0) - torch.as_tensor(expected, dtype=torch.float64).flatten()
    error = samples.std(0) / len(samples) ** 0.5
    rounding = 3e-6 * (1 + samples.mean(0).abs())
    return float(torch.where(off.abs() <= rounding, 0.0, off / error.clamp(min=1e-12)).abs().max())


def differ(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far the means of independent samples are from each other, in standard errors of the difference."""
    one, other = one.double().flatten(1), other.double().flatten(1)
    off, error = one.mean(0) - other.mean(0), (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
    rounding = 1e-5 * (1 + one.mean(0).abs())
    return float(torch.where(off.abs() <= rounding, 0.0, off / error.clamp(min=1e-12)).abs().max())


def assert_unbiased(model, episodes, exact, smc, times=300, likely=3.0, reward=True) -> None:
    """Likelihoods, then means and rewards weighted by them, where the context can have been the true one."""
    known = exact.run(model, episodes)
    found = smc.run(model, times_over(episodes, times), seed=1)
    B, C = known.log_likelihood.shape
    ratio = (found.log_likelihood.reshape(times, B, C) - known.log_likelihood).exp()
    rows = known.log_likelihood >= known.log_likelihood.amax(1, keepdim=True) - likely
    assert apart(ratio[:, rows], 1.0) < FAR
    last = found.increments.reshape(times, B, -1, C)[:, :, -1]
    before = (found.log_likelihood.reshape(times, B, C) - last) - (
        known.log_likelihood - known.increments[:, -1]
    )
    if reward:  # of the last action, given what was seen before it
        off = found.expected_reward[:, -1].reshape(times, B, C) - known.expected_reward[:, -1]
        assert apart((before.exp() * off)[:, rows], 0.0) < FAR
    for (_, mean), (_, expected) in zip(leaves(found.state_mean), leaves(known.state_mean), strict=True):
        off = mean[:, -1].reshape(times, B, C, -1) - expected[:, -1].reshape(B, C, -1)
        assert apart((ratio[..., None] * off)[:, rows], 0.0) < FAR


def assert_engines_agree(model, episodes, times=150, num_particles=48, moments=True, **settings) -> None:
    """All that a filter finds, on average over runs of either engine."""
    B = len(episodes)
    many = times_over(episodes, times)
    one = native(num_particles, **settings).run(model, many, seed=1)
    other = ParticleFilter(num_particles, engine="eager", **settings).run(model, many, seed=2)
    highest = other.log_likelihood.reshape(times, B, -1).amax(0).clamp(min=-1e30).repeat(times, 1)
    kinds = {
        "likelihood": lambda f: (f.log_likelihood - highest).exp(),
        "first increment": lambda f: f.increments[:, 0].exp(),
        "initial increment": lambda f: f.initial_increment.exp(),
        "reward": lambda f: f.expected_reward[:, :2],
        "effective sample size": lambda f: f.ess,
        "resampled": lambda f: f.resampled.float(),
        "standard error": lambda f: f.standard_error.clamp(max=30.0),
    }
    for what, of in kinds.items():
        samples = [of(f).reshape(times, B, *of(f).shape[1:]) for f in (one, other)]
        assert differ(*samples) < FAR, what
    for moment in ("state_mean", "state_variance") if moments else ():
        for (name, a), (_, b) in zip(
            leaves(getattr(one, moment)), leaves(getattr(other, moment)), strict=True
        ):
            assert a.dtype == b.dtype
            pair = (x[:, :2].reshape(times, B, -1) for x in (a, b))
            assert differ(*pair) < FAR, f"{moment} {name}"


# ---------------------------------------------------------------------------------------------------------
# Models that others have


class Ferry(CPOMDP):
    """As in the README: hold a ferry at its pier, against a current that nobody told you about."""

    contexts = ("calm", "current left", "current right")
    actions = ("steer left", "steer right", "take a bearing")
    horizon = 12

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 2.0))

    def transition(self, state, action, context):
        steer = (action == 1).float() - (action == 0).float()
        current = (context == 2).float() - (context == 1).float()
        return pyro.sample("x", dist.Normal(state + steer + 0.5 * current, 0.2))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.5).mask(action == 2))

    def reward(self, state, action, context):
        return -state.abs()


EXACT = [
    (Ferry, ExtendedKalmanFilter(), 5, False),  # of |x|, a Kalman filter knows no mean
    (Walk, ExtendedKalmanFilter(), 3, True),
    (EyesOpen, ExtendedKalmanFilter(), 3, True),
    (Learnable, ExtendedKalmanFilter(), 3, True),
    (ContextualTiger, ObservableOperator(), 6, True),
    (LineGrid, ObservableOperator(), 4, True),
    (Skewed, ObservableOperator(), 1, True),
    (Machine, ObservableOperator(), 4, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "exact", "steps", "reward"), EXACT)
def test_likelihoods_moments_and_rewards_are_those_of_an_exact_filter(make, exact, steps, reward):
    model = make()
    assert_unbiased(model, some_episodes(model, 3, steps), exact, native(100), reward=reward)


@pytest.mark.slow
@pytest.mark.parametrize("common", [True, False], ids=["common", "own"])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [Walk, ContextualTiger])
def test_every_way_to_resample_is_unbiased(make, scheme, threshold, common):
    model = make()
    exact = ExtendedKalmanFilter() if make is Walk else ObservableOperator()
    settings = {"ess_threshold": threshold, "common_random_numbers": common}
    assert_unbiased(model, some_episodes(model, 2, 3), exact, native(32, resampling=scheme, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("num_particles", [1, 2, 3, 7, 31, 33, 100, 256, 1000])
def test_any_number_of_particles_is_unbiased(num_particles):
    model = Walk()
    one_step = some_episodes(model, 2, 1)
    assert_unbiased(model, one_step, ExtendedKalmanFilter(), native(num_particles), times=200)
    steps = some_episodes(model, 2, 2)
    settings = {"resampling": SCHEMES[num_particles % 4], "ess_threshold": 1.0}
    assert_unbiased(model, steps, ExtendedKalmanFilter(), native(num_particles, **settings), times=400)


class Coin(CPOMDP):
    """One of three coins, tossed twice: with few particles, any way to resample that is not fair shows."""

    contexts, actions, horizon, states = 1, 1, 2, 3

    def initial(self, context):
        return pyro.sample("coin", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])))

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Bernoulli(torch.tensor([0.1, 0.5, 0.9])[state]))

    def reward(self, state, action, context):
        return torch.tensor([1.0, 0.0, -1.0])[state]


@pytest.mark.slow
@pytest.mark.parametrize("num_particles", [2, 3, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_resampling_is_fair(scheme, num_particles):
    model = Coin()
    tosses = Episodes.from_arrays(
        model, torch.zeros(3, 2, dtype=torch.long), {"z": torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])}
    )
    smc = native(num_particles, resampling=scheme, ess_threshold=1.0)
    assert_unbiased(model, tosses, ObservableOperator(), smc, times=10_000)


@pytest.mark.slow
def test_light_dark_is_that_of_the_reference_and_the_grid():
    reference = np.load(ROOT / "tests" / "reference" / "light_dark_dev.npz")
    model = LightDark()
    episodes = Episodes.from_arrays(model, reference["action"], {"z": reference["observation"]})
    exact = torch.tensor(reference["log_likelihood_increment"]).sum(1)
    found = native(4096).run(model, episodes, seed=0)
    likelier = exact.argmax(1, keepdim=True)
    errors = (found.log_likelihood - exact).gather(1, likelier)[:, 0]
    scale = found.standard_error.double().gather(1, likelier)[:, 0]
    assert 0.8 < float((errors / scale).square().mean().sqrt()) < 1.25  # 1 / √(2 · 128) is 0.06
    assert_unbiased(model, some_episodes(model, 2, 4), GridFilter(num_points=400), native(128))


OTHERS = [Beacons, Plates, Dice, Clinic, Robot, Well, LightDark]
LEARNED = ["Walk", "Curved", "Plane", "Alarm", "Sensor", "Door", "ByHand", "Gauge", "Cart", "Constant"]


@pytest.mark.slow
@pytest.mark.parametrize("make", OTHERS + [getattr(learned, name) for name in LEARNED])
def test_engines_agree_on_models_of_other_tests_and_examples(make):
    model = make()
    assert_engines_agree(model, some_episodes(model))


COMPILED = [0, 2, 10, 11, 13, 17, 18, 22, 28, 31, 38, 43, 45, 63, 87, 88]
"""Seeds of programs whose sites depend on each other, or are hidden, and which look at no values."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", COMPILED)
def test_sites_that_depend_on_each_other_are_summed_over_or_drawn(seed):
    description, times = describe(seed), 300
    data = draw(description, seed, 2)
    expected = torch.tensor(truth(description, data)[0])
    smc = native(96, resampling=SCHEMES[seed % 4], common_random_numbers=bool(seed // 4 % 2))
    with default_dtype(torch.float64):  # as its tables
        model = Structured(description)
        many = times_over(episodes_of(description, data, model), times)
        found = smc.run(model, many, seed=1).log_likelihood.reshape(times, *expected.shape)
    rows = expected >= expected.amax(1, keepdim=True) - 3.0
    assert apart((found - expected).exp()[:, rows], 1.0) < FAR


def plan(kind: str, seed: int, **changes) -> Plan:
    usual = {"contexts": 2, "actions": 2, "horizon": 3, "mask": "on", "initial_observation": bool(seed % 2)}
    usual |= {"scale": 1.0, "dtype": (torch.float32, torch.float64)[seed // 2 % 2], "dim": 1 + seed % 3}
    return Plan(kind=kind, seed=seed, **(usual | changes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "sensor"),
    [
        ("Tables", "Categorical"),
        ("Tables", "Binomial"),
        ("Tables", "Poisson"),
        ("Linear", "Normal"),
        ("Parts", "Normal"),
    ],
)
def test_random_programs_with_exact_filters(kind, sensor, seed):
    random = plan(kind, seed, sensor=sensor, mask=("on", "by action")[seed // 2])
    exact = ObservableOperator() if kind == "Tables" else ExtendedKalmanFilter()
    with default_dtype(random.dtype):
        model = random.model()
        settings = {"resampling": SCHEMES[seed], "common_random_numbers": bool(seed % 2)}
        assert_unbiased(model, some_episodes(model, 2, 2), exact, native(200, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "noise", "sensor"),
    [
        ("Scalar", "StudentT", "Cauchy"),
        ("Scalar", "Cauchy", "Binomial"),
        ("Scalar", "Laplace", "Poisson"),
        ("Hybrid", "Normal", "Laplace"),
        ("Plated", "Normal", "Categorical"),
        ("Plated", "Laplace", "Bernoulli"),
    ],
)
def test_random_programs_without(kind, noise, sensor):
    for seed in range(3):
        random = plan(kind, seed, noise=noise, sensor=sensor, mask=("on", "by action", "off")[seed])
        with default_dtype(random.dtype):
            model = random.model()
            assert_engines_agree(model, some_episodes(model, 2, 3), resampling=SCHEMES[seed])


# ---------------------------------------------------------------------------------------------------------
# Odd models


class Base(CPOMDP):
    """A random walk, seen with noise; others change some of it."""

    contexts, actions, horizon = 2, 2, 4

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(0.8 * state + action - 0.5 * context, 0.5))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.7))

    def reward(self, state, action, context):
        return -state.abs()


class Register(Base):
    """What was drawn in the last steps: what one place may hold, the next one may hold a step later."""

    def initial(self, context):
        return torch.zeros(7, dtype=torch.long)

    def transition(self, state, action, context):
        new = pyro.sample("n", dist.Categorical(torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2]])[context]))
        return torch.cat([new[..., None].expand(*state.shape[:-1], 1), state[..., :-1]], -1)

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal((state * torch.tensor([1.0, 0, 2, 0, 3, 5, -4])).sum(-1), 0.7))

    def reward(self, state, action, context):
        return (state == 0).sum(-1).float()


class Counter(Register):
    """As before, but what is counted up grows without bounds."""

    horizon = 8

    def transition(self, state, action, context):
        new = pyro.sample("n", dist.Bernoulli(0.6)).long()
        return torch.cat([state[..., :1] + new.expand(state.shape[:-1])[..., None], state[..., :-1]], -1)


class Far(Base):
    """Whole numbers beyond 2 ** 53, which no float64 tells apart."""

    start = 2**53 + 1

    def initial(self, context):
        return pyro.sample("k", dist.Categorical(torch.ones(5))) + self.start

    def transition(self, state, action, context):
        return 3 * state - 2 * state + pyro.sample("up", dist.Bernoulli(0.5)).long() + action

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal((state - self.start).float(), 0.8))

    def reward(self, state, action, context):
        return (state % 7).float()


class Growing(Far):
    """From below 2 ** 31 to above."""

    start = 2**31 - 4


class Wrapping(Far):
    """Whole numbers that overflow, as those of a linear congruential generator."""

    start = 1

    def transition(self, state, action, context):
        moved = state * 6364136223846793005 + 1442695040888963407
        return moved + pyro.sample("up", dist.Bernoulli(0.5)).long()

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(((state >> 30) % 5).float(), 0.8))


class Parts(Base):
    """A truth, a whole number and a vector."""

    def initial(self, context):
        return {
            "up": pyro.sample("u", dist.Bernoulli(0.5)).bool(),
            "n": pyro.sample("n", dist.Categorical(torch.ones(3))).int(),
            "v": pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1)),
        }

    def transition(self, state, action, context):
        flip = pyro.sample("f", dist.Bernoulli(0.3)).bool()
        mean = 0.9 * state["v"] + state["up"][..., None]
        v = pyro.sample("v", dist.Normal(mean, 0.3).to_event(1))
        return {"up": state["up"] ^ flip, "n": (state["n"] + 1) % 3, "v": v}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["v"], 1.0).to_event(1))
        pyro.sample("b", dist.Bernoulli(torch.where(state["up"], 0.9, 0.2)))

    def reward(self, state, action, context):
        return state["n"].float() * state["up"]


class InDouble(Base):
    """A program in float64, while the default is float32."""

    def initial(self, context):
        return pyro.sample("x", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))


class ManyContexts(Base):
    """More contexts and actions than have code of their own."""

    contexts, actions = 11, 4

    def transition(self, state, action, context):
        push = torch.linspace(-1, 1, 44).reshape(11, 4)[context, action]
        return pyro.sample("x", dist.Normal(0.8 * state + push, 0.5))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.3 + 0.1 * context).mask(action != 2))


class OwnNoise(Base):
    """Every context, and every action, has noise of its own kind."""

    def transition(self, state, action, context):
        first = pyro.sample("n", dist.Normal(0.0, 0.3))
        second = pyro.sample("e", dist.Exponential(1.0))
        third = pyro.sample("g", dist.Gamma(2.0, 1.0))
        return state + torch.where(context == 0, first, torch.where(action == 0, second, -third))


class Families(Base):
    """Distributions that are drawn by inversion, by rejection, and by parts."""

    def initial(self, context):
        return pyro.sample("x", dist.Gamma(2.0 + context, 1.5))

    def transition(self, state, action, context):
        noise = pyro.sample("g", dist.Gamma(0.5, 1.0)) + pyro.sample("b", dist.Binomial(9, 0.3))
        noise = (
            noise + pyro.sample("e", dist.Exponential(2.0)) + pyro.sample("u", dist.Uniform(-1.0, 1.0)).abs()
        )
        noise = noise + pyro.sample("nb", dist.NegativeBinomial(3.0, 0.3)) + pyro.sample("c", dist.Chi2(3.0))
        share = pyro.sample("share", dist.Beta(2.0, 3.0)) * pyro.sample("wb", dist.Weibull(1.0, 2.0))
        return state * share + 0.1 * noise + pyro.sample("p", dist.Poisson(0.5 + state)) * 0.5

    def observation(self, state, action, context):
        pyro.sample("n", dist.Poisson(state + 0.1))
        pyro.sample("z", dist.Gamma(2.0, 1 / (state + 0.1)))


class Shares(Base):
    """A state on a simplex."""

    def initial(self, context):
        return pyro.sample("x", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Dirichlet(1 + 5 * state))

    def observation(self, state, action, context):
        pyro.sample("k", dist.Categorical(state))
        pyro.sample("n", dist.Multinomial(3, state))

    def reward(self, state, action, context):
        return state[..., 0]


class Joint(Base):
    """Multivariate normals, one of them with a covariance that depends on the state, and mixtures."""

    def initial(self, context):
        return pyro.sample(
            "x", dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.5, 2.0]]))
        )

    def transition(self, state, action, context):
        means = torch.stack([0.5 * state, state + 1], -2)
        components = dist.Normal(means, torch.tensor([[0.5, 0.4], [1.0, 0.3]])).to_event(1)
        return pyro.sample(
            "x", dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.3, 0.7])), components)
        )

    def observation(self, state, action, context):
        spread = torch.eye(2) * (1 + state[..., :1, None] ** 2) + 0.3
        pyro.sample("z", dist.MultivariateNormal(state, covariance_matrix=spread))

    def reward(self, state, action, context):
        return state.norm(dim=-1)


class Relayed(Base):
    """Sites that others depend on: few values, many values, and a real number."""

    def observation(self, state, action, context):
        few = pyro.sample("few", dist.Categorical(torch.stack([state.sigmoid(), 1 - state.sigmoid()], -1)))
        many = pyro.sample("many", dist.Categorical(torch.ones(40)))
        real = pyro.sample("real", dist.Normal(state, 1.0))
        pyro.sample("z", dist.Normal(real + 2 * few + 0.05 * many, 0.5).mask(action == 1))
        pyro.sample("w", dist.Normal(state * few, 1.0))


class Sensors(Base):
    """Plates, some of whose cells an action hides, beside sites that are in no plate."""

    max_plate_nesting = 1

    def initial(self, context):
        with pyro.plate("legs", 3):
            return pyro.sample("x", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        with pyro.plate("legs", 3):
            return pyro.sample("x", dist.Normal(0.9 * state + action, 0.5))

    def observation(self, state, action, context):
        with pyro.plate("legs", 3):
            pyro.sample("z", dist.Normal(state, 0.5).mask(torch.arange(3) != action))
        pyro.sample("n", dist.Poisson(state.sum(-1, keepdim=True).exp().clamp(max=9)))
        with pyro.plate("lamps", 2):
            pyro.sample("on", dist.Bernoulli(torch.tensor([0.2, 0.7]) + 0.1 * context))

    def reward(self, state, action, context):
        return state.sum(-1, keepdim=True)


ODD = [
    OwnNoise,
    Register,
    Counter,
    Parts,
    InDouble,
    ManyContexts,
    Families,
    Shares,
    Joint,
    Relayed,
    Sensors,
    Far,
    Growing,
    Wrapping,
]


def hidden_at_random(episodes: Episodes, seed: int = 0) -> Episodes:
    """The same, with every other value missing, and episodes of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    observed = {
        name: seen & (torch.rand(seen.shape, generator=generator) < 0.5)
        for name, seen in episodes.observed.items()
    }
    lengths = torch.arange(len(episodes)) % episodes.horizon + 1
    return replace(episodes, observed=observed).truncated(lengths.flip(0))


@pytest.mark.slow
@pytest.mark.parametrize("make", ODD)
def test_engines_agree_on_odd_models(make):
    model = make()
    episodes = some_episodes(model, 3, steps=8)
    moments = not isinstance(model, Far)  # which have more digits than float32
    assert_engines_agree(model, episodes, num_particles=33, moments=moments)
    assert_engines_agree(model, hidden_at_random(episodes), moments=moments, common_random_numbers=False)


def test_moments_are_those_of_the_particles():
    """Of a cloud that is known: nothing was seen, and the state takes few values."""
    model = Parts()
    episodes = some_episodes(model, 1, 2)
    blind = replace(episodes, observed={name: torch.zeros_like(o) for name, o in episodes.observed.items()})
    found = native(4000).run(model, blind, seed=0)
    up, n = found.state_mean["up"], found.state_mean["n"]  # [1, 3, C]
    assert float((up - 0.5).abs().max()) < FAR * (0.25 / 4000) ** 0.5
    torch.testing.assert_close(found.state_variance["up"], up * (1 - up), rtol=1e-4, atol=1e-6)
    assert float((n - 1).abs().max()) < FAR * (2 / 3 / 4000) ** 0.5
    assert float((found.state_variance["v"][:, 0] - 1).abs().max()) < FAR * (2 / 4000) ** 0.5
    assert (found.ess == 4000).all()
    assert not found.resampled.any()
    assert (found.standard_error == 0).all()


# ---------------------------------------------------------------------------------------------------------
# How far it is off


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("make", "steps"), [(Walk, 3), (Ferry, 8), (ContextualTiger, 8)])
def test_the_standard_error_is_the_spread_over_runs(make, steps, scheme):
    """As the eager engine's: typically the spread over runs, up to a fifth."""
    model, times = make(), 400
    many = times_over(some_episodes(model, 1, steps, seed=3), times)
    found = native(256, resampling=scheme).run(model, many, seed=0)
    other = ParticleFilter(256, resampling=scheme, engine="eager").run(model, many, seed=1)
    likely = found.log_likelihood.mean(0) > found.log_likelihood.mean(0).max() - 3
    spread = found.log_likelihood.std(0)[likely]
    typical = found.standard_error.double().square().mean(0).sqrt()[likely]
    assert ((typical / spread - 1).abs() < 0.2).all()  # the spread of 400 is known to 4 %
    assert differ(found.standard_error[:, likely], other.standard_error[:, likely]) < FAR


# ---------------------------------------------------------------------------------------------------------
# The same seed, the same bits


def everything(filtering) -> list[torch.Tensor]:
    parts = [filtering.increments, filtering.initial_increment, filtering.expected_reward, filtering.ess]
    parts += [filtering.resampled, filtering.standard_error]
    return [*parts, *(leaf for _, leaf in leaves(filtering.state_mean))]


def assert_same_bits(one, other) -> None:
    for a, b in zip(everything(one), everything(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Walk, ContextualTiger, EyesOpen])
def test_an_episode_is_filtered_the_same_in_any_company(make):
    model = make()
    episodes = some_episodes(model, 12, 3)
    whole = native(100).run(model, episodes, seed=5)
    assert_same_bits(whole, native(100).run(model, episodes, seed=5))
    assert_same_bits(whole, native(100, chunk=5).run(model, episodes, seed=5))
    few = native(100).run(model, episodes[:4], seed=5)
    for a, b in zip(everything(whole), everything(few), strict=True):
        assert torch.equal(a[:4], b)
    assert not torch.equal(whole.increments, native(100).run(model, episodes, seed=6).increments)


def test_what_others_saw_changes_nothing():
    model = Walk()
    episodes = some_episodes(model, 6, 3)
    other = Episodes.concatenate([episodes[:3], episodes[[5, 3, 4]]])
    found, again = (native(100).run(model, each, seed=5) for each in (episodes, other))
    for a, b in zip(everything(found), everything(again), strict=True):
        assert torch.equal(a[:3], b[:3])


def test_threads_change_nothing(monkeypatch):
    from cpomdp_ppl.inference import native_filter

    monkeypatch.setattr(native_filter, "WORK_FOR_A_THREAD", 1)
    model = Walk()
    episodes, before = some_episodes(model, 7, 3), torch.get_num_threads()
    one = native(100).run(model, episodes, seed=5)
    try:
        torch.set_num_threads(2)
        two = native(100).run(model, episodes, seed=5)
        torch.set_num_threads(3)
        three = native(100).run(model, episodes, seed=5)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(one, two)
    assert_same_bits(one, three)


AGAIN = """
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ParticleFilter
from tests.programs import Walk
model = Walk()
found = ParticleFilter(100, engine="native").run(model, simulate(model, RandomPolicy(2), 2, seed=0), seed=5)
print([x.hex() for x in found.log_likelihood.flatten().tolist()])
"""


@pytest.mark.slow
def test_another_process_finds_the_kernel_and_the_same_bits():
    model = Walk()
    found = native(100).run(model, simulate(model, RandomPolicy(2), 2, seed=0), seed=5)
    printed = run_python(AGAIN, env=environment(CC="no-compiler-at-all"))
    assert printed.splitlines()[-1] == str([x.hex() for x in found.log_likelihood.flatten().tolist()])


def test_the_caller_is_left_alone():
    pyro.clear_param_store()
    torch.manual_seed(3)
    pyro.param("mine", torch.tensor(2.0))
    model = Learnable()
    episodes = some_episodes(model)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    validates = torch.distributions.Distribution._validate_args
    names = set(pyro.get_param_store().keys())
    native(10).run(model, episodes, seed=0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.distributions.Distribution._validate_args == validates
    assert set(pyro.get_param_store().keys()) == names
    pyro.clear_param_store()


# ---------------------------------------------------------------------------------------------------------
# What is learned


class Stored(Base):
    """A constant in Pyro's param store, and two of a module's."""

    def __init__(self):
        super().__init__()
        self.scale = PyroParam(torch.tensor(0.5), constraints.positive)
        self.layer = torch.nn.Linear(1, 1)

    def transition(self, state, action, context):
        push = pyro.param("push", torch.tensor(0.0)) * action
        return pyro.sample("x", dist.Normal(self.layer(state[..., None])[..., 0] + push, self.scale))


@pytest.mark.slow
def test_learned_constants_may_change_between_runs():
    pyro.clear_param_store()
    model = Stored()
    pyro.param("push", torch.tensor(0.3))
    episodes = some_episodes(model, 3, 3)
    for scale, push, weight in ((0.5, 0.3, 1.0), (0.9, -1.0, 0.6), (0.2, 2.0, -0.4)):
        with torch.no_grad():
            model.scale = torch.tensor(scale)
            model.layer.weight.fill_(weight)
            model.layer.bias.fill_(0.1)
        pyro.get_param_store()["push"] = torch.tensor(push)
        assert_unbiased(model, episodes, ExtendedKalmanFilter(), native(200), reward=False)
    kernel = native().kernel(model)
    with torch.no_grad():
        model.layer.weight.fill_(0.7)
    assert native().kernel(model) is kernel, "numbers alone take no new kernel"
    pyro.clear_param_store()


@pytest.mark.slow
def test_the_default_type_is_that_of_the_run():
    model = Walk()
    episodes = some_episodes(model, 1, 2)
    native(50).run(model, episodes, seed=0)
    with default_dtype(torch.float64):
        found = native(50).run(model, some_episodes(model, 1, 2), seed=0)
        eager = ParticleFilter(50, engine="eager").run(model, some_episodes(model, 1, 2), seed=0)
        assert (found.expected_reward.dtype, found.ess.dtype) == (
            eager.expected_reward.dtype,
            eager.ess.dtype,
        )
    assert native(50).run(model, episodes, seed=0).ess.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------
# Errors


class Rare(Base):
    """Something is wrong in one state of a thousand: not in those that are looked at first."""

    def initial(self, context):
        return pyro.sample("k", dist.Categorical(torch.tensor([0.001, 0.499, 0.5])))

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state.float(), 1.0))

    def reward(self, state, action, context):
        return state.float()


class DividesByZero(Rare):
    def transition(self, state, action, context):
        return 4 // state


class MissesTable(Rare):
    def observation(self, state, action, context):
        pyro.sample(
            "z", dist.Normal(torch.arange(2.0)[(state - 1) * (state - 1) * 3 * (state == 0) + state % 2], 1.0)
        )


class MissesClass(Rare):
    def reward(self, state, action, context):
        return torch.nn.functional.one_hot(2 - state, 2)[..., 0].float()


class BreaksProbability(Rare):
    def transition(self, state, action, context):
        return state + pyro.sample("b", dist.Bernoulli(torch.tensor([1.5, 0.0, 0.0])[state])).long()


class LosesReward(Rare):
    def reward(self, state, action, context):
        return state.float().log() * 0


class LosesState(Base):
    def transition(self, state, action, context):
        return torch.where(state > 3.2, torch.nan, state)

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(0.0 * context, 1.0))


class LosesDensity(Rare):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(1.0, torch.tensor([-1.0, 1.0, 1.0])[state]))


class TooDense(Rare):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(1.0, torch.tensor([0.0, 1.0, 1.0])[state]))


class NotPositive(Rare):
    def observation(self, state, action, context):
        spread = torch.eye(2) * torch.tensor([-1.0, 1.0, 1.0])[state][..., None, None]
        pyro.sample("z", dist.MultivariateNormal(torch.zeros(2), covariance_matrix=spread).to_event(0))


class Hides(Base):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask((action == 1) & (context == 0)))


class Narrow(Base):
    """In context 0, nothing above 1 is seen; in context 1, nothing above 5."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Uniform(-5.0, 1.0 + 4.0 * context))


def seen(model: CPOMDP, z: float, actions=(0, 0)) -> Episodes:
    shape = (1, len(actions), 2) if isinstance(model, NotPositive) else (1, len(actions))
    return Episodes.from_arrays(model, torch.tensor([actions]), {"z": torch.full(shape, z)})


FAULTS = [DividesByZero, MissesTable, MissesClass, BreaksProbability, LosesReward, LosesState]
FAULTS += [LosesDensity, TooDense, NotPositive]


@pytest.mark.slow
@pytest.mark.parametrize("make", FAULTS)
def test_what_is_wrong_in_a_program_is_the_same_error_by_either_engine(make):
    model = make()
    episodes = seen(model, 0.5)
    told = []
    for engine in ("native", "eager"):
        with pytest.raises(Exception) as error:  # noqa: PT011 - compared below
            ParticleFilter(5000, engine=engine).run(model, episodes, seed=0)
        told.append(error)
    assert told[0].type is told[1].type
    assert not issubclass(told[0].type, UnsupportedModelError), "it was to be compiled"
    messages = [re.sub(r"element \d+", "element", str(error.value)) for error in told]
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("model", "z", "error"), [(Hides(), 0.5, ObservationError), (Narrow(), 7.0, DegenerateWeightsError)]
)
def test_what_is_wrong_with_data_is_the_same_error_by_either_engine(model, z, error):
    told = []
    for engine in ("native", "eager"):
        with pytest.raises(error) as raised:
            ParticleFilter(50, engine=engine).run(model, seen(model, z, (1, 1)), seed=0)
        told.append(str(raised.value))
    assert told[0] == told[1]


def test_a_context_that_is_impossible_hurts_no_other_and_an_attempt_may_lose_all():
    model = Narrow()
    for engine in ("native", "eager"):
        found = ParticleFilter(50, engine=engine).run(model, seen(model, 3.0), seed=0)
        assert found.log_likelihood[0, 0] == -torch.inf
        assert found.log_likelihood[0, 1] == pytest.approx(-2 * np.log(10.0), rel=1e-6)
        lost = ParticleFilter(50, engine=engine).attempt(model, seen(model, 7.0), seed=0)
        assert (lost.log_likelihood == -torch.inf).all()


def test_a_refusal_names_the_method_and_the_line():
    class Looks(Base):
        def transition(self, state, action, context):
            return state if bool((state > 0).all()) else -state

    with pytest.raises(
        UnsupportedModelError,
        match=r"Looks cannot be compiled: transition \(transition, line \d+: return state if",
    ):
        native().run(Looks(), some_episodes(Walk()), seed=0)


@pytest.mark.slow
def test_bounds_of_whole_numbers_are_given_up_only_where_they_grow():
    kernel = native().kernel(Register())
    assert kernel.traced.bounds[:3] == ((0, 2),) * 3
    assert native().kernel(Counter()).traced.bounds == (None,) * 7
    assert native().kernel(Finite()).traced.bounds == ((0, 4),)


class Finite(Base):
    states = 5

    def initial(self, context):
        return pyro.sample("s", dist.Categorical(torch.ones(5)))

    def transition(self, state, action, context):
        return (state + pyro.sample("k", dist.Categorical(torch.tensor([0.5, 0.3, 0.2]))) + action) % 5

    def observation(self, state, action, context):
        pyro.sample("z", dist.Categorical(0.5 * torch.eye(5)[state] + 0.1))

    def reward(self, state, action, context):
        return torch.arange(5.0)[state]


def test_a_step_of_a_table_by_time_is_not_looked_up_beyond_the_horizon():
    class Timed(Base):
        horizon = 2

        def initial(self, context):
            return {"x": pyro.sample("x", dist.Normal(0.0, 1.0)), "t": torch.zeros((), dtype=torch.long)}

        def transition(self, state, action, context):
            push = torch.tensor([0.5, -0.5])[state["t"]]
            return {"x": pyro.sample("x", dist.Normal(state["x"] + push, 1.0)), "t": state["t"] + 1}

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state["x"], torch.tensor([9.0, 0.5, 1.0])[state["t"]]))

        def reward(self, state, action, context):
            return state["x"]

    model = Timed()
    assert_engines_agree(model, some_episodes(model, 2, 2))


SANITIZED = """
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.models import LightDark, LineGrid
from tests.inference.test_native_filter import ODD, SCHEMES
for make in (*ODD, LightDark, LineGrid):
    model = make()
    episodes = simulate(model, RandomPolicy(model.num_actions), 3, seed=0)
    for k, N in enumerate((1, 2, 7, 31, 33, 100)):
        smc = ParticleFilter(N, SCHEMES[k % 4], (0.5, 1.0)[k % 2], engine="native")
        assert smc.attempt(model, episodes, seed=0) is not None
"""


@pytest.mark.long
def test_no_kernel_leaves_its_memory_or_the_language(tmp_path):
    """Under GCC's sanitizers: addresses, overflows of whole numbers, shifts, divisions."""
    names = [f"lib{name}.so" for name in ("asan", "ubsan")]
    words = [["gcc", f"-print-file-name={name}"] for name in names]
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    found = [
        subprocess.run(each, check=True, capture_output=True, text=True).stdout.strip() for each in words
    ]
    if found == names:
        pytest.skip("this gcc has no sanitizers")
    variables = {"CC": "gcc -g -fsanitize=address,undefined -fno-sanitize-recover=all"}
    variables |= {
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "CPOMDP_CACHE": str(tmp_path),
    }
    run_python(SANITIZED, env=environment(**variables), timeout=600)
