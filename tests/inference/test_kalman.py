from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.errors import DensityError, ModelError, ObservationError, UnsupportedModelError
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.gaussian_belief import square_root
from cpomdp_ppl.inference.moment_matching import normal_points
from cpomdp_ppl.inference.unscented import UnscentedKalmanFilter
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.state import leaves, map_state
from tests.programs import EyesOpen, Learnable, Plates, Walk

FILTERS = {
    "ekf": ExtendedKalmanFilter(),
    "ukf": UnscentedKalmanFilter(),
    "ukf, classical": UnscentedKalmanFilter(alpha=0.1, beta=2.0, kappa=0.0),
}
REFERENCE = Path(__file__).parents[1] / "reference" / "light_dark_dev.npz"


@pytest.fixture(params=FILTERS)
def backend(request):
    return FILTERS[request.param]


# ---------------------------------------------------------------------------------------------- the truth


class LinearGaussian(CPOMDP):
    """x' = A_c x + b_a + L_c ε, and two sensors, linear in x with noise, each there for some actions."""

    actions = 4  # 0 sees nothing, 1 `near`, 2 `far`, 3 both

    def __init__(self, seed, horizon=6):
        super().__init__()
        draw = np.random.default_rng(seed)
        self.D, self.contexts, self.horizon = 1 + seed % 4, 1 + seed % 3, horizon
        C, D = self.contexts, self.D
        E = D if seed % 2 else max(1, D - 1)  # with less noise than state, covariances are singular

        def normal(*shape):
            return torch.as_tensor(draw.normal(size=shape))

        self.as_dict = seed % 3 > 0 and D > 1
        self.direct = seed % 2 == 1  # whether the next state is itself a site
        self.m0, self.L0 = normal(C, D), 0.7 * normal(C, D, D).tril()
        self.L0.diagonal(dim1=-2, dim2=-1).abs_().add_(0.1)
        self.A, self.b = 0.6 * normal(C, D, D), normal(self.actions, D)
        self.L = 0.5 * normal(C, D, E)
        if self.direct:
            self.L = self.L.tril()
            self.L.diagonal(dim1=-2, dim2=-1).abs_().add_(0.1)
        self.E = E
        self.G, self.g, self.LR = normal(C, 2, D), normal(C, 2), 0.5 * normal(C, 2, 2).tril()
        self.LR.diagonal(dim1=-2, dim2=-1).abs_().add_(0.2)
        self.F, self.f, self.sF = normal(C, 1, D), normal(C, 1), 0.3 + normal(C, 1).abs()
        self.w = normal(C, D)

    def pack(self, x):
        return {"first": x[..., 0], "others": {"rest": x[..., 1:]}} if self.as_dict else x

    def unpack(self, state):
        if not self.as_dict:
            return state
        return torch.cat([state["first"][..., None], state["others"]["rest"]], -1)

    def initial(self, context):
        return self.pack(
            pyro.sample("x", dist.MultivariateNormal(self.m0[context], scale_tril=self.L0[context]))
        )

    def transition(self, state, action, context):
        mean = times(self.A[context], self.unpack(state)) + self.b[action]
        if self.direct:
            return self.pack(pyro.sample("x", dist.MultivariateNormal(mean, scale_tril=self.L[context])))
        zeros = torch.zeros(self.E, dtype=torch.double)
        return self.pack(mean + times(self.L[context], pyro.sample("e", dist.Normal(zeros, 1.0).to_event(1))))

    def observation(self, state, action, context):
        x = self.unpack(state)
        near = dist.MultivariateNormal(
            times(self.G[context], x) + self.g[context], scale_tril=self.LR[context]
        )
        pyro.sample("near", near.mask(action % 2 == 1))
        far = dist.Normal(times(self.F[context], x) + self.f[context], self.sF[context])
        pyro.sample("far", far.to_event(1).mask(action >= 2))

    def reward(self, state, action, context):
        return (self.w[context] * self.unpack(state)).sum(-1)


def times(matrix, vector):
    return (matrix @ vector[..., None])[..., 0]


