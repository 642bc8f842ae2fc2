"""How fast schedules go by: evenly, unless nothing improves any more."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from solvers.cids.pace import Pace


def paced(pace, earned, worth=None, told=None):
    """Advance to the end by functions of the iteration, as a fit does; the progress of each iteration."""
    progress = []
    while not pace.ended and len(progress) < pace.iterations:
        i = len(progress)
        progress.append(pace.progress)
        now = earned(i)
        pace.advance(now, now if worth is None else worth(i), math.nan if told is None else told(i))
    return progress


def noise(seed=0, sd=0.1):
    rng = np.random.default_rng(seed)
    return lambda: float(rng.normal(scale=sd))


def test_while_something_is_learned_it_goes_evenly_to_the_end():
    progress = paced(Pace(200, trivial=0.0), lambda i: 1.0 + i)
    assert len(progress) == 200
    np.testing.assert_allclose(progress, np.arange(200) / 199, atol=1e-9)


def test_what_is_found_out_and_what_the_told_earn_count_as_well():
    """Neither hurries while the return itself stays where it is."""
    draw = noise()
    for settings in ({"worth": lambda i: 0.1 * i}, {"told": lambda i: 0.1 * i}):
        assert len(paced(Pace(200, trivial=0.0), lambda i: 1.0 + draw(), **settings)) == 200


@pytest.mark.parametrize("seed", range(3))
def test_it_hurries_when_nothing_improves(seed):
    draw = noise(seed)
    progress = paced(Pace(400, trivial=0.0), lambda i: 1.0 + draw())
    assert 40 < len(progress) < 300
    assert max(np.diff(progress)) > 1.5 / 399


def test_it_takes_its_time_while_nothing_was_found():
    """To earn what doing the same thing all the time earns is not to have finished."""
    draw = noise()
    progress = paced(Pace(300, trivial=1.0), lambda i: 0.5 + draw())
    np.testing.assert_allclose(progress, np.arange(300) / 299, atol=1e-9)


@pytest.mark.parametrize("iterations", [2, 7, 60, 400])
@pytest.mark.parametrize("level", [-1.0, 1.0])
def test_it_never_ends_before_schedules_are_through(iterations, level):
    """The last iteration is at progress 1, and none goes back."""
    draw = noise()
    progress = paced(Pace(iterations, trivial=0.0), lambda i: level + draw())
    assert progress[0] == 0.0
    assert progress[-1] == pytest.approx(1.0)
    assert progress == sorted(progress)
    assert max(progress) <= 1.0
    assert len(progress) <= iterations


def test_a_single_iteration_is_one():
    assert paced(Pace(1, trivial=0.0), lambda i: 1.0) == [0.0]


@pytest.mark.parametrize("at", [0, 1, 25, 70])
def test_it_goes_on_from_a_saved_state(at):
    """Through JSON, as a checkpoint might write it; from any iteration."""
    draw = noise(3)
    series = [1.0 + draw() for _ in range(150)]

    def told(i):
        return min(i, 30) / 30

    whole = paced(Pace(150, trivial=0.0), lambda i: series[i], told=told)
    pace, again = Pace(150, trivial=0.0), Pace(150, trivial=0.0)
    for i in range(at):
        pace.advance(series[i], series[i], told(i))
    again.load_state_dict(json.loads(json.dumps(pace.state_dict())))
    rest = []
    for i in range(at, len(whole)):
        rest.append(again.progress)
        again.advance(series[i], series[i], told(i))
    assert whole[at:] == rest
    assert len(whole) < 150  # it hurried, after the break as before
