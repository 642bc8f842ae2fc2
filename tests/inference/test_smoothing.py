"""What all backends do: draw states from a belief, and whole trajectories in hindsight.

Limits are in standard errors of M independent draws.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import Episodes, RandomPolicy, simulate
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
    as_backend,
)
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark
from cpomdp_ppl.state import leaves, map_state
from tests.conftest import fixed_actions
from tests.inference.test_finite import Random, paths, random_episodes
from tests.inference.test_grid import LINE, PLANE
from tests.inference.test_kalman import (
    FILTERS,
    LinearGaussian,
    as_vectors,
    gaussian_of_all_states,
    ragged,
    rounds_of,
)
from tests.inference.test_online import ONLINE, at
from tests.programs import EyesOpen, Plates, Walk

M = 4000
LIMIT = 5.5  # of some thousand numbers, the worst


def quick(name):
    return GridFilter(200) if name == "grid" else as_backend(name)


def assert_gaussian(draws, mean, covariance, allowed=0.0):
    """Draws `[M, n]` have the first and second moments of a Gaussian, up to `allowed` besides the error."""
    number = len(draws)
    variance = np.diag(covariance)
    error = np.sqrt(variance / number) + 1e-9
    assert ((np.abs(draws.mean(0) - mean) - allowed) / error).max() < LIMIT
    found = np.cov(draws.T, bias=True).reshape(covariance.shape)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / number) + 1e-9
    assert ((np.abs(found - covariance) - allowed) / error).max() < LIMIT


# -------------------------------------------------------------------------------------------- trajectories


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("seed", [1, 2, 6, 7])  # 2 and 6 have singular covariances
def test_kalman_trajectories_are_draws_of_the_joint_gaussian(name, seed):
    model = LinearGaussian(seed, horizon=4)
    episodes = ragged(model, seed, num_episodes=3)
    result = FILTERS[name].smooth(model, episodes, M, seed=seed)
    draws = as_vectors(model, result.trajectories)
    assert draws.shape == (M, 3, 5, model.contexts, model.D)
    for b in range(3):
        length = int(episodes.lengths[b])
        for c in range(model.contexts):
            P0 = (model.L0[c] @ model.L0[c].T).numpy()
            joint = gaussian_of_all_states(model.m0[c].numpy(), P0, rounds_of(model, episodes, b, c))
            assert_gaussian(draws[:, b, : length + 1, c].reshape(M, -1), *joint)
            assert (draws[:, b, length:, c] == draws[:, b, length : length + 1, c]).all()


@pytest.mark.parametrize(("seed", "initial_observation"), [(0, False), (5, True), (8, True)])
def test_exact_trajectories_are_as_frequent_as_they_are_probable(seed, initial_observation):
    model = Random(seed, 2, 3, 2, 3, initial_observation)
    episodes = random_episodes(model, seed, 4)
    draws = ObservableOperator().smooth(model, episodes, M, seed=0).trajectories
    assert draws.shape == (M, 4, 4, 2)
    assert draws.dtype == torch.int64
    compared = 0
    for b in range(4):
        length = int(episodes.lengths[b])
        for c in range(2):
            weights = paths(model, episodes, b, c, length)
            total = sum(weights.values())
            if total == 0:  # a context that cannot have produced this has some states nevertheless
                continue
            counts = Counter(map(tuple, draws[:, b, : length + 1, c].tolist()))
            assert set(counts) <= {path for path, weight in weights.items() if weight > 0}
            for path, weight in weights.items():
                p = weight / total
                z = (counts[path] / M - p) / max((p * (1 - p) / M) ** 0.5, 1e-9)
                assert abs(z) < LIMIT
                compared += 0 < p < 1
            assert (draws[:, b, length:, c] == draws[:, b, length : length + 1, c]).all()
    assert compared > 30


class Drift(Walk):
    """Moves without any noise, to anywhere between the points of a grid."""

    def transition(self, state, action, context):
        return 0.9 * state + 0.137 * (1 + action) * (1 + context)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend", "tolerance"),
    [
        (LINE, GridFilter(400), 1e-4),
        (PLANE, GridFilter(900, tolerance=math.inf), 0.03),
        (EyesOpen(), GridFilter(600), 1e-4),
        (Drift(), GridFilter(600), 1e-3),
    ],
)
def test_the_grid_smooths_as_kalman_does(model, backend, tolerance):
    number = 600
    episodes = simulate(model, RandomPolicy(model.num_actions), 4, contexts="balanced", seed=0)
    episodes = episodes.truncated(torch.tensor([3, 1, 2, 3]))
    exact = ExtendedKalmanFilter().smooth(model, episodes, 10 * number, seed=0)
    found = backend.smooth(model, episodes, number, seed=1)
    torch.testing.assert_close(found.state_mean, exact.state_mean, rtol=0, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(
        found.state_variance, exact.state_variance, rtol=0, atol=tolerance, check_dtype=False
    )
    with inference_scope(model, 0):
        width = float(backend.recursion(model).grid.widths.max())
    for b in range(4):
        length = int(episodes.lengths[b])
        for c in range(2):
            one, other = (
                each.trajectories[:, b, : length + 1, c].reshape(len(each.trajectories), -1).double().numpy()
                for each in (found, exact)
            )
            # The other one's moments have an error, too; and a place in a cell has a variance of its own.
            allowed = tolerance + width**2 / 12
            assert_gaussian(one, other.mean(0), np.cov(other.T), allowed)


def test_what_does_not_move_keeps_its_place():
    model = LightDark(horizon=4)
    look = model.action_names.index("observe")
    episodes = simulate(model, fixed_actions(0, look, look, 1), 3, seed=0)
    draws = GridFilter(200).smooth(model, episodes, 50, seed=0).trajectories
    assert torch.equal(draws[:, :, 1], draws[:, :, 2])
    assert torch.equal(draws[:, :, 2], draws[:, :, 3])
    assert (draws[:, :, 0] != draws[:, :, 1]).all()
    assert len(draws[:, 0, 1, 0].unique()) == 50


class OneSided(Walk):
    """Context 1 rings, never and nowhere in context 0."""

    def observation(self, state, action, context):
        super().observation(state, action, context)
        pyro.sample("ring", dist.Bernoulli(0.5 * context.double()))


@pytest.mark.parametrize("name", ["grid", "smc"])
def test_an_impossible_context_hurts_no_other(name):
    silent = simulate(Walk(), RandomPolicy(2), 2, seed=0)
    z = silent.observations["z"]
    ring = torch.zeros_like(z)
    ring[0, 1] = 1.0
    episodes = Episodes.from_arrays(OneSided(), actions=silent.actions, observations={"z": z, "ring": ring})
    backend = quick(name)
    assert backend.run(OneSided(), episodes, seed=0).log_likelihood[0, 0] == -torch.inf
    found = backend.smooth(OneSided(), episodes, 500, seed=0)
    assert found.trajectories.isfinite().all()
    assert found.state_mean.isfinite().all()
    exact = ExtendedKalmanFilter().smooth(Walk(), silent, 1)
    # Trajectories share 256 particles, of which a quarter or so count.
    error = exact.state_variance.sqrt() * (1e-3 if name == "grid" else 60**-0.5)
    difference = (found.state_mean - exact.state_mean).abs() / error
    assert difference[..., 1].max() < LIMIT
    assert difference[1].max() < LIMIT


SHORT = [*ONLINE, (Plates, "smc"), (Plates, "ekf")]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), SHORT)
def test_every_backend_draws_trajectories(make, name):
    """Of the model's own types, with the moments that it gives, the same under a seed, and unnoticed."""
    model, backend = make(), quick(name)
    model.horizon = 3
    episodes = simulate(model, RandomPolicy(model.num_actions), 2, seed=0).truncated(torch.tensor([3, 2]))
    before = torch.get_rng_state()
    result = backend.smooth(model, episodes, 300, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    again, other = (backend.smooth(model, episodes, 300, seed=seed) for seed in (3, 4))
    for (_, draws), (_, same), (_, different), (_, true), (_, mean), (_, variance) in zip(
        *(leaves(each.trajectories) for each in (result, again, other)),
        leaves(episodes.states),
        leaves(result.state_mean),
        leaves(result.state_variance),
        strict=True,
    ):
        assert draws.shape == (300, 2, 4, model.num_contexts, *true.shape[2:])
        assert draws.dtype == true.dtype
        assert torch.equal(draws, same)
        assert torch.equal(draws, different) == bool(variance.max() < 1e-12)  # all known, in the line grid
        assert torch.equal(draws[:, 1, 2], draws[:, 1, 3])
        error = (variance.double() / 300).sqrt() + 1e-3
        assert ((draws.double().mean(0) - mean) / error).abs().max() < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [(LINE, "grid"), (LINE, "ekf"), (LINE, "smc")])
