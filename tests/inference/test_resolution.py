"""A grid is right, or says how many points it would take: against closed forms and brute-force quadrature."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, evaluate, simulate
from cpomdp_ppl.errors import DensityError, ResolutionError, UnsupportedModelError
from cpomdp_ppl.inference import GridFilter, ParticleFilter, reference_backend
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.scan import scan
from tests.programs import Walk

TOLERANCE = GridFilter().tolerance


class Drift(CPOMDP):
    """Linear and Gaussian in d dimensions: each number is halved, pushed, and seen with noise."""

    contexts, actions, horizon = 2, 1, 4

    def __init__(self, process: float, sensor: float, start: float = 1.0, d: int = 1):
        super().__init__()
        self.process, self.sensor, self.start, self.d = process, sensor, start, d

    def initial(self, context):
        return pyro.sample("x", dist.Normal(torch.zeros(self.d), self.start).to_event(1))

    def transition(self, state, action, context):
        push = self.start * (0.3 * context)[..., None]
        return pyro.sample("x", dist.Normal(0.5 * state + push, self.process).to_event(1))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.sensor).to_event(1))

    def reward(self, state, action, context):
        return state.sum(-1)


def kalman(model: Drift, episodes: Episodes) -> np.ndarray:
    """Log-likelihoods `[B, C]` by a scalar Kalman filter, one for each number of the state."""
    z = episodes.observations["z"].double().numpy()
    found = np.zeros((len(z), 2))
    for c in range(2):
        m, P = np.zeros((len(z), model.d)), model.start**2
        for t in range(model.horizon):
            m = 0.5 * m + model.start * 0.3 * c
            P = 0.25 * P + model.process**2
            S = P + model.sensor**2
            found[:, c] += stats.norm.logpdf(z[:, t], m, S**0.5).sum(-1)
            m, P = m + P / S * (z[:, t] - m), P * model.sensor**2 / S
    return found


def assert_right(found: torch.Tensor, expected: np.ndarray) -> None:
    """As near as a grid promises; what is promised of contexts far behind is nothing."""
    behind = expected.max(1, keepdims=True) - expected
    error = np.abs(found.numpy() - expected) / np.maximum(1, behind)
    assert error[behind <= 35].max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "process", "sensor"),
    [(1, 0.3, s) for s in (0.01, 0.1, 3.0)]
    + [(1, q, 0.3) for q in (0.003, 0.03, 3.0)]
    + [(1, 0.0, 0.1), (1, 0.02, 0.02), (2, 0.6, 0.8), (2, 0.3, 2.0)],
)
def test_whatever_the_noise_the_grid_is_a_kalman_filter(d, process, sensor):
    model = Drift(process, sensor, d=d)
    episodes = simulate(model, RandomPolicy(1), 8, contexts="balanced", seed=0)
    assert_right(GridFilter().run(model, episodes).log_likelihood, kalman(model, episodes))


@pytest.mark.parametrize("d", [1, 2])
def test_what_would_take_too_many_points_is_refused_at_once(d):
    model = Drift(0.001, 0.001, d=d)
    episodes = simulate(model, RandomPolicy(1), 8, contexts="balanced", seed=0)
    with pytest.raises(ResolutionError, match=r"it would take about .* points") as refused:
        GridFilter().run(model, episodes)
    extent = 12  # seven standard deviations of 1 on either side, and little besides; half as much will not do
    assert (0.5 * extent / 0.001) ** d < refused.value.num_points < (3 * extent / 0.001) ** d
    again = pickle.loads(pickle.dumps(refused.value))
    assert (str(again), again.num_points) == (str(refused.value), refused.value.num_points)
    small = Drift(0.001, 0.001, start=0.02, d=1)  # just as narrow, but with less to cover
    episodes = simulate(small, RandomPolicy(1), 8, contexts="balanced", seed=0)
    assert_right(GridFilter().run(small, episodes).log_likelihood, kalman(small, episodes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "points"),
    [(Drift(0.3, 0.05), 100), (Drift(0.01, 0.3), 40), (Drift(0.6, 0.8, d=2), 200)],
)
def test_the_number_of_points_that_a_refusal_names_will_do(model, points):
    episodes = simulate(model, RandomPolicy(1), 8, contexts="balanced", seed=0)
    refused = 0
    while True:
        try:
            found = GridFilter(points).run(model, episodes)
            break
        except ResolutionError as error:
            points, refused = error.num_points, refused + 1
    assert 1 <= refused <= 3  # what is far off cannot tell exactly
    assert_right(found.log_likelihood, kalman(model, episodes))


@pytest.mark.parametrize("process", [0.0, 0.03, 0.3])
@pytest.mark.parametrize("sensor", [0.3, 1.0])
@pytest.mark.parametrize("points", [60, 90, 135, 200])
def test_errors_are_smaller_than_estimated(process, sensor, points):
    """At any resolution, refused or not; also where process noise is too small for the grid to see."""
    model = Drift(process, sensor)
    episodes = simulate(model, RandomPolicy(1), 16, contexts="balanced", seed=0)
    with inference_scope(model):
        recursion = GridFilter(points, tolerance=1e9).recursion(model)
        steps = list(scan(recursion, episodes))
    total, belief = sum(step.increment for step in steps), steps[-1].after
    true = episodes.contexts, torch.arange(16)
    error = np.abs(total[true].numpy() - kalman(model, episodes)[true[::-1]])
    estimated = belief.error[true].numpy()
    assert error.max() <= estimated.max() + 1e-9
    assert (error[estimated <= TOLERANCE] < TOLERANCE).all()  # each episode on its own


@pytest.mark.slow
def test_those_who_use_the_recursion_are_told_as_well():
    model = Drift(0.01, 0.3)
    episodes = simulate(model, RandomPolicy(1), 4, contexts="balanced", seed=0)
    coarse = GridFilter(40)
    with pytest.raises(ResolutionError, match=r"at time \d of episode \d .*`tolerance`"):
        coarse.smooth(model, episodes, 5, seed=0)
    online = coarse.online(model, 4)

    def follow():
        for t in (0, 1):
            online.observe(0, {"z": episodes.observations["z"][:, t]})

    with pytest.raises(ResolutionError, match=r"at time [12] of episode \d .*`tolerance`"):
        follow()
    smoothed = GridFilter().smooth(model, episodes, 5, seed=0)  # finds out what it needs
    assert smoothed.state_mean.isfinite().all()
    with pytest.raises(ValueError, match="tolerance: expected"):
        GridFilter(tolerance=0.0)


class Corner(Drift):
    """Sees its distance from zero, and that much better on one side: a kink and a jump."""

    def observation(self, state, action, context):
        noise = torch.where(state > 0.3, self.sensor, 5 * self.sensor)
        pyro.sample("z", dist.Normal(state.abs(), noise).to_event(1))


@pytest.mark.slow
@pytest.mark.parametrize("sensor", [0.05, 0.5])
def test_a_sensor_with_kink_and_jump_against_quadrature(sensor):
    model = Corner(0.4, sensor)
    episodes = simulate(model, RandomPolicy(1), 3, contexts="balanced", seed=0)
    h = 0.005
    x = np.arange(-1800, 1800) * h + h / 2  # the jump is between two points
    z, expected = episodes.observations["z"].double().numpy(), np.zeros((3, 2))
    reach = np.arange(-700, 701) * h  # nearly nine standard deviations
    kernel = stats.norm.pdf(reach, 0, model.process) * h
    for b in range(3):
        for c in range(2):
            p = stats.norm.pdf(x, 0, model.start)
            for t in range(model.horizon):
                halved = np.interp(2 * (x - 0.3 * c), x, p, left=0, right=0) * 2  # what is halved, and pushed
                p = np.convolve(halved, kernel, "same")
                noise = np.where(x > 0.3, sensor, 5 * sensor)
                p = p * stats.norm.pdf(z[b, t, 0], np.abs(x), noise)
                expected[b, c] += np.log(p.sum() * h)
                p /= p.sum() * h
    assert_right(GridFilter().run(model, episodes).log_likelihood, expected)


class Spike(Drift):
    """Half of the time its sensor is perfect, or nearly so: far too narrow for two grids to differ."""

    def observation(self, state, action, context):
        scales = torch.tensor([1e-4, 1.0]).expand(*state.shape[:-1], 2)
        each = dist.Normal(state.expand(*state.shape[:-1], 2), scales)
        pyro.sample("z", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), each))


@pytest.mark.parametrize("points", [None, 1200, 2400])
def test_two_grids_that_miss_the_same_do_not_agree_on_it(points):
    model = Spike(0.3, 1.0)
    episodes = simulate(model, RandomPolicy(1), 4, contexts="balanced", seed=0)
    with pytest.raises(ResolutionError, match=r"vary over lengths of .*it would take about \d+,000 points"):
        GridFilter(points).run(model, episodes)


class Faraway(Spike):
    """Such a sensor, but only where a random walk hardly gets to."""

    contexts, actions, horizon = 2, 2, 8

    def transition(self, state, action, context):
        step = (1 - 2 * action) * (1 + 0.02 * context)
        return pyro.sample("x", dist.Normal(state + step[..., None], self.process).to_event(1))

    def observation(self, state, action, context):
        narrow = torch.where(state > 6, 1e-5, 1.0)
        scales = torch.cat([narrow, torch.ones_like(narrow)], -1)
        each = dist.Normal(state.expand(*state.shape[:-1], 2), scales)
        pyro.sample("z", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), each))


@pytest.mark.slow
def test_what_only_some_policy_gets_to_see_is_not_missed():
    model = Faraway(0.3, 1.0, start=0.3)
    episodes = simulate(model, lambda history: torch.zeros(4).long(), 4, contexts="balanced", seed=0)
    with pytest.raises(ResolutionError, match=r"vary over lengths of .*it would take about [\d,]+ points"):
        GridFilter().run(model, episodes)
    back = simulate(model, lambda history: torch.ones(4).long(), 4, contexts="balanced", seed=0)
    expected = np.zeros((4, 2))  # a single sensor of noise 1 there
    for c in range(2):
        m, P = np.zeros(4), 0.3**2
        for z in back.observations["z"].double().numpy().T:
            m, P = m - 1 - 0.02 * c, P + 0.3**2
            expected[:, c] += stats.norm.logpdf(z, m, (P + 1) ** 0.5)
            m, P = m + P / (P + 1) * (z - m), P / (P + 1)
    assert_right(GridFilter().run(model, back).log_likelihood, expected)


class Sum(Walk):
    """Moves by the sum of some noises."""

    contexts, actions, horizon = 1, 1, 1

    def __init__(self, *scales: float):
        super().__init__()
        self.scales = scales

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 0.2))

    def transition(self, state, action, context):
        return state + sum(pyro.sample(f"e{i}", dist.Normal(0.0, sd)) for i, sd in enumerate(self.scales))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.25))


def sum_of(z: float, model: Sum, **settings: float) -> tuple[float, float]:
    """The log-likelihood of a single observation, found and in closed form."""
    episodes = Episodes(torch.tensor([[0]]), {"z": torch.tensor([[z]])}, {"z": torch.tensor([[True]])})
    found = GridFilter(250, bounds=(-14, 14), **settings).run(model, episodes).log_likelihood.item()
    expected = stats.norm.logpdf(
        np.float32(z), 0, (0.2**2 + 0.25**2 + sum(sd**2 for sd in model.scales)) ** 0.5
    )
    return found, expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scales", "reach", "fine", "cut"),
    [((1.0,), 8.5, 8.5, (9.3, 10.0, 11.0)), ((1.0, 0.2), 6.0, 6.0, (6.8, 9.0))],
)
def test_where_tails_that_were_cut_matter_it_is_refused(scales, reach, fine, cut):
    model = Sum(*scales)
    found, expected = sum_of(fine, model, reach=reach)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    for z in cut:
        with pytest.raises(DensityError, match=r"out of reach.*a larger `reach`"):
            sum_of(z, model, reach=reach)


@pytest.mark.slow
@pytest.mark.parametrize(("scales", "z"), [((1.0,), 9.3), ((1.0, 0.2), 7.6)])
def test_tails_are_followed_further_where_that_is_needed(scales, z):
    found, expected = sum_of(z, Sum(*scales))
    assert found == pytest.approx(expected, abs=TOLERANCE)


class Door(Drift):
    """A state that is partly discrete, of whatever type."""

    def __init__(self, as_type: torch.dtype):
        super().__init__(0.3, 0.5)
        self.as_type = as_type

    def initial(self, context):
        door = pyro.sample("door", dist.Bernoulli(0.5)).to(self.as_type)
        return {"door": door, "x": pyro.sample("x", dist.Normal(0.0, 1.0))}

    def transition(self, state, action, context):
        door = pyro.sample("door", dist.Bernoulli(0.25 + 0.5 * state["door"])).to(self.as_type)
        return {"door": door, "x": pyro.sample("x", dist.Normal(state["x"], 0.3))}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["x"] + state["door"], 0.5))

    def reward(self, state, action, context):
        return state["x"]


class Vector(Door):
    def initial(self, context):
        return torch.stack(list(super().initial(context).values()), -1)

    def transition(self, state, action, context):
        moved = super().transition({"door": state[..., 0], "x": state[..., 1]}, action, context)
        return torch.stack(list(moved.values()), -1)

    def observation(self, state, action, context):
        super().observation({"door": state[..., 0], "x": state[..., 1]}, action, context)

    def reward(self, state, action, context):
        return state[..., 1]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Door(torch.float32), "'door' of Door takes the values 0, 1 only, so it is discrete"),
        (Door(torch.long), "'door' of Door is torch.int64, not a real number"),
        (Vector(torch.float32), "number 0 of 'state' of Vector takes the values 0, 1 only"),
    ],
)
def test_a_state_that_is_partly_discrete_is_refused_as_that(model, reason):
    episodes = simulate(model, RandomPolicy(1), 4, seed=0)
    with pytest.raises(UnsupportedModelError, match=reason):
        GridFilter().run(model, episodes)


# --------------------------------------------------------------------------------- which backend to trust


@pytest.mark.parametrize(
    "model",
    [Drift(0.3, 0.01), Drift(0.001, 0.001), Drift(1e-3, 1.0), Drift(10.0, 0.01), Drift(0.3, 0.1, d=2)],
)
def test_where_a_kalman_filter_is_exact_it_is_the_reference(model):
    backend = reference_backend(model)
    assert backend.name == "ekf"
    episodes = simulate(model, RandomPolicy(1), 8, contexts="balanced", seed=1)
    expected = kalman(model, episodes)
    likely = expected > expected.max(1, keepdims=True) - 36
    found = backend.run(model, episodes).log_likelihood.numpy()
    np.testing.assert_allclose(found[likely], expected[likely], atol=0.01)  # single precision


class Volatile(Drift):
    """Kalman filters agree on it, and are both wrong: they do not see what noise tells of the state."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(torch.zeros_like(state), torch.exp(state)).to_event(1))


