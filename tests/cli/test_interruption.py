"""Ctrl-C and kill -9: what is kept, and how to go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from cpomdp_command import main
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.models import LineGrid
from solvers import cids
from tests import ROOT
from tests.children import environment, start_python, wait_for
from tests.cli.conftest import LINE_GRID, data_of, interrupted, read, refused

FIT = ("fit", LINE_GRID, "horizon=4", "--likelihood", "exact", "--batch-size", "8", "--seed", "5")
FIT += ("--iterations", "80", "--checkpoint-every", "5", "--run", "here")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:iteration .* the information about the context")  # batches are small
@pytest.mark.parametrize("policy", ["belief", "lstm"])
def test_a_fit_that_is_killed_and_stopped_goes_on_and_ends_as_if_it_had_not_been(policy, capsys, monkeypatch):
    # kill -9: the best so far is in the checkpoint.
    words = (*FIT, "--policy", policy)
    process = start_python("-m", "cpomdp_ppl", *words, stderr=subprocess.DEVNULL)
    wait_for(Path("here/checkpoint/checkpoint.pt").exists, process)
    process.kill()
    process.communicate()
    assert not Path("here/solution").exists()
    assert "half-written" in refused(capsys, "evaluate", "here")
    assert main(["evaluate", "here", "--unfinished", "--num-episodes", "8", "--quiet"]) == 0
    assert main(["report", "here", "--unfinished", "--num-episodes", "1", "--quiet"]) == 0
    data = data_of("here/report.html")
    assert data["player"]["likelihood"] == "exact"
    found = cids.load("here/checkpoint", LineGrid(horizon=4))
    start = 3.0 if policy == "lstm" else found.settings["temperature"]["start"]
    assert dict(data["configuration"][2]["rows"])["temperature"].startswith(f"Geometric(start={start}")
    assert not found.finished
    done = found.history.sizes["iteration"]
    assert done % 5 == 0
    assert done < 60

    # Ctrl-C: so is a solution.
    def press(iteration, measured, policy):
        if iteration == 63:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(cids, "fit", partial(cids.fit, callbacks=[press]))
        capsys.readouterr()
        assert main(words) == 130
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert re.search(r"stopped after 6[34] of 80 iterations; the best policy so far is in here/solution", err)
    assert "to go on from the last checkpoint: cpomdp fit cpomdp_ppl.models:LineGrid horizon=4" in err
    assert read("here/run.json")["finished"] is False
    assert "half-written" in refused(capsys, "evaluate", "here")
    assert main(["evaluate", "here", "--unfinished", "--num-episodes", "8"]) == 0

    assert main([*words, "--quiet"]) == 0
    settings = dict(likelihood="exact", batch_size=8, iterations=80, seed=5, progress=False)
    whole = cids.fit(LineGrid(horizon=4), policy=policy, **settings)
    again = cids.load("here/solution", LineGrid(horizon=4))
    assert again.history["return"].values.tolist() == whole.history["return"].values.tolist()
    for name, weight in whole.policy.state_dict().items():
        assert torch.equal(again.policy.state_dict()[name], weight), name
    assert read("here/run.json")["finished"] is True
    assert main(["evaluate", "here", "--num-episodes", "8", "--quiet"]) == 0


def test_ctrl_c_before_anything_is_written(capsys, monkeypatch):
    monkeypatch.setattr(ModelSpec, "build", interrupted)
    assert main(["fit", LINE_GRID]) == 130
    assert capsys.readouterr().err == "cpomdp: stopped, before anything was written\n"


def test_ctrl_c_while_torch_is_imported(elsewhere):
    Path("slow").mkdir()
    Path("slow/torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    path = f"{elsewhere / 'slow'}{os.pathsep}{ROOT}"
    script = "import cpomdp_command; cpomdp_command.entry()"
    process = start_python(script, stderr=subprocess.PIPE, env=environment(PYTHONPATH=path))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "cpomdp: stopped, before anything was written\n"


def test_what_begins_again_does_not_say_that_it_goes_on(capsys, monkeypatch):
    words = ["evaluate", LINE_GRID, "--policy", "random", "--run", "a folder"]
    with monkeypatch.context() as patch:
        patch.setattr("cpomdp_ppl.cli.evaluate.take_stock", interrupted)
        assert main(words) == 130
    err = capsys.readouterr().err
    assert "stopped, before anything was written; to begin again: cpomdp evaluate" in err
    assert "--run 'a folder'" in err
    words = ["simulate", LINE_GRID, "--policy", "random", "--run", "other", "--num-episodes", "4"]
    with monkeypatch.context() as patch:
        patch.setattr("cpomdp_ppl.experiments.run_folder.RunFolder.write_table", interrupted)
        assert main(words) == 130
    assert "stopped; other has episodes.npz; to begin again: " in capsys.readouterr().err
