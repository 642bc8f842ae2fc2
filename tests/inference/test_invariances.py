"""What holds of every backend that draws no random numbers, whatever it computes with."""

from __future__ import annotations

import pytest
import torch

from cpomdp_ppl import Episodes, RandomPolicy, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, GridFilter, ObservableOperator, UnscentedKalmanFilter
from cpomdp_ppl.models import ContextualTiger, LightDark
from cpomdp_ppl.state import leaves
from tests.inference.test_finite import Random
from tests.inference.test_kalman import LinearGaussian
from tests.programs import Noting

CASES = {
    "exact": (ObservableOperator(), ContextualTiger, ()),
    "exact, random tables": (ObservableOperator(), Random, (0, 2, 3, 2, 4)),
    "ekf": (ExtendedKalmanFilter(), LinearGaussian, (2,)),
    "ukf": (UnscentedKalmanFilter(), LinearGaussian, (2,)),
    "ukf, classical": (UnscentedKalmanFilter(alpha=0.1, beta=2.0, kappa=0.0), LinearGaussian, (7,)),
    "grid": (GridFilter(200), LightDark, (5,)),
}
BUDGETS = ("discrete.MEMORY", "finite.MEMORY", "grid.MEMORY", "kalman.MEMORY", "kalman.POINT_NUMBERS")
FILTERED = ("log_likelihood", "increments", "expected_reward", "state_mean", "state_variance")


@pytest.fixture(params=CASES)
def case(request):
    """A backend, a model, what makes another of its kind, and episodes of it."""
    backend, kind, arguments = CASES[request.param]
    model = kind(*arguments)
    episodes = simulate(model, RandomPolicy(model.num_actions), 6, contexts="balanced", seed=3)
    return backend, model, lambda mixin: type(kind.__name__, (mixin, kind), {})(*arguments), episodes


def same(found, expected):
    for (_, one), (_, other) in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Reversed:
    """In front of a model: its contexts in reverse order."""

    def initial(self, context):
        return super().initial(self.num_contexts - 1 - context)

    def transition(self, state, action, context):
        return super().transition(state, action, self.num_contexts - 1 - context)

    def observation(self, state, action, context):
        return super().observation(state, action, self.num_contexts - 1 - context)

    def reward(self, state, action, context):
        return super().reward(state, action, self.num_contexts - 1 - context)


def test_permuted_contexts_and_episodes_give_permuted_results(case):
    backend, model, another, episodes = case
    order, contexts = torch.tensor([3, 1, 5, 4, 0, 2]), torch.arange(model.num_contexts).flip(0)
    found, permuted = backend.run(model, episodes), backend.run(another(Reversed), episodes[order])
    for name in ("log_likelihood", "increments", "expected_reward"):
        same(getattr(permuted, name), getattr(found, name)[order][..., contexts])
    for (_, one), (_, other) in zip(leaves(permuted.state_mean), leaves(found.state_mean), strict=True):
        same(one, other[order][:, :, contexts])


@pytest.mark.slow
def test_steps_past_the_end_change_nothing(case):
    backend, model, _, episodes = case
    T = model.horizon
    lengths = torch.tensor([1, 2, 3, T, T - 1, T])
    ragged, smoothed = (run(model, episodes.truncated(lengths)) for run in (backend.run, backend.smooth))
    for b, length in enumerate(lengths.tolist()):
        short = Episodes(
            episodes.actions[b, None, :length],
            {site: value[b, None, :length] for site, value in episodes.observations.items()},
            {site: value[b, None, :length] for site, value in episodes.observed.items()},
        )
        same(ragged.log_likelihood[b], backend.run(model, short).log_likelihood[0])
        assert not ragged.increments[b, length:].any()
        assert not ragged.expected_reward[b, length:].any()
        alone = backend.smooth(model, short)
        for (_, found), (_, expected) in zip(
            leaves(smoothed.state_mean), leaves(alone.state_mean), strict=True
        ):
            same(found[b, : length + 1], expected[0])
            same(found[b, length:], expected[0, -1:].expand_as(found[b, length:]))


@pytest.mark.slow
def test_one_episode_at_a_time_gives_the_same(case, monkeypatch):
    backend, model, _, episodes = case
    filtered, smoothed = backend.run(model, episodes), backend.smooth(model, episodes)
    for name in BUDGETS:
        monkeypatch.setattr(f"cpomdp_ppl.inference.{name}", 1)
    recursion = backend.recursion(model)
    assert backend.episodes_at_once(model, recursion) == 1
    assert backend.episodes_smoothed_at_once(model, recursion, model.horizon, 100) == 1
    again = backend.run(model, episodes)
    for name in FILTERED:
        same(getattr(again, name), getattr(filtered, name))
    again = backend.smooth(model, episodes)
    for name in ("state_mean", "state_variance"):
        same(getattr(again, name), getattr(smoothed, name))


def test_deterministic_sites_are_no_sites(case):
    backend, model, another, episodes = case
    noting = another(Noting)
    model.as_dict = noting.as_dict = False  # of a linear model: Pyro notes tensors alone
    found, expected = backend.run(noting, episodes), backend.run(model, episodes)
    assert torch.equal(found.log_likelihood, expected.log_likelihood)
