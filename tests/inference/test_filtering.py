from __future__ import annotations

import re

import pytest
import torch

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter
from cpomdp_ppl.inference.scan import TimeBuffer
from cpomdp_ppl.models import LightDark


@pytest.fixture(scope="module")
def episodes():
    return simulate(LightDark(), RandomPolicy(3), 10, seed=0)


def test_it_prints_as_a_line_of_numbers(episodes):
    filtering = ParticleFilter(50).run(LightDark(), episodes, seed=0)
    number = r"(-?[\d.]+|inf)"
    expected = (
        rf"Filtering\(B=10, T=20, C=2, mean log p\(o\)={number}, smallest ESS={number}, "
        rf"largest standard error={number}, known=\['state_mean', 'state_variance'\], device='cpu'\)"
    )
    assert (found := re.fullmatch(expected, str(filtering)))
    evidence = (filtering.log_likelihood.exp() @ filtering.prior.double()).log().mean()
    assert float(found[1]) == pytest.approx(float(evidence), abs=0.01)
    assert float(found[2]) == pytest.approx(float(filtering.ess.min()), rel=0.01)


def test_it_says_nothing_of_what_there_is_not(episodes):
    text = repr(ExtendedKalmanFilter().run(LightDark(), episodes, moments=False))
    assert "known=[]" in text
    assert "ESS" not in text
    assert "error" not in text


def test_smoothing_prints_as_a_line(episodes):
    smoothing = ExtendedKalmanFilter().smooth(LightDark(), episodes, 7, seed=0)
    assert str(smoothing) == "Smoothing(method='RTS', B=10, T=20, C=2, M=7, states=['state'])"


def written(terms):
    series = TimeBuffer(len(terms))
    for t, term in enumerate(terms):
        series[t] = term
    return series.by_episode()


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (torch.bool, torch.int64, torch.float32),
    ],
)
def test_a_series_is_its_terms_in_a_stack(dtypes):
    terms = [torch.arange(6).reshape(2, 3).add(t).to(dtype) / 7 for t, dtype in enumerate(dtypes)]
    terms = [term.to(dtype) for term, dtype in zip(terms, dtypes, strict=True)]
    expected = torch.stack(terms).movedim(2, 0)  # [B, T, C]
    found = written(terms)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    nested = written([{"x": term, "y": {"z": -term.double()}} for term in terms])
    assert torch.equal(nested["x"], expected)
    assert torch.equal(nested["y"]["z"], -torch.stack([term.double() for term in terms]).movedim(2, 0))


@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (3,), (2, 3, 1)])
def test_terms_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"at step 1, but \[2, 3\] at the first"):
        written([torch.ones(2, 3), torch.ones(shape)])


def test_what_is_not_known_stays_so():
    assert written([None, None]) is None