class Growing(Drift):
    """Its noise grows with the state, which no sigma point along an axis shows."""

    def transition(self, state, action, context):
        noise = pyro.sample("noise", dist.Normal(torch.zeros(self.d), 1.0).to_event(1))
        return 0.5 * state + (0.3 * context)[..., None] + (0.5 + 0.2 * state) * noise


class Angle(Drift):
    """Two dimensions, not linear."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state.square().sum(-1).sqrt(), self.sensor))


class Surveyed(Drift):
    """Linear, but for a first look whose noise depends on the state."""

    initial_observation = True

    def observation(self, state, action, context):
        noise = state.abs() + 0.1 if action is None else torch.tensor(self.sensor)
        pyro.sample("z", dist.Normal(state, noise).to_event(1))


class Corridor(Drift):
    """Steps to the left or right; beyond 4 the sensor shows waves, or beyond -4 and 4."""

    actions, horizon, contexts = 3, 6, 2

    def __init__(self, both: bool):
        super().__init__(0.1, 0.2)
        self.both = both

    def transition(self, state, action, context):
        step = (1.0 + 0.1 * context) * (torch.as_tensor(action) - 1)
        return pyro.sample("x", dist.Normal(state + step[..., None], self.process).to_event(1))

    def observation(self, state, action, context):
        far = state.abs() if self.both else state
        mean = torch.where(far > 4, 4 + torch.sin(4 * state), state)
        pyro.sample("z", dist.Normal(mean, self.sensor).to_event(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Volatile(0.5, 1.0), "grid"),
        (Growing(0.5, 1.0), "grid"),
        (Angle(0.3, 0.3, d=2), "smc"),
        (Surveyed(0.5, 1.0), "grid"),
        (Corridor(both=False), "grid"),
    ],
)
def test_where_it_is_not_something_else_is(model, name):
    state = torch.get_rng_state()
    assert reference_backend(model).name == name
    assert torch.equal(torch.get_rng_state(), state)


class Misty(Drift):
    """A Gaussian nuisance that is never seen adds to the noise of what is."""

    def observation(self, state, action, context):
        mist = pyro.sample("mist", dist.Normal(0.0, 0.8).mask(torch.tensor(False)))
        pyro.sample("z", dist.Normal(state + mist[..., None], 0.6).to_event(1))


def test_a_nuisance_that_cannot_be_summed_over_is_left_to_particles():
    model = Misty(0.5, 1.0)
    backend = reference_backend(model)
    assert backend.name == "smc"
    assert evaluate(model, RandomPolicy(1), 8, seed=0).likelihood == backend.label
    episodes = simulate(model, RandomPolicy(1), 8, seed=0)
    found = backend.run(model, episodes, seed=0)
    errors = found.log_likelihood.numpy() - kalman(model, episodes)  # 0.8² + 0.6² = 1
    assert (np.abs(errors) < 5 * found.standard_error.numpy()).all()


class Hidden(Drift):
    """Linear wherever constant and random actions lead: only who goes right after waiting gets beyond 9."""

    actions, horizon, contexts = 2, 10, 2

    def initial(self, context):
        return {"x": pyro.sample("x", dist.Normal(0.0, 0.1)), "charge": torch.zeros_like(context) * 1.0}

    def transition(self, state, action, context):
        waits = (torch.as_tensor(action) == 0).to(state["x"].dtype)
        charge = state["charge"] * waits + waits  # steps waited in a row
        step = (1 - waits) * state["charge"] * 2
        return {"x": pyro.sample("x", dist.Normal(state["x"] + step + 0.1 * context, 0.1)), "charge": charge}

    def observation(self, state, action, context):
        x = state["x"]
        pyro.sample("z", dist.Normal(torch.where(x > 9, 9 + torch.sin(4 * x), x), 0.2))

    def reward(self, state, action, context):
        return state["x"]


@pytest.mark.slow
def test_a_policy_may_get_to_where_the_reference_is_not_exact(monkeypatch):
    """Here random actions never get there; a policy does, and a Kalman filter would not serve it."""
    model = Hidden(0.1, 0.2)
    monkeypatch.setattr("cpomdp_ppl.inference.choice.trials", lambda model: iter([_still(model)]))
    assert reference_backend(model).name == "ekf"

    def leap(history):
        return torch.full((history.num_episodes,), int(history.time == 7))

    found = evaluate(model, leap, 40, seed=0)
    assert found.likelihood.startswith("smc")
    assert evaluate(model, _still_policy, 40, seed=0).likelihood == "ekf"


def _still_policy(history):
    return torch.zeros(history.num_episodes, dtype=torch.long)


def _still(model):
    return simulate(model, _still_policy, 16, contexts="balanced", seed=0)


def test_an_evaluation_by_too_few_particles_says_so():
    model = Angle(0.3, 0.01, d=2)
    with pytest.warns(UserWarning, match=r"contexts \(by smc, 32 particles\) have standard errors of"):
        evaluate(model, RandomPolicy(1), 40, likelihood=ParticleFilter(32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(Angle(0.3, 3.0, d=2), RandomPolicy(1), 40)


def test_more_particles_where_few_are_unsure():
    few = reference_backend(Angle(0.3, 3.0, d=2)).num_particles
    many = reference_backend(Angle(0.3, 0.01, d=2)).num_particles
    assert few == 1024 < many <= 4096
    assert reference_backend(Angle(0.3, 0.01, d=2)).num_particles == many


def test_an_evaluation_is_by_the_reference():
    assert evaluate(Drift(0.3, 0.01), RandomPolicy(1), 20).likelihood == "ekf"


class Radar(Walk):
    """The last of three actions looks; a gate then decides whether there is anything to see."""

    contexts, actions, horizon = 2, 3, 5

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 2.0))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state + action - 1 + 0.5 * context, 0.4))

    def observation(self, state, action, context):
        looked = action == 2
        detected = pyro.sample("detected", dist.Bernoulli(logits=1.0 - 0.5 * state.abs()).mask(looked))
        pyro.sample("z", dist.Normal(state, 0.5).mask(looked & (detected == 1)))


def test_imagined_observations_respect_gates():
    """What a gate hides is not made up, even if it was seen in all the episodes; against quadrature."""
    model = Radar()
    episodes = simulate(model, RandomPolicy(3), 8, seed=0)
    x = np.linspace(-25.0, 25.0, 501)
    truth = np.zeros((8, 2))
    for b, c in np.ndindex(8, 2):
        p = stats.norm.pdf(x, 0.0, 2.0)
        for t, a in enumerate(episodes.actions[b].tolist()):
            p = stats.norm.pdf(x[:, None], x + a - 1 + 0.5 * c, 0.4) @ p * (x[1] - x[0])
            if a == 2:
                seen = {site: float(value[b, t]) for site, value in episodes.observations.items()}
                detectable = 1 / (1 + np.exp(0.5 * np.abs(x) - 1))
                z = stats.norm.pdf(seen["z"], x, 0.5)
                p = p * (detectable * z if seen["detected"] else 1 - detectable)
        truth[b, c] = np.log(p.sum() * (x[1] - x[0]))
    found = GridFilter().run(model, episodes)
    np.testing.assert_allclose(found.log_likelihood, truth, atol=1e-3)
    assert reference_backend(model).name == "grid"
    assert evaluate(model, RandomPolicy(3), 8, seed=0).likelihood == "grid"
