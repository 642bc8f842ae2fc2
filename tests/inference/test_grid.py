"""The grid filter against closed forms, and against numbers computed elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.errors import DensityError, UnsupportedModelError
from cpomdp_ppl.inference.cells import CellGrid
from cpomdp_ppl.inference.grid import GridFilter
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from tests.inference.test_kalman import Scales
from tests.programs import EyesOpen, Plates, Walk

REFERENCE = Path(__file__).parent.parent / "reference" / "light_dark_dev.npz"


@pytest.mark.slow
def test_light_dark_reference():
    arrays = np.load(REFERENCE)
    model = LightDark()
    episodes = Episodes.from_arrays(
        model, actions=arrays["action"], observations={"z": arrays["observation"]}
    )
    found = GridFilter().run(model, episodes)
    increments = torch.as_tensor(arrays["log_likelihood_increment"])
    assert (found.log_likelihood - increments.sum(1)).abs().max() < 2e-3
    # The reference's own grid ended near ±12: in episode 32 it loses mass there (a reward of 0.96 where
    # the robot is nine standard deviations inside the goal).
    reach = found.state_mean.abs() + 2.5 * found.state_variance.sqrt()
    covered = reach[:, :-1] < 11.2
    assert (~covered).sum() < 10
    error = (found.expected_reward - torch.as_tensor(arrays["expected_reward"])).abs()
    assert error[covered].max() < 1e-3


@pytest.mark.slow
def test_a_jump_may_be_anywhere():
    """Moved by a third, LightDark is still the same: thresholds need not be round numbers."""

    class Moved(LightDark):
        def initial(self, context):
            return super().initial(context) + 1 / 3

        def transition(self, state, action, context):
            return super().transition(state - 1 / 3, action, context) + 1 / 3

        def observation(self, state, action, context):
            super().observation(state - 1 / 3, action, context)

        def reward(self, state, action, context):
            return super().reward(state - 1 / 3, action, context)

    episodes = simulate(LightDark(), RandomPolicy(3), 10, contexts="balanced", seed=0)
    here, there = GridFilter().run(LightDark(), episodes), GridFilter().run(Moved(), episodes)
    assert (here.log_likelihood - there.log_likelihood).abs().max() < 1e-3
    assert (here.expected_reward - there.expected_reward).abs().max() < 1e-3
    assert (here.state_mean + 1 / 3 - there.state_mean).abs().max() < 1e-3
    fixed = GridFilter(bounds=(-29.9, 31.2)).run(LightDark(), episodes)
    assert (here.log_likelihood - fixed.log_likelihood).abs().max() < 1e-3


class Linear(CPOMDP):
    """A linear-Gaussian model of d dimensions; context 1 is noisier, and drifts."""

    actions, contexts, horizon = 3, 2, 6
    LOOK = 2

    def __init__(self, A, Q, H, R, spread, drift):
        super().__init__()
        arrays = dict(A=A, Q=Q, H=H, R=R, spread=spread, drift=drift)
        self.arrays = {name: np.asarray(array, float) for name, array in arrays.items()}
        self.d = len(self.arrays["A"])
        for name, array in self.arrays.items():
            self.register_buffer(name, torch.as_tensor(array, dtype=torch.float32))

    def noise_scale(self, context):
        return 1.0 + 0.5 * context

    def initial(self, context):
        return pyro.sample("x", dist.MultivariateNormal(torch.zeros(self.d), self.spread))

    def transition(self, state, action, context):
        noise = pyro.sample("noise", dist.MultivariateNormal(torch.zeros(self.d), self.Q))
        push = (action.float() - 0.5)[..., None] * self.drift
        moved = (self.A @ state[..., None]).squeeze(-1) + push + self.noise_scale(context)[..., None] * noise
        return torch.where((action == self.LOOK)[..., None], state, moved)

    def observation(self, state, action, context):
        mean = (state * self.H).sum(-1)
        pyro.sample("z", dist.Normal(mean, self.R.sqrt() * (1 + context)).mask(action != 0))

    def reward(self, state, action, context):
        return (state**2).sum(-1) + action


def kalman(model: Linear, episodes: Episodes) -> dict[str, np.ndarray]:
    """A plain Kalman filter, one episode and context after the other."""
    A, Q, H, R, spread, drift = model.arrays.values()
    B, T = episodes.actions.shape
    result = {name: np.zeros((B, T, 2)) for name in ("increments", "rewards")}
    means = np.zeros((B, T + 1, 2, model.d))
    variances = np.zeros((B, T + 1, 2, model.d))
    for b in range(B):
        for c in range(2):
            m, P = np.zeros(model.d), spread.copy()
            variances[b, 0, c] = np.diag(P)
            for t in range(T):
                a = int(episodes.actions[b, t])
                result["rewards"][b, t, c] = m @ m + np.trace(P) + a
                if a != Linear.LOOK:
                    m = A @ m + (a - 0.5) * drift
                    P = A @ P @ A.T + (1 + 0.5 * c) ** 2 * Q
                if bool(episodes.observed["z"][b, t]):
                    z = float(episodes.observations["z"][b, t])
                    S = H @ P @ H + R * (1 + c) ** 2
                    K = P @ H / S
                    result["increments"][b, t, c] = -0.5 * ((z - H @ m) ** 2 / S + np.log(2 * np.pi * S))
                    m, P = m + K * (z - H @ m), P - np.outer(K, H @ P)
                means[b, t + 1, c], variances[b, t + 1, c] = m, np.diag(P)
    return {**result, "means": means, "variances": variances}


LINE = Linear([[0.9]], [[0.2]], [1.5], 0.5, [[0.4]], [1.0])
PLANE = Linear(
    [[0.6, 0.1], [-0.1, 0.5]], [[0.5, 0.1], [0.1, 0.4]], [1.0, 0.4], 0.5, np.eye(2) * 0.5, [0.3, 0.2]
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend", "tolerance"),
    [
        (LINE, GridFilter(), 1e-5),
        (LINE, GridFilter(200), 1e-3),
        (PLANE, GridFilter(900, tolerance=math.inf), 0.01),
    ],
)
def test_equals_a_kalman_filter(model, backend, tolerance):
    episodes = simulate(model, RandomPolicy(3), 10, contexts="balanced", seed=0)
    found, expected = backend.run(model, episodes), kalman(model, episodes)
    np.testing.assert_allclose(found.increments, expected["increments"], atol=tolerance)
    np.testing.assert_allclose(found.expected_reward, expected["rewards"], atol=tolerance)
    np.testing.assert_allclose(found.state_mean, expected["means"], atol=tolerance)
    np.testing.assert_allclose(found.state_variance, expected["variances"], atol=tolerance)


class Chance(Walk):
    """Sites that are not Gaussian: a uniform one, a skewed one and a coin."""

    horizon = 2

    def initial(self, context):
        return {"x": pyro.sample("x", dist.Uniform(-1.0, 2.0))}

    def transition(self, state, action, context):
        up = pyro.sample("up", dist.Bernoulli(0.25))
        wait = pyro.sample("wait", dist.Exponential(2.0))
        return {"x": 0.5 * state["x"] + up + wait * (1 + context)}

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state["x"], 1.0).mask(action == 5))

    def reward(self, state, action, context):
        return state["x"]


@pytest.mark.slow
def test_sites_that_are_not_gaussian():
    episodes = simulate(Chance(), RandomPolicy(2), 3, seed=0)
    found = GridFilter(400).run(Chance(), episodes)
    mean, variance = np.full(2, 0.5), np.full(2, 9 / 12)
    for t in range(3):
        np.testing.assert_allclose(found.state_mean["x"][0, t], mean, atol=1e-4)
        np.testing.assert_allclose(found.state_variance["x"][0, t], variance, atol=3e-3)
        mean = 0.5 * mean + 0.25 + 0.5 * np.array([1, 2])
        variance = 0.25 * variance + 3 / 16 + 0.25 * np.array([1, 4])


def test_points_share_so_that_moments_are_kept():
    edges = torch.tensor([-2.0, -1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    grid = CellGrid([edges, torch.linspace(0, 1, 9, dtype=torch.float64)])
    low, high = grid.points.amin(0), grid.points.amax(0)
    uniform = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = low + (high - low) * uniform
    index, share = grid.shares(x)
    for p, q in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 3), (2, 1), (3, 3)):
        moment = grid.points[:, 0] ** p * grid.points[:, 1] ** q
        assert torch.allclose((share * moment[index]).sum(-1), x[:, 0] ** p * x[:, 1] ** q, atol=1e-9)
    index, share = grid.shares(grid.points)
    exact = torch.zeros(grid.size, grid.size, dtype=torch.float64).scatter_add_(1, index, share)
    assert torch.equal(exact, torch.eye(grid.size, dtype=torch.float64))


def test_to_stay_is_exactly_the_identity():
    recursion = GridFilter(200).recursion(LightDark())
    assert recursion.transition(2).identity
    assert not recursion.transition(1).identity
    p = recursion.start(3).probabilities
    assert torch.equal(recursion.predict(p, torch.tensor([2, 2, 2])), p)
    mixed = recursion.predict(p, torch.tensor([2, 1, 2]))
    assert torch.equal(mixed[:, 0], p[:, 0])
    assert torch.allclose(mixed.sum(-1), torch.ones(2, 3, dtype=torch.float64), rtol=0, atol=1e-12)


class Unresolved(Walk):
    """Moves without noise, to between the grid's points."""

    def initial(self, context):
        return pyro.sample("x", dist.Normal(0.0, 0.5))

    def transition(self, state, action, context):
        return state + 0.12345


