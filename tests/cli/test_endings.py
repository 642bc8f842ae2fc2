"""Commands about a model whose episodes end, whose rewards are discounted, and whose actions are numbers."""

from __future__ import annotations

from pathlib import Path

import arviz as az
import pytest
import torch

from cpomdp_command import main
from cpomdp_ppl import Episodes, evaluate
from cpomdp_ppl.inference import ParticleFilter
from solvers import cids
from tests.cli.conftest import data_of, read, refused, rows_of
from tests.programs import Sail

SAIL, REEF = "tests.programs:Sail", "tests.programs:Reef"
MINE = """
import torch

def ahead(history):
    return torch.tensor([[0.5, 1.0]]).expand(history.num_episodes, 2)

def lost(history):
    return torch.full((history.num_episodes, 2), float("nan"))

def overboard(history):
    return torch.full((history.num_episodes, 2), 7.0)

def narrow(history):
    return torch.zeros(history.num_episodes, 1)
"""


@pytest.mark.slow
def test_from_check_to_report(capsys):
    assert main(["check", SAIL]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == "Sail: no faults in 2 contexts, actions of 2 numbers, at most 4 steps, discount 0.8"

    assert main(["simulate", SAIL, "--policy", "random", "--num-episodes", "40", "--seed", "1"]) == 0
    played = Episodes.load("runs/Sail-simulate-1/episodes.npz")
    assert played.actions.shape == (40, 4, 2)
    total = sum(
        float(row["return"]) * int(row["episodes"]) for row in rows_of("runs/Sail-simulate-1/returns.csv")
    )
    worth = sum(
        0.8**t * float(played.rewards[b, t]) for b in range(40) for t in range(int(played.lengths[b]))
    )
    assert total == pytest.approx(worth, rel=1e-4)

    few, smc = "smc,num_particles=16", "smc,num_particles=256"
    words = ["--iterations", "2", "--batch-size", "8", "--likelihood", few, "--seed", "5", "--quiet"]
    assert main(["fit", SAIL, *words, "--run", "here"]) == 0
    words = ["--num-episodes", "60", "--likelihood", smc, "--seed", "2"]
    capsys.readouterr()
    assert main(["evaluate", "here", *words]) == 0
    assert "\nended " in capsys.readouterr().out
    assert main(["evaluate", "here", *words, "--run", "elsewhere"]) == 0
    found, again = read("here/evaluation.json"), read("elsewhere/evaluation.json")
    solution = cids.load("here/solution", Sail())
    mine = evaluate(Sail(), solution.policy, 60, likelihood=ParticleFilter(256), prior=solution.prior, seed=2)
    for name in ("returns", "entropy", "ended", "end_time", "regret"):
        assert found[name] == again[name]
    assert found["returns"]["mean"] == mine.returns.mean
    assert found["ended"]["mean"] == mine.ended.mean
    assert found["end_time"]["mean"] == mine.end_time.mean

    assert main(["run", "here", "--num-episodes", "2", "--num-runs", "3", "--likelihood", few]) == 0
    assert len(rows_of("here/algorithm_1.csv")) == 6
    words = [
        "--num-episodes",
        "3",
        "--draws",
        "10",
        "--calibrate",
        "30",
        "--likelihood",
        few,
        "--chains",
        "2",
    ]
    assert main(["diagnose", "here", *words]) == 0
    data = az.from_netcdf("here/episodes.nc")
    lasted = data.constant_data["length"].values.tolist()
    assert min(lasted) < 4
    states = [row["quantity"] for row in rows_of("here/rhat.csv") if row["quantity"].startswith("state")]
    assert states == [f"state[{b}, {t}]" for b, length in enumerate(lasted) for t in range(length + 1)]
    assert data.constant_data["action_axis"].values.tolist() == ["steer", "drive"]
    assert "observations: ended" in read("here/calibration.json")["p_values"]
    assert main(["report", "here", "--num-episodes", "2"]) == 0
    page = data_of("here/report.html")
    assert [axis["name"] for axis in page["player"]["axes"]] == ["steer", "drive"]
    (ended,) = (each["value"] for each in page["headline"]["numbers"] if each["name"] == "Ended")
    assert ended == f"{100 * mine.ended.mean:.1f} %"


@pytest.mark.slow
def test_a_comparison_says_who_ended(capsys):
    Path("mine.py").write_text(MINE)
    words = ["--policies", "random,mine.py:ahead", "--num-episodes", "30", "--likelihood", "smc"]
    assert main(["compare", SAIL, *words, "--run", "one"]) == 0
    assert "| identified | ended | regret |" in capsys.readouterr().out
    ahead = rows_of("one/comparison.csv")[1]
    mine = evaluate(
        Sail(),
        lambda history: torch.tensor([[0.5, 1.0]]).expand(history.num_episodes, 2),
        30,
        likelihood="smc",
    )
    assert float(ahead["return"]) == pytest.approx(mine.returns.mean)
    assert float(ahead["ended"]) == pytest.approx(mine.ended.mean)
    assert float(ahead["end_time"]) == pytest.approx(mine.end_time.mean)
    assert main(["compare", SAIL, *words, "--run", "one"]) == 0  # from what was measured before
    assert float(rows_of("one/comparison.csv")[1]["ended"]) == pytest.approx(mine.ended.mean)


@pytest.mark.slow
def test_what_cannot_be_done_is_said(capsys):
    Path("mine.py").write_text(MINE)
    few = ("--num-episodes", "4")
    for name, message in (
        ("lost", "policy: expected within Box"),
        ("overboard", "policy: expected within Box"),
        ("narrow", "policy: expected real actions of shape [4, 2], got torch.float32 of shape [4, 1]"),
    ):
        assert message in refused(capsys, "simulate", SAIL, "--policy", f"mine.py:{name}", *few)
    assert "policy: expected int64 actions" in refused(
        capsys, "simulate", REEF, "--policy", "mine.py:ahead", *few
    )
    assert "Sail has continuous actions" in refused(capsys, "evaluate", SAIL, "--policy", "qmdp", *few)