def kalman(m, P, rounds):
    """A textbook Kalman filter in numpy. A round is (A, b, Q, H, d, R, z), of what was observed alone."""
    increments, means, covariances = [], [m], [P]
    for A, b, Q, H, d, R, z in rounds:
        m, P = A @ m + b, A @ P @ A.T + Q
        S, v = H @ P @ H.T + R, z - H @ m - d
        increments.append(
            -0.5 * (v @ np.linalg.solve(S, v) + np.linalg.slogdet(S)[1] + len(z) * np.log(2 * np.pi))
        )
        K = P @ H.T @ np.linalg.inv(S)
        m, P = m + K @ v, P - K @ S @ K.T
        means.append(m)
        covariances.append(P)
    return np.array(increments), np.array(means), np.array(covariances)


def gaussian_of_all_states(m, P, rounds):
    """Mean `[n]` and covariance `[n, n]` of all states in a vector, given all data; rounds as in `kalman`."""
    D, n = m.size, m.size * (len(rounds) + 1)
    mean, covariance = [m], np.zeros((n, n))
    covariance[:D, :D] = P
    H, residual, R = np.zeros((0, n)), np.zeros(0), np.zeros((0, 0))
    for t, (A, b, Q, Ht, d, Rt, z) in enumerate(rounds):
        now, then = slice(t * D, (t + 1) * D), slice((t + 1) * D, (t + 2) * D)
        mean.append(A @ mean[-1] + b)
        covariance[then] = A @ covariance[now]
        covariance[:, then] = covariance[then].T
        covariance[then, then] = A @ covariance[now, now] @ A.T + Q
        rows = np.zeros((len(z), n))
        rows[:, then] = Ht
        H, residual = np.vstack([H, rows]), np.concatenate([residual, z - Ht @ mean[-1] - d])
        R = np.block([[R, np.zeros((len(R), len(z)))], [np.zeros((len(z), len(R))), Rt]])
    gain = covariance @ H.T @ np.linalg.inv(H @ covariance @ H.T + R)
    return np.concatenate(mean) + gain @ residual, covariance - gain @ H @ covariance


def rounds_of(model, episodes, b, c):
    """What episode b looks like to a Kalman filter that knows context c of a LinearGaussian."""
    A, L = model.A[c].numpy(), model.L[c].numpy()
    H = np.vstack([model.G[c], model.F[c]])
    d = np.concatenate([model.g[c], model.f[c]])
    R = np.zeros((3, 3))
    R[:2, :2], R[2, 2] = model.LR[c] @ model.LR[c].T, model.sF[c] ** 2
    result = []
    for t in range(int(episodes.lengths[b])):
        near, far = (bool(episodes.observed[site][b, t]) for site in ("near", "far"))
        seen = np.array([near, near, far])
        z = np.concatenate([episodes.observations[site][b, t] for site in ("near", "far")])
        offset = model.b[episodes.actions[b, t]].numpy()
        result.append((A, offset, L @ L.T, H[seen], d[seen], R[np.ix_(seen, seen)], z[seen]))
    return result


def ragged(model, seed, num_episodes=5):
    """Episodes of which some end early, and some miss what they might have seen."""
    episodes = simulate(model, RandomPolicy(model.num_actions), num_episodes, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    kept = {
        site: flags & (torch.rand(flags.shape, generator=draw) < 0.8)
        for site, flags in episodes.observed.items()
    }
    lengths = torch.randint(1, model.horizon + 1, (num_episodes,), generator=draw)
    lengths[0] = model.horizon
    return replace(episodes, observed=kept, lengths=lengths, returns=None)


def as_vectors(model, state):
    return model.unpack(state).numpy()


def close(actual, expected, rtol):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=rtol)


# -------------------------------------------------------------------------------------- linear and Gaussian


