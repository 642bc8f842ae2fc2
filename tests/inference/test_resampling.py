from __future__ import annotations

import pytest
import torch

from cpomdp_ppl.inference.resampling import SCHEMES, Systematic

GENERATOR = torch.Generator()


def offspring(scheme, weights, num):
    """Offspring counts of `num` independent resamplings of one row of weights, `[num, N]`."""
    N = len(weights)
    GENERATOR.manual_seed(0)
    uniforms = torch.rand(num, scheme.num_uniforms(N), generator=GENERATOR)
    ancestors = scheme(weights.expand(num, N), uniforms)
    assert ancestors.shape == (num, N)
    return torch.zeros(num, N).scatter_add(1, ancestors, torch.ones(num, N))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", ["spread", "sparse", "uniform", "single"])
def test_offspring_are_unbiased(name, kind):
    """E[offspring of i] = N W_i within 4.5 s.e.; nothing comes from nothing."""
    weights = {
        "spread": torch.tensor([0.05, 0.3, 0.15, 0.21, 0.29]),
        "sparse": torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0]),
        "uniform": torch.full((5,), 0.2),
        "single": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]),
    }[kind]
    counts = offspring(SCHEMES[name], weights, 20_000)
    assert bool((counts.sum(1) == 5).all())
    error = counts.std(0) / len(counts) ** 0.5
    assert bool(((counts.mean(0) - 5 * weights).abs() <= 4.5 * error + 1e-6).all())
    assert not bool(counts[:, weights == 0].any())


@pytest.mark.parametrize("name", ["systematic", "residual"])
def test_offspring_stay_near_their_expectation(name):
    weights = torch.tensor([0.05, 0.3, 0.15, 0.21, 0.29])
    counts = offspring(SCHEMES[name], weights, 1000)
    assert bool((counts >= (5 * weights).floor()).all())
    if name == "systematic":
        assert bool((counts <= (5 * weights).ceil()).all())


def test_systematic_is_the_textbook_search():
    GENERATOR.manual_seed(1)
    weights = torch.rand(50, 40, generator=GENERATOR, dtype=torch.float64)
    weights /= weights.sum(1, keepdim=True)
    u = torch.rand(50, 1, generator=GENERATOR, dtype=torch.float64)
    points = (torch.arange(40) + u) / 40
    expected = torch.stack(
        [torch.searchsorted(w.cumsum(0), p, right=True) for w, p in zip(weights, points, strict=True)]
    )
    assert torch.equal(Systematic()(weights, u), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_many_particles_in_single_precision_stay_in_range(name):
    """Cumulative sums that miss 1 must not produce index N."""
    N = 100_000
    GENERATOR.manual_seed(2)
    weights = torch.rand(2, N, generator=GENERATOR)
    weights /= weights.sum(1, keepdim=True)
    scheme = SCHEMES[name]
    for u in (0.0, 1 - 2**-24):
        ancestors = scheme(weights, torch.full((2, scheme.num_uniforms(N)), u))
        assert ancestors.shape == (2, N)
        assert int(ancestors.min()) >= 0
        assert int(ancestors.max()) < N
