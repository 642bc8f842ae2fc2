"""The particle filter's gradient against exact ones, and what it refuses."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import AffineTransform

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.inference import ParticleFilter
from cpomdp_ppl.learning import log_likelihood, maximum_likelihood
from cpomdp_ppl.learning.ascent import estimate_score
from cpomdp_ppl.learning.fisher import _moves
from cpomdp_ppl.learning.likelihood import LogLikelihood
from tests.learning.programs import ByHand, Cart, Constant, Door, Gauge, Walk
from tests.learning.test_likelihood import values_of

FILTER = ParticleFilter(300)


def filtered(model, episodes, backend=FILTER, seeds=60):
    """What filters say together of the score by the parameters."""
    objective, at = LogLikelihood(model, episodes, backend, use_contexts=False), values_of(model)
    return estimate_score(lambda _, seed: objective.scores(at, seed), torch.zeros(()), list(range(seeds)))


def gradient(model, episodes, backend):
    found = LogLikelihood(model, episodes, backend, use_contexts=False).value_and_gradient(values_of(model))[
        1
    ]
    return torch.cat([x.reshape(-1) for x in found.values()])


def agree(found, exact):
    return bool(((found.gradient - exact).abs() < 4 * found.noise.diagonal().sqrt() + 1e-9).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "exact"),
    [(Door(), "exact"), (Walk(), "ekf"), (ByHand(), "ekf"), (Gauge(), "ekf")],
    ids=lambda x: type(x).__name__,
)
def test_the_mean_gradient_is_the_exact_one(model, exact):
    """Of sites in all programs; of states that are functions of them; of a site that was not seen."""
    episodes = simulate(model, RandomPolicy(2), 12, seed=1)
    expected = gradient(model, episodes, exact)
    found = filtered(model, episodes)
    assert agree(found, expected)
    noise = found.noise.diagonal().sqrt()
    assert bool((noise < 0.1 * expected.abs().max()).all())  # else it would agree with anything
    assert not agree(found, 0.0 * expected)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["multinomial", "residual"])
def test_however_it_resamples_and_episodes_end(scheme):
    model = Door()
    episodes = simulate(model, RandomPolicy(2), 12, seed=1)
    lengths = torch.tensor([1, 2, 3, 4]).repeat(3)
    alive = torch.arange(4) < lengths[:, None]
    short = replace(episodes, lengths=lengths, observed={"z": episodes.observed["z"] & alive})
    backend = ParticleFilter(300, scheme, ess_threshold=1.0, common_random_numbers=False)
    assert agree(filtered(model, short, backend, seeds=30), gradient(model, short, "exact"))


def test_value_is_that_of_the_filter_and_batches_add_up(monkeypatch):
    model = Gauge()
    episodes = simulate(model, RandomPolicy(2), 7, seed=0)
    at = values_of(model)
    objective = LogLikelihood(model, episodes, FILTER, use_contexts=False, seed=3)
    value, slopes = objective.value_and_gradient(at)
    values, each = objective.scores(at, 3)
    assert objective.value(at).item() == pytest.approx(value.item(), rel=1e-12)
    assert values.sum().item() == pytest.approx(value.item(), rel=1e-12)
    assert torch.allclose(each.sum(0), torch.stack(list(slopes.values())), rtol=1e-9)
    filtering = ParticleFilter(300).run(model.double(), episodes, seed=3)
    expected = (filtering.log_likelihood + model.prior().double().log()).logsumexp(-1).sum()
    assert value.item() == pytest.approx(expected.item(), abs=2.0)
    monkeypatch.setattr("cpomdp_ppl.learning.likelihood.episodes_with_graph", lambda *_: 3)
    assert objective.scores(at, 3)[1].shape == (7, 5)


def test_log_likelihood_with_random_numbers_of_its_own():
    model = Walk()
    episodes = simulate(model, RandomPolicy(2), 5, seed=0)
    first, again, other = (log_likelihood(model, episodes, "smc", seed=seed) for seed in (1, 1, 2))
    assert first.item() == again.item() != other.item()
    other.backward()
    assert torch.isfinite(model.q_unconstrained.grad)


@pytest.mark.slow
def test_wheels_that_slip():
    """Three numbers for a state and a discrete site: no other backend has a gradient."""
    episodes = simulate(Cart(0.3, 1.0, 0.2), RandomPolicy(2), 60, seed=0)
    estimate = maximum_likelihood(Cart(0.6, 0.5, 1.0), episodes, ParticleFilter(300), seed=0, progress=False)
    assert estimate.converged
    for name, truth in [("slip", 0.3), ("push", 1.0), ("variance", 0.2)]:
        error = estimate.standard_errors[name].item()
        assert abs(estimate.values[name].item() - truth) < 3 * error < 0.3
    assert "slip" in str(estimate)


@pytest.mark.slow
def test_estimate_and_errors_against_the_exact_ones():
    episodes = simulate(Walk(0.5, 2.0), RandomPolicy(2), 100, seed=0)
    exact = maximum_likelihood(Walk(), episodes, "ekf", progress=False)
    found = maximum_likelihood(Walk(2.0, 0.5), episodes, ParticleFilter(200), seed=0, progress=False)
    assert found.converged
    for name, error in exact.standard_errors.items():
        # Noise has a fiftieth of the variance; squares of 100 scores tell a variance to a fifth or so.
        assert abs((found.values[name] - exact.values[name]) / error) < 3 * 0.02**0.5 * 2**0.5
        assert found.standard_errors[name].item() == pytest.approx(error.item(), rel=0.3)
    other = maximum_likelihood(Walk(2.0, 0.5), episodes, ParticleFilter(200), seed=1, progress=False)
    apart = abs((found.values["q"] - other.values["q"]) / exact.standard_errors["q"])
    assert 1e-4 < apart < 4 * (2 * 0.02 * 2) ** 0.5  # the random numbers are others


@pytest.mark.slow
def test_what_episodes_do_not_tell_has_no_standard_error():
    class Idle(Walk):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Normal(0.0, self.variance.sqrt()))

    episodes = simulate(Idle(), RandomPolicy(2), 20, seed=0)
    estimate = maximum_likelihood(Idle(), episodes, ParticleFilter(10), iterations=6, seed=0, progress=False)
    assert estimate.standard_errors["q"].isnan()
    assert not estimate.converged


def test_a_delta_keeps_its_graph():
    class Certain(ByHand):
        def transition(self, state, action, context):
            moved = super().transition(state, action, context)
            return pyro.sample("x", dist.Delta(moved))

    episodes = simulate(ByHand(), RandomPolicy(2), 12, seed=1)
    found, expected = (filtered(model, episodes, seeds=2).gradient for model in (Certain(), ByHand()))
    assert torch.allclose(found, expected)


def test_supports_that_move():
    a, b = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)
    moving = [
        dist.Uniform(0.0, a),
        dist.Uniform(a, 3.0).expand([2]).to_event(1),
        dist.Pareto(a, b),
        dist.AffineBeta(b, b, a, b),
        dist.TransformedDistribution(dist.Exponential(b), [AffineTransform(a, 1.0)]),
        dist.TransformedDistribution(dist.Bernoulli(0.5), [AffineTransform(0.0, a)]),
        dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Uniform(torch.zeros(2), a.expand(2))),
        dist.MaskedMixture(torch.tensor(True), dist.Normal(0.0, 1.0), dist.Delta(a)),
        dist.Empirical(a.expand(3), torch.zeros(3)),
        dist.Uniform(0.0, a).mask(False),
    ]
    assert [type(fn).__name__ for fn in moving if not _moves(fn)] == []
    still = [
        dist.Normal(a, b),
        dist.LogNormal(a, b),
        dist.Weibull(a, a),
        dist.Gamma(a, a),
        dist.Beta(a, a),
        dist.Categorical(a.expand(3)),
        dist.Binomial(3, a),
        dist.Poisson(a),
        dist.Gumbel(a, a),
        dist.Laplace(a, a).expand([2]).to_event(1),
        dist.MixtureSameFamily(dist.Categorical(a.expand(2)), dist.Normal(a.expand(2), b)),
        dist.MultivariateNormal(a.expand(2), torch.eye(2)),
        dist.TransformedDistribution(dist.Normal(0.0, 1.0), [AffineTransform(a, a)]),
        dist.Uniform(0.0, b),
        dist.Dirichlet(a.expand(3)),
    ]
    assert [type(fn).__name__ for fn in still if _moves(fn)] == []


def test_refusals():
    class Observed(Constant):
        def observation(self, state, action, context):
            pyro.sample("z", dist.Uniform(state - self.variance, state + self.variance))

    class Moved(Constant):
        def transition(self, state, action, context):
            return pyro.sample("jump", dist.Uniform(0.0, self.variance))

    class Hidden(Constant):
        def observation(self, state, action, context):
            warm = pyro.sample("warm", dist.Uniform(0.0, self.variance).mask(action == 1))
            pyro.sample("z", dist.Normal(state + warm, 1.0))

    for kind, site in [(Observed, "z"), (Moved, "jump"), (Hidden, "warm")]:
        episodes = simulate(kind(), RandomPolicy(2), 5, seed=0)
        with pytest.raises(UnsupportedModelError, match=rf"site '{site}' \(Uniform\): which values"):
            log_likelihood(kind(), episodes, FILTER)
    episodes = simulate(Walk(), RandomPolicy(2), 5, seed=0)
    with pytest.raises(ValueError, match=r"likelihood: .*without.*got a particle filter with a guide"):
        log_likelihood(Walk(), episodes, ParticleFilter(100, guide="ekf"))
