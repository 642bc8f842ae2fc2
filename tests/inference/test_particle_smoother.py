"""Particle smoothing against exact smoothers. Limits are in standard errors of M trajectories."""

from __future__ import annotations

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ObservableOperator, ParticleFilter
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark
from tests.programs import EyesOpen, Walk

M = 1000


@pytest.mark.slow
@pytest.mark.parametrize("make", [Walk, EyesOpen])
def test_backward_sampling_is_the_rts_smoother(make):
    model = make()
    episodes = simulate(model, RandomPolicy(2), 3, seed=0).truncated(torch.tensor([1, 2, 3]))
    exact = ExtendedKalmanFilter().smooth(model, episodes)
    found = ParticleFilter(4000).smooth(model, episodes, M, seed=0)
    assert found.method == "backward sampling"
    assert found.trajectories.shape == (M, 3, 4, 2)
    # Trajectories share particles; 4000 of those count for about a twelfth in the worst row.
    error = (exact.state_variance / (M / 3)).sqrt()
    assert ((found.state_mean - exact.state_mean) / error).abs().max() < 5
    assert (found.state_variance / exact.state_variance - 1).abs().max() < 0.25


@pytest.mark.slow
def test_trajectories_are_joint():
    """The lag-one covariance of drawn trajectories is the smoother's, not zero."""
    episodes = simulate(Walk(), RandomPolicy(2), 1, seed=0)
    draws = ParticleFilter(1500).smooth(Walk(), episodes, M, seed=1).trajectories[:, 0, :, 0]  # [M, T+1]
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
    found = ParticleFilter(5000).smooth(model, episodes, M, seed=0)
    assert found.method == "genealogy"
    error = (exact * (1 - exact) / (M / 3)).sqrt().clamp(min=2e-3)
    assert ((found.state_mean - exact) / error).abs().max() < 5


@pytest.mark.parametrize(("make", "method"), [(LightDark, "genealogy"), (Beacons, "backward sampling")])
def test_it_says_which_way_it_took(make, method):
    model = make(horizon=4)
    episodes = simulate(model, RandomPolicy(model.num_actions), 3, seed=0)
    assert ParticleFilter(50).smooth(model, episodes, 10, seed=0).method == method


def test_bad_arguments_are_named():
    episodes = simulate(Walk(), RandomPolicy(2), 2, seed=0)
    with pytest.raises(ValueError, match="num_trajectories: expected a positive integer, got 0"):
        ParticleFilter(10).smooth(Walk(), episodes, 0)
