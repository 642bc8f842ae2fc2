"""Z and moments of a standard normal times a probability, against quadrature and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from cpomdp_ppl.inference.moment_matching import LARGEST_ERROR, by_importance_sampling, by_quadrature

X = np.linspace(-12, 12, 2_000_001)


def poisson(rate, n):
    """`log Poisson(n; rate(x))` up to a constant, which is left out in the truth, too."""
    return lambda x: n * rate(x).log() - rate(x) - math.lgamma(n + 1)


def alarm(floor, threshold):
    return lambda x: (floor + (1 - 2 * floor) * (x > threshold).double()).log()


LINES = {
    "a count": poisson(lambda x: torch.exp(3 * x), 20),
    "a large count": poisson(lambda x: torch.exp(5 * x), 1e8),
    "none": poisson(lambda x: torch.exp(3 * x), 0),
    "two narrow peaks": poisson(lambda x: 50_000 / (1 + (x + 1) ** 2), 25_000),
    "a rare alarm": alarm(0.0, 4.0),
    "a rare alarm, or a false one": alarm(1e-6, 4.0),
    "a common alarm": alarm(1e-3, 1.0),
    "a slope": lambda x: torch.nn.functional.logsigmoid(20 * (x - 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_by_quadrature(name):
    log_f = LINES[name](torch.tensor(X)).numpy() + stats.norm.logpdf(X)
    w = np.exp(log_f - log_f.max())
    total, mean = w.sum(), (w * X).sum() / w.sum()
    sd = math.sqrt((w * (X - mean) ** 2).sum() / total)
    found = by_quadrature(lambda u: LINES[name](u[..., 0]), torch.zeros(1, 1, dtype=torch.float64))
    assert float(found.log_mass) == pytest.approx(log_f.max() + math.log(total * (X[1] - X[0])), abs=3e-3)
    assert float(found.mean) == pytest.approx(mean, abs=5e-3 * max(sd, 0.1))
    assert float(found.covariance) == pytest.approx(sd**2, rel=0.02)


def product(D, n, slope, level):
    """D counts that each depend on a number of their own: `Z` is a power of that on a line."""
    one = poisson(lambda x: torch.exp(level + slope * x), n)
    log_f = one(torch.tensor(X)).numpy() + stats.norm.logpdf(X)
    return (lambda u: one(u).sum(-1)), D * (
        log_f.max() + math.log(np.exp(log_f - log_f.max()).sum() * (X[1] - X[0]))
    )


@pytest.mark.slow
@pytest.mark.parametrize("D", [2, 4, 8])
@pytest.mark.parametrize(
    ("n", "slope", "level"), [(0, 1.0, 0.0), (7, 1.0, 1.0), (1500, 1.0, 4.0), (3, 3.0, 0.0)]
)
def test_by_importance_sampling(D, n, slope, level):
    """However far away: 1,500 is seven standard deviations from what the belief expects, in every number."""
    log_p, expected = product(D, n, slope, level)
    found = by_importance_sampling(log_p, torch.zeros(1, 1, D, dtype=torch.float64))
    assert float(found.error) < 0.05
    assert float(found.log_mass) == pytest.approx(expected, abs=3 * float(found.error))


@pytest.mark.parametrize("width", [0.2, 0.05])
def test_peaks_on_both_sides(width):
    """Mirror images in the plane, a tenth or a fortieth as wide as they are apart."""
    peaks = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)

    def log_p(u):
        return (-0.5 * ((u[..., None, :] - peaks) / width).square().sum(-1)).logsumexp(-1)

    found = by_importance_sampling(log_p, torch.zeros(1, 1, 2, dtype=torch.float64))
    density = stats.multivariate_normal.pdf([1, 1], cov=np.eye(2) * (1 + width**2))
    assert float(found.log_mass) == pytest.approx(math.log(2 * density * 2 * math.pi * width**2), abs=0.03)
    centre = 1 / (1 + width**2)
    np.testing.assert_allclose(found.mean[0, 0], [centre, 0], atol=0.02)
    assert float(found.covariance[0, 0, 1, 1]) == pytest.approx(centre**2 + width**2 * centre, rel=0.03)


@pytest.mark.parametrize("D", [1, 3])
def test_nothing_learned_is_nothing_changed(D):
    weigh = by_quadrature if D == 1 else by_importance_sampling
    found = weigh(lambda u: torch.full(u.shape[:3], -1.5).double(), torch.zeros(2, 3, D).double())
    assert (found.log_mass == -1.5).all()
    assert (found.mean == 0).all()
    assert torch.equal(found.covariance, torch.eye(D).double().expand(2, 3, D, D))


@pytest.mark.parametrize("D", [1, 3])
def test_impossible(D):
    weigh = by_quadrature if D == 1 else by_importance_sampling
    found = weigh(lambda u: torch.full(u.shape[:3], -torch.inf).double(), torch.zeros(1, 1, D).double())
    assert float(found.log_mass) == -math.inf
    assert float(found.error) == 0


def test_what_is_not_settled_says_so():
    """A comb with many more teeth than there are points."""
    found = by_importance_sampling(
        lambda u: 40 * (torch.sin(50 * u) - 1).sum(-1), torch.zeros(1, 1, 4).double()
    )
    assert float(found.error) > LARGEST_ERROR


def test_rows_do_not_look_at_each_other():
    rates = torch.tensor([[3.0], [-1.0], [40.0]]).double()[..., None]  # [3, 1, 1]

    def log_p(u):
        return (rates[: len(u)] * u[..., 0]) - torch.exp(u[..., 1].clamp(max=20))

    together = by_importance_sampling(log_p, torch.zeros(3, 1, 2).double())
    alone = by_importance_sampling(log_p, torch.zeros(1, 1, 2).double())
    assert float(together.log_mass[0]) == pytest.approx(float(alone.log_mass[0]), abs=1e-9)
