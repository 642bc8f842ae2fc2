"""Because of a record alone, no code is run but what was run before, or is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cpomdp_command import main
from tests.cli.conftest import COIN, FIT_COIN, LINE_GRID, change_record, read, refused

TRACE = "open('was_here', 'w')\n"
"""Code that leaves a trace if it is run."""


def simulated(run):
    words = ["--policy", "random", "--num-episodes", "4", "--run", run, "--quiet"]
    assert main(["simulate", LINE_GRID, *words]) == 0


@pytest.mark.parametrize("spec", ["here/evil.py:Evil", "./here/../here/evil.py:Evil", "here.evil:Evil"])
def test_no_code_is_run_from_a_run_folder(capsys, spec):
    simulated("here")
    Path("here/evil.py").write_text(TRACE)
    Path("here/__init__.py").write_text(TRACE)
    change_record("here", model=spec)
    for command in ("evaluate", "diagnose", "report"):
        assert "no code is run from there" in refused(capsys, command, "here")
    assert not Path("was_here").exists()


@pytest.mark.parametrize(
    "spec", ["d.evil:X", "evil_beside:X", "runs/evil_beside.py:X", "{here}/runs/evil_beside.py:X"]
)
def test_code_beside_a_run_folder_is_not_run(elsewhere, capsys, monkeypatch, spec):
    simulated("runs/d")
    for path in ("runs/d/evil.py", "runs/evil_beside.py"):
        Path(path).write_text(TRACE)
    monkeypatch.syspath_prepend(str(elsewhere / "runs"))
    source = read("runs/d/run.json")["source"]
    for recorded in (source, None, {"path": "evil_beside.py", "sha256": "0"}):
        change_record("runs/d", model=spec.format(here=elsewhere), source=recorded)
        for command in ("evaluate", "report"):
            assert "if you trust it, say which it is with --model" in refused(capsys, command, "runs/d")
    assert not Path("was_here").exists()


def test_code_that_has_changed(elsewhere, here, coin_fit, capsys, monkeypatch):
    source = read(coin_fit / "run.json")["source"]
    assert source["path"] == str((coin_fit.parent / "coin.py").resolve())
    assert source["sha256"] == hashlib.sha256(COIN.encode()).hexdigest()

    # From another directory, the file is the one that it was, not the one of its name there.
    (elsewhere / "deep").mkdir()
    (elsewhere / "deep" / "coin.py").write_text(TRACE)
    monkeypatch.chdir(elsewhere / "deep")
    assert main(["evaluate", "../here", "--num-episodes", "4"]) == 0
    assert not Path("was_here").exists()
    monkeypatch.chdir(elsewhere)

    Path("coin.py").write_text(COIN.replace("-1.0", "-2.0"))
    assert "made with code of the model (sha256) = " in refused(capsys, *FIT_COIN)
    said = refused(capsys, "evaluate", "here")
    assert "coin.py has changed since here was made" in said
    assert "--model coin.py:Coin" in said
    assert main(["evaluate", "here", "--model", "coin.py:Coin", "--num-episodes", "4"]) == 0
    assert "cpomdp: warning: coin.py is not the code that here was made with" in capsys.readouterr().err


def test_installed_code_that_has_changed_is_warned_of(capsys):
    simulated("here")
    assert main(["report", "here", "--num-episodes", "1"]) == 0
    assert "warning" not in capsys.readouterr().err
    change_record("here", source={**read("here/run.json")["source"], "sha256": "0"})
    assert main(["report", "here", "--num-episodes", "1"]) == 0
    assert "warning: the code of cpomdp_ppl.models:LineGrid has changed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_record_alone_runs_no_policy_but_one_beside_the_model(capsys):
    rule = "\ndef rule(history):\n    return torch.full((history.num_episodes,), 1)\n"
    with open("coin.py", "a") as file:
        file.write(rule)
    Path("rules.py").write_text(f"import torch\n{rule}")
    for number, policy in enumerate(("coin.py:rule", "rules.py:rule")):
        words = ["evaluate", "coin.py:Coin", "bias=0.8", "--policy", policy, "--num-episodes", "4"]
        assert main([*words, "--run", f"run{number}", "--quiet"]) == 0
    assert main(["report", "run0", "--num-episodes", "1", "--quiet"]) == 0
    said = refused(capsys, "report", "run1", "--num-episodes", "1", "--quiet")
    assert "run1 is of the policy rules.py:rule, and no code is run because a record says so" in said
    assert "say --policy rules.py:rule" in said
    assert main(["report", "run1", "--policy", "rules.py:rule", "--num-episodes", "1", "--quiet"]) == 0
