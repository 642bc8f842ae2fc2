from dataclasses import replace

import pyro
import pytest
import torch
from pyro.nn import PyroParam
from torch.distributions import Bernoulli, MultivariateNormal, constraints

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import GridFilter, as_backend
from cpomdp_ppl.learning import log_likelihood
from cpomdp_ppl.learning.likelihood import LogLikelihood
from cpomdp_ppl.learning.parameters import learnable
from cpomdp_ppl.models import ContextualTiger, LightDark
from tests.learning.programs import Alarm, Constant, Curved, Plane, Sensor, Walk, positive

GRID = GridFilter(300, bounds=(-9.0, 9.0))


def values_of(model):
    return {one.name: one.value.detach().double() for one in learnable(model)}


@pytest.mark.parametrize(("likelihood", "tolerance"), [("ekf", 1e-9), ("ukf", 1e-9), (GRID, 1e-4)])
def test_random_walk_against_the_joint_normal_distribution(likelihood, tolerance):
    model = Walk().double()
    episodes = simulate(model, RandomPolicy(2), 6, seed=0)
    log_likelihood(model, episodes, likelihood).backward()
    log_q = model.q_unconstrained.detach().clone().requires_grad_()
    log_r = model.variance_unconstrained.detach().clone().requires_grad_()
    t = torch.arange(1.0, 6).double()
    covariance = log_q.exp() * torch.minimum(t[:, None], t) + log_r.exp() * torch.eye(5).double()
    truth = MultivariateNormal(torch.zeros(5).double(), covariance)
    expected = truth.log_prob(episodes.observations["z"].double()).sum()
    expected.backward()
    with torch.no_grad():
        assert log_likelihood(model, episodes, likelihood).item() == pytest.approx(
            expected.item(), rel=tolerance
        )
    assert model.q_unconstrained.grad.item() == pytest.approx(log_q.grad.item(), rel=100 * tolerance)
    assert model.variance_unconstrained.grad.item() == pytest.approx(log_r.grad.item(), rel=100 * tolerance)