def test_chunks_and_pieces_agree(model, name, monkeypatch):
    episodes = simulate(model, RandomPolicy(3), 5, seed=0).truncated(torch.tensor([6, 2, 4, 6, 1]))
    backend = quick(name)
    whole = backend.smooth(model, episodes, 200, seed=0)
    monkeypatch.setattr("cpomdp_ppl.inference.discrete.MEMORY", 1)
    monkeypatch.setattr("cpomdp_ppl.inference.kalman.MEMORY", 1)
    monkeypatch.setattr("cpomdp_ppl.inference.particle_filter.PARTICLES_AT_ONCE", 1)
    monkeypatch.setattr("cpomdp_ppl.inference.discrete.PAIRS_AT_ONCE", 30_000)
    parts = backend.smooth(model, episodes, 200, seed=1)
    assert parts.trajectories.shape == whole.trajectories.shape
    if name != "smc":
        torch.testing.assert_close(parts.state_mean, whole.state_mean)
        torch.testing.assert_close(parts.state_variance, whole.state_variance)
    error = (whole.state_variance / (25 if name == "smc" else 100)).sqrt() + 0.02
    difference = parts.trajectories.mean(0) - whole.trajectories.mean(0)
    assert (difference / error).abs().max() < LIMIT


@pytest.mark.parametrize("name", ["ekf", "ukf", "grid", "exact", "smc"])
def test_bad_arguments_are_named(name):
    episodes = simulate(Walk(), RandomPolicy(2), 2, seed=0)
    with pytest.raises(ValueError, match="num_trajectories: expected a positive integer, got 0"):
        as_backend(name).smooth(Walk(), episodes, 0)


