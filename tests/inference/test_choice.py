from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import CPOMDP, Agent, RandomPolicy, evaluate, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, GridFilter, ObservableOperator, ParticleFilter
from cpomdp_ppl.inference.choice import backend_for, default_backend, more_particles
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.report.recording import record
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

    def observation(self, state, action, context):
        pyro.sample("o", dist.Categorical(torch.ones(2)))

    def reward(self, state, action, context):
        return 1.0 * state


class Drifting(CPOMDP):
    """Two numbers drift; a sensor shows the first, or the distance, with noise that may be volatile."""

    contexts, actions, horizon = 2, 2, 8

    def __init__(self, sensor: float = 1.0, *, bent: bool = False, volatile: bool = False):
        super().__init__()
        self.sensor, self.bent, self.volatile = sensor, bent, volatile

    def initial(self, context):
        return pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def transition(self, state, action, context):
        step = (torch.as_tensor(action) - 0.5) * (1 + 0.5 * context)
        return pyro.sample("x", dist.Normal(0.9 * state + step[..., None], 0.3).to_event(1))

    def observation(self, state, action, context):
        mean = state.square().sum(-1).sqrt() if self.bent else state[..., 0]
        pyro.sample("z", dist.Normal(mean, self.sensor * (0.2 + state[..., 1].abs() * self.volatile)))

    def reward(self, state, action, context):
        return state[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (LineGrid(), "exact"),
        (ContextualTiger(), "exact"),
        (Workshop(), "exact"),
        (Machine(0), "exact"),
        (Awake(0), "exact"),
        (LightDark(), "smc"),
        (Beacons(), "smc"),
        (Orchard(), "smc"),
        (Detected(0), "smc"),
        (Misnumbered(0), "smc"),  # which the exact backend refuses
        (LineGrid(num_cells=300), "smc"),  # more states than particles would take
        (Drifting(), "ekf"),
        (Drifting(volatile=True), "smc"),
        (Drifting(bent=True), "smc"),
    ],
)
def test_which_backend_a_model_gets(model, name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert default_backend(model).name == name
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "truth"),
    [
        (LightDark(), GridFilter()),
        (Beacons(), ParticleFilter(8192)),
        (LineGrid(num_cells=300), ObservableOperator()),
        (Drifting(), ParticleFilter(8192)),
        (Drifting(0.3, bent=True), ParticleFilter(8192)),
    ],
)
def test_what_is_chosen_agrees_with_what_is_much_more_exact(model, truth):
    """Within 0.1 nats, where 0.05 were asked for, on episodes that it was not chosen by."""
    uniform = torch.full((model.num_contexts,), 1 / model.num_contexts)
    for policy in (RandomPolicy(model.num_actions), lambda h: torch.full((h.num_episodes,), h.time % 2)):
        episodes = simulate(model, policy, 64, contexts="balanced", seed=5)
        p, q = (
            each.run(model, episodes, seed=5, moments=False).posterior(uniform)[:, -1]
            for each in (truth, default_backend(model))
        )
        nats = (torch.xlogy(p, p) - torch.xlogy(p, 0.999 * q + 0.001 / model.num_contexts)).sum(1)  # KL
        assert nats.mean() < 0.1


@pytest.mark.slow
def test_a_sharper_sensor_gets_more_particles():
    dull, sharp = (default_backend(Drifting(sensor, bent=True)) for sensor in (5.0, 0.05))
    assert dull.num_particles == 64 < 4 * dull.num_particles <= sharp.num_particles <= 4096
    assert default_backend(Drifting(0.05, bent=True)) == sharp


def test_particles_are_doubled_up_to_a_limit():
    assert more_particles(ParticleFilter(64, ess_threshold=0.3)) == ParticleFilter(128, ess_threshold=0.3)
    assert more_particles(ParticleFilter(4096)) is None
    assert more_particles(ObservableOperator()) is None


def test_what_backends_are_called():
    labels = [each.label for each in (ParticleFilter(1024), ExtendedKalmanFilter(), ObservableOperator())]
    assert labels == ["smc, 1,024 particles", "ekf", "exact"]


def test_auto_is_what_is_taken_if_nothing_is_given():
    model = LineGrid()
    assert backend_for(model, "auto") == backend_for(model, None) == ObservableOperator()
    left_out, auto = (evaluate(model, RandomPolicy(3), 20, likelihood=name) for name in (None, "auto"))
    assert left_out.likelihood == auto.likelihood == "exact"
    assert left_out.entropy == auto.entropy
    assert record(model, RandomPolicy(3), num_episodes=2, likelihood="auto").likelihood == "exact"


def test_tables_too_large_for_memory_are_not_made(monkeypatch):
    monkeypatch.setattr("cpomdp_ppl.inference.choice.MEMORY", 8 * 2 * 3 * 8**2)  # C, A, N of the line grid
    assert default_backend(LineGrid()).name == "exact"
    assert default_backend(LineGrid(num_cells=8)).name == "smc"


def test_who_says_which_gets_that():
    assert backend_for(LineGrid(), "smc") == ParticleFilter()
    assert backend_for(LineGrid(), ParticleFilter(7)) == ParticleFilter(7)
    with pytest.raises(ValueError, match=r"^likelihood: expected one of \['auto', 'smc'"):
        backend_for(LineGrid(), "exactly")


def test_an_agent_of_a_finite_model_believes_what_bayes_rule_says():
    agent = Agent(LineGrid(), RandomPolicy(3), seed=0)
    agent.observe({"side": 1.0}, action="sense")
    assert agent.posterior.tolist() == pytest.approx([0.85, 0.15], abs=1e-12)
