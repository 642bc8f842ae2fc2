"""The recipes of CONTRIBUTING: each runs as a script, and what it adds does what it says."""

import itertools
import math

import pytest
import torch
from scipy.stats import norm

from cpomdp_ppl import RandomPolicy, compare, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ObservableOperator
from cpomdp_ppl.models import Beacons, ContextualTiger
from examples.extending import backend, baseline, model, objective
from examples.extending.backend import ImportanceSampling
from examples.extending.baseline import Myopic
from examples.extending.model import HEAT, READ, Heater
from examples.extending.objective import Identification
from solvers import cids
from solvers.cids.batch import Batch
from tests.conftest import fixed_actions

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", [model, backend, baseline], ids=lambda recipe: recipe.__name__)
def test_it_runs(recipe, capsys):
    recipe.main()
    assert capsys.readouterr().out


def test_the_objective_runs(monkeypatch, capsys):
    fit = cids.fit
    monkeypatch.setattr(cids, "fit", lambda *given, **asked: fit(*given, **{**asked, "iterations": 2}))
    objective.main()
    assert "H(C|Y)" in capsys.readouterr().out


# A model


def test_the_model_is_as_it_should_be():
    Heater().check()


def test_moments_of_the_model():
    """An autoregressive process: a geometric series of means, and another of variances."""
    heater, B, T = Heater(), 20_000, 6
    episodes = simulate(
        Heater(horizon=T), fixed_actions(*[HEAT] * (T - 1), READ), B, contexts="balanced", seed=0
    )
    for c, power in enumerate(heater.powers.tolist()):
        mean = heater.kept * power * (1 - heater.kept ** (T - 1)) / (1 - heater.kept)
        squares = heater.kept**2
        variance = squares**T * 0.25 + heater.drift**2 * (1 - squares**T) / (1 - squares)
        some = episodes.contexts == c
        for values, spread in (
            (episodes.states[some, -1], variance),
            (episodes.observations["reading"][some, -1], variance + heater.noise**2),
        ):
            assert float(values.mean()) == pytest.approx(mean, abs=4 * math.sqrt(spread / (B / 2)))
            assert float(values.var()) == pytest.approx(spread, rel=4 * math.sqrt(2 / (B / 2)))
        earned = -(episodes.states[some, :-1] - heater.comfort).abs().sum(1) - heater.fuel * (T - 1)
        torch.testing.assert_close(episodes.returns[some], earned)


# A backend


@pytest.fixture(scope="module")
def tigers():
    """A finite model, some of its episodes, and how many particles are enough for it."""
    tiger = ContextualTiger(horizon=5)
    return tiger, simulate(tiger, RandomPolicy(tiger.num_actions), 20, seed=0), ImportanceSampling(20_000)


def test_the_backend_agrees_with_the_exact_one(tigers):
    tiger, episodes, importance = tigers
    found, exact = importance.run(tiger, episodes, seed=0), ObservableOperator().run(tiger, episodes)
    torch.testing.assert_close(found.log_likelihood, exact.log_likelihood, atol=0.1, rtol=0)
    torch.testing.assert_close(found.posterior(), exact.posterior(), atol=0.02, rtol=0)
    torch.testing.assert_close(found.expected_reward, exact.expected_reward, atol=2.0, rtol=0)  # of ±100
    torch.testing.assert_close(found.state_mean, exact.state_mean, atol=0.03, rtol=0)
    torch.testing.assert_close(found.state_variance, exact.state_variance, atol=0.03, rtol=0)


def test_the_backend_smooths_as_the_exact_one(tigers):
    tiger, episodes, importance = tigers
    found = importance.smooth(tiger, episodes, 4000, seed=0)
    exact = ObservableOperator().smooth(tiger, episodes, 1, seed=0)
    torch.testing.assert_close(found.state_mean, exact.state_mean, atol=0.03, rtol=0)
    torch.testing.assert_close(found.trajectories.double().mean(0), exact.state_mean, atol=0.05, rtol=0)


def test_the_backend_step_by_step_gives_the_numbers_of_the_batch(tigers):
    tiger, episodes, importance = tigers
    online = importance.online(tiger, len(episodes), seed=0)
    for t in range(tiger.horizon):
        seen = {site: values[:, t] for site, values in episodes.observations.items()}
        flags = {site: values[:, t] for site, values in episodes.observed.items()}
        online.observe(episodes.actions[:, t], seen, flags)
    found = importance.run(tiger, episodes, seed=0)
    torch.testing.assert_close(online.log_likelihood, found.log_likelihood)
    torch.testing.assert_close(online.state_mean, found.state_mean[:, -1])


