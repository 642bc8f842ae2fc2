"""Densities against scipy: right where a value is possible, `-inf` where it is not, and differentiable."""

from __future__ import annotations

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from scipy import stats

from cpomdp_ppl import CPOMDP, Episodes, RandomPolicy, simulate
from cpomdp_ppl.errors import DegenerateWeightsError, UnsupportedModelError
from cpomdp_ppl.inference import GridFilter, ObservableOperator, ParticleFilter
from cpomdp_ppl.inference.density import equal, log_density
from cpomdp_ppl.inference.precision import double_precision
from cpomdp_ppl.inference.sampling import draw
from tests.distributions import CASES

INF = float("inf")
CONTEXTS = torch.arange(3).reshape(-1, 1, 1)
NO_DENSITY = {
    "GaussianScaleMixture",
    "LinearHMM",
    "RelaxedBernoulliStraightThrough",
    "RelaxedOneHotCategoricalStraightThrough",
}


@pytest.fixture(autouse=True)
def no_validation():
    """As in the engine."""
    before = td.Distribution._validate_args
    with pyro.validation_enabled(False):
        td.Distribution.set_default_validate_args(False)
        yield
    td.Distribution.set_default_validate_args(before)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def precision(request):
    """Of the program; records are in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def scored(name: str, values: torch.Tensor) -> np.ndarray:
    fn = CASES[name].at(CONTEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = log_density(fn, values.reshape(1, len(values), 1, *fn.event_shape))
    return found.expand(3, len(values), 1)[..., 0].double().numpy()


@pytest.mark.parametrize("name", sorted(name for name, case in CASES.items() if case.oracle is not None))
def test_every_distribution(name, precision):
    case = CASES[name]
    values = case.recorded(torch.float32)
    if name in NO_DENSITY:
        with pytest.raises(UnsupportedModelError, match=f"{name} has no density"):
            scored(name, values)
        return
    with np.errstate(divide="ignore"):
        truth = [[float(case.truth(c).log_density(v.double().numpy())) for v in values] for c in range(3)]
    tolerance = case.rough + (3e-5 if precision == torch.float32 else 1e-6)
    np.testing.assert_allclose(scored(name, values), truth, rtol=tolerance, atol=tolerance)
    if case.outside:
        outside = torch.tensor(np.array(case.outside)).to(case.dtype or torch.float32)
        assert (scored(name, outside) == -np.inf).all()


def of(p: float, kind: str) -> dict[str, torch.Tensor]:
    """A probability as such, or as log-odds."""
    return {"probs": torch.tensor(p)} if kind == "probs" else {"logits": torch.tensor(p).logit()}


@pytest.mark.parametrize("kind", ["probs", "logits"])
@pytest.mark.parametrize("p", [0.0, 1e-30, 0.2, 1.0])
def test_counts_of_probabilities_near_zero_and_one(kind, p, precision):
    pairs = [
        (dist.Bernoulli(**of(p, kind)), stats.bernoulli(p), [0, 1]),
        (dist.Binomial(4, **of(p, kind)), stats.binom(4, p), range(5)),
        (dist.Geometric(**of(p, kind)), stats.geom(p, loc=-1), range(4)),
        (dist.NegativeBinomial(torch.tensor(2.5), **of(p, kind)), stats.nbinom(2.5, 1 - p), range(4)),
    ]
    for fn, oracle, values in pairs:
        if (p == 1 and isinstance(fn, dist.NegativeBinomial)) or (p == 0 and isinstance(fn, dist.Geometric)):
            continue  # they would never end
        with np.errstate(divide="ignore", invalid="ignore"):
            truth = [oracle.logpmf(k) for k in values]
        if p == 1e-30 and isinstance(fn, dist.NegativeBinomial):  # scipy cannot hold 1 - p
            ways = (1.0, 2.5, 4.375, 6.5625)
            truth = [np.log(w) + k * np.log(p) for k, w in enumerate(ways)]
        found = log_density(fn, torch.tensor([float(k) for k in values]))
        np.testing.assert_allclose(found.numpy(), truth, rtol=1e-5, atol=1e-6, err_msg=type(fn).__name__)


def test_classes_without_a_chance(precision):
    for kind in ("probs", "logits"):
        table = torch.tensor([0.25, 0.75, 0.0])
        given = {kind: table if kind == "probs" else table.log()}
        truth = np.array([np.log(0.25), np.log(0.75), -np.inf])
        np.testing.assert_allclose(log_density(dist.Categorical(**given), torch.arange(3)), truth, rtol=1e-6)
        np.testing.assert_allclose(
            log_density(dist.OneHotCategorical(**given), torch.eye(3)), truth, rtol=1e-6
        )
        counts = torch.tensor([[1.0, 2.0, 0.0], [0.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
        truth = stats.multinomial(3, table.numpy()).logpmf(counts.numpy())  # the last do not add up to 3
        np.testing.assert_allclose(log_density(dist.Multinomial(3, **given), counts), truth, rtol=1e-6)


def test_unlikely_is_not_impossible():
    """Where a softmax or a difference of sigmoids underflows, the logarithm is known none the less."""
    fn = dist.Categorical(logits=torch.tensor([0.0, -200.0]))
    assert float(fn.probs[1]) == 0  # computed now, as a sampler would
    assert float(log_density(fn, torch.tensor(1))) == -200
    ordered = dist.OrderedLogistic(torch.tensor(-40.0), torch.tensor([0.0, 1.0]))
    np.testing.assert_allclose(
        float(log_density(ordered, torch.tensor(2))), stats.logistic.logsf(41), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_parameters_that_torch_has_completed_and_expanded(kind):
    """A distribution with both of its parameters does not tell which was given."""
    for p in (0.0, 1e-9, 0.3, 1.0):
        fn = dist.Bernoulli(**of(p, kind))
        assert fn.probs is not None
        assert fn.logits is not None
        found = log_density(fn.expand([2]), torch.tensor([0.0, 1.0]))
        with np.errstate(divide="ignore"):
            truth = [np.log1p(-p), np.log(p)]
        np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-6)
    table = torch.tensor([0.3, 0.7, 0.0])
    fn = dist.Categorical(**{kind: table if kind == "probs" else table.log()})
    assert fn.probs is not None
    assert fn.logits is not None
    found = log_density(fn.expand([3]), torch.arange(3))
    np.testing.assert_allclose(found, [np.log(0.3), np.log(0.7), -np.inf], rtol=1e-6)


def test_large_counts_keep_their_digits():
    """The terms are of 10⁷ nats, of which float32 holds one digit behind the point."""
    n, k, p, rate = 1_000_000, 300_100.0, float(np.float32(0.3)), float(np.float32(1.5e-4))
    pairs = [
        (dist.Poisson(torch.tensor(3e5)), stats.poisson(3e5)),
        (dist.Binomial(n, torch.tensor(p)), stats.binom(n, p)),
        (dist.BetaBinomial(torch.tensor(30.0), torch.tensor(70.0), n), stats.betabinom(n, 30, 70)),
        (dist.GammaPoisson(torch.tensor(50.0), torch.tensor(rate)), stats.nbinom(50, rate / (1 + rate))),
    ]
    for fn, oracle in pairs:
        found = float(log_density(fn, torch.tensor(k)))
        np.testing.assert_allclose(found, oracle.logpmf(k), atol=2e-3, err_msg=type(fn).__name__)


def test_transforms_of_what_is_bounded():
    chain = [td.transforms.SigmoidTransform(), td.transforms.AffineTransform(0.0, 2.0)]
    fn = dist.TransformedDistribution(dist.Normal(0.0, 1.0), chain)
    found = log_density(fn, torch.tensor([0.5, 3.0, -1.0]))
    inside = stats.norm.logpdf(np.log(1 / 3)) - np.log(0.25 * 0.75) - np.log(2)
    np.testing.assert_allclose(found, [inside, -np.inf, -np.inf], rtol=1e-5)
    fn = dist.TransformedDistribution(dist.Exponential(1.0), [td.transforms.AffineTransform(1.0, -2.0)])
    np.testing.assert_allclose(
        log_density(fn, torch.tensor([0.0, 2.0])), [-0.5 - np.log(2), -np.inf], rtol=1e-6
    )
    fn = dist.TransformedDistribution(dist.Normal(0.0, 1.0), [td.transforms.AbsTransform()])
    with pytest.raises(UnsupportedModelError, match=r"site 'z' \(TransformedDistribution\) has no density"):
        log_density(fn, torch.tensor(1.0), "z")


def test_draws_of_many_components_are_possible():
    """In float32 they add up to 1 but for some 10⁻⁶."""
    fn = dist.Dirichlet(torch.full((2000,), 5.0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert bool(torch.isfinite(log_density(fn, fn.sample([200]))).all())


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda p: dist.Bernoulli(0 * p), [1.0]),
        (lambda p: dist.Binomial(3, 0 * p), [0.0]),
        (lambda p: dist.Binomial(3, 0 * p + 1), [1.0]),
        (lambda p: dist.Geometric(0 * p + 1), [2.0]),
        (lambda p: dist.NegativeBinomial(torch.tensor(2.0), 0 * p), [0.0]),
        (lambda p: dist.Poisson(0 * p), [0.0]),
        (lambda p: dist.Poisson(0 * p), [2.0]),
        (lambda p: dist.Poisson(p), [-1.0]),
        (lambda p: dist.LogNormal(p, 1.0), [-1.0]),
        (lambda p: dist.Gamma(p, p), [-1.0]),
        (lambda p: dist.Uniform(0.0 * p, p), [3.0]),
        (lambda p: dist.Categorical(torch.stack([p, 0 * p], -1)), [1]),
        (lambda p: dist.Multinomial(2, torch.stack([p, 0 * p], -1)), [[2.0, 0.0]]),
        (lambda p: dist.Multinomial(2, torch.stack([p, 0 * p], -1)), [[1.0, 1.0]]),
        (
            lambda p: dist.MixtureSameFamily(
                dist.Categorical(torch.tensor([0.5, 0.5])), dist.Bernoulli(torch.stack([0 * p, 0 * p], -1))
            ),
            [1.0],
        ),
        (lambda p: dist.ZeroInflatedPoisson(p, gate=0 * p + 1), [2.0]),
        (lambda p: dist.Delta(p, log_density=p), [1.0]),
    ],
)
def test_gradients_are_numbers(make, value):
    p = torch.tensor([0.3], requires_grad=True)
    found = log_density(make(p), torch.tensor(value))
    likelihood = (0.5 + 0.5 * found.exp()).log().sum()  # something else is possible
    (gradient,) = torch.autograd.grad(likelihood, p, allow_unused=True)
    assert gradient is None or bool(torch.isfinite(gradient).all())


def test_equal_up_to_rounding_but_whole_numbers_exactly():
    recorded = torch.tensor([0.3, 0.3, 1e-9, 2.0**20, 7.0])
    computed = torch.tensor([0.1 * 3, 0.30001, 2e-9, 2.0**20 + 1, 7.0], dtype=torch.float64)
    assert equal(recorded, computed).tolist() == [True, False, False, False, True]


class Gauge(CPOMDP):
    """Three states that are read off a gauge, whose unit the context decides."""

    contexts, actions, horizon, states = 2, 1, 4, 3

    def initial(self, context):
        return pyro.sample("s", dist.Categorical(torch.ones(3) / 3))

    def transition(self, state, action, context):
        return pyro.sample("s", dist.Categorical(torch.ones(3) / 3))

    def observation(self, state, action, context):
        unit = torch.where(context == 1, 0.3, 0.1)
        pyro.sample("z", dist.Delta(unit * state + 0.7))
        both = torch.stack(torch.broadcast_tensors(0.1 * state, 0.01 * state - 0.3), -1)
        pyro.sample("v", dist.Delta(both, event_dim=1))

    def reward(self, state, action, context):
        return 0.0 * state


class ContinuousGauge(Gauge):
    """The same, read off the sign of a state in the continuum."""

    states = None

    def initial(self, context):
        return pyro.sample("s", dist.Normal(0.0, 1.0))

    def transition(self, state, action, context):
        return pyro.sample("s", dist.Normal(0.0, 1.0))

    def observation(self, state, action, context):
        super().observation(torch.where(state > 0, 1.0, 2.0), action, context)


@pytest.mark.parametrize(
    ("model", "backend", "log_p"),
    [
        (Gauge(), ObservableOperator(), -np.log(3)),
        (Gauge(), ParticleFilter(num_particles=300), -np.log(3)),
        (ContinuousGauge(), GridFilter(num_points=64), -np.log(2)),
        (ContinuousGauge(), ParticleFilter(num_particles=300), -np.log(2)),
    ],
    ids=["exact", "finite smc", "grid", "smc"],
)
def test_readings_without_noise(model, backend, log_p):
    """Drawn in float32, scored in whatever precision: every reading has the probability of its state."""
    episodes = simulate(model, RandomPolicy(1), 20, contexts=1, seed=0)
    z = episodes.observations["z"]
    found = backend.run(model, episodes, seed=0).increments  # [B, T, C]
    error = 5 * np.sqrt(2 / 300) if isinstance(backend, ParticleFilter) else 1e-3
    np.testing.assert_allclose(found[..., 1], log_p, atol=error)
    possible = (z[..., None] - 0.7 - 0.1 * torch.arange(3)).abs().amin(-1) < 1e-5  # in the other unit, too
    assert ((found[..., 0] > -torch.inf) == (possible & (z < 0.71))).all()


@pytest.mark.parametrize("backend", [ObservableOperator(), ParticleFilter(num_particles=100)])
def test_a_reading_that_no_state_gives(backend):
    model = Gauge()
    episodes = simulate(model, RandomPolicy(1), 3, seed=0)
    for site, value in episodes.observations.items():
        observations = {**episodes.observations, site: value + 1e-4}
        wrong = Episodes(episodes.actions, observations, episodes.observed)
        with pytest.raises(DegenerateWeightsError, match=f"'{site}'"):
            backend.run(model, wrong, seed=0)


def test_a_continuous_bernoulli_that_torch_has_moved_is_refused():
    with pytest.raises(UnsupportedModelError, match="moves probabilities away from 0 and 1"):
        log_density(dist.ContinuousBernoulli(torch.tensor(0.0)), torch.tensor(0.5))


def test_draws_at_the_end_of_the_unit_interval(monkeypatch):
    """The largest uniform number there is must not find a category of probability zero, nor cut tails."""
    rand = torch.rand

    def largest(*size, dtype=None, **kwargs):
        dtype = dtype or torch.get_default_dtype()
        return torch.full_like(rand(*size, dtype=dtype, **kwargs), 1 - torch.finfo(dtype).eps / 2)

    monkeypatch.setattr(torch, "rand", largest)
    probs = torch.tensor([1.0] * 3 + [1e-3] * 40 + [0.0]) / 3.04
    assert int(draw(dist.Categorical(probs), torch.Size((1, 1, 1)), True)) == 42
    for loc in (torch.tensor(0.0), torch.zeros(1, 1, 1)):
        far = draw(dist.HalfNormal(loc + 1), torch.Size((1, 1, 1)), True)
        assert far.dtype == torch.float32
        np.testing.assert_allclose(far.item(), stats.halfnorm.isf(2**-50), rtol=1e-6)
    with double_precision():
        p = torch.tensor(1 - 1e-12)
        assert float(draw(dist.Bernoulli(p), torch.Size((1, 1, 1)), True)) == 0
