from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.context import entropy, information_gain, mutual_information
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.models import LineGrid
from tests.conftest import fixed_actions
from tests.programs import Walk


class Twins(Walk):
    """Two contexts that do not differ."""

    horizon = 6

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 1.0))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 0.3))


def test_entropy():
    p = torch.tensor([[0.25, 0.25, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert entropy(p, "bits").tolist() == [1.5, 0.0]
    assert entropy(p).tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    with pytest.raises(ValueError, match="unit: expected"):
        entropy(p, "bytes")


def test_information_adds_up():
    model = LineGrid()
    episodes = simulate(model, RandomPolicy(3), 50, contexts="balanced", seed=0)
    filtering = ObservableOperator().run(model, episodes)
    posterior = filtering.posterior()
    gain = information_gain(filtering, episodes.contexts)
    assert gain.shape == (50, 10)
    true = posterior[torch.arange(50), -1, episodes.contexts]
    torch.testing.assert_close(gain.sum(1), true.log() - math.log(0.5))
    torch.testing.assert_close(information_gain(filtering).sum(1), math.log(2) - entropy(posterior[:, -1]))
    assert bool((gain[~episodes.observed["side"]] == 0).all())


def test_the_bracket_of_an_exact_filter_is_the_closed_form():
    """n reports of accuracy p: I = log 2 − E H(posterior), by the binomial distribution."""
    n, p = 4, 0.85
    model = LineGrid(horizon=n)
    episodes = simulate(model, fixed_actions(*[2] * n), 4000, contexts="balanced", seed=0)
    bracket = mutual_information(ObservableOperator().run(model, episodes), episodes.contexts)
    exact = math.log(2)
    for k in range(n + 1):
        right = p**k * (1 - p) ** (n - k)
        wrong = (1 - p) ** k * p ** (n - k)
        q = right / (right + wrong)
        probability = math.comb(n, k) * 0.5 * (right + wrong)
        exact -= probability * float(entropy(torch.tensor([q, 1 - q], dtype=torch.float64)))
    assert abs(bracket.upper - exact) < 4 * bracket.upper_error
    assert abs(bracket.lower - exact) < 4 * bracket.lower_error
    assert abs(bracket.gap) < 4 * bracket.gap_error


def test_the_bracket_covers_zero_for_identical_contexts_and_tightens():
    episodes = simulate(Twins(), RandomPolicy(2), 400, contexts="balanced", seed=0)
    gaps = []
    for num_particles in (16, 128, 1024):
        smc = ParticleFilter(num_particles, common_random_numbers=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bracket = mutual_information(smc.run(Twins(), episodes, seed=0), episodes.contexts)
        assert bracket.lower - 4 * bracket.lower_error <= 0 <= bracket.upper + 4 * bracket.upper_error
        gaps.append(bracket.gap)
    assert gaps[0] > 3 * gaps[1] > 9 * gaps[2] > 0


def test_a_wide_bracket_warns():
    episodes = simulate(Twins(), RandomPolicy(2), 200, contexts="balanced", seed=0)
    noisy = ParticleFilter(8, common_random_numbers=False).run(Twins(), episodes, seed=0)
    with pytest.warns(UserWarning, match="only known to lie between .* more particles"):
        mutual_information(noisy, episodes.contexts)


def test_bad_arguments_are_named():
    episodes = simulate(Twins(), RandomPolicy(2), 3, seed=0)
    filtering = ParticleFilter(8).run(Twins(), episodes, seed=0)
    with pytest.raises(ValueError, match=r"contexts: expected shape \[3\]"):
        mutual_information(filtering, [0, 1])
    with pytest.raises(ValueError, match="contexts: expected indices 0 to 1"):
        information_gain(filtering, [0, 1, 2])
    one = ParticleFilter(8).run(Twins(), episodes[0], seed=0)
    with pytest.raises(ValueError, match="filtering: expected at least two"):
        mutual_information(one, [0])
