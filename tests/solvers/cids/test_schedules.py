from __future__ import annotations

import pytest

from solvers.cids.schedules import Constant, Geometric, Linear, as_schedule


def test_a_line_arrives_and_stays():
    line = Linear(4.0, 1.0, until=0.5)
    assert [line(p) for p in (0.0, 0.25, 0.5, 0.8, 1.0)] == [4.0, 2.5, 1.0, 1.0, 1.0]


def test_equal_times_are_equal_factors():
    curve = Geometric(8.0, 1.0, until=0.75)
    assert [curve(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([8.0, 4.0, 2.0, 1.0, 1.0])


def test_numbers_and_functions_are_schedules():
    assert as_schedule("temperature", 2)(0.3) == 2.0
    assert as_schedule("temperature", lambda progress: 1 - progress)(0.25) == 0.75
    assert as_schedule("temperature", Constant(0.0))(1.0) == 0.0


@pytest.mark.parametrize("value", [-1.0, "hot", None, True, float("nan"), float("inf"), lambda p: -p])
def test_what_is_no_schedule_is_refused_by_name(value):
    with pytest.raises(ValueError, match="temperature"):
        as_schedule("temperature", value)


def test_a_rate_of_zero_is_too_little():
    with pytest.raises(ValueError, match="learning_rate"):
        as_schedule("learning_rate", 0.0, positive=True)


@pytest.mark.parametrize("settings", [dict(start=0.0, end=1.0), dict(start=1.0, end=0.0)])
def test_equal_factors_need_positive_ends(settings):
    with pytest.raises(ValueError, match="positive"):
        Geometric(**settings)


@pytest.mark.parametrize("kind", [Linear, Geometric])
def test_arrival_is_within_the_fit(kind):
    with pytest.raises(ValueError, match="until"):
        kind(2.0, 1.0, until=1.5)
