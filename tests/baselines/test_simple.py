from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch

from baselines.simple import (
    Always,
    ApproachObserveCommit,
    ContextKnown,
    MostLikelyContext,
    PosteriorSampling,
    ThompsonSampling,
)
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.evaluation import evaluate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ObservableOperator
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from tests.programs import EyesOpen
from tests.solvers.truth import known_context_value, solve, tables


def one_way(model):
    """What to do if the context were known: in LightDark and LineGrid, one direction."""
    towards = {"LightDark": ("right", "left"), "LineGrid": ("left", "right")}[type(model).__name__]
    return [Always(model, action) for action in towards]


@pytest.mark.slow
def test_one_way_is_worth_its_closed_form():
    """In its own light 17.96, and in the other context the mirror image of the walk without a goal."""
    model = LightDark()
    result = evaluate(model, Always(model, "right"), 4000, likelihood="ekf", seed=0)
    known = float(model.context_known_return()[0])
    right = result.returns_by_context["light right"]
    assert abs(right.mean - known) < 4 * right.standard_error
    assert abs(result.returns.mean - -0.77) < 4 * result.returns.standard_error


def test_the_oracle_is_worth_the_exact_optimum():
    model = ContextualTiger(horizon=5)
    truth = tables(model)
    plans = [solve(truth, 5, prior=[float(c == k) for c in range(3)]) for k in range(3)]
    result = evaluate(model, ContextKnown(model, plans), 6000, reveal_context=True, seed=0)
    assert abs(result.returns.mean - known_context_value(truth, 5)) < 4 * result.returns.standard_error


def test_the_oracle_must_be_told():
    model = LightDark()
    with pytest.raises(ValueError, match="prior"):
        simulate(model, ContextKnown(model, one_way(model)), 4, seed=0)


def test_the_likeliest_context_decides():
    """Against the exact posterior of what was seen up to each step."""
    model = LineGrid()
    rule = MostLikelyContext(model, one_way(model), "exact")

    class Sensing:  # looks three times, and then follows the rule
        def start(self, prior):
            return rule.start(prior)

        def act(self, history, memory):
            decision, memory = rule.act(history, memory)
            looking = torch.full((history.num_episodes,), 2)
            return (looking, memory) if history.time < 3 else (decision.probs.argmax(-1), memory)

    episodes = simulate(model, Sensing(), 60, seed=0)
    posterior = ObservableOperator().run(model, episodes).posterior()[:, 3]
    assert torch.equal(episodes.actions[:, 3], posterior.argmax(-1))  # left in context 0, right in context 1


def test_thompson_draws_contexts_as_often_as_they_are_likely():
    model = LightDark()
    rule = ThompsonSampling(model, one_way(model), "ekf")
    episodes = simulate(model, rule, 4000, prior=[0.8, 0.2], seed=1)
    first = (episodes.actions[:, 0] == 1).double()
    assert abs(first.mean() - 0.8) < 4 * (0.16 / 4000) ** 0.5


def test_posterior_sampling_draws_once_for_the_whole_episode():
    model = LightDark()
    episodes = simulate(
        model, PosteriorSampling(model, one_way(model)), 4000, contexts=0, prior=[0.8, 0.2], seed=1
    )
    assert bool((episodes.actions == episodes.actions[:, :1]).all())
    first = (episodes.actions[:, 0] == 1).double()
    assert abs(first.mean() - 0.8) < 4 * (0.16 / 4000) ** 0.5


def test_each_policy_remembers_what_happened():
    """A policy of its own memory, which counts its steps, is asked at every step whether picked or not."""
    model = LineGrid()
    counts = []

    class Counting(RandomPolicy):
        def start(self, prior):
            return 0

        def act(self, history, memory):
            counts.append((history.time, memory))
            probs = torch.full((history.num_episodes, 3), 1 / 3)
            return dist.Categorical(probs), memory + 1

    simulate(model, MostLikelyContext(model, [Counting(3), Counting(3)], "exact"), 2, seed=0)
    assert counts == [(t, t) for t in range(10) for _ in range(2)]


def test_approach_observe_commit():
    """It goes, looks until the posterior says so, and then never changes its mind."""
    model = LightDark()
    rule = ApproachObserveCommit(model, "right", 1, "observe", ["right", "left"], 0.9, ExtendedKalmanFilter())
    episodes = simulate(model, rule, 200, seed=0)
    posterior = ExtendedKalmanFilter().run(model, episodes).posterior()
    assert (episodes.actions[:, 0] == 1).all()
    for b in range(200):
        sure = (posterior[b, 1:].amax(-1) > 0.9).nonzero()[:, 0] + 1
        t = int(sure[0]) if len(sure) else 20
        assert (episodes.actions[b, 1:t] == 2).all()
        if t < 20:
            context = int(posterior[b, t].argmax())
            assert (episodes.actions[b, t:] == (1, 0)[context]).all()


def test_it_is_hard_to_beat_on_light_dark():
    """Far above one way with two guesses for its numbers; the best two are within 2 % of the optimum."""
    model = LightDark()
    rule = ApproachObserveCommit(model, "right", 1, "observe", ["right", "left"], 0.9, "ekf")
    assert evaluate(model, rule, 1000, likelihood="ekf").returns.mean > 9.5


def test_models_with_an_initial_observation_are_followed_from_the_start():
    model = EyesOpen()
    rule = MostLikelyContext(model, [Always(model, 0)] * model.num_contexts)
    assert simulate(model, rule, 3, seed=0).actions.shape == (3, model.horizon)


@pytest.mark.parametrize("action", ["up", 3, [1]])
def test_actions_that_are_none(action):
    with pytest.raises(ValueError, match="action"):
        Always(LightDark(), action)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("approach", "up"),
        ("steps", -1),
        ("observe", 7),
        ("commit", ["left"]),
        ("confidence", 1.0),
        ("likelihood", "guess"),
    ],
)
def test_rules_that_make_no_sense(argument, value):
    settings = dict(approach="right", steps=1, observe="observe", commit=["right", "left"])
    with pytest.raises(ValueError, match=argument):
        ApproachObserveCommit(LightDark(), **{**settings, argument: value})


def test_a_policy_for_each_context_is_needed():
    model = LightDark()
    with pytest.raises(ValueError, match="policies"):
        MostLikelyContext(model, [Always(model, 0)])
