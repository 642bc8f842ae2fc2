import math
from dataclasses import replace

import pyro
import pytest
import torch
from pyro.nn import PyroParam
from torch.distributions import constraints

from cpomdp_ppl import RandomPolicy, evaluate, simulate
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.learning import maximum_likelihood, with_parameters
from cpomdp_ppl.models import LightDark
from tests.learning.programs import Constant, Sensor, Walk, positive


@pytest.mark.parametrize("likelihood", ["ekf", "ukf"])
def test_variance_in_closed_form(likelihood):
    episodes = simulate(Constant(3.0), RandomPolicy(2), 40, seed=0)
    estimate = maximum_likelihood(Constant(0.5), episodes, likelihood, tolerance=1e-8, progress=False)
    expected = episodes.observations["z"].double().square().mean().item()
    assert estimate.converged
    assert estimate.values["variance"].item() == pytest.approx(expected, rel=1e-4)
    # The information about log v is n / 2.
    assert estimate.standard_errors["variance"].item() == pytest.approx(expected * (2 / 200) ** 0.5, rel=1e-3)
    highest = -100 * (math.log(2 * math.pi * expected) + 1)
    assert estimate.log_likelihood[-1].item() == pytest.approx(highest, rel=1e-6)
    assert bool((estimate.log_likelihood.diff() >= 0).all())


def test_accuracy_in_closed_form_if_contexts_are_known():
    episodes = simulate(Sensor(0.8), RandomPolicy(1), 60, seed=0)
    right = (episodes.observations["z"] == episodes.contexts[:, None]).double().mean().item()
    estimate = maximum_likelihood(
        Sensor(0.3), episodes, "exact", use_contexts=True, tolerance=1e-8, progress=False
    )
    assert estimate.values["accuracy"].item() == pytest.approx(right, abs=1e-4)
    error = (right * (1 - right) / 240) ** 0.5
    assert estimate.standard_errors["accuracy"].item() == pytest.approx(error, rel=1e-3)


@pytest.mark.slow
def test_starts_find_the_higher_of_two_maxima():
    """Few of the contexts are known: the mirror image of the sensor is a maximum, but a lower one."""
    episodes = simulate(Sensor(0.8), RandomPolicy(1), 60, seed=0)
    known = episodes.contexts.clone()
    known[4:] = -1
    partly = replace(episodes, contexts=known)
    options = {"use_contexts": True, "progress": False}
    once = maximum_likelihood(Sensor(0.4), partly, "exact", **options)
    often = maximum_likelihood(Sensor(0.4), partly, "exact", starts=8, seed=1, **options)
    assert once.values["accuracy"].item() < 0.5 < often.values["accuracy"].item()
    assert often.ends.max() == often.log_likelihood[-1]
    assert len(often.ends) == 8


def test_two_parameters_and_their_table():
    episodes = simulate(Walk(0.5, 2.0), RandomPolicy(2), 300, seed=0)
    model = Walk(2.0, 0.5)
    estimate = maximum_likelihood(model, episodes, "ekf", progress=False)
    assert model.q.item() == pytest.approx(2.0)  # the model is left alone
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, truth in [("q", 0.5), ("variance", 2.0)]:
        error = estimate.standard_errors[name].item()
        assert abs(estimate.values[name].item() - truth) < 3.5 * error < 1.0
    table = str(estimate)
    assert "variance" in table
    assert "std. error" in table
    assert "converged" in table


@pytest.mark.slow
def test_what_episodes_do_not_tell_has_no_standard_error():
    episodes = simulate(LightDark(3), lambda history: torch.full((10,), 2), 10, seed=0)  # never moves
    model = LightDark(3, process_variance=positive(0.3), light_variance=positive(1.0))
    estimate = maximum_likelihood(model, episodes, "ekf", progress=False)
    assert math.isnan(estimate.standard_errors["process_variance"].item())
    assert "no standard errors" in str(estimate)


@pytest.mark.slow
def test_estimate_serves_to_simulate_and_a_store_cannot_spoil_it():
    model = LightDark(4, dark_variance=positive(5.0))
    learned = with_parameters(model, {"dark_variance": 8.0})
    with pyro.get_param_store().scope():
        pyro.param("dark_variance", torch.tensor(100.0), constraint=constraints.positive)
        found = simulate(learned, RandomPolicy(3), 50, seed=0)
        evaluate(learned, RandomPolicy(3), 20, seed=0)
    expected = simulate(LightDark(4), RandomPolicy(3), 50, seed=0)
    assert torch.equal(found.observations["z"], expected.observations["z"])
    assert model.dark_variance.item() == pytest.approx(5.0)
    assert "dark_variance" in learned.state_dict()


def test_nested_and_decorated_parameters():
    class Scale(pyro.nn.PyroModule):
        @PyroParam(constraint=constraints.positive)
        def variance(self):
            return torch.tensor(2.0)

    class Nested(Constant):
        def __init__(self):
            super().__init__()
            del self.variance
            self.scale = Scale()

        def observation(self, state, action, context):
            pyro.sample("z", pyro.distributions.Normal(state, self.scale.variance.sqrt()))

    episodes = simulate(Constant(3.0), RandomPolicy(2), 10, seed=0)
    estimate = maximum_likelihood(Nested(), episodes, progress=False, tolerance=1e-8)
    expected = episodes.observations["z"].square().mean().item()
    assert estimate.values["scale.variance"].item() == pytest.approx(expected, rel=1e-4)
    assert estimate.model.scale.variance.item() == pytest.approx(expected, rel=1e-4)


def test_refusals():
    episodes = simulate(Sensor(0.8), RandomPolicy(1), 5, seed=0)
    with pytest.raises(ValueError, match="PyroParam"):
        maximum_likelihood(LightDark(3), episodes, progress=False)
    with pytest.raises(ValueError, match="initial: expected parameters of the model"):
        maximum_likelihood(Sensor(), episodes, "exact", initial={"precision": 1.0}, progress=False)
    with pytest.raises(ValueError, match=r"initial\['accuracy'\]: .*got 1\.5"):
        maximum_likelihood(Sensor(), episodes, "exact", initial={"accuracy": 1.5}, progress=False)
    with pytest.raises(ValueError, match="a finite value"):
        maximum_likelihood(Sensor(), episodes, "exact", initial={"accuracy": math.nan}, progress=False)
    with pytest.raises(ValueError, match="shape"):
        with_parameters(Sensor(), {"accuracy": [0.5, 0.5]})
    with pytest.raises(ValueError, match="iterations"):
        maximum_likelihood(Sensor(), episodes, "exact", iterations=0, progress=False)

    class Silent(Sensor):
        def observation(self, state, action, context):
            pyro.sample("z", pyro.distributions.Bernoulli(self.accuracy * 0.0))

    with pytest.raises(DegenerateWeightsError):
        maximum_likelihood(Silent(), episodes, "exact", progress=False)
