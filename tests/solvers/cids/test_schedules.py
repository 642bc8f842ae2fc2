from __future__ import annotations

import pytest

from solvers.cids.schedules import Constant, Geometric, Linear, as_schedule


def test_numbers_and_functions_are_schedules():
    assert as_schedule("temperature", 2)(0.3) == 2.0
    assert as_schedule("temperature", lambda progress: 1 - progress)(0.25) == 0.75
    assert as_schedule("temperature", Constant(0.0))(1.0) == 0.0


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Linear(4.0, 1.0, until=0.5), [4.0, 2.5, 1.0, 1.0, 1.0]),
        (Geometric(8.0, 1.0, until=0.75), [8.0, 4.0, 2.0, 1.0, 1.0]),
    ],
)
def test_they_arrive_and_stay(schedule, values):
    assert [schedule(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(values)


@pytest.mark.parametrize(
    "value", [-1.0, "hot", None, True, float("nan"), float("inf"), lambda p: -p, lambda: 1]
)
def test_what_is_no_schedule_is_refused_by_name(value):
    with pytest.raises(ValueError, match="temperature"):
        as_schedule("temperature", value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: as_schedule("learning_rate", 0.0, positive=True), "learning_rate"),
        (lambda: Geometric(0.0, 1.0), "positive"),
        (lambda: Geometric(1.0, 0.0), "positive"),
        (lambda: Linear(2.0, 1.0, until=1.5), "until"),
        (lambda: Geometric(2.0, 1.0, until=1.5), "until"),
    ],
)
def test_settings_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()
