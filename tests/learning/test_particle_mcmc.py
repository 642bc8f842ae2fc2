import ast
import os
import re
import signal
import threading

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from tqdm import tqdm

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter, as_backend
from cpomdp_ppl.learning import (
    SamplingInterrupted,
    particle_marginal_metropolis_hastings,
    with_parameters,
)
from cpomdp_ppl.learning.posterior import BlockLikelihood
from cpomdp_ppl.models import LightDark
from tests.learning.programs import Alarm, Constant, Window, positive

QUICK = {"chains": 2, "draws": 5, "warm_up": 5, "num_particles": 8, "progress": False}


def posterior_of_power(episodes, prior):
    """Mean and standard deviation by a sum over many values, with the likelihood written out."""
    p = (torch.arange(2000).double() + 0.5) / 2000
    k = episodes.observations["alarm"].double().sum(1)[:, None]  # [B, 1]
    T = episodes.horizon
    per_context = [
        0.5 * p**k * (1 - p) ** (T - k) + 0.5 * false**k * (1 - false) ** (T - k) for false in (0.3, 0.6)
    ]
    log_density = (0.5 * per_context[0] + 0.5 * per_context[1]).log().sum(0) + prior.log_prob(p)
    weights = log_density.softmax(0)
    mean = (weights * p).sum()
    return mean.item(), (weights * (p - mean) ** 2).sum().sqrt().item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:particle_marginal_metropolis_hastings")
@pytest.mark.parametrize(
    ("likelihood", "draws", "jumps", "blocks"),
    [(None, 200, 0.5, 2), ("exact", 100, 1.0, 2)],
    ids=["smc", "exact, jumps alone"],
)
def test_posterior_against_the_exact_one(likelihood, draws, jumps, blocks):
    """With six particles for a state of two values the estimate is noisy, but the target must be right."""
    episodes = simulate(Alarm(0.8), RandomPolicy(1), 10, seed=0)
    prior = dist.Beta(2.0, 2.0)
    data = particle_marginal_metropolis_hastings(
        Alarm(0.6),
        episodes,
        {"power": prior},
        num_particles=6,
        likelihood=likelihood,
        initial={"power": 0.75},
        covariance=0.3 * torch.eye(1) if jumps == 1 else None,
        jumps=jumps,
        blocks=blocks,
        chains=3,
        draws=draws,
        warm_up=60,
        seed=0,
        progress=False,
    )
    mean, sd = posterior_of_power(episodes, prior)
    drawn = data.posterior["power"]
    error = float(az.mcse(drawn.to_dataset())["power"])
    squares = (drawn - drawn.mean()) ** 2
    effective = float(az.ess(squares.to_dataset(), method="mean")["power"])
    error_of_sd = float(squares.std()) / effective**0.5 / (2 * float(drawn.std()))
    assert error < 0.25 * sd  # so the next lines can fail
    assert abs(float(drawn.mean()) - mean) < 4 * error
    assert abs(float(drawn.std()) - sd) < 4 * error_of_sd
    rates = data.sample_stats["acceptance_rate"].mean("draw")
    assert bool(((rates > 0.05) & (rates < 0.95)).all())
    noise = data.posterior.attrs["log_likelihood_sd"]
    assert noise < 1e-9 if likelihood == "exact" else noise > 0.3
    renewal = data.posterior.attrs["renewal"]
    assert renewal == [0.0] * 3 if likelihood == "exact" else all(0.05 < rate < 0.95 for rate in renewal)
    lp = data.sample_stats["lp"].values
    estimate = data.sample_stats["log_likelihood"].values
    expected = estimate + prior.log_prob(torch.as_tensor(drawn.values)).numpy()
    assert np.allclose(lp, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:particle_marginal_metropolis_hastings")
def test_a_start_where_no_particle_is():
    """At a width of 0.6, 16 of a hundred places leave most episodes impossible; draws from the prior help."""
    episodes = simulate(Window(10.0), RandomPolicy(1), 10, seed=0)
    prior = {"width": dist.Uniform(0.5, 30.0)}
    options = {**QUICK, "num_particles": 16, "seed": 0}
    data = particle_marginal_metropolis_hastings(Window(0.6), episodes, prior, **options)
    width = data.posterior["width"].values
    assert bool(np.isfinite(data.sample_stats["lp"]).all())
    assert bool(((width > 0.6) & (width < 30.0)).all())
    assert width[0, 0] != width[1, 0]  # each chain found its own


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:particle_marginal_metropolis_hastings")
def test_no_start_at_all_says_what_to_pass():
    episodes = simulate(Window(0.6), RandomPolicy(1), 10, seed=0)
    prior = {"width": dist.Uniform(0.55, 0.65)}
    options = {**QUICK, "blocks": 1, "num_particles": 32, "seed": 0}
    with pytest.raises(ValueError, match=r"initial: .*with 32 particles, but with") as found:
        particle_marginal_metropolis_hastings(Window(0.6), episodes, prior, **options)
    said = re.search(r"time 1 of episode \d+: .* pass num_particles=(\d+), initial=(.*)$", str(found.value))
    options |= {"num_particles": int(said[1]), "initial": ast.literal_eval(said[2])}
    particle_marginal_metropolis_hastings(Window(0.6), episodes, prior, **options)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [None, "exact"])
