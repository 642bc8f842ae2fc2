"""Run folders: what goes on, what is refused, and what is kept when something goes wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from shutil import rmtree

import pytest
import torch

from cpomdp_command import main
from cpomdp_ppl import Episodes, RandomPolicy, evaluate
from cpomdp_ppl.cli import Recipe, diagnose
from cpomdp_ppl.diagnostics import calibrate
from cpomdp_ppl.models import LineGrid
from tests.cli.conftest import FIT_COIN, LINE_GRID, SMALL, change_record, interrupted, read, refused


@pytest.mark.slow
def test_the_same_fit_is_taken_up_and_another_is_refused(here, capsys):
    before = Path("here/history.csv").read_bytes()
    assert main([*FIT_COIN, "--quiet"]) == 0
    assert Path("here/history.csv").read_bytes() == before  # with the seconds that it took: not run again

    evaluate_planner = ("evaluate", LINE_GRID, "--policy", "pft", "--num-episodes", "2", "--run")
    planner = (*evaluate_planner, "planner", "horizon=2")
    assert main([*planner, "--simulations", "3"]) == 0
    for words, said in (
        ([*FIT_COIN, "--iterations", "5"], "settings = {'iterations': 4}, but expected {'iterations': 5}"),
        ([*FIT_COIN, "horizon=5"], "arguments = {}, but expected {'horizon': '5'}"),
        ([*evaluate_planner, "here"], "command = 'fit', but expected 'evaluate'"),
        ([*planner, "--simulations", "2"], "{'simulations': 3}, but expected {'simulations': 2}"),
    ):
        assert said in refused(capsys, *words)


def test_the_solution_of_another_model(here, capsys):
    said = refused(capsys, "evaluate", "here", "--model", "coin.py:Coin", "--argument", "bias=0.7")
    assert "solution.json was made with constants" in said
    said = refused(capsys, "compare", LINE_GRID, "--solution", "here")
    assert "solution.json was made with" in said
    # A file that has moved, with the arguments of the run.
    Path("coin.py").rename("moved.py")
    assert "coin.py any more: say where it is now with --model" in refused(capsys, "evaluate", "here")
    assert main(["evaluate", "--model", "moved.py:Coin", "here", "--num-episodes", "8"]) == 0
    assert capsys.readouterr().err.startswith("evaluation: ")  # the same code, so that no warning is due


def test_weights_that_are_damaged(here, capsys):
    (weights,) = Path("here/solution").glob("policy-*.pt")
    weights.write_bytes(b"nonsense")
    assert f"{weights.name} holds something else than weights" in refused(capsys, "evaluate", "here")


@pytest.fixture
def simulated():
    """A folder without a solution."""
    words = ["--policy", "random", "--num-episodes", "4", "--seed", "0", "--run", "here"]
    assert main(["simulate", LINE_GRID, *words, "--quiet"]) == 0


@pytest.mark.usefixtures("simulated")
def test_run_folders_that_will_not_do(capsys):
    assert "it is of the command 'simulate', not of a fit" in refused(capsys, "evaluate", "here")
    said = refused(capsys, "run", "here", "--policy", "random")
    assert "here is a run folder, where its solution acts" in said
    change_record("here", finished=False)
    said = refused(capsys, "evaluate", "here")
    assert "half-written" in said
    assert "left episodes.npz, returns.csv" in said
    change_record("here", finished=True, model="nonsense")
    assert "model: expected module:Class or file.py:Class, got nonsense" in refused(capsys, "report", "here")
    change_record("here", model=LINE_GRID, format=2)
    said = refused(capsys, "report", "here")
    assert "is of format 2, and this version of cpomdp-ppl reads format 1" in said


@pytest.mark.slow
def test_a_full_disk(capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = [*FIT_COIN, "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "the disk is full: here/run.json could not be written" in refused(capsys, *words)
    saved = torch.save

    def torch_full(content, path):
        saved(content, path)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torch_full)
        said = refused(capsys, *words)
        assert "the disk is full: here/checkpoint/checkpoint.pt could not be written" in said
    assert main(words) == 0
    assert read("here/run.json")["finished"] is True


def test_a_folder_that_cannot_be_written_is_found_out_before_the_work(capsys, monkeypatch):
    words = ["evaluate", LINE_GRID, "--policy", "random", "--num-episodes", "4", "--run", "here"]
    assert main(words) == 0

    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def worked(*_, **__):
        raise AssertionError("all that work")

    monkeypatch.setattr(os, "replace", denied)
    monkeypatch.setattr(Recipe, "made", worked)
    assert ": Permission denied" in refused(capsys, *words)


ODD = """
from cpomdp_ppl.models import LineGrid

class Odd(LineGrid):
    def __init__(self, walls, costs=None, far=0.0):
        super().__init__(horizon=3)
        assert isinstance(walls, tuple), walls
        assert costs is None or set(costs) == {1, 2}, costs
        self.far = float(far)
        assert self.far in (0.0, float("inf")), far
