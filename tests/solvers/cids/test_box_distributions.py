"""Distributions over a box: against numerical integrals, scipy, and torch's own change of variables."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from scipy import stats
from torch.distributions import AffineTransform, Normal, SigmoidTransform, TransformedDistribution

from cpomdp_ppl.actions import Box
from solvers.cids.box_distributions import (
    EDGE,
    FAMILIES,
    FURTHEST_MEAN,
    LARGEST_LOG_SD,
    SMALLEST_LOG_SD,
    ScaledBeta,
    SquashedGaussian,
    as_family,
)
from tests.conftest import assert_mean

BOX = Box([-1.0, 10.0], [3.0, 10.5])
doubles = partial(torch.tensor, dtype=torch.float64)
CASES = [
    SquashedGaussian(BOX, doubles([0.3, -1.0]), doubles([0.4, 1.2])),
    SquashedGaussian(BOX, doubles([1.5, 0.0]), doubles([0.1, 2.0])),
    ScaledBeta(BOX, doubles([1.2, 7.0]), doubles([1.7, 3.0])),
    ScaledBeta(BOX, doubles([30.0, 1.0]), doubles([2.0, 1.4])),
]


def axis(case, d):
    """The distribution of one axis alone."""
    box = Box(case.box.low[d], case.box.high[d])
    return type(case)(box, case.first[d : d + 1], case.second[d : d + 1])


def integral(one, function):
    """`∫ p(x) f(x, log p(x)) dx` over a box of one axis, by the trapezoid rule in log-odds."""
    odds = torch.linspace(-13.8, 13.8, 6001, dtype=torch.float64)  # as far as the edge
    share, width = odds.sigmoid(), one.box.high[0] - one.box.low[0]
    x = one.box.low[0] + width * share
    log_p = one.log_prob(x[:, None])
    weights = width * share * (1 - share) * (odds[1] - odds[0])
    return float((log_p.exp() * function(x, log_p) * weights).sum())


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_densities_integrate_to_one_and_entropies_are_integrals(case):
    """On each axis, but for what is drawn at the very edge; entropies by 16 nodes are 0.02 off at most."""
    for d in range(2):
        one = axis(case, d)
        assert integral(one, lambda x, log_p: torch.ones_like(x)) == pytest.approx(1.0, abs=1e-3)
        assert float(one.entropy()) == pytest.approx(integral(one, lambda x, log_p: -log_p), abs=0.02)
    by_axis = [axis(case, d) for d in range(2)]
    value = doubles([0.7, 10.2])
    parts = [one.log_prob(value[d : d + 1]) for d, one in enumerate(by_axis)]
    torch.testing.assert_close(case.log_prob(value), parts[0] + parts[1])
    torch.testing.assert_close(case.entropy(), by_axis[0].entropy() + by_axis[1].entropy())


def test_the_density_over_two_axes_integrates_to_one():
    """By the midpoints of 160,000 cells."""
    x, y = (torch.linspace(low, high, 401, dtype=torch.float64) for low, high in ((-1.0, 3.0), (10.0, 10.5)))
    middles = torch.cartesian_prod((x[1:] + x[:-1]) / 2, (y[1:] + y[:-1]) / 2)
    for case in (CASES[0], CASES[2]):
        total = case.log_prob(middles).exp().sum() * (x[1] - x[0]) * (y[1] - y[0])
        assert float(total) == pytest.approx(1.0, abs=4e-3)


def test_densities_are_those_of_torch_and_scipy():
    value = doubles([[0.7, 10.2], [-0.9, 10.01], [2.5, 10.49]])
    for case in CASES:
        for d in range(2):
            low, width = case.box.low[d], case.box.high[d] - case.box.low[d]
            first, second = case.first[d], case.second[d]
            if isinstance(case, SquashedGaussian):
                twice = AffineTransform(0.0, 2.0)
                into = AffineTransform(low, width)
                chain = TransformedDistribution(Normal(first, second), [twice, SigmoidTransform(), into])
                expected = chain.log_prob(value[:, d])
            else:
                expected = doubles(stats.beta(first, second, low, width).logpdf(value[:, d].numpy()))
                entropy = stats.beta(first, second, low, width).entropy()
                assert float(axis(case, d).entropy()) == pytest.approx(float(entropy))
            torch.testing.assert_close(axis(case, d).log_prob(value[:, d : d + 1]), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_draws_have_the_density(case):
    """Means of a few functions, axis by axis: 4.5 standard errors."""
    torch.manual_seed(0)
    draws = case.sample((20_000,))
    assert draws.shape == (20_000, 2)
    for d in range(2):
        one, x = axis(case, d), draws[:, d]
        low, width = case.box.low[d], case.box.high[d] - case.box.low[d]
        share = (x - low) / width
        assert_mean(share, integral(one, lambda x, _: (x - low) / width), "the mean")  # noqa: B023
        assert_mean(share**2, integral(one, lambda x, _: ((x - low) / width) ** 2), "the square")  # noqa: B023
        assert_mean(-one.log_prob(x[:, None]), integral(one, lambda _, log_p: -log_p), "the entropy")
        for threshold in (0.2, 0.5, 0.8):
            below = integral(one, lambda x, _: (x < low + threshold * width).double())  # noqa: B023
            sd = (below * (1 - below)) ** 0.5 + 0.05  # 0.0016 for the cell of the integral
            assert_mean((share < threshold).double(), below, f"below {threshold}", sd=sd)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_gradients_are_finite_differences(family):
    """Of log-densities, entropies, and of draws by numbers that are drawn alike, by both parameters."""
    outputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs.requires_grad_()
    value = doubles([[0.7, 10.2], [-0.9, 10.01], [2.5, 10.49], [0.0, 10.3], [1.0, 10.25]])
    previous = value.roll(1, 0)

    def densities(x):
        return family.of(BOX, x).near(previous, 0.7).log_prob(value)

    def entropies(x):
        return family.of(BOX, x).entropy()

    def drawn(x):
        torch.manual_seed(3)
        return family.of(BOX, x).rsample()

    for function in (densities, entropies, *([drawn] if family is SquashedGaussian else [])):
        assert torch.autograd.gradcheck(function, (outputs,), rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("box", [BOX, Box(-1e-3, 1e3), Box(1000.0, 1001.0)])
def test_extreme_outputs_have_finite_draws_and_densities_inside_the_box(family, dtype, box):
    extremes = torch.tensor([-1e30, -200.0, -5.0, 0.0, 5.0, 200.0, 1e6], dtype=dtype)
    outputs = torch.cartesian_prod(extremes, extremes)
    outputs = outputs.repeat_interleave(box.dim, 1).requires_grad_()
    found = family.of(box, outputs)
    torch.manual_seed(0)
    draws = found.sample((100,))
    assert bool(box.contains(draws).all())
    assert bool(box.contains(found.mode).all())
    log_probs = found.log_prob(draws)
    assert bool(log_probs.isfinite().all())
    (gradient,) = torch.autograd.grad((log_probs.sum() + found.entropy().sum()), outputs)
    assert bool(gradient.isfinite().all())


def test_what_a_network_says_is_bounded_but_always_heard():
    """A mean or a spread that has gone too far comes back: its gradient is never just zero."""
    x = torch.linspace(-15.0, 15.0, 301).requires_grad_()
    found = SquashedGaussian.of(Box(0.0, 1.0), torch.stack([x, x], -1))
    mean, log_sd = found.first[:, 0], found.second[:, 0].log()
    assert bool((mean.abs() <= FURTHEST_MEAN).all())
    assert bool(((log_sd >= SMALLEST_LOG_SD - 1e-6) & (log_sd <= LARGEST_LOG_SD + 1e-6)).all())
    for values in (mean, log_sd):
        (slope,) = torch.autograd.grad(values.sum(), x, retain_graph=True)
        assert bool((slope[x.abs() < 8] > 0).all())
        assert float(slope[150]) == pytest.approx(1.0)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_high_densities_are_right_in_single_precision(family):
    """Near a mode, narrow ones are 0.02 off at most, against the same in double precision."""
    parameters = (0.3, math.exp(-5.0)) if family is SquashedGaussian else (2e4, 1e4)
    single, double = (
        family(Box(-1.0, 1.0), *(torch.tensor([p], dtype=dtype) for p in parameters))
        for dtype in (torch.float32, torch.float64)
    )
    torch.manual_seed(0)
    draws = single.sample((500,))
    torch.testing.assert_close(single.log_prob(draws).double(), double.log_prob(draws), rtol=0, atol=0.02)
    torch.testing.assert_close(single.entropy().double(), double.entropy(), rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------ persistence


@pytest.mark.parametrize("family", FAMILIES.values())
def test_near_is_the_product_of_two_densities(family):
    """Up to a constant, and only where there was an action before."""
    outputs = torch.randn(1, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain, persistence = family.of(BOX, outputs), 1.3
    previous, grid = (
        doubles([0.7, 10.2]),
        torch.cartesian_prod(
            torch.linspace(-0.9, 2.9, 7, dtype=torch.float64),
            torch.linspace(10.05, 10.45, 7, dtype=torch.float64),
        ),
    )
    extra = math.expm1(persistence)
    share, before = ((x - doubles(BOX.low)) / doubles([4.0, 0.5]) for x in (grid, previous))
    if family is SquashedGaussian:
        x, centre = (0.5 * torch.logit(part) for part in (share, before))
        factor = -0.5 * extra * (x - centre).square()
    else:
        factor = 2 * extra * (before * share.log() + (1 - before) * (1 - share).log())
    expected = plain.log_prob(grid) + factor.sum(-1)
    found = plain.near(previous.expand(1, 2), persistence).log_prob(grid)
    torch.testing.assert_close(found - found[0], expected - expected[0])
    none = torch.full((1, 2), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(plain.near(none, persistence).log_prob(grid), plain.log_prob(grid))


@pytest.mark.parametrize("family", FAMILIES.values())
def test_wider_distributions_spread_as_with_noise_before_squashing(family):
    """Means of narrow ones stay, and the variance of shares is that of both together; 4.5 standard errors."""
    n, box, noise = 40_000, Box(0.0, 1.0), 0.1
    first, second = (0.3, 0.05) if family is SquashedGaussian else (120.0, 60.0)
    one = family(box, torch.full((n, 1), first).double(), torch.full((n, 1), second).double())
    assert one.wider(0.0) is one
    torch.manual_seed(0)
    before = torch.logit(one.sample()) / 2
    truth = torch.sigmoid(2 * (before + noise * torch.randn(n, 1))).double()
    drawn = one.wider(noise).sample()
    assert_mean(drawn - truth, 0.0, "the mean")
    off = (drawn - drawn.mean()).square() - (truth - truth.mean()).square()
    few = 0.0 if family is SquashedGaussian else 0.02 * float(truth.var())  # it is not the same family
    assert abs(float(off.mean())) < 4.5 * float(off.std()) / n**0.5 + few
    assert drawn.std() > 1.2 * one.sample().std()


@pytest.mark.slow
@pytest.mark.parametrize("run", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("family", FAMILIES.values())
def test_wide_distributions_repeat_their_actions_for_as_long_as_they_say(family, run):
    """Each action keeps `1 − exp(−persistence)` of what the one before was off the middle.

    So the correlations with all later ones add up to `exp(persistence)` steps. Of a Gaussian this holds
    before it is squashed. 4.5 standard errors of 2,000 chains.
    """
    persistence, n = math.log(run), 2000
    wide = SquashedGaussian.of(Box(0.0, 1.0), torch.zeros(n, 2).double())
    if family is ScaledBeta:
        wide = ScaledBeta(Box(0.0, 1.0), *torch.ones(2, n, 1).double())
    read = torch.logit if family is SquashedGaussian else lambda share: share - 0.5
    torch.manual_seed(0)
    action, kept, series = torch.full((n, 1), torch.nan).double(), 1 - 1 / run, []
    for _ in range(60):
        action = wide.near(action, persistence).sample()
        series.append(read(action[:, 0]))
    x = torch.stack(series, 1)  # [n, 60]
    before, after = x[:, 20:-1], x[:, 21:]
    assert_mean(((after - kept * before) * before).mean(1), 0.0, "what is left of the correlation")


# --------------------------------------------------------------------------------------------- families


def test_families_are_chosen_by_name():
    assert as_family(None, None) is None
    assert as_family(BOX, None) is SquashedGaussian
    assert as_family(BOX, "beta") is ScaledBeta
    with pytest.raises(ValueError, match=r"distribution: .* a name out of \['squashed', 'beta'\]"):
        as_family(BOX, "normal")
    with pytest.raises(ValueError, match="distribution: expected None, as there are finitely many actions"):
        as_family(None, "beta")


@pytest.mark.parametrize("family", FAMILIES.values())
def test_first_decisions_are_wide_and_in_the_middle(family):
    found = family.of(BOX, torch.zeros(3, 4))
    assert found.batch_shape == (3,)
    assert found.event_shape == (2,)
    torch.testing.assert_close(found.mode, torch.tensor([1.0, 10.25]).expand(3, 2))
    assert float(found.axis_entropy().max()) > -0.2  # that of a uniform distribution is 0
    series = family.stack([found, family.of(BOX, torch.ones(3, 4))])
    assert series.batch_shape == (3, 2)
    torch.testing.assert_close(series.mode[:, 0], found.mode)
    assert EDGE < 1e-4
