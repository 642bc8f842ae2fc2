from __future__ import annotations

import pytest
import torch

from baselines.commands import POLICIES, best_repeated
from cpomdp_ppl import simulate
from cpomdp_ppl.cli.command import CommandError
from cpomdp_ppl.cli.policies import Budget, Recipe
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid


def test_the_best_action_to_repeat():
    # By the models' definitions: the reward is where the light is, and left of a detector on the right.
    light_dark, line_grid = LightDark(), LineGrid()
    assert [light_dark.action_names[each.action] for each in best_repeated(light_dark, 0)] == [
        "right",
        "left",
    ]
    assert [line_grid.action_names[each.action] for each in best_repeated(line_grid, 0)] == ["left", "right"]


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_every_baseline_is_made_from_a_model_alone(name):
    pytest.importorskip(
        {"recurrent_ppo": "sb3_contrib", "pouct": "pomdp_py", "pomcp": "pomdp_py"}.get(name, "torch")
    )
    model = ContextualTiger(horizon=3)
    budget = Budget(simulations=4, training_episodes=20, seed=1)
    policy = POLICIES[name].made(name, model, budget)
    episodes = simulate(model, policy, 6, seed=0)
    again = simulate(model, POLICIES[name].made(name, model, budget), 6, seed=0)
    assert torch.equal(episodes.actions, again.actions)  # the seed decides


@pytest.mark.parametrize("name", ["pft", "ipft", "pouct", "pomcp"])
def test_planners_keep_to_the_budget(name):
    if name in ("pouct", "pomcp"):
        pytest.importorskip("pomdp_py")
    planner = POLICIES[name].made(name, LineGrid(), Budget(simulations=7, seed=3))
    assert (planner.num_simulations, planner.seed) == (7, 3)
    assert POLICIES[name].plans
    assert not POLICIES[name].learns


def test_what_is_not_installed_is_named():
    def missing(model, budget):
        raise ModuleNotFoundError("No module named 'pomdp_py'", name="pomdp_py")

    with pytest.raises(CommandError, match=r"No module named 'pomdp_py'; install cpomdp-ppl\[pomcp\]"):
        Recipe(missing, extra="pomcp").made("pomcp", LineGrid(), Budget())


@pytest.mark.slow
def test_a_learner_that_was_interrupted_is_no_baseline(monkeypatch):
    from baselines import rdpg

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(rdpg.Fitting, "iterate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        POLICIES["rdpg"].made("rdpg", LineGrid(), Budget(training_episodes=20))