def test_no_numerical_diffusion():
    episodes = simulate(Unresolved(), RandomPolicy(2), 2, seed=0)
    blind = Episodes(episodes.actions, episodes.observations, {"z": torch.zeros(2, 3, dtype=torch.bool)})
    found = GridFilter(200).run(Unresolved(), blind)
    expected = 0.12345 * np.arange(4)
    np.testing.assert_allclose(found.state_mean[0, :, 0], expected, atol=1e-6)
    np.testing.assert_allclose(found.state_variance[0, :, 0], 0.25, atol=1e-5)
    assert torch.equal(found.increments, torch.zeros(2, 3, 2, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Walk(), EyesOpen(), Plates()])
def test_other_programs_run(model):
    episodes = simulate(model, RandomPolicy(2), 4, seed=0)
    backend = GridFilter(400, tolerance=math.inf)
    found = backend.run(model, episodes)
    assert found.log_likelihood.isfinite().all()
    assert found.state_mean.shape[:3] == (4, 4, 2)
    again = backend.run(model, episodes[2:])
    assert torch.allclose(found.log_likelihood[2:], again.log_likelihood, rtol=0, atol=1e-12)


class Skewed(Walk):
    def transition(self, state, action, context):
        return state + pyro.sample("pause", dist.Gamma(2.0, 1.0))