def tiger():
    unit = constraints.unit_interval
    return ContextualTiger(
        5, sharp=PyroParam(torch.tensor(0.8), unit), dull=PyroParam(torch.tensor(0.6), unit)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "likelihood"),
    [
        (Curved(), "ekf"),
        (Curved(), "ukf"),
        (Curved(), GRID),
        (Plane(), "ekf"),
        (Plane(), "ukf"),
        (tiger(), "exact"),
        (Alarm(), "exact"),
        (LightDark(5, light_variance=positive(2.0), dark_variance=positive(5.0)), "ekf"),
        (LightDark(5, light_variance=positive(2.0), process_variance=positive(0.2)), GRID),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_gradient_against_finite_differences(model, likelihood):
    episodes = simulate(model, RandomPolicy(model.num_actions), 12, seed=1)
    objective = LogLikelihood(model, episodes, likelihood, use_contexts=False)
    at = values_of(model)
    value, gradient = objective.value_and_gradient(at)
    filtering = as_backend(likelihood).run(model, episodes)
    expected = (filtering.log_likelihood + model.prior().detach().double().log()).logsumexp(-1).sum()
    assert value.item() == pytest.approx(expected.item(), abs=2e-4)  # of float32
    assert objective.value(at).item() == pytest.approx(value.item(), abs=1e-7)
    for name, x in at.items():
        for k in range(x.numel()):
            h = (
                torch.zeros_like(x).index_fill_(0, torch.tensor(k), 1e-4)
                if x.dim()
                else 1e-4 * torch.ones_like(x)
            )
            if name == "context_prior":  # stays on the simplex
                h = h - h.flip(0)
            difference = objective.value({**at, name: x + h}) - objective.value({**at, name: x - h})
            slope = (gradient[name] * h).sum().item() / 1e-4
            assert slope == pytest.approx(difference.item() / 2e-4, rel=2e-4, abs=2e-4), (name, k)


def test_batches_of_episodes_add_up(monkeypatch):
    model, at = Curved(), values_of(Curved())
    episodes = simulate(model, RandomPolicy(2), 7, seed=0)
    objective = LogLikelihood(model, episodes, "ekf", use_contexts=False)
    value, gradient = objective.value_and_gradient(at)
    monkeypatch.setattr("cpomdp_ppl.learning.likelihood.episodes_with_graph", lambda *_: 3)
    again, slopes = objective.value_and_gradient(at)
    assert again.item() == pytest.approx(value.item(), rel=1e-12)
    for name in at:
        assert torch.allclose(slopes[name], gradient[name], rtol=1e-10)


def test_contexts_known_for_some():
    model = Sensor(0.7)
    episodes = simulate(model, RandomPolicy(1), 6, seed=0)
    z = episodes.observations["z"].double()
    p = torch.tensor([0.3, 0.7]).double()
    by_context = Bernoulli(p).log_prob(z[..., None]).sum(1) + torch.tensor(0.5).double().log()  # [B, C]
    known = episodes.contexts.clone()
    known[::2] = -1
    of_known = by_context[torch.arange(6), episodes.contexts]
    for contexts, expected in [
        (episodes.contexts, of_known),
        (known, torch.where(known < 0, by_context.logsumexp(-1), of_known)),
    ]:
        found = log_likelihood(model, replace(episodes, contexts=contexts), "exact", use_contexts=True)
        assert found.item() == pytest.approx(expected.sum().item(), abs=1e-5)
    unaware = log_likelihood(model, episodes, "exact")
    assert unaware.item() == pytest.approx(by_context.logsumexp(-1).sum().item(), abs=1e-5)


def test_impossible_contexts_have_no_gradient_instead_of_nan():
    class Certain(Sensor):
        def observation(self, state, action, context):
            right = torch.where(context == 1, self.accuracy, torch.zeros(()))
            pyro.sample("z", pyro.distributions.Bernoulli(right))

    model = Certain(0.7)
    episodes = simulate(model, RandomPolicy(1), 12, contexts=torch.ones(12).long(), seed=0)
    z = episodes.observations["z"].double()
    accuracy = torch.tensor(0.7).double().requires_grad_()
    ones = Bernoulli(accuracy).log_prob(z).sum(1)
    zeros = torch.where(z.sum(1) > 0, -torch.inf, 0.0)
    expected = torch.stack([ones, zeros], -1).logsumexp(-1).sum() - 12 * torch.tensor(2.0).log()
    expected.backward()
    _, gradient = LogLikelihood(model, episodes, "exact", use_contexts=False).value_and_gradient(
        values_of(model)
    )
    assert gradient["accuracy"].item() == pytest.approx(accuracy.grad.item(), rel=1e-5)


def test_param_store_has_the_say_as_elsewhere():
    model = Constant(2.0)
    episodes = simulate(model, RandomPolicy(2), 5, seed=0)
    with torch.no_grad():
        expected = log_likelihood(Constant(3.0), episodes)
        with pyro.get_param_store().scope():
            pyro.param("variance", torch.tensor(3.0), constraint=constraints.positive)
            assert torch.allclose(log_likelihood(model, episodes), expected)


def test_refusals():
    episodes = simulate(LightDark(3), RandomPolicy(3), 3, seed=0)
    with pytest.raises(ValueError, match="PyroParam"):
        log_likelihood(LightDark(3), episodes)
    learnt = LightDark(3, light_variance=positive(2.0))
    with pytest.raises(ValueError, match="use_contexts"):
        log_likelihood(learnt, replace(episodes, contexts=None), use_contexts=True)
    with pytest.raises(ValueError, match=r"episodes\.contexts"):
        log_likelihood(learnt, replace(episodes, contexts=episodes.contexts + 2), use_contexts=True)


def test_light_dark_takes_tensors_and_simulates_the_same():
    names = ("step", "process_variance", "light_variance", "dark_variance", "initial_variance", "goal")
    plain = LightDark(6)
    tensors = LightDark(6, **{name: torch.tensor(getattr(plain, name)) for name in names})
    parameters = LightDark(6, **{name: positive(getattr(plain, name)) for name in names})
    first = simulate(plain, RandomPolicy(3), 50, seed=3)
    for model in (tensors, parameters):
        again = simulate(model, RandomPolicy(3), 50, seed=3)
        assert torch.allclose(first.observations["z"], again.observations["z"], atol=1e-5)
        assert torch.equal(first.actions, again.actions)
        assert torch.allclose(model.context_known_return(), plain.context_known_return(), atol=1e-5)