# ----------------------------------------------------------------------------------------------- particles

NUM_DRAWN = 1000


@pytest.mark.slow
@pytest.mark.parametrize("make", [Walk, EyesOpen])
def test_backward_sampling_is_the_rts_smoother(make):
    model = make()
    episodes = simulate(model, RandomPolicy(2), 3, seed=0).truncated(torch.tensor([1, 2, 3]))
    exact = ExtendedKalmanFilter().smooth(model, episodes)
    runs = [ParticleFilter(4000).smooth(model, episodes, NUM_DRAWN, seed=s) for s in range(2)]
    assert runs[0].method == "backward sampling"
    assert runs[0].trajectories.shape == (NUM_DRAWN, 3, 4, 2)
    found = torch.cat([run.trajectories for run in runs])
    # Trajectories share particles; 4000 of those count for about a twelfth in the worst row, and in some runs
    # for far less, so that variances of single ones are off by up to a half.
    error = (exact.state_variance / (len(found) / 6)).sqrt()
    assert ((found.mean(0) - exact.state_mean) / error).abs().max() < 5
    assert (found.var(0) / exact.state_variance - 1).abs().max() < 0.25


@pytest.mark.slow
def test_trajectories_are_joint():
    """The lag-one covariance of drawn trajectories is the smoother's, not zero."""
    episodes = simulate(Walk(), RandomPolicy(2), 1, seed=0)
    draws = (
        ParticleFilter(1500).smooth(Walk(), episodes, NUM_DRAWN, seed=1).trajectories[:, 0, :, 0]
    )  # [M, T+1]
    # Exact: three steps of a random walk with unit noises, as one Gaussian.
    T = 3
    L = torch.tril(torch.ones(T + 1, T + 1))
    prior = L @ L.T
    H = torch.eye(T + 1)[1:]
    gain = prior @ H.T @ torch.linalg.inv(H @ prior @ H.T + torch.eye(T))
    posterior = prior - gain @ H @ prior
    assert (torch.cov(draws.T) - posterior).abs().max() < 0.12


