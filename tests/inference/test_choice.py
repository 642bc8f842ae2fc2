from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import Agent, RandomPolicy
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.inference.choice import backend_for, default_backend
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from tests.baselines.upfront import Orchard, Workshop
from tests.solvers.machines import Awake, Machine


class Detected(Machine):
    """What is read depends on a continuous signal that is hidden after all but the first action."""

    def observation(self, state, action, context):
        signal = pyro.sample("signal", dist.Normal(state.double(), 1.0).mask(action == 0))
        pyro.sample("reading", dist.Bernoulli(torch.sigmoid(signal)))


class Misnumbered(Machine):
    """Says that it has fewer states than it has."""

    def transition(self, state, action, context):
        return pyro.sample("s", dist.Categorical(torch.ones(3)))

    def reward(self, state, action, context):
        return 1.0 * state


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LineGrid(), ObservableOperator()),
        (ContextualTiger(), ObservableOperator()),
        (Workshop(), ObservableOperator()),
        (Machine(0), ObservableOperator()),
        (Awake(0), ObservableOperator()),
        (LightDark(), ParticleFilter()),
        (Beacons(), ParticleFilter()),
        (Orchard(), ParticleFilter()),
        (Detected(0), ParticleFilter()),
        (LineGrid(num_cells=300), ParticleFilter()),  # more states than there would be particles
    ],
)
def test_it_is_exact_where_that_is_quick_and_never_biased(model, expected):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert default_backend(model) == expected
    assert torch.equal(before, torch.get_rng_state())


def test_tables_too_large_for_memory_are_not_made(monkeypatch):
    monkeypatch.setattr("cpomdp_ppl.inference.choice.MEMORY", 8 * 2 * 3 * 8**2)  # C, A, N of the line grid
    assert default_backend(LineGrid()).name == "exact"
    assert default_backend(LineGrid(num_cells=8)).name == "smc"


def test_who_says_which_gets_that():
    assert backend_for(LineGrid(), "smc") == ParticleFilter()
    assert backend_for(LineGrid(), ParticleFilter(7)) == ParticleFilter(7)
    with pytest.raises(ValueError, match=r"^likelihood: expected"):
        backend_for(LineGrid(), "exactly")


def test_an_agent_of_a_finite_model_believes_what_bayes_rule_says():
    agent = Agent(LineGrid(), RandomPolicy(3), seed=0)
    agent.observe({"side": 1.0}, action="sense")
    assert agent.posterior.tolist() == pytest.approx([0.85, 0.15], abs=1e-12)


def test_a_model_that_the_exact_backend_refuses_keeps_the_particle_filter():
    assert default_backend(Misnumbered(0)) == ParticleFilter()