class Whole(Walk):
    def initial(self, context):
        return torch.zeros((), dtype=torch.long)

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state.float(), 1.0))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LineGrid(), r"LineGrid is finite \(`states = 8`\)"),
        (ContextualTiger(), r"ContextualTiger is finite \(`states = 2`\)"),
        (Beacons(), "has 3 numbers .*'position': 2, 'heading': 1"),
        (Skewed(), r"transition: site 'pause' \(Gamma\)"),
        (Whole(), "'state' of Whole is torch.int64"),
    ],
)
def test_refuses_what_does_not_fit_on_a_grid(model, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        GridFilter().recursion(model).transition(0)
    assert torch.get_default_dtype() == torch.float32


def test_bounds_that_are_too_tight_are_named():
    episodes = simulate(LightDark(), lambda h: torch.ones(2).long(), 2, seed=0)
    with pytest.raises(DensityError, match=r"leaves the bounds \[-5, 5\] at time \d of episode 0"):
        GridFilter(200, bounds=(-5, 5)).run(LightDark(), episodes)
    with pytest.raises(DensityError, match="at the start"):
        GridFilter(200, bounds=(0, 5)).run(LightDark(), episodes)
    with pytest.raises(ValueError, match="bounds: expected"):
        GridFilter(bounds=(5, -5))
    with pytest.raises(ValueError, match="1 pair"):
        GridFilter(bounds=((-5, 5), (-5, 5))).run(LightDark(), episodes)


class Outlier(Walk):
    """One step of a walk, seen with some noise."""

    contexts, actions, horizon = 1, 2, 1

    def __init__(self, sd):
        super().__init__()
        self.sd = sd

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 0.3))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.sd))


def once(z):
    return Episodes(torch.tensor([[0]]), {"z": torch.tensor([[z]])}, {"z": torch.tensor([[True]])})