def test_the_genealogy_is_the_forward_backward_smoother():
    model = ContextualTiger(horizon=5)
    episodes = simulate(model, RandomPolicy(3), 8, seed=0).truncated(torch.tensor([5, 5, 5, 5, 2, 3, 4, 5]))
    exact = ObservableOperator().smooth(model, episodes).probabilities[..., 1]  # [B, T+1, C]
    found = ParticleFilter(5000).smooth(model, episodes, NUM_DRAWN, seed=0)
    assert found.method == "genealogy"
    error = (exact * (1 - exact) / (NUM_DRAWN / 3)).sqrt().clamp(min=2e-3)
    assert ((found.state_mean - exact) / error).abs().max() < 5


@pytest.mark.parametrize(("make", "method"), [(LightDark, "genealogy"), (Beacons, "backward sampling")])
def test_it_says_which_way_it_took(make, method):
    model = make(horizon=4)
    episodes = simulate(model, RandomPolicy(model.num_actions), 3, seed=0)
    assert ParticleFilter(50).smooth(model, episodes, 10, seed=0).method == method


# ----------------------------------------------------------------------------------- draws from one belief


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), [*SHORT, (lambda: PLANE, "grid"), (lambda: PLANE, "ukf")])
def test_draws_have_the_moments_of_the_belief(make, name):
    model = make()
    backend = GridFilter(1200) if model is PLANE and name == "grid" else quick(name)  # 200 are too few
    episodes = simulate(model, RandomPolicy(model.num_actions), 2, seed=0)
    online = backend.online(model, 2, seed=0)
    if model.initial_observation:
        online.observe(None, episodes.initial_observations, episodes.initially_observed)
    for t in range(2):
        online.observe(episodes.actions[:, t], at(episodes.observations, t), at(episodes.observed, t))
    with inference_scope(model, 1):
        recursion = backend.recursion(model)
        mean, variance = recursion.moments(online.belief)
    with inference_scope(model, 2):
        draws = recursion.draw(online.belief, M)
    with inference_scope(model, 2):
        map_state(lambda x, y: torch.testing.assert_close(x, y), recursion.draw(online.belief, M), draws)
    within = recursion.grid.widths.max() ** 2 / 12 if name == "grid" else 0.0  # the variance in a cell
    for (_, x), (_, m), (_, v), (_, true) in zip(
        *map(leaves, (draws, mean, variance, episodes.states)), strict=True
    ):
        assert x.shape == (model.num_contexts, 2, M, *true.shape[2:])
        assert x.dtype == true.dtype
        x, m, v = x.double(), m.double(), v.double()
        assert ((x.mean(2) - m).abs() / ((v / M).sqrt() + 1e-6)).max() < LIMIT
        squares = (x - m.unsqueeze(2)) ** 2
        error = squares.std(2) / M**0.5 + 1e-6
        assert (((squares.mean(2) - v).abs() - within) / error).max() < LIMIT


@pytest.mark.parametrize("name", FILTERS)
def test_kalman_draws_have_the_covariance_of_the_belief(name):
    model = LinearGaussian(7)
    with inference_scope(model, 0):
        recursion = FILTERS[name].recursion(model)
        belief = recursion.start(1)
        draws = as_vectors(model, recursion.draw(belief, M))
    for c in range(model.contexts):
        assert_gaussian(draws[c, 0], model.m0[c].numpy(), (model.L0[c] @ model.L0[c].T).numpy())


def test_draws_of_the_grid_fill_its_cells():
    """A coarse grid's draws are spread over the cells as the belief is over the points, evenly in each."""
    with inference_scope(LINE, 0):
        recursion = GridFilter(20, tolerance=math.inf).recursion(LINE)
        belief = recursion.start(1)
        x = recursion.draw(belief, 20 * M)[0, 0, :, 0].double()
    edges = recursion.grid.edges[0]
    cell = torch.searchsorted(edges, x, right=True) - 1
    p = belief.probabilities[0, 0]
    share = torch.bincount(cell, minlength=len(p)) / len(x)
    assert ((share - p).abs() / ((p * (1 - p) / len(x)).sqrt() + 1e-9)).max() < LIMIT
    place = (x - edges[cell]) / edges.diff()[cell]
    quarters = torch.bincount((4 * place).long(), minlength=4)[:4] / len(x)
    assert ((quarters - 0.25).abs() / (0.1875 / len(x)) ** 0.5).max() < LIMIT
    assert len(x.unique()) > 0.99 * len(x)
