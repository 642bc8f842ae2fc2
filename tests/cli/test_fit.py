"""`cpomdp fit`: what is learned, where it starts from, and the verdict on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpomdp_command import main
from cpomdp_ppl.cli.model import ModelSpec
from solvers import cids
from solvers.cids import training
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.policy import LSTMPolicy
from tests.cli.conftest import COIN, FIT_COIN, SMALL, data_of, read, refused

RULE = """
def always_flip(history):
    return history.actions.new_zeros(history.num_episodes)
"""
COIN_WITH_RULE = COIN + RULE


def solution(place="here"):
    return cids.load(place, ModelSpec.of(["coin.py:Coin", "bias=0.8"]).build())


@pytest.mark.slow
def test_both_kinds_of_policy(here, capsys):
    assert type(solution().policy) is BeliefPolicy
    assert read("here/run.json")["settings"]["policy"] == "belief"
    assert main([*FIT_COIN[:-1], "lstm", "--policy", "lstm", "--quiet"]) == 0
    assert type(solution("lstm").policy) is LSTMPolicy
    assert main([*FIT_COIN[:-1], "variational", "--objective", "variational", "--quiet"]) == 0
    assert type(solution("variational").policy) is LSTMPolicy
    assert "invalid choice: 'tree'" in refused(capsys, *FIT_COIN[:-1], "tree", "--policy", "tree")
    assert "was made with settings" in refused(capsys, *FIT_COIN[:-1], "lstm", "--policy", "belief")


@pytest.mark.slow
def test_a_rule_to_start_from(here, capsys):
    Path("coin.py").write_text(COIN_WITH_RULE)
    words = [*FIT_COIN[:-1], "started", "--start", "coin.py:always_flip", "--quiet"]
    assert main(words) == 0
    settings = read("started/run.json")["settings"]
    assert settings["start"] == "coin.py:always_flip"
    assert len(settings["start_sha256"]) == 64
    assert main([*FIT_COIN[:-1], "by name", "--start", "random", "--quiet"]) == 0
    assert read("by name/run.json")["settings"]["start_sha256"] is None
    assert main(["report", "started", "--num-episodes", "1", "--quiet"]) == 0
    rows = {part["title"]: dict(part["rows"]) for part in data_of("started/report.html")["configuration"]}
    assert rows["Settings"]["start"] == "coin.py:always_flip"
    assert rows["Settings"]["policy"] == "belief"

    assert "there is no policy 'nobody'" in refused(capsys, *FIT_COIN[:-1], "x", "--start", "nobody")
    lstm = refused(capsys, *FIT_COIN[:-1], "y", "--start", "coin.py:always_flip", "--policy", "lstm")
    assert "--start: only a belief policy imitates a rule" in lstm
    assert not Path("x").exists()
    assert not Path("y").exists()
    Path("coin.py").write_text(COIN_WITH_RULE.replace("new_zeros", "new_ones"))
    assert "was made with" in refused(capsys, *words)


@pytest.mark.slow
def test_the_verdict_is_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(training, "FEWEST_EPISODES", 8)
    assert main([*FIT_COIN, "--quiet"]) == 0
    out, err = capsys.readouterr()
    found = solution().verdict
    assert out.splitlines()[-1] == found.sentence
    assert not found.solved  # after a few batches
    assert err == ""
    assert main(["evaluate", "here", "--num-episodes", "4", "--quiet"]) == 0
    assert main(["report", "here", "--num-episodes", "1", "--quiet"]) == 0
    data = data_of("here/report.html")
    assert data["solved"] == {"likelihood": "exact", "sentence": found.sentence, "solved": False}


@pytest.mark.slow
def test_the_likelihood_that_was_chosen_is_told(capsys):
    """`auto` is as if nothing was said."""
    words = ["fit", "cpomdp_ppl.models:LightDark", "horizon=2", "--iterations", "1", "--batch-size", "4"]
    assert main([*words, "--likelihood", "auto", "--seed", "1", "--run", "dark"]) == 0
    assert read("dark/run.json")["settings"]["likelihood"] is None
    backend = solution_of_dark().policy.backend
    assert backend.name == "smc"
    assert main(["report", "dark", "--num-episodes", "1", "--quiet"]) == 0
    assert data_of("dark/report.html")["solved"] == {
        "likelihood": backend.label,
        "sentence": None,
        "solved": None,
    }


def solution_of_dark():
    return cids.load("dark", ModelSpec.of(["cpomdp_ppl.models:LightDark", "horizon=2"]).build())


def test_help_says_what_the_defaults_are(capsys):
    assert main(["fit", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("{belief,lstm}", "default: belief, or lstm if variational", "path/to/file.py:name"):
        assert words in shown
    assert SMALL[0] in shown