@pytest.mark.slow
@pytest.mark.parametrize(("sd", "z"), [(1.0, 15.0), (0.1, 10.0), (1.0, -12.0)])
def test_outliers_are_followed_into_the_tails(sd, z):
    found = GridFilter(bounds=(-20, 20)).run(Outlier(sd), once(z)).log_likelihood.item()
    variance = 1.09 + sd**2
    assert found == pytest.approx(-0.5 * (z**2 / variance + np.log(2 * np.pi * variance)), abs=2e-3)
    longer = GridFilter(bounds=(-20, 20), reach=12).run(Outlier(sd), once(z)).log_likelihood.item()
    assert longer == pytest.approx(found, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("z", [1e3, -1e9, 1e30])
def test_what_is_far_out_of_reach_is_refused(z):
    """Only tails that were cut explain it: the grid would be off by more than there are nats to spare."""
    with pytest.raises(DensityError, match="at time 1 of episode 0 in context '0' is out of reach"):
        GridFilter(bounds=(-20, 20)).run(Outlier(0.1), once(z))
    found = GridFilter(bounds=(-20, 20), tolerance=math.inf).run(Outlier(0.1), once(z))
    assert found.log_likelihood.item() < -1e5  # not NaN
    assert found.state_mean.isfinite().all()


class PlainTensors(Outlier):
    def __init__(self):
        super().__init__(0.5)
        self.half = torch.tensor([[0.5]])
        self.several = [torch.tensor(0.25)]
        self.named = {"sd": torch.tensor(0.5, requires_grad=True) * 1}

    def initial(self, context):
        return pyro.sample("x", dist.Normal(torch.zeros(1), 1.0).to_event(1))

    def transition(self, state, action, context):
        return state @ self.half + self.several[0]

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state[..., 0], self.named["sd"]))

    def reward(self, state, action, context):
        return state[..., 0]


def test_plain_tensors_are_made_double():
    model = PlainTensors()
    found = GridFilter(400).run(model, once(1.0)).log_likelihood.item()
    assert found == pytest.approx(-0.5 * (0.75**2 / 0.5 + np.log(2 * np.pi * 0.5)), abs=1e-5)
    assert model.half.dtype == model.several[0].dtype == model.named["sd"].dtype == torch.float32


@pytest.mark.parametrize("scale", [-1.0, float("nan")])
@pytest.mark.parametrize(("program", "site"), [("initial", "x"), ("transition", "x"), ("observation", "z")])
def test_scales_that_make_no_sense(program, site, scale):
    with pytest.raises(DensityError, match=f"{program}: site '{site}' .*scale = {scale}"):
        GridFilter(100, bounds=(-30, 30)).run(Scales(program, scale), once(0.0))


class Counts(Outlier):
    def __init__(self, mean):
        super().__init__(1.0)
        self.mean = mean

    def initial(self, context):
        return super().initial(context) + self.mean

    def observation(self, state, action, context):
        pyro.sample("z", dist.Poisson(state))


def test_a_rate_may_be_negative_only_where_the_state_never_is():
    with pytest.raises(DensityError, match=r"observation: site 'z' \(Poisson\) has rate = -"):
        GridFilter(400, bounds=(-20, 20)).run(Counts(-3.0), once(0.0))
    backend = GridFilter(400, bounds=(-20, 20))
    likely = backend.run(Counts(9.5), once(3.0)).log_likelihood.item()
    x = np.linspace(0.01, 19, 20_000)
    density = np.exp(-0.5 * (x - 9.5) ** 2 / 1.09) / np.sqrt(2 * np.pi * 1.09) * np.exp(-x) * x**3 / 6
    assert likely == pytest.approx(np.log(density.sum() * (x[1] - x[0])), abs=1e-4)


@pytest.mark.parametrize(
    "bounds", [5, "ab", (1,), (1, 2, 3), ((0, 1), (0, 1), (0, 1)), ((0, 1), 2), (), (0, float("inf"))]
)
def test_bounds_that_make_no_sense(bounds):
    with pytest.raises(ValueError, match="bounds: expected"):
        GridFilter(bounds=bounds)


def test_bounds_may_be_of_any_numbers():
    expected = GridFilter(100, bounds=(-20, 20)).run(Outlier(1.0), once(0.0)).log_likelihood
    for bounds in ((np.float32(-20), np.int64(20)), np.array([-20, 20]), np.array([[-20.0, 20.0]])):
        assert torch.equal(
            GridFilter(100, bounds=bounds).run(Outlier(1.0), once(0.0)).log_likelihood, expected
        )
    for reach in (0, "far", 100):
        with pytest.raises(ValueError, match="reach: expected"):
            GridFilter(reach=reach)
