from __future__ import annotations

import re

import pytest
import torch

from cpomdp_ppl import RandomPolicy, evaluate, progress
from cpomdp_ppl.models import LineGrid


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def test_lines_tell_how_far_it_is_and_how_long_it_takes(clock):
    """A step takes 2 seconds: the first line comes with the first step, the others every 10 seconds."""
    said = []
    with progress.bar(said.append, 100, "sums", "terms", initial=40) as shown:
        for _ in range(60):
            clock.now += 2.0
            shown.set_postfix_str("so far 3.1", refresh=False)
            shown.update()
    assert said[0] == "sums: 41 of 100 terms, so far 3.1; 2 min left"
    assert said[1] == "sums: 46 of 100 terms, so far 3.1; 2 min left"
    assert said[-1] == "sums: 96 of 100 terms, so far 3.1; 8 s left"
    assert len(said) == 12


def test_what_else_there_is_to_say_does_not_make_lines_more_frequent(clock):
    said = []
    with progress.bar(said.append, 300, "sums", "terms") as shown:
        for _ in range(300):
            clock.now += 0.1
            shown.set_postfix_str("batch by batch")
            shown.update()
    assert len(said) == 3  # after 1, 11 and 21 of 30 seconds


def test_what_is_quick_needs_no_lines(clock):
    said = []
    with progress.bar(said.append, 10, "sums", "terms") as shown:
        for _ in range(10):
            clock.now += 0.01
            shown.update()
        shown.set_postfix_str("nearly done")
    assert said == []


@pytest.mark.parametrize("value", ["bar", 1, None])
def test_what_is_no_way_to_show_progress(value):
    with pytest.raises(ValueError, match=r"^progress: expected"):
        progress.bar(value, 3, "sums", "terms")


def test_an_evaluation_shows_every_decision(monkeypatch):
    """With the filter to come after the last of each batch, and then nothing more."""
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    said = []
    quiet = evaluate(LineGrid(horizon=3), RandomPolicy(3), 10, batch_size=5)
    shown = evaluate(LineGrid(horizon=3), RandomPolicy(3), 10, batch_size=5, progress=said.append)
    assert shown.returns == quiet.returns
    done = [
        re.match(r"playing: (\d+) of 30 decisions(, context posteriors)?; .* left$", line) for line in said
    ]
    counts = [(int(each[1]), each[2] is not None) for each in done]
    half = [(5, False), (10, False), (15, False), (15, True)]
    assert counts == [*half, *((n + 15, waits) for n, waits in half)]


def test_a_bar_counts_decisions_too(capsys):
    evaluate(LineGrid(horizon=3), RandomPolicy(3), 10, progress=True)
    assert "30/30" in capsys.readouterr().err
    evaluate(LineGrid(horizon=3), lambda h: torch.zeros(h.num_episodes, dtype=torch.long), 10)
    assert capsys.readouterr().err == ""