@pytest.mark.parametrize("seed", range(12))
def test_filters_are_exact_where_programs_are_linear_and_gaussian(backend, seed):
    model = LinearGaussian(seed)
    episodes = ragged(model, seed)
    result = backend.run(model, episodes)
    mean, variance = as_vectors(model, result.state_mean), as_vectors(model, result.state_variance)
    assert result.increments.dtype == torch.float64
    assert mean.shape == (5, model.horizon + 1, model.contexts, model.D)
    for b in range(len(episodes)):
        n = int(episodes.lengths[b])
        for c in range(model.contexts):
            P0 = (model.L0[c] @ model.L0[c].T).numpy()
            increments, means, covariances = kalman(model.m0[c].numpy(), P0, rounds_of(model, episodes, b, c))
            close(result.increments[b, :n, c], increments, 1e-8)
            close(result.log_likelihood[b, c], increments.sum(), 1e-8)
            close(mean[b, : n + 1, c], means, 1e-8)
            close(variance[b, : n + 1, c], np.diagonal(covariances, 0, 1, 2), 1e-8)
            close(result.expected_reward[b, :n, c], means[:-1] @ model.w[c].numpy(), 1e-8)
            assert not result.increments[b, n:, c].any()
            assert not result.expected_reward[b, n:, c].any()
            close(mean[b, n:, c], means[-1:].repeat(model.horizon + 1 - n, 0), 1e-8)


@pytest.mark.parametrize("seed", range(12))
def test_smoothers_give_the_posterior_of_the_joint_gaussian(backend, seed):
    model = LinearGaussian(seed)
    episodes = ragged(model, seed)
    result = backend.smooth(model, episodes)
    mean, variance = as_vectors(model, result.state_mean), as_vectors(model, result.state_variance)
    assert result.method == "RTS"
    for b in range(len(episodes)):
        n = int(episodes.lengths[b])
        for c in range(model.contexts):
            P0 = (model.L0[c] @ model.L0[c].T).numpy()
            joint = gaussian_of_all_states(model.m0[c].numpy(), P0, rounds_of(model, episodes, b, c))
            close(mean[b, : n + 1, c].ravel(), joint[0], 1e-7)
            close(variance[b, : n + 1, c].ravel(), np.diag(joint[1]), 1e-7)


class Echo(Walk):
    """The second sensor adds to the state what the first one said."""

    def observation(self, state, action, context):
        z = pyro.sample("z", dist.Normal(state, 1.0))
        pyro.sample("echo", dist.Normal(state + z, 0.5))


def rounds_of_walk(model, episodes, b, c):
    """What episode b of a walk, in single precision, looks like to a Kalman filter that knows context c."""
    one, rounds = np.eye(1), []
    if model.initial_observation:
        z = episodes.initial_observations["z"][b].double().numpy()[None]
        rounds.append((one, 0.0, 0 * one, one, 0.0, one, z))
    for t in range(3):
        a = int(episodes.actions[b, t])
        seen = {site: float(values[b, t]) for site, values in episodes.observations.items()}
        z, noise = np.array([seen["z"]]), [1.0]
        if isinstance(model, EyesOpen) and a == 1:
            z, noise = np.array([seen["z"], seen["w"]]), [1.0, 1.0]
        if isinstance(model, Echo):
            z, noise = np.array([seen["z"], seen["echo"] - seen["z"]]), [1.0, 0.25]
        rounds.append(
            (one, a * np.ones(1), (1.0 + c) ** 2 * one, np.ones((len(z), 1)), 0.0, np.diag(noise), z)
        )
    return rounds


@pytest.mark.parametrize("model", [Walk(), EyesOpen(), Echo()], ids=lambda model: type(model).__name__)
def test_walks_in_single_precision(backend, model):
    """One has a first look and both kinds of masks; of one, a sensor depends on what another said."""
    episodes = simulate(model, RandomPolicy(2), 10, seed=1)
    result, first = backend.run(model, episodes), int(model.initial_observation)
    assert result.state_mean.dtype == torch.float32
    for b, c in np.ndindex(10, 2):
        increments, means, covariances = kalman(np.zeros(1), np.eye(1), rounds_of_walk(model, episodes, b, c))
        close(result.initial_increment[b, c], increments[:first].sum(), 1e-5)
        close(result.increments[b, :, c], increments[first:], 1e-5)
        close(result.state_mean[b, :, c], means[first:, 0], 1e-5)
        close(result.state_variance[b, :, c], covariances[first:, 0, 0], 1e-5)