def test_the_backend_serves_states_of_several_parts_and_episodes_that_end():
    beacons = Beacons(horizon=4)
    episodes = simulate(beacons, RandomPolicy(beacons.num_actions), 6, seed=0).truncated([4, 4, 3, 3, 2, 1])
    found = ImportanceSampling(20_000).run(beacons, episodes, seed=0)
    one = ImportanceSampling(20_000).run(beacons, episodes[5:], seed=1)
    torch.testing.assert_close(found.log_likelihood[5:], one.log_likelihood, atol=0.1, rtol=0)
    assert set(found.state_mean) == set(episodes.states)


# A baseline


def test_the_baseline_beats_chance():
    tiger = ContextualTiger()
    policies = {"myopic": Myopic(tiger, "exact"), "random": RandomPolicy(tiger.num_actions)}
    each = [found.returns for found in compare(tiger, policies, 400).evaluations.values()]
    assert each[0].mean - each[1].mean > 10 * math.hypot(each[0].standard_error, each[1].standard_error)


def test_the_baseline_is_myopic():
    """It opens a door as soon as that is worth more than to listen: where the tiger is elsewhere for 9/10.

    Both ears are as good here, and all contexts alike: reports are coins of 0.8, and only their sum counts.
    """
    tiger = ContextualTiger(horizon=4, sharp=0.8, dull=0.8)
    policy = Myopic(tiger, "exact")
    episodes = simulate(tiger, policy, 400, seed=0)
    reports = sum(2 * episodes.observations[ear] - 1 for ear in ("left_ear", "right_ear"))  # [B, T]
    for b in range(len(episodes)):
        lead = 0.0
        for t, action in enumerate(episodes.actions[b].tolist()):
            p = 1 / (1 + (0.8 / 0.2) ** -abs(lead))  # of the door that was heard more often
            best = 0 if 10 * p - 100 * (1 - p) < -1 else (1 if lead > 0 else 2)
            assert action == best
            lead = lead + float(reports[b, t]) if action == 0 else 0.0


def test_the_baseline_plays_a_batch_again():
    tiger = ContextualTiger(horizon=4)
    policy = Myopic(tiger, "exact")
    first, again = (simulate(tiger, policy, 50, seed=0) for _ in range(2))
    assert torch.equal(first.actions, again.actions)


# An objective


def test_the_objective_pays_what_it_says():
    """Heated twice and then read, the temperature is Gaussian in both contexts, and Bayes' rule short."""
    heater, T = Heater(horizon=3), 3
    episodes = simulate(heater, fixed_actions(HEAT, HEAT, READ), 200, contexts="balanced", seed=0)
    filtering = ExtendedKalmanFilter().run(heater, episodes)
    batch = Batch.of(episodes, filtering, torch.tensor([0.3, 0.7]))
    paid, unpaid = (Identification().payoffs(batch, torch.zeros(200, T), tau) for tau in (10.0, 0.0))
    powers, squares = heater.powers.double(), heater.kept**2
    mean = powers * (heater.kept + heater.kept**2)  # [C]
    variance = squares**3 * 0.25 + heater.drift**2 * (1 + squares + squares**2) + heater.noise**2
    density = norm.pdf(episodes.observations["reading"][:, -1, None], mean, variance**0.5)  # [B, C]
    joint = torch.as_tensor(density) * torch.tensor([0.3, 0.7])
    posterior = joint / joint.sum(1, keepdim=True)
    rows = torch.arange(200)
    gained = posterior[rows, episodes.contexts] - torch.tensor([0.3, 0.7])[episodes.contexts]
    torch.testing.assert_close((paid - unpaid).sum(1), 10 * gained, atol=1e-4, rtol=0)
    torch.testing.assert_close(unpaid, batch.rewards(belief=True))


def test_the_objective_is_maximised():
    """Learned, a policy does as well as the best of all sequences of actions, by an evaluation of its own."""
    heater, tau = Heater(horizon=3), 10.0
    solution = cids.fit(
        heater,
        likelihood="ekf",
        objective=Identification(),
        temperature=tau,
        iterations=150,
        batch_size=100,
        seed=0,
        progress=False,
    )

    def worth(policy):
        episodes = simulate(heater, policy, 4000, contexts="balanced", seed=1)
        posterior = ExtendedKalmanFilter().run(heater, episodes, moments=False).posterior()[:, -1]
        right = posterior.gather(1, episodes.contexts[:, None]).squeeze(1)
        return float((episodes.returns + tau * right).mean())

    sequences = itertools.product(range(3), repeat=3)
    best = max(worth(fixed_actions(*sequence)) for sequence in sequences)
    assert worth(solution.policy) > best - 0.1