def test_episodes_that_are_not_the_models(likelihood):
    model = Alarm() if likelihood else Window()
    episodes = simulate(model, RandomPolicy(1), 3, seed=0)
    site = "alarm" if likelihood else "z"
    episodes.observations[site][1, 0] = 1.0 if likelihood else 300.0
    if likelihood:
        model.observation = lambda state, action, context: pyro.sample("alarm", dist.Delta(0.0 * model.power))
    prior = {"power": dist.Beta(2.0, 2.0)} if likelihood else {"width": dist.Uniform(0.5, 30.0)}
    with pytest.raises(ValueError, match=r"no context can have produced.*pass `initial` values"):
        particle_marginal_metropolis_hastings(model, episodes, prior, likelihood=likelihood, seed=0, **QUICK)


@pytest.mark.slow
def test_groups_and_seeds():
    class Two(Constant):
        def __init__(self):
            super().__init__()
            self.offset = pyro.nn.PyroParam(torch.tensor([0.1, -0.1, 0.0]))

        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state + self.offset.sum(), self.variance.sqrt()))

    model = Two()
    episodes = simulate(model, RandomPolicy(2), 4, seed=0)
    prior = {"offset": dist.Normal(0.0, 1.0), "variance": dist.LogNormal(0.0, 1.0)}
    data = particle_marginal_metropolis_hastings(model, episodes, prior, seed=1, **QUICK)
    again = particle_marginal_metropolis_hastings(model, episodes, prior, seed=1, **QUICK)
    other = particle_marginal_metropolis_hastings(model, episodes, prior, seed=2, **QUICK)
    assert model.variance.item() == pytest.approx(2.0)  # the model is left alone
    assert data.posterior["offset"].shape == (2, 5, 3)
    assert data.posterior["variance"].shape == (2, 5)
    assert np.array_equal(data.posterior["offset"], again.posterior["offset"])
    assert not np.array_equal(data.posterior["offset"], other.posterior["offset"])
    assert not np.array_equal(data.posterior["offset"][0], data.posterior["offset"][1])
    assert set(data.sample_stats) == {"lp", "accepted", "acceptance_rate", "log_likelihood"}
    draw = {name: data.posterior[name].values[0, -1] for name in prior}
    assert with_parameters(model, draw).offset.tolist() == pytest.approx(draw["offset"].tolist(), rel=1e-5)


@pytest.mark.slow
def test_jumps_forget_in_fewer_steps():
    """Two hundred looks at a variance: its posterior is nearly normal on the scale of logarithms."""
    episodes = simulate(Constant(3.0), RandomPolicy(2), 40, seed=0)
    z = episodes.observations["z"].double()
    options = {"initial": {"variance": z.square().mean()}, "covariance": 2 / z.numel() * torch.eye(1)}
    options |= {"likelihood": "ekf", "chains": 2, "draws": 150, "warm_up": 20, "seed": 0, "progress": False}
    prior = {"variance": dist.LogNormal(0.0, 2.0)}
    effective = []
    for jumps in (0.0, 1.0):
        data = particle_marginal_metropolis_hastings(Constant(), episodes, prior, jumps=jumps, **options)
        effective.append(float(az.ess(data)["variance"]))
    assert effective[1] > 2 * effective[0]