def test_plates_of_the_programs_own(backend):
    model = Plates()
    episodes = simulate(model, RandomPolicy(2), 10, seed=3)
    result = backend.run(model, episodes)
    assert result.state_mean.shape == (10, 4, 2, 2)
    H, R = np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), np.diag([1.0, 1.0, 0.01])
    for b in range(10):
        rounds = []
        for t in range(3):
            z = episodes.observations["z"][b, t, [0, 2]].double()  # the one in the middle is out of order
            z = np.append(z, episodes.observations["battery"][b, t].double())
            shift = np.full(2, float(episodes.actions[b, t]))
            rounds.append((np.eye(2), shift, np.eye(2), H, np.array([0.0, 0.0, 1.0]), R, z))
        increments, means, covariances = kalman(np.zeros(2), np.eye(2), rounds)
        smoothed, _ = gaussian_of_all_states(np.zeros(2), np.eye(2), rounds)
        for c in range(2):
            close(result.increments[b, :, c], increments, 1e-4)
            close(result.state_mean[b, :, c], means, 1e-5)
            close(result.state_variance[b, :, c], np.diagonal(covariances, 0, 1, 2), 1e-5)
        close(backend.smooth(model, episodes).state_mean[b, :, 0].ravel(), smoothed, 1e-5)


def test_learnable_constants(backend):
    episodes = simulate(Learnable(), RandomPolicy(2), 10, seed=5)
    assert not backend.run(Learnable(), episodes).increments.requires_grad


class Constant(Walk):
    """Nothing moves, and nothing is uncertain."""

    def initial(self, context):
        return torch.tensor(2.0)

    def transition(self, state, action, context):
        return state


def test_no_noise_at_all_in_the_state(backend):
    episodes = simulate(Constant(), RandomPolicy(2), 10, seed=6)
    result = backend.run(Constant(), episodes)
    expected = dist.Normal(2.0, 1.0).log_prob(episodes.observations["z"])
    close(result.increments, expected[..., None].expand(-1, -1, 2), 1e-5)
    assert not result.state_variance.any()
    assert bool((backend.smooth(Constant(), episodes).state_mean == 2).all())