"""


@pytest.mark.slow
def test_arguments_come_back_as_they_were(capsys):
    Path("odd.py").write_text(ODD)
    odd = ["odd.py:Odd", "walls=(1, 2)", "costs={1: 2.0, 2: 'x'}", "far=1e999"]
    assert main(["fit", *odd, *SMALL, "--run", "here", "--quiet"]) == 0
    assert main(["evaluate", "here", "--num-episodes", "4", "--quiet"]) == 0
    arguments = {"walls": "(1, 2)", "costs": "{1: 2.0, 2: 'x'}", "far": "1e999"}
    assert read("here/run.json")["arguments"] == arguments
    # As JSON would have had it: a list, which is not what it was.
    change_record("here", arguments={"walls": [1, 2]})
    said = refused(capsys, "evaluate", "here")
    assert "does not say what the argument walls was" in said
    assert "--model odd.py:Odd --argument walls=…" in said
    words = ["--model", "odd.py:Odd", "--argument", "walls=(1, 2)", "--argument", "far=1e999"]
    assert main(["evaluate", *words, "here", "--num-episodes", "4"]) == 0


@pytest.mark.slow
def test_the_noted_seed_repeats_the_run(monkeypatch):
    # Thompson sampling: which action is best is found by playing, and what it draws is drawn, too.
    words = ["simulate", LINE_GRID, "--policy", "thompson", "--num-episodes", "40", "--quiet"]
    seeds = []
    made = Recipe.made

    def noted(self, name, model, budget):
        seeds.append(budget.seed)
        return made(self, name, model, budget)

    monkeypatch.setattr(Recipe, "made", noted)
    assert main([*words, "--run", "one"]) == 0
    seed = read("one/run.json")["seed"]
    assert main([*words, "--run", "two", "--seed", str(seed)]) == 0
    assert main([*words, "--run", "one"]) == 0  # begins again, with the seed that is noted there
    assert seeds == [seed] * 3
    one, two = (Episodes.load(f"{name}/episodes.npz") for name in ("one", "two"))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.rewards, two.rewards)


FIT_TILTED = ("fit", LINE_GRID, "horizon=2", *SMALL, "--quiet", "--prior", "0.9,0.1")


@pytest.mark.slow
def test_a_solution_that_has_changed_is_measured_again(capsys):
    assert main([*FIT_TILTED, "--seed", "1", "--run", "mine"]) == 0
    words = ["compare", LINE_GRID, "horizon=2", "--policies", "random", "--solution", "mine"]
    words += ["--num-episodes", "40", "--run", "table"]
    assert main(words) == 0
    # One rule: what the solution was learned for.
    truth = evaluate(LineGrid(horizon=2), RandomPolicy(3), 40, prior=(0.9, 0.1), seed=0)
    assert read("table/comparison.json")["random"]["evaluation"]["entropy"]["mean"] == truth.entropy.mean
    assert main(["evaluate", "mine", "--num-episodes", "40", "--quiet"]) == 0
    both = read("mine/evaluation.json"), read("table/comparison.json")["mine"]["evaluation"]
    assert both[0]["returns"] == both[1]["returns"]
    capsys.readouterr()
    assert main(words) == 0
    assert "mine: measured before" in capsys.readouterr().err

    rmtree("mine")
    assert main([*FIT_TILTED, "--seed", "2", "--run", "mine"]) == 0
    assert main(words) == 0
    err = capsys.readouterr().err
    assert "random: measured before" in err
    assert "mine: the solution has changed, and is measured again" in err
    assert main([*FIT_TILTED[:-2], "--seed", "2", "--run", "other"]) == 0
    assert "say which with --prior" in refused(capsys, *words[:-2], "--solution", "other")


@pytest.mark.slow
def test_former_results_do_not_stay_beside_new_ones(monkeypatch):
    assert main([*FIT_TILTED, "--seed", "1", "--run", "here"]) == 0
    priors = []

    def noted(*arguments, prior, **settings):
        priors.append(prior.tolist())
        return calibrate(*arguments, prior=prior, **settings)

    monkeypatch.setattr(diagnose, "calibrate", noted)
    words = ["diagnose", "here", "--num-episodes", "2", "--draws", "5", "--likelihood", "exact", "--quiet"]
    assert main([*words, "--calibrate", "40"]) in (0, 1)
    assert priors == [[0.9, 0.1]]
    assert Path("here/calibration.json").exists()
    with monkeypatch.context() as patch:  # what fails leaves what was there
        patch.setattr(diagnose, "to_inference_data", interrupted)
        assert main(words) == 130
    assert Path("here/calibration.json").exists()
    assert main(words) == 0
    assert not Path("here/calibration.json").exists()
    assert read("here/run.json")["added"]["diagnose"]["settings"]["calibrate"] is None