@pytest.mark.slow
def test_blocks_of_an_estimate_have_their_own_random_numbers():
    model = LightDark(4, light_variance=positive(1.0))
    episodes = simulate(model, RandomPolicy(3), 7, seed=0)
    at = {"light_variance": torch.tensor(2.0).double()}
    smc = BlockLikelihood(model, episodes, ParticleFilter(8), use_contexts=False, blocks=3)
    both = smc.per_block(at, {0: 5, 2: 6})
    assert smc.per_block(at, {2: 6}) == {2: both[2]}
    assert smc.per_block(at, {0: 5, 2: 7})[0] == both[0]
    assert smc.per_block(at, {0: 5, 2: 7})[2] != both[2]
    ekf = BlockLikelihood(model, episodes, as_backend("ekf"), use_contexts=True, blocks=3)
    per_block = ekf.per_block(at, {0: 0, 1: 0, 2: 0})
    known = with_parameters(model, at)
    per_context = as_backend("ekf").run(known, episodes).log_likelihood + known.prior().log()  # [B, C]
    of_context = per_context[torch.arange(7), episodes.contexts]
    expected = [part.sum().item() for part in of_context.split([2, 2, 3])]
    assert list(per_block.values()) == pytest.approx(expected, abs=1e-4)
    assert ekf(at, 0) == pytest.approx(sum(expected), abs=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:particle_marginal_metropolis_hastings")
def test_workers_make_no_difference(monkeypatch):
    episodes = simulate(Alarm(), RandomPolicy(1), 6, seed=0)
    threads = torch.get_num_threads()
    runs = []
    for workers, seconds in ((1, 2.0), (2, 1e-9)):
        monkeypatch.setattr("cpomdp_ppl.learning.metropolis.ROUND_SECONDS", seconds)
        options = {**QUICK, "chains": 3, "workers": workers}
        prior = {"power": dist.Beta(2.0, 2.0)}
        runs.append(particle_marginal_metropolis_hastings(Alarm(), episodes, prior, seed=3, **options))
    for group, name in (("posterior", "power"), ("sample_stats", "lp")):
        assert np.array_equal(*(run[group][name] for run in runs))
    assert torch.get_num_threads() == threads


def interrupting(after, delay):
    """A progress bar at which somebody presses Ctrl-C."""

    class Bar(tqdm):
        seen = 0

        def update(self, n=1):
            self.seen += n
            if self.seen - n < after <= self.seen:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()

    return Bar


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_the_draws(monkeypatch, workers):
    episodes = simulate(Alarm(), RandomPolicy(1), 6, seed=0)
    prior = {"power": dist.Beta(2.0, 2.0)}
    options = {**QUICK, "num_particles": 32, "warm_up": 3, "seed": 4, "workers": workers}
    monkeypatch.setattr("cpomdp_ppl.learning.metropolis.ROUND_SECONDS", 0.2)
    monkeypatch.setattr("cpomdp_ppl.learning.particle_mcmc.tqdm", interrupting(2 * (3 + 2), 0.3))
    options["draws"] = 10**6
    with pytest.raises(SamplingInterrupted, match=r"stopped after \d+ of 1000000 draws") as stopped:
        particle_marginal_metropolis_hastings(Alarm(), episodes, prior, **options)
    data = stopped.value.data
    monkeypatch.setattr("cpomdp_ppl.learning.particle_mcmc.tqdm", tqdm)
    count = data.posterior.sizes["draw"]
    assert 2 <= count < 10**6
    assert data.posterior.attrs["interrupted"] == 1
    options["draws"] = min(count, 20)
    finished = particle_marginal_metropolis_hastings(Alarm(), episodes, prior, **options)
    assert finished.posterior.attrs["interrupted"] == 0
    assert np.array_equal(data.posterior["power"][:, :20], finished.posterior["power"])


def test_ctrl_c_before_there_are_draws(monkeypatch):
    episodes = simulate(Alarm(), RandomPolicy(1), 6, seed=0)
    monkeypatch.setattr("cpomdp_ppl.learning.particle_mcmc.tqdm", interrupting(2, 0.1))
    options = {**QUICK, "warm_up": 10**6}
    with pytest.raises(KeyboardInterrupt):
        particle_marginal_metropolis_hastings(Alarm(), episodes, {"power": dist.Beta(2.0, 2.0)}, **options)


@pytest.mark.slow
def test_too_few_particles_are_reported():
    model = LightDark(8, light_variance=positive(0.02))
    episodes = simulate(model, RandomPolicy(3), 100, seed=0)
    prior = {"light_variance": dist.LogNormal(-4.0, 0.5)}
    with pytest.warns(UserWarning, match=r"num_particles = 8.*chains stick: take"):
        particle_marginal_metropolis_hastings(model, episodes, prior, seed=0, **QUICK)


def test_refusals():
    episodes = simulate(Alarm(), RandomPolicy(1), 4, seed=0)

    def run(prior, model=None, **options):
        particle_marginal_metropolis_hastings(model or Alarm(), episodes, prior, **{**QUICK, **options})

    beta = dist.Beta(2.0, 2.0)
    with pytest.raises(ValueError, match="PyroParam"):
        run({}, LightDark(3))
    with pytest.raises(ValueError, match="prior: expected a distribution for parameter 'power'"):
        run({})
    with pytest.raises(ValueError, match=r"prior: expected parameters of the model.*got strength"):
        run({"power": beta, "strength": beta})
    with pytest.raises(ValueError, match=r"prior\['power'\]: expected a distribution, got 0\.5"):
        run({"power": 0.5})
    with pytest.raises(ValueError, match=r"prior\['power'\]: .*shape"):
        run({"power": dist.Beta(torch.ones(3), 1.0)})
    with pytest.raises(ValueError, match="initial: expected values at which the prior is not zero"):
        run({"power": dist.Uniform(0.8, 0.9)})
    with pytest.raises(ValueError, match="covariance"):
        run({"power": beta}, covariance=torch.full((1, 1), torch.nan))
    with pytest.raises(ValueError, match=r"jumps: expected a share from 0 to 1, got 1\.5"):
        run({"power": beta}, jumps=1.5)
    for name in ("blocks", "workers"):
        with pytest.raises(ValueError, match=name):
            run({"power": beta}, **{name: 0})


@pytest.mark.slow
def test_one_kernel_serves_all_values_of_constants():
    """And it is told them: the Kalman filter has no noise, and the eager one is the truth."""
    model = LightDark(5, light_variance=positive(1.0), dark_variance=positive(5.0))
    episodes = simulate(LightDark(5), RandomPolicy(3), 9, seed=0)
    native, eager = (
        BlockLikelihood(model, episodes, ExtendedKalmanFilter(engine=engine), use_contexts=False, blocks=2)
        for engine in ("native", "eager")
    )
    kernels, found = set(), set()
    for light, dark in ((1.0, 5.0), (2.0, 5.0), (0.3, 9.0)):
        at = {"light_variance": torch.tensor(light).double(), "dark_variance": torch.tensor(dark).double()}
        value = native(at, 0)
        assert value == pytest.approx(eager(at, 0), rel=1e-6)
        kernels.add(id(native.backend.kernel(native.copy)))
        found.add(round(value, 6))
    assert len(kernels) == 1
    assert len(found) == 3


@pytest.mark.slow
def test_an_impossible_block_is_named():
    """Its episodes are counted from its first, and the message says which that is."""
    model = Window(10.0)
    episodes = simulate(model, RandomPolicy(1), 8, seed=0)
    smc = BlockLikelihood(model, episodes, ParticleFilter(4), use_contexts=False, blocks=2)
    assert smc.per_block({"width": torch.tensor(1e-3).double()}, {1: 0}) == {1: -float("inf")}
    assert smc.impossible.startswith("episodes[4:8]: time 1 of episode ")
