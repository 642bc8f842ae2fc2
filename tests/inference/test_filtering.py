from __future__ import annotations

import re

import pytest

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter
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