class Doubles(Walk):
    """States in single precision, seen in double."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state.double(), 1.0))


def test_precisions_may_mix(backend):
    episodes = simulate(Walk(), RandomPolicy(2), 5, seed=7)
    doubles = replace(episodes, observations={"z": episodes.observations["z"].double()})
    close(backend.run(Doubles(), doubles).increments, backend.run(Walk(), episodes).increments, 1e-5)


# ------------------------------------------------------------------------------------------- not linear


class Curved(Walk):
    """Double precision; nothing is linear, and all noise depends on where it happens."""

    def initial(self, context):
        return pyro.sample("x", dist.Normal(torch.tensor(0.5).double(), 0.4))

    def transition(self, state, action, context):
        noise = pyro.sample("noise", dist.Normal(torch.zeros(()).double(), 1.0))
        return state.sin() + action + (0.3 * noise).exp() * state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state**2, (state / 4).exp()))


def test_the_extended_filter_linearises_about_the_mean():
    episodes = simulate(Curved(), RandomPolicy(2), 5, seed=8)
    result = ExtendedKalmanFilter().run(Curved(), episodes)
    for b in range(5):
        m, P = 0.5, 0.16
        for t in range(3):
            F, G = math.cos(m) + 1, 0.3 * m
            m, P = math.sin(m) + int(episodes.actions[b, t]) + m, F * P * F + G * G
            H, R = 2 * m, math.exp(m / 2)
            S, innovation = H * P * H + R, float(episodes.observations["z"][b, t]) - m**2
            increment = -0.5 * (innovation**2 / S + math.log(2 * math.pi * S))
            close(result.increments[b, t, 0], increment, 1e-9)
            m, P = m + P * H / S * innovation, P - (P * H) ** 2 / S
            close(result.state_mean[b, t + 1, 0], m, 1e-9)
            close(result.state_variance[b, t + 1, 0], P, 1e-9)


class Squared(Curved):
    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state**2, 0.5 * state))


def test_the_unscented_filter_knows_the_moments_of_a_square():
    episodes = simulate(Squared(), RandomPolicy(2), 5, seed=9)
    result = UnscentedKalmanFilter().run(Squared(), episodes)
    m, P = 0.5, 0.16
    variance = 4 * m**2 * P + 2 * P**2 + 0.25 * (m**2 + P)
    away = episodes.observations["z"][:, 0].numpy() - (m**2 + P)
    expected = -0.5 * (away**2 / variance + math.log(2 * math.pi * variance))
    close(result.increments[:, 0, 0], expected, 1e-9)


# ------------------------------------------------------------------------------------------------ rewards


class Steps(LinearGaussian):
    def reward(self, state, action, context):
        return ((self.w[context] * self.unpack(state)).sum(-1) > 0.3).double()


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(("points", "tolerance"), [(64, 0.06), (1024, 0.02)])
def test_expected_rewards_that_jump(seed, points, tolerance):
    model = Steps(seed)
    episodes = ragged(model, seed)
    result = ExtendedKalmanFilter(reward_points=points).run(model, episodes)
    tolerance = 1 / points if model.D == 1 else tolerance
    for c in range(model.contexts):
        w, P0 = model.w[c].numpy(), (model.L0[c] @ model.L0[c].T).numpy()
        _, means, covariances = kalman(model.m0[c].numpy(), P0, rounds_of(model, episodes, 0, c))
        standardised = (means @ w - 0.3) / np.sqrt(np.einsum("i,tij,j->t", w, covariances, w))
        expected = [0.5 * math.erfc(-s / math.sqrt(2)) for s in standardised[:-1]]
        np.testing.assert_allclose(result.expected_reward[0, :, c], expected, atol=tolerance)


@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("num_points", [2, 50, 64])
def test_normal_points_have_the_moments_of_a_normal(num_points, dim):
    points = normal_points(num_points, dim)
    assert points.shape == (num_points, dim)
    close(points.mean(0), np.zeros(dim), 1e-12)
    close(points.square().mean(0), np.ones(dim), 1e-12)
    if num_points > 2 * dim:
        close(points.mT @ points / num_points, np.eye(dim), 1e-12)
    assert len(points.unique(dim=0)) == num_points


# ------------------------------------------------------------------------------------- models that are not


def bits(log_likelihood):
    log_p = torch.log_softmax(torch.as_tensor(log_likelihood).double(), -1)
    return -(log_p.exp() * log_p).sum(-1) / math.log(2)


@pytest.mark.parametrize(("name", "bound"), [("ekf", 0.037), ("ukf", 0.029)])
def test_light_dark_against_the_exact_filter(name, bound):
    data = np.load(REFERENCE)
    episodes = Episodes.from_arrays(LightDark(), data["action"], {"z": data["observation"]})
    result = FILTERS[name].run(LightDark(), episodes)
    exact = data["log_likelihood_increment"].sum(1)
    error = (bits(result.log_likelihood) - bits(exact)).abs().mean()
    assert error < bound, f"mean |H - H_exact| = {error:.4f} bits"
    likelier = exact.argmax(1)
    rewards = np.abs(result.expected_reward.numpy() - data["expected_reward"])[np.arange(64), :, likelier]
    assert rewards.mean() < 0.02


class DarkAtTheOrigin(LightDark):
    """The first mean is exactly 0, so that it matters to a plain filter whether it is light there."""

    def observation(self, state, action, context):
        variance = torch.where((1 - 2 * context) * state > 0, self.light_variance, self.dark_variance)
        pyro.sample("z", dist.Normal(state, variance.sqrt()).mask(action == 2))


@pytest.mark.slow
def test_light_dark_against_a_plain_extended_filter():
    data = np.load(REFERENCE)
    episodes = Episodes.from_arrays(LightDark(), data["action"], {"z": data["observation"]})
    result = ExtendedKalmanFilter().run(DarkAtTheOrigin(), episodes)
    increments, rewards = np.zeros((64, 20, 2)), np.zeros((64, 20, 2))
    for b, c in np.ndindex(64, 2):
        m, P, side = 0.0, 0.09, 1 - 2 * c
        for t in range(20):
            beyond = [0.5 * math.erfc((goal - side * m) / math.sqrt(2 * P)) for goal in (1.0, 0.0)]
            rewards[b, t, c] = beyond[0] - (1 - beyond[1])
            if data["action"][b, t] < 2:
                m, P = m + (-1, 1)[data["action"][b, t]], P + 0.1
                continue
            S, innovation = P + (1.0 if side * m > 0 else 8.0), data["observation"][b, t] - m
            increments[b, t, c] = -0.5 * (innovation**2 / S + math.log(2 * math.pi * S))
            m, P = m + P / S * innovation, P - P * P / S
    close(result.increments, increments, 1e-5)
    np.testing.assert_allclose(result.expected_reward, rewards, atol=0.021)  # two jumps, 64 points


def test_beacons(backend):
    model = Beacons()
    episodes = simulate(model, RandomPolicy(5), 50, seed=0).truncated(torch.arange(50) % 20 + 1)
    result, smoothed = backend.run(model, episodes), backend.smooth(model, episodes)
    assert result.state_mean["position"].shape == (50, 21, 4, 2)
    assert smoothed.state_variance["heading"].shape == (50, 21, 4)
    for moments in (result, smoothed):
        for _, leaf in leaves(moments.state_mean):
            assert bool(leaf.isfinite().all())
        for _, leaf in leaves(moments.state_variance):
            assert bool((leaf.isfinite() & (leaf >= 0)).all())
    true = result.log_likelihood.gather(1, episodes.contexts[:, None]).mean()
    assert true > result.log_likelihood.mean() + 1
    at = torch.arange(50)
    error = {
        name: map_state(
            lambda mean, state: (mean[at, :, episodes.contexts] - state)[:, 1].square().mean(),
            moments.state_mean,
            episodes.states,
        )["position"]
        for name, moments in (("filtered", result), ("smoothed", smoothed))
    }
    assert error["smoothed"] < error["filtered"]


# ------------------------------------------------------------------------------------------------ refusals


class Gust(Walk):
    def transition(self, state, action, context):
        return state + pyro.sample("gust", dist.Gamma(1.0, 1.0))


class Waits(Walk):
    def observation(self, state, action, context):
        pyro.sample("wait", dist.Exponential(state.exp()))


class Forced(Walk):
    def transition(self, state, action, context):
        pyro.sample("seen inside", dist.Normal(state, 1.0), obs=torch.tensor(0.0))
        return state


def test_an_observation_that_the_program_masks(backend):
    episodes = Episodes(
        torch.tensor([[1, 2], [1, 0]]),
        {"z": torch.zeros(2, 2)},
        {"z": torch.tensor([[False, True], [False, True]])},
    )
    with pytest.raises(ObservationError, match="site 'z' at time 2 of episode 1"):
        backend.run(LightDark(), episodes)


class Exact(Constant):
    def observation(self, state, action, context):
        pyro.sample("z", dist.Delta(state))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExtendedKalmanFilter(reward_points=0), "reward_points"),
        (lambda: UnscentedKalmanFilter(reward_points=0), "reward_points"),
        (lambda: UnscentedKalmanFilter(alpha=0.0), "alpha"),
        (lambda: UnscentedKalmanFilter(beta=math.inf), "beta"),
        (lambda: UnscentedKalmanFilter(kappa=-1.0), "kappa"),
        (lambda: UnscentedKalmanFilter(alpha="a"), "alpha"),
        (lambda: UnscentedKalmanFilter(beta=None), "beta"),
        (lambda: UnscentedKalmanFilter(kappa="3"), "kappa"),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_square_roots_of_singular_matrices():
    draw = torch.Generator().manual_seed(0)
    for D in (1, 2, 4):
        for rank in range(D + 1):
            half = torch.randn(50, D, rank, generator=draw, dtype=torch.double)
            P = half @ half.mT
            root = square_root(P)
            torch.testing.assert_close(root @ root.mT, P, rtol=1e-10, atol=1e-10)
    assert bool(square_root(torch.full((2, 2), torch.nan)).isnan().any())


class Scales(Walk):
    def __init__(self, program, scale):
        super().__init__()
        self.scales = {"initial": 1.0, "transition": 1.0, "observation": 1.0, program: scale}

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, self.scales["initial"]))

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, self.scales["transition"]))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.scales["observation"]))


class Boxed(Walk):
    def transition(self, state, action, context):
        return {"x": super().transition(state, action, context)}


class PlainReward(Walk):
    def reward(self, state, action, context):
        return 1.0


class LongReward(Walk):
    def reward(self, state, action, context):
        return torch.zeros(7)


class Pair(CPOMDP):
    """Two unknown numbers that hardly differ: covariances need more digits than float32 has."""

    contexts, actions, horizon, near, sensor = 2, 1, 3, (0.1, 0.2), 0.02

    def initial(self, context):
        a = pyro.sample("a", dist.Normal(0.0, 100.0))
        return {"a": a, "b": pyro.sample("b", dist.Normal(a, torch.tensor(self.near)[context]))}

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        for name, value in state.items():
            pyro.sample(f"z_{name}", dist.Normal(value, self.sensor))

    def reward(self, state, action, context):
        return state["a"]


def test_numbers_that_hardly_differ(backend):
    episodes = simulate(Pair(), RandomPolicy(1), 20, contexts="balanced", seed=0)
    z = torch.stack([episodes.observations["z_a"], episodes.observations["z_b"]], -1)  # [B, T, 2]
    expected = []
    for near in Pair.near:
        one = np.ones((6, 6))  # of a at all times, and b
        of_b = np.kron(np.ones((3, 3)), np.diag([0.0, 1.0]))
        covariance = 100.0**2 * one + near**2 * of_b + Pair.sensor**2 * np.eye(6)
        expected.append(scipy.stats.multivariate_normal.logpdf(z.reshape(20, 6).double(), cov=covariance))
    found = backend.run(Pair(), episodes).log_likelihood
    np.testing.assert_allclose(found, np.stack(expected, 1), atol=1e-3)


class Insists(Walk):
    """Has numbers of single precision, whatever the default, which do not mix with others."""

    def observation(self, state, action, context):
        weights = torch.ones(1, 1, dtype=torch.float32)
        pyro.sample("z", dist.Normal((state[..., None, None] @ weights)[..., 0, 0], 0.5))


def test_programs_that_insist_on_single_precision(backend):
    class Plain(Walk):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(state, 0.5))

    episodes = simulate(Insists(), RandomPolicy(2), 10, seed=0)
    found, expected = (backend.run(model, episodes).log_likelihood for model in (Insists(), Plain()))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


class Weighty(Walk):
    def observation(self, state, action, context):
        pyro.sample("d", dist.Delta(state, log_density=torch.tensor(-1.0)))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (LineGrid, UnsupportedModelError, r"LineGrid: the state is torch\.int64"),
        (ContextualTiger, UnsupportedModelError, r"ContextualTiger: the state is torch\.int64"),
        (Gust, UnsupportedModelError, "transition: site 'gust' is Gamma"),
        (Waits, UnsupportedModelError, "observation: site 'wait' is Exponential"),
        (Forced, UnsupportedModelError, "transition: site 'seen inside' is given its value"),
        (Weighty, UnsupportedModelError, "site 'd' has a density of its own"),
        (Boxed, ModelError, "transition: returns a state of shapes"),
        (PlainReward, ModelError, "reward: returns a float"),
        (LongReward, ModelError, r"reward: returns shape \[7\]"),
        (Exact, DensityError, r"time 1 of episode 0 in context '0': .*'z' .*positive definite"),
        *(
            (partial(Scales, program, scale), DensityError, f"{program}: site '{site}' .*scale = {scale}")
            for program, site in (("initial", "x"), ("transition", "x"), ("observation", "z"))
            for scale in (-1.0, math.nan)
        ),
    ],
)
def test_what_is_not_gaussian_or_makes_no_sense_is_refused_by_name(backend, model, error, message):
    episodes = simulate(Walk(), RandomPolicy(2), 3, seed=0)
    with pytest.raises(error, match=message):
        backend.run(model(), episodes)
