from __future__ import annotations

import ast
import csv
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from shutil import copytree, rmtree

import arviz as az
import pytest
import torch

from cpomdp_command import entry, main
from cpomdp_ppl import Episodes, RandomPolicy, evaluate, simulate
from cpomdp_ppl.cli import COMMANDS, Recipe, compare, diagnose
from cpomdp_ppl.cli.figures import is_installed
from cpomdp_ppl.cli.model import ModelSpec, as_value
from cpomdp_ppl.cli.report import likelihood_of
from cpomdp_ppl.diagnostics import calibrate
from cpomdp_ppl.evaluation import Evaluation
from cpomdp_ppl.experiments.run_folder import RunFolder
from cpomdp_ppl.inference import GridFilter, ObservableOperator, ParticleFilter
from cpomdp_ppl.models import LineGrid
from solvers import cids

ROOT = Path(__file__).parent.parent
LINE_GRID = "cpomdp_ppl.models:LineGrid"

COIN = """
import pyro
import pyro.distributions as dist
import torch
from sides import FAIR
from cpomdp_ppl import CPOMDP

class Coin(CPOMDP):
    contexts, actions, states = ("fair", "loaded"), ("flip", "call fair", "call loaded"), 1

    def __init__(self, bias, horizon=4):
        super().__init__()
        self.bias, self.horizon = bias, horizon

    def initial(self, context):
        return torch.zeros((), dtype=torch.long)

    def transition(self, state, action, context):
        return state

    def observation(self, state, action, context):
        heads = torch.where(context == 0, FAIR, self.bias)
        pyro.sample("heads", dist.Bernoulli(heads).mask(action == 0))

    def reward(self, state, action, context):
        return torch.where(action == 0, 0.0, torch.where(action == context + 1, 1.0, -1.0))

class Broken(Coin):
    def __init__(self):
        super().__init__(0.9)

    def reward(self, state, action, context):
        return torch.where(action == 0, float("nan"), 0.0)

class Picky(Coin):
    def __init__(self, size):
        raise ValueError(f"a size of {size} will not do")

class NoModel:
    pass

constant = 3
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A directory with a model of the user's, which imports what lies beside it, and nothing else."""
    (tmp_path / "coin.py").write_text(COIN)
    (tmp_path / "sides.py").write_text("FAIR = 0.5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    """As if matplotlib were not installed: drawing takes longest."""
    monkeypatch.setattr("cpomdp_ppl.cli.figures.is_installed", lambda module: module != "matplotlib")


def read(path):
    return json.loads(Path(path).read_text())


def refused(capsys, *words):
    """What the command says when it refuses, in one sentence and without any result."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cpomdp: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


QUICK = ("--iterations", "4", "--batch-size", "8", "--likelihood", "exact", "--seed", "5")


def test_a_model_of_ones_own_from_check_to_report(elsewhere, capsys):
    coin = ("coin.py:Coin", "bias=0.8")
    assert main(["check", *coin]) == 0
    assert capsys.readouterr().out == "Coin: no faults in 2 contexts, 3 actions, 4 steps\n"

    words = ["--policy", "random", "--num-episodes", "50", "--contexts", "loaded", "--seed", "1"]
    assert main(["simulate", *coin, *words]) == 0
    played = Episodes.load("runs/Coin-simulate-1/episodes.npz")
    model = ModelSpec.of(coin).build()
    mine = simulate(model, RandomPolicy(3), 50, contexts="loaded", seed=1)
    assert torch.equal(played.rewards, mine.rewards)
    with open("runs/Coin-simulate-1/returns.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["context"] == "loaded"
    assert float(row["return"]) == pytest.approx(float(mine.returns.mean()))

    assert main(["fit", *coin, *QUICK, "--run", "here"]) == 0
    fitted = cids.fit(model, iterations=4, batch_size=8, likelihood="exact", seed=5, progress=False)
    kept = cids.load("here/solution", model)
    for name, weight in fitted.policy.state_dict().items():
        assert torch.equal(kept.policy.state_dict()[name], weight), name
    with open("here/history.csv") as file:
        history = list(csv.DictReader(file))
    assert [float(row["return"]) for row in history] == fitted.history["return"].values.tolist()
    record = read("here/run.json")
    assert (record["command"], record["seed"], record["finished"]) == ("fit", 5, True)
    assert (record["model"], record["arguments"]) == ("coin.py:Coin", {"bias": "0.8"})
    assert (record["settings"]["iterations"], record["settings"]["objective"]) == (4, "information")

    assert main(["evaluate", "here", "--num-episodes", "64", "--seed", "2"]) == 0
    found, expected = read("here/evaluation.json"), fitted.evaluate(64, seed=2)
    assert found["returns"]["mean"] == expected.returns.mean
    assert found["entropy"]["mean"] == expected.entropy.mean
    assert found["likelihood"] == "exact"

    words = ["--num-episodes", "4", "--draws", "20", "--calibrate", "40", "--likelihood", "exact"]
    assert main(["diagnose", "here", *words]) == 0
    assert set(az.from_netcdf("here/episodes.nc").groups()) >= {"posterior", "sample_stats", "observed_data"}
    assert read("here/calibration.json")["calibrated"] is True
    with open("here/rhat.csv") as file:
        rows = {row["quantity"]: row for row in csv.DictReader(file)}
    posterior = az.from_netcdf("here/episodes.nc").posterior["is_context"].mean(("chain", "draw"))
    assert float(rows["is_context[0, fair]"]["mean"]) == pytest.approx(float(posterior[0, 0]), abs=1e-5)
    figures = {path.name for path in Path("here/figures").iterdir()}
    names = ("solution", "contexts", "states", "filter", "calibration")
    assert figures == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert set(read("here/run.json")["added"]) == {"evaluate", "diagnose"}

    capsys.readouterr()
    assert main(["report", "here", "--num-episodes", "2"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert "call loaded" in page.read_text()


@pytest.mark.usefixtures("undrawn")
def test_algorithm_1(elsewhere, capsys, monkeypatch):
    coin = ["fit", "coin.py:Coin", "bias=0.8", *QUICK, "--prior", "dirichlet", "--run", "here", "--quiet"]
    assert main(coin) == 0
    words = ["run", "here", "--context", "loaded", "--num-episodes", "3", "--num-runs", "5", "--seed", "4"]
    words += ["--likelihood", "exact"]
    assert main(words) == 0
    model = ModelSpec.of(["coin.py:Coin", "bias=0.8"]).build()
    solution = cids.load("here/solution", model)
    lived = cids.run(
        model, "loaded", 3, solution=solution, num_runs=5, likelihood="exact", seed=4, progress=False
    )
    with open("here/algorithm_1.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["return"]) for row in rows] == lived.returns.flatten().tolist()
    assert [float(row["P(loaded)"]) for row in rows] == lived.posteriors[:, 1:, 1].flatten().tolist()
    assert {row["true_context"] for row in rows} == {"loaded"}
    assert "run" in az.from_netcdf("here/algorithm_1.nc").groups()
    assert read("here/run.json")["added"]["run"]["settings"]["context"] == "loaded"

    def interrupted(*_, **__):
        raise cids.RunInterrupted(lived)

    monkeypatch.setattr(cids, "run", interrupted)
    capsys.readouterr()
    assert main([*words[:4], "--num-episodes", "9"]) == 130
    assert "stopped after 3 of 9 episodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fit", "no_such_module:Coin"], "there is no module 'no_such_module'"),
        (["fit", "cpomdp_ppl.no_such:Coin"], "there is no module 'cpomdp_ppl.no_such'"),
        (["fit", "missing.py:Coin"], "there is no file missing.py"),
        (["fit", "coin.py:Dime"], "coin.py has no class 'Dime'; it has Coin, Broken, Picky"),
        (["fit", "json:Coin"], "json has no class 'Coin'; it has no CPOMDP at all"),
        (["fit", "coin.py:NoModel"], "is the class NoModel, but expected a subclass of cpomdp_ppl.CPOMDP"),
        (["fit", "coin.py:constant"], "is a int, but expected a subclass"),
        (["fit", "coin.py:CPOMDP"], "expected a subclass of cpomdp_ppl.CPOMDP"),
        (["fit", "coin.py"], "model: expected module:Class or file.py:Class, got coin.py"),
        (["fit", "coin.py:Coin"], "Coin needs the argument 'bias': add bias=…"),
        (["fit", "coin.py:Coin", "bais=0.9"], "Coin takes no argument 'bais'; it takes bias, horizon"),
        (["fit", "coin.py:Broken", "name=3"], "Broken takes no argument 'name'; it takes none"),
        (["fit", "coin.py:Coin", "0.9"], "arguments: expected key=value after the model, got 0.9"),
        (["fit", "coin.py:Coin", "bias=1", "bias=2"], "expected each once, got bias twice"),
        (["fit", "coin.py:Picky", "size=3"], "cannot be made: ValueError: a size of 3 will not do"),
        (["fit", LINE_GRID, "--iterations", "0"], "--iterations: expected a positive integer, got 0"),
        (["fit", LINE_GRID, "--iterations", "1.5"], "--iterations: expected a positive integer, got 1.5"),
        (["fit", LINE_GRID, "--batch-size", "many"], "--batch-size: expected a positive integer, got many"),
        (
            ["fit", LINE_GRID, "--learning-rate", "nan"],
            "--learning-rate: expected a positive number, got nan",
        ),
        (["fit", LINE_GRID, "--temperature=-1"], "--temperature: expected a number, not negative, got -1"),
        (["fit", LINE_GRID, "--seed", "-3"], "--seed: expected an integer from 0 to 2**32 - 1, got -3"),
        (["fit", LINE_GRID, "--prior", "0.5,0.6"], "--prior: expected probabilities that sum to 1"),
        (["fit", LINE_GRID, "--prior", "half,half"], "--prior: expected probabilities that sum to 1"),
        (["fit", LINE_GRID, "--likelihood", "magic"], "--likelihood: likelihood: expected one of smc, ekf"),
        (["fit", LINE_GRID, "--likelihood", "smc,num_particles=0"], "num_particles: expected a positive"),
        (
            ["fit", LINE_GRID, "--likelihood", "exact,speed=3"],
            "--likelihood: exact: expected no settings, got speed",
        ),
        (["fit", LINE_GRID, "--likelihood", "smc,foo=3"], "smc: expected settings out of num_particles, "),
        (["fit", LINE_GRID, "--objective", "magic"], "--objective: invalid choice: 'magic'"),
        (["fit", LINE_GRID, "--itrations", "3"], "unrecognized arguments: --itrations"),
        (["fit"], "the following arguments are required: MODEL"),
        (["fti"], "argument COMMAND: invalid choice: 'fti'"),
        (["--verbose"], "the following arguments are required: COMMAND"),
        (["evaluate", "nowhere"], "nowhere is not a run folder: there is no such folder"),
        (["evaluate", "."], "is not a run folder: it has no run.json"),
        (["evaluate", LINE_GRID], "is a model, so say who acts in it: --policy random"),
        (["evaluate", LINE_GRID, "--policy", "magic"], "there is no policy 'magic'; there are random,"),
        (
            ["evaluate", LINE_GRID, "--policy", ":rule"],
            "policy: expected a name, module:name or path/to/file.py:name, got :rule",
        ),
        (["evaluate", LINE_GRID, "--policy", "nowhere.py:rule"], "there is no file nowhere.py"),
        (["compare", LINE_GRID, "--policies", "sides.py:rule"], "sides.py has no policy 'rule'; it has no"),
        (
            ["compare", LINE_GRID, "--policies", "coin.py:Coin"],
            "coin.py:Coin is the class Coin, but expected a function of a History, an object with `start`",
        ),
        (["compare", LINE_GRID, "--policies", "sides.py:FAIR"], "sides.py:FAIR is a float, but expected"),
        (["simulate", LINE_GRID, "--policy", "random", "--contexts", "north"], "contexts: expected"),
        (
            ["run", LINE_GRID, "--policy", "random", "--context", "north"],
            "--context: expected one of detector",
        ),
        (["compare", LINE_GRID], "whom to compare?"),
        (["compare", LINE_GRID, "--policies", "random,random"], "each once, got random,random"),
        (["compare", LINE_GRID, "--policies", ","], "expected names joined by commas"),
        (["diagnose", "nowhere", "--calibrate", "0"], "--calibrate: expected a positive integer, got 0"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(elsewhere, capsys, words, said):
    assert said in refused(capsys, *words)
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_prior_of_another_length(capsys):
    assert "prior: expected" in refused(capsys, "fit", LINE_GRID, "--prior", "0.2,0.3,0.5", "--quiet")
    assert not list(Path("runs").iterdir())


def test_a_backend_that_does_not_serve_the_model(capsys):
    said = refused(capsys, "fit", "cpomdp_ppl.models:LightDark", "--likelihood", "exact", "--quiet")
    assert "exact: LightDark does not say that it has finitely many states" in said
    assert not list(Path("runs").iterdir())  # not even a folder


def test_what_goes_wrong_in_a_users_file_is_said(elsewhere, capsys):
    Path("half.py").write_text("class Coin(\n")
    assert "half.py cannot be imported: SyntaxError" in refused(capsys, "check", "half.py:Coin")
    Path("needy.py").write_text("import no_such_package\n")
    said = refused(capsys, "check", "needy.py:Coin")
    assert "needy.py cannot be imported: ModuleNotFoundError: No module named 'no_such_package'" in said
    assert main(["check", "needy.py:Coin", "--traceback"]) == 2
    assert 'needy.py", line 1' in capsys.readouterr().err


def test_a_module_of_the_current_directory(elsewhere, capsys):
    Path("module_beside.py").write_text("from cpomdp_ppl.models import LineGrid\n")
    before = list(sys.path)
    assert main(["check", "module_beside:LineGrid"]) == 0
    assert sys.path == before


def test_a_model_with_faults(elsewhere, capsys):
    assert main(["check", "coin.py:Broken"]) == 1
    assert "reward" in capsys.readouterr().out
    assert main(["fit", "coin.py:Broken"]) == 2
    err = capsys.readouterr().err
    assert "Broken has 1 fault" in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_a_fault_in_a_program_keeps_its_traceback(elsewhere, capsys, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("cpomdp_ppl.cli.evaluate.take_stock", broken)
    assert main(["evaluate", LINE_GRID, "--policy", "random"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: by zero" in err


def test_values_are_literals_or_text_and_never_run():
    assert as_value("(1, 2.5)") == (1, 2.5)
    assert as_value("None") is None
    assert as_value("north") == "north"
    assert as_value("__import__('os').getcwd()") == "__import__('os').getcwd()"
    assert as_value("") == ""


@pytest.mark.usefixtures("undrawn")
def shown(page):
    """The data of a report."""
    text = Path(page).read_text()
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.filterwarnings("ignore:iteration .* the information about the context")  # batches are small
@pytest.mark.usefixtures("undrawn")
def test_a_report_shows_what_was_in_force(elsewhere, capsys):
    words = ["fit", LINE_GRID, "horizon=3", "--iterations", "2", "--batch-size", "4", "--seed", "0"]
    assert main([*words, "--likelihood", "exact", "--run", "here", "--quiet"]) == 0
    assert main(["evaluate", "here", "--num-episodes", "4", "--quiet"]) == 0
    assert main(["report", "here", "--num-episodes", "1", "--quiet"]) == 0
    data = shown("here/report.html")
    rows = {part["title"]: dict(part["rows"]) for part in data["configuration"]}
    assert rows["Settings"]["temperature"] == "Geometric(start=3.0, end=0.5, until=0.7) (default)"
    assert rows["Settings"]["learning_rate"] == "Linear(start=0.006, end=0.0003, until=1.0) (default)"
    assert rows["Settings"]["prior"] == "[0.5, 0.5] (default)"
    assert rows["Added by evaluate"]["likelihood"] == "exact (default)"
    assert rows["Added by evaluate"]["policy"] == "the solution (default)"
    assert "–" not in [*rows["Settings"].values(), *rows["Added by evaluate"].values()]
    assert data["player"]["likelihood"] == "exact"
    assert main(["report", "here", "--num-episodes", "1", "--likelihood", "smc", "--quiet"]) == 0
    assert shown("here/report.html")["player"]["likelihood"] == "smc"


@pytest.mark.parametrize(
    ("found", "backend"),
    [
        ("ParticleFilter(num_particles=9, guide='ekf')", ParticleFilter(9, guide="ekf")),
        ({"": "GridFilter", "num_points": 50}, GridFilter(num_points=50)),
        ("exact", ObservableOperator()),
        ("ParticleFilter(guide=<coin.Guide object>)", None),  # only its author has it
        ({"": "ParticleFilter", "guide": "Guide"}, None),
        ("__import__('os').system('true')", None),
        (None, None),
    ],
)
def test_the_backend_of_a_run_by_its_record(tmp_path, found, backend):
    folder = RunFolder.create(
        tmp_path / "run", "fit", model=LINE_GRID, settings={"likelihood": found}, seed=0
    )
    assert likelihood_of(folder, {}) == backend
    folder.record["settings"] = {}
    assert likelihood_of(folder, {"likelihood": found}) == backend


@pytest.mark.filterwarnings("ignore:iteration .* the information about the context")  # batches are small
@pytest.mark.usefixtures("undrawn")
def test_a_killed_fit_is_evaluated_from_its_checkpoint(elsewhere, capsys):
    words = ["fit", LINE_GRID, "horizon=4", "--likelihood", "exact", "--batch-size", "8", "--seed", "5"]
    words += ["--iterations", "40", "--checkpoint-every", "22", "--run", "here", "--quiet"]
    with pytest.MonkeyPatch.context() as patch:  # as after kill -9: nothing is written any more
        patch.setattr("solvers.cids.training._show", killing(after=30))
        with pytest.raises(SystemExit):
            main(words)
    assert not Path("here/solution").exists()
    assert "half-written" in refused(capsys, "evaluate", "here")
    assert main(["evaluate", "here", "--unfinished", "--num-episodes", "8", "--quiet"]) == 0
    assert main(["report", "here", "--unfinished", "--num-episodes", "1", "--quiet"]) == 0
    data = shown("here/report.html")
    assert data["player"]["likelihood"] == "exact"
    assert dict(data["configuration"][2]["rows"])["temperature"].startswith("Geometric(start=3.0")
    found = cids.load("here/checkpoint", LineGrid(horizon=4))
    assert found.history.sizes["iteration"] == 22
    assert not found.finished
    assert main(words) == 0
    assert main(["evaluate", "here", "--num-episodes", "8", "--quiet"]) == 0


def killing(after):
    """Something to call in every iteration, which ends everything in one of them."""
    calls = itertools.count(1)

    def show(bar, measured):
        if next(calls) == after:
            raise SystemExit(137)

    return show


def test_the_same_fit_is_taken_up_and_another_is_refused(elsewhere, capsys):
    words = ["fit", "coin.py:Coin", "bias=0.8", *QUICK, "--run", "here", "--quiet"]
    assert main(words) == 0
    first = Path("here/history.csv").read_bytes()
    assert main(words) == 0
    assert Path("here/history.csv").read_bytes() == first  # with the seconds that it took: not run again
    capsys.readouterr()

    more = [*words[:4], "5", *words[5:]]
    assert (
        "made with settings = {'iterations': 4}, but expected {'iterations': 5}; use another folder"
        in refused(capsys, *more)
    )
    other = ["fit", "coin.py:Coin", "bias=0.9", *words[3:]]
    assert "made with arguments = {'bias': '0.8'}, but expected {'bias': '0.9'}" in refused(capsys, *other)
    said = refused(capsys, "evaluate", LINE_GRID, "--policy", "random", "--run", "here")
    assert "made with command = 'fit', but expected 'evaluate'" in said


@pytest.mark.usefixtures("undrawn")
def test_the_solution_of_another_model(elsewhere, capsys):
    assert main(["fit", "coin.py:Coin", "bias=0.8", *QUICK, "--run", "here", "--quiet"]) == 0
    capsys.readouterr()
    said = refused(capsys, "evaluate", "here", "--model", "coin.py:Coin", "--argument", "bias=0.7")
    assert "solution.json was made with constants" in said
    said = refused(capsys, "compare", LINE_GRID, "--solution", "here")
    assert "solution.json was made with" in said
    # A file that has moved, with the arguments of the run.
    Path("coin.py").rename("moved.py")
    assert "coin.py any more: say where it is now with --model" in refused(capsys, "evaluate", "here")
    assert main(["evaluate", "--model", "moved.py:Coin", "here", "--num-episodes", "8"]) == 0
    assert capsys.readouterr().err.startswith("evaluation: ")  # the same code, so that no warning is due


@pytest.mark.usefixtures("undrawn")
def test_weights_that_are_damaged(elsewhere, capsys):
    assert main(["fit", "coin.py:Coin", "bias=0.8", *QUICK, "--run", "here", "--quiet"]) == 0
    capsys.readouterr()
    (weights,) = Path("here/solution").glob("policy-*.pt")
    weights.write_bytes(b"nonsense")
    assert f"{weights.name} holds something else than weights" in refused(capsys, "evaluate", "here")


def test_run_folders_that_will_not_do(elsewhere, capsys):
    assert main(["simulate", LINE_GRID, "--policy", "random", "--num-episodes", "4", "--run", "here"]) == 0
    capsys.readouterr()
    assert "it is of the command 'simulate', not of a fit" in refused(capsys, "evaluate", "here")
    record = read("here/run.json")
    Path("here/run.json").write_text(json.dumps({**record, "finished": False}))
    said = refused(capsys, "evaluate", "here")
    assert "half-written" in said
    assert "left episodes.npz, returns.csv" in said
    Path("here/run.json").write_text(json.dumps({**record, "model": "nonsense"}))
    assert "model: expected module:Class or file.py:Class, got nonsense" in refused(capsys, "report", "here")
    Path("here/run.json").write_text(json.dumps({**record, "format": 2}))
    assert "is of format 2, and this version of cpomdp-ppl reads format 1" in refused(
        capsys, "report", "here"
    )


@pytest.mark.parametrize("spec", ["here/evil.py:Evil", "./here/../here/evil.py:Evil", "here.evil:Evil"])
def test_no_code_is_run_from_a_run_folder(elsewhere, capsys, spec):
    assert main(["simulate", LINE_GRID, "--policy", "random", "--num-episodes", "4", "--run", "here"]) == 0
    capsys.readouterr()
    Path("here/evil.py").write_text("open('was_here', 'w')\n")
    Path("here/__init__.py").write_text("open('was_here', 'w')\n")
    Path("here/run.json").write_text(json.dumps({**read("here/run.json"), "model": spec}))
    for command in ("evaluate", "diagnose", "report"):
        assert "no code is run from there" in refused(capsys, command, "here")
    assert not Path("was_here").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk(elsewhere, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = ["fit", "coin.py:Coin", "bias=0.8", *QUICK, "--quiet", "--run", "here"]
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


@pytest.mark.filterwarnings("ignore:iteration .* the information about the context")  # batches are small
@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_keeps_the_best_so_far_and_the_same_command_goes_on(elsewhere, capsys):
    words = ["fit", LINE_GRID, "horizon=4", "--likelihood", "exact", "--batch-size", "8"]
    words += ["--iterations", "80", "--checkpoint-every", "5", "--run", "here"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cpomdp_ppl", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # It may be ignored here, as in what a shell runs in the background, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not Path("here/checkpoint/checkpoint.pt").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "the best policy so far is in here/solution" in err
    assert "to go on from the last checkpoint: cpomdp fit cpomdp_ppl.models:LineGrid horizon=4" in err
    done = int(re.search(r"stopped after (\d+) of 80 iterations", err)[1])
    assert 5 <= done < 80
    seed = read("here/run.json")["seed"]
    assert read("here/run.json")["finished"] is False

    assert "half-written" in refused(capsys, "evaluate", "here")
    assert main(["evaluate", "here", "--unfinished", "--num-episodes", "8"]) == 0
    assert main([*words, "--quiet"]) == 0
    whole = cids.fit(
        LineGrid(horizon=4), likelihood="exact", batch_size=8, iterations=80, seed=seed, progress=False
    )
    again = cids.load("here/solution", LineGrid(horizon=4))
    assert again.history["return"].values.tolist() == whole.history["return"].values.tolist()
    for name, weight in whole.policy.state_dict().items():
        assert torch.equal(again.policy.state_dict()[name], weight), name
    assert read("here/run.json")["finished"] is True


def test_ctrl_c_before_anything_is_written(elsewhere, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelSpec, "build", interrupted)
    assert main(["fit", LINE_GRID]) == 130
    assert capsys.readouterr().err == "cpomdp: stopped, before anything was written\n"


def test_a_comparison_measures_nobody_twice(elsewhere, capsys, monkeypatch):
    played = []

    def interrupted_at_the_second(model, policy, *arguments, **settings):
        played.append(type(policy).__name__)
        if len(played) == 2:
            raise KeyboardInterrupt
        return evaluate(model, policy, *arguments, **settings)

    monkeypatch.setattr(compare, "evaluate", interrupted_at_the_second)
    words = ["compare", LINE_GRID, "--policies", "random,likeliest", "--num-episodes", "40", "--seed", "3"]
    assert main(words) == 130
    err = capsys.readouterr().err
    assert "runs/LineGrid-compare-1 has comparison.json" in err
    assert f"to go on: cpomdp {' '.join(words)} --run runs/LineGrid-compare-1" in err
    assert main([*words, "--run", "runs/LineGrid-compare-1"]) == 0
    assert played == ["RandomPolicy", "MostLikelyContext", "MostLikelyContext"]
    assert "| likeliest | 40 |" in capsys.readouterr().out
    with open("runs/LineGrid-compare-1/comparison.csv") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["random", "likeliest"]
    truth = evaluate(LineGrid(), RandomPolicy(3), 40, seed=3)
    assert float(rows["random"]["return"]) == truth.returns.mean
    assert float(rows["random"]["regret_standard_error"]) == truth.regret.standard_error
    assert rows["random"]["training_seconds"] == ""


RULES = """
import torch
from cpomdp_ppl import FunctionPolicy
from cpomdp_ppl.cli import Recipe

def rule(history):
    return torch.full((history.num_episodes,), 1)

loaded = FunctionPolicy(lambda history: torch.full((history.num_episodes,), 2))
made = Recipe(lambda model, budget: FunctionPolicy(lambda history: torch.zeros(history.num_episodes).long()))
"""


def test_policies_of_ones_own(elsewhere, capsys):
    """A function, a policy and a recipe, in a file or in a module."""
    Path("rules.py").write_text(RULES)
    names = ["random", "rules.py:rule", "rules:loaded", "./rules.py:made"]
    words = ["compare", "coin.py:Coin", "bias=0.8", "--policies", ",".join(names), "--run", "table"]
    assert main([*words, "--num-episodes", "40"]) == 0
    found = {name: each["evaluation"]["returns_by_context"] for name, each in measured("table").items()}
    assert list(found) == names
    assert [found["rules.py:rule"][c]["mean"] for c in ("fair", "loaded")] == [4.0, -4.0]
    assert [found["rules:loaded"][c]["mean"] for c in ("fair", "loaded")] == [-4.0, 4.0]
    assert [found["./rules.py:made"][c]["mean"] for c in ("fair", "loaded")] == [0.0, 0.0]

    Path("rules.py").write_text(RULES.replace("num_episodes,), 1", "num_episodes,), 2"))
    capsys.readouterr()
    assert main([*words, "--num-episodes", "40"]) == 0
    err = capsys.readouterr().err
    assert "random: measured before" in err
    assert "rules.py:rule: its code has changed, and is measured again" in err
    assert measured("table")["rules.py:rule"]["evaluation"]["returns_by_context"]["fair"]["mean"] == -4.0
    Path("tools.py").write_text("def one(): pass\n\ndef other(): pass\n")
    said = refused(capsys, *words[:4], "tools.py:rule")
    assert "tools.py has no policy 'rule'; its functions are one, other" in said


def measured(run):
    return read(f"{run}/comparison.json")


@pytest.mark.usefixtures("undrawn")
def test_a_record_alone_runs_no_policy_but_one_beside_the_model(elsewhere, capsys):
    rule = "\ndef rule(history):\n    return torch.full((history.num_episodes,), 1)\n"
    with open("coin.py", "a") as file:
        file.write(rule)
    Path("rules.py").write_text(RULES)
    for number, policy in enumerate(("coin.py:rule", "rules.py:rule")):
        words = ["evaluate", "coin.py:Coin", "bias=0.8", "--policy", policy, "--num-episodes", "4"]
        assert main([*words, "--run", f"run{number}", "--quiet"]) == 0
    assert main(["report", "run0", "--num-episodes", "1", "--quiet"]) == 0
    capsys.readouterr()
    said = refused(capsys, "report", "run1", "--num-episodes", "1", "--quiet")
    assert "run1 is of the policy rules.py:rule, and no code is run because a record says so" in said
    assert "say --policy rules.py:rule" in said
    assert main(["report", "run1", "--policy", "rules.py:rule", "--num-episodes", "1", "--quiet"]) == 0


def test_one_episode_has_no_standard_error(elsewhere, capsys):
    assert main(["compare", LINE_GRID, "--policies", "random", "--num-episodes", "1", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "± – | – |" in out
    assert "nan" not in out
    evaluation = Evaluation.from_dict(read("runs/LineGrid-compare-1/comparison.json")["random"]["evaluation"])
    assert math.isnan(evaluation.returns.deviation)


@pytest.mark.usefixtures("undrawn")
def test_a_filter_that_is_not_calibrated_is_a_failure(elsewhere, capsys):
    words = ["diagnose", "cpomdp_ppl.models:LightDark", "horizon=4", "--policy", "random"]
    words += [
        "--calibrate",
        "200",
        "--likelihood",
        "smc,num_particles=2",
        "--num-episodes",
        "3",
        "--draws",
        "20",
    ]
    assert main(words) == 1
    assert "smc is not calibrated" in capsys.readouterr().out
    assert read("runs/LightDark-diagnose-1/calibration.json")["calibrated"] is False


@pytest.mark.usefixtures("undrawn")
def test_without_matplotlib_there_are_no_figures(elsewhere, capsys):
    assert main(["fit", "coin.py:Coin", "bias=0.8", *QUICK, "--run", "here"]) == 0
    assert "no figures: they need cpomdp-ppl[plot]" in capsys.readouterr().err
    assert not Path("here/figures").exists()
    assert read("here/run.json")["finished"] is True


@pytest.mark.usefixtures("undrawn")
def test_progress_is_told_in_lines_where_there_is_no_terminal(elsewhere, capsys, monkeypatch):
    monkeypatch.setattr("cpomdp_ppl.progress.SECONDS_TO_FIRST_LINE", 0.0)
    monkeypatch.setattr("cpomdp_ppl.progress.SECONDS_BETWEEN_LINES", 0.0)
    words = ["fit", "coin.py:Coin", "bias=0.8", *QUICK]
    assert main(words) == 0
    err = capsys.readouterr().err
    lines = re.findall(r"^C-IDS.*: \d of 4 iterations, return -?\d+\.\d\d, .*; .* left$", err, re.MULTILINE)
    assert len(lines) == 4
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in Path("runs").iterdir()) == ["Coin-fit-1", "Coin-fit-2"]


@pytest.mark.usefixtures("elsewhere")
def test_planners_and_learners_tell_how_long_they_take_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("cpomdp_ppl.progress.SECONDS_TO_FIRST_LINE", 0.0)
    monkeypatch.setattr("cpomdp_ppl.progress.SECONDS_BETWEEN_LINES", 0.0)
    names, budget = "qmdp,pft,rdpg", ["--simulations", "3", "--training-episodes", "50"]
    episodes = ["--num-episodes", "6", "--planned-episodes", "2"]
    assert main(["compare", "coin.py:Coin", "bias=0.8", "--policies", names, *budget, *episodes]) == 0
    err = capsys.readouterr().err
    for name, decisions in (("qmdp", 6), ("pft", 2), ("rdpg", 6)):
        assert re.search(rf"^{name}: playing: {decisions} of \d+ decisions; .* left$", err, re.MULTILINE)
    assert re.search(r"^rdpg: RDPG: \d+ of 50 episodes, best return .*; .* left$", err, re.MULTILINE)


PLUGIN = """
from cpomdp_ppl import FunctionPolicy
from cpomdp_ppl.cli import Command, Recipe

import torch

def greet(options):
    print("hello", options.whom)
    return 0

GREET = Command("Say hello.", ("cpomdp greet World",), lambda parser: parser.add_argument("whom"), greet)

def first(history):
    seen = next(iter(history.latest.observed.values()))
    return torch.zeros(len(seen), dtype=torch.long)

STILL = Recipe(lambda model, budget: FunctionPolicy(first))
"""


@pytest.fixture
def plugin(elsewhere, monkeypatch):
    """Another distribution, installed in a directory of its own."""
    place = elsewhere / "site"
    (place / "other-1.0.dist-info").mkdir(parents=True)
    (place / "other_package.py").write_text(PLUGIN)
    (place / "other-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n"
    )
    (place / "other-1.0.dist-info" / "entry_points.txt").write_text(
        "[cpomdp_ppl.commands]\ngreet = other_package:GREET\ngone = no_such_package:IT\n"
        "check = other_package:GREET\n[cpomdp_ppl.policies]\nstill = other_package:STILL\n"
    )
    monkeypatch.syspath_prepend(place)
    yield
    sys.modules.pop("other_package", None)


@pytest.mark.usefixtures("plugin")
def test_other_packages_add_commands_and_policies(capsys):
    assert main(["greet", "World"]) == 0
    assert capsys.readouterr().out == "hello World\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +greet +Say hello\.$", out, re.MULTILINE)
    assert re.search(r"^ +fit +Learn a policy", out, re.MULTILINE)
    said = "the command 'gone' is not available: no_such_package cannot be imported"
    assert said in " ".join(out.split())
    assert said in refused(capsys, "gone")
    assert main(["check", LINE_GRID]) == 0  # what is ours stays ours
    assert main(["evaluate", LINE_GRID, "--policy", "still", "--num-episodes", "4"]) == 0


OUR_COMMANDS = ("check", "simulate", "evaluate", "compare", "diagnose", "report", "fit", "run")


MAZE = """
from cpomdp_ppl.models import LineGrid

class Maze(LineGrid):
    def __init__(self, walls=(), horizon=3):
        super().__init__(horizon=min(horizon, 3))

def rule(history):
    return history.actions.new_zeros(history.num_episodes)
"""

LITTLE = {
    "--num-episodes": "2",
    "--planned-episodes": "1",
    "--simulations": "2",
    "--training-episodes": "8",
    "--iterations": "2",
    "--batch-size": "4",
    "--num-runs": "2",
    "--draws": "5",
    "--likelihood": "smc,num_particles=32",
    "--calibrate": "20",
}
"""Instead of what an example says, or of what is usual."""


@pytest.fixture(scope="module")
def light_dark_fit(tmp_path_factory):
    """The run that examples speak of."""
    place = tmp_path_factory.mktemp("examples") / "LightDark-fit-1"
    words = ["--iterations", "2", "--batch-size", "4", "--likelihood", "ekf", "--seed", "1", "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpomdp_ppl.cli.figures.is_installed", lambda module: module != "matplotlib")
        assert main(["fit", "cpomdp_ppl.models:LightDark", *words, "--run", str(place)]) == 0
    return place


@pytest.mark.filterwarnings("ignore")  # there is too little of everything
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", OUR_COMMANDS)
def test_examples_of_help_can_be_run(elsewhere, light_dark_fit, capsys, name):
    Path("my_model.py").write_text(MAZE)
    copytree(light_dark_fit, "runs/LightDark-fit-1")
    assert main([name, "--help"]) == 0
    known = capsys.readouterr().out
    assert f"usage: cpomdp {name}" in known
    examples = COMMANDS.find(name).examples
    assert examples
    for example in examples:
        if "pouct" in example and not is_installed("pomdp_py"):
            continue
        cpomdp, *words = shlex.split(example)
        assert (cpomdp, words[0]) == ("cpomdp", name)
        less = [word for pair in LITTLE.items() if f"{pair[0]} " in known for word in pair]
        if "--calibrate" not in words:
            less = [word for word in less if word not in ("--calibrate", LITTLE["--calibrate"])]
        assert main([*words, *less, "--quiet"]) in ((0, 1) if "--calibrate" in words else (0,)), example


def test_packages_import_only_what_they_may():
    forbidden = {
        "cpomdp_ppl": {"solvers", "baselines", "examples"},
        "solvers": {"baselines", "examples"},
        "baselines": {"solvers", "examples"},
    }
    for package, others in forbidden.items():
        paths = list((ROOT / package).rglob("*.py"))
        assert paths
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found = {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found = {node.module or ""}
                else:
                    continue
                assert not others & {name.partition(".")[0] for name in found}, path


def test_version_and_usage(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("cpomdp-ppl")
    assert main([]) == 2
    assert "usage: cpomdp [-h] [--version] COMMAND" in capsys.readouterr().out


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


@pytest.mark.usefixtures("undrawn")
def test_arguments_come_back_as_they_were(elsewhere, capsys):
    Path("odd.py").write_text(ODD)
    odd = ["odd.py:Odd", "walls=(1, 2)", "costs={1: 2.0, 2: 'x'}", "far=1e999"]
    assert main(["fit", *odd, *QUICK, "--run", "here", "--quiet"]) == 0
    assert main(["evaluate", "here", "--num-episodes", "4", "--quiet"]) == 0
    record = read("here/run.json")
    assert record["arguments"] == {"walls": "(1, 2)", "costs": "{1: 2.0, 2: 'x'}", "far": "1e999"}
    # As JSON would have had it: a list, which is not what it was.
    Path("here/run.json").write_text(json.dumps({**record, "arguments": {"walls": [1, 2]}}))
    capsys.readouterr()
    said = refused(capsys, "evaluate", "here")
    assert "does not say what the argument walls was" in said
    assert "--model odd.py:Odd --argument walls=…" in said
    words = ["--model", "odd.py:Odd", "--argument", "walls=(1, 2)", "--argument", "far=1e999"]
    assert main(["evaluate", *words, "here", "--num-episodes", "4"]) == 0


def test_what_decides_the_results_makes_another_run(elsewhere, capsys):
    words = ["evaluate", LINE_GRID, "horizon=2", "--policy", "pft", "--num-episodes", "2", "--run", "here"]
    assert main([*words, "--simulations", "3"]) == 0
    before = Path("here/evaluation.json").read_bytes()
    capsys.readouterr()
    said = refused(capsys, *words, "--simulations", "2")
    assert "made with settings = {'simulations': 3}, but expected {'simulations': 2}" in said
    said = refused(capsys, *words, "--simulations", "3", "--training-episodes", "5")
    assert "{'training_episodes': 10000}, but expected {'training_episodes': 5}" in said
    assert Path("here/evaluation.json").read_bytes() == before


def test_the_noted_seed_repeats_the_run(elsewhere):
    # Thompson sampling: which action is best is found by playing, and what it draws is drawn, too.
    words = ["simulate", LINE_GRID, "--policy", "thompson", "--num-episodes", "40", "--quiet"]
    seeds = []
    monkey = pytest.MonkeyPatch()
    made = Recipe.made
    monkey.setattr(
        Recipe,
        "made",
        lambda self, name, model, budget: seeds.append(budget.seed) or made(self, name, model, budget),
    )
    try:
        assert main([*words, "--run", "one"]) == 0
        seed = read("one/run.json")["seed"]
        assert main([*words, "--run", "two", "--seed", str(seed)]) == 0
        assert main([*words, "--run", "one"]) == 0  # begins again, with the seed that is noted there
    finally:
        monkey.undo()
    assert seeds == [seed] * 3
    one, two = (Episodes.load(f"{name}/episodes.npz") for name in ("one", "two"))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.rewards, two.rewards)


def test_a_report_shows_who_was_judged(elsewhere, capsys, monkeypatch):
    words = ["evaluate", LINE_GRID, "horizon=2", "--policy", "pft", "--simulations", "3", "--seed", "7"]
    assert main([*words, "--num-episodes", "1", "--run", "here"]) == 0
    assert "nan" not in capsys.readouterr().out
    budgets = []
    made = Recipe.made

    def noted(self, name, model, budget):
        budgets.append((name, budget.simulations, budget.training_episodes, budget.seed))
        return made(self, name, model, budget)

    monkeypatch.setattr(Recipe, "made", noted)
    assert main(["report", "here", "--num-episodes", "1", "--seed", "2"]) == 0
    assert '"played_by":"pft"' in Path("here/report.html").read_text().replace(" ", "")
    assert main(["report", "here", "--num-episodes", "1", "--simulations", "2"]) == 0
    assert main(["report", "here", "--num-episodes", "1", "--policy", "random"]) == 0
    assert budgets == [("pft", 3, 10_000, 7), ("pft", 2, 10_000, 7), ("random", 100, 10_000, 0)]


@pytest.mark.usefixtures("undrawn")
def test_a_solution_that_has_changed_is_measured_again(elsewhere, capsys):
    fit = [
        "fit",
        LINE_GRID,
        "horizon=2",
        "--iterations",
        "2",
        "--batch-size",
        "4",
        "--likelihood",
        "exact",
        "--quiet",
    ]
    assert main([*fit, "--seed", "1", "--run", "mine", "--prior", "0.9,0.1"]) == 0
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
    assert main([*fit, "--seed", "2", "--run", "mine", "--prior", "0.9,0.1"]) == 0
    assert main(words) == 0
    err = capsys.readouterr().err
    assert "random: measured before" in err
    assert "mine: the solution has changed, and is measured again" in err
    assert main([*fit, "--seed", "2", "--run", "other"]) == 0
    capsys.readouterr()
    assert "say which with --prior" in refused(capsys, *words[:-2], "--solution", "other")


@pytest.mark.usefixtures("undrawn")
def test_code_that_has_changed(elsewhere, capsys, monkeypatch):
    fit = ["fit", "coin.py:Coin", "bias=0.8", *QUICK, "--run", "here", "--quiet"]
    assert main(fit) == 0
    source = read("here/run.json")["source"]
    assert source["path"] == str((elsewhere / "coin.py").resolve())
    assert source["sha256"] == hashlib.sha256(COIN.encode()).hexdigest()

    # From another directory, the file is the one that it was, not the one of its name there.
    (elsewhere / "deep").mkdir()
    (elsewhere / "deep" / "coin.py").write_text("open('was_here', 'w')\n")
    monkeypatch.chdir(elsewhere / "deep")
    assert main(["evaluate", "../here", "--num-episodes", "4"]) == 0
    assert not Path("was_here").exists()
    monkeypatch.chdir(elsewhere)

    Path("coin.py").write_text(COIN.replace("-1.0", "-2.0"))
    capsys.readouterr()
    assert "made with code of the model (sha256) = " in refused(capsys, *fit)
    said = refused(capsys, "evaluate", "here")
    assert "coin.py has changed since here was made" in said
    assert "--model coin.py:Coin" in said
    assert main(["evaluate", "here", "--model", "coin.py:Coin", "--num-episodes", "4"]) == 0
    assert "cpomdp: warning: coin.py is not the code that here was made with" in capsys.readouterr().err


def test_installed_code_that_has_changed_is_warned_of(elsewhere, capsys):
    assert main(["simulate", LINE_GRID, "--policy", "random", "--num-episodes", "4", "--run", "here"]) == 0
    record = read("here/run.json")
    assert main(["report", "here", "--num-episodes", "1"]) == 0
    assert "warning" not in capsys.readouterr().err
    Path("here/run.json").write_text(json.dumps({**record, "source": {**record["source"], "sha256": "0"}}))
    assert main(["report", "here", "--num-episodes", "1"]) == 0
    assert "warning: the code of cpomdp_ppl.models:LineGrid has changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "spec", ["d.evil:X", "evil_beside:X", "runs/evil_beside.py:X", "{here}/runs/evil_beside.py:X"]
)
def test_code_beside_a_run_folder_is_not_run(elsewhere, capsys, monkeypatch, spec):
    assert main(["simulate", LINE_GRID, "--policy", "random", "--num-episodes", "4", "--run", "runs/d"]) == 0
    capsys.readouterr()
    for path in ("runs/d/evil.py", "runs/evil_beside.py"):
        Path(path).write_text("open('was_here', 'w')\n")
    monkeypatch.syspath_prepend(str(elsewhere / "runs"))
    record = {**read("runs/d/run.json"), "model": spec.format(here=elsewhere)}
    for source in (record["source"], None, {"path": "evil_beside.py", "sha256": "0"}):
        Path("runs/d/run.json").write_text(json.dumps({**record, "source": source}))
        for command in ("evaluate", "report"):
            assert "if you trust it, say which it is with --model" in refused(capsys, command, "runs/d")
    assert not Path("was_here").exists()


@pytest.mark.usefixtures("undrawn")
def test_former_results_do_not_stay_beside_new_ones(elsewhere, monkeypatch):
    assert (
        main(["fit", LINE_GRID, "horizon=2", *QUICK, "--prior", "0.9,0.1", "--run", "here", "--quiet"]) == 0
    )
    priors = []
    monkeypatch.setattr(
        diagnose, "calibrate", lambda *a, prior, **k: priors.append(prior) or calibrate(*a, prior=prior, **k)
    )
    words = ["diagnose", "here", "--num-episodes", "2", "--draws", "5", "--likelihood", "exact", "--quiet"]
    assert main([*words, "--calibrate", "40"]) in (0, 1)
    assert priors[0].tolist() == [0.9, 0.1]
    assert Path("here/calibration.json").exists()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # what fails leaves what was there
        patch.setattr(diagnose, "to_inference_data", interrupted)
        assert main(words) == 130
    assert Path("here/calibration.json").exists()
    assert main(words) == 0
    assert not Path("here/calibration.json").exists()
    assert read("here/run.json")["added"]["diagnose"]["settings"]["calibrate"] is None


def test_what_begins_again_does_not_say_that_it_goes_on(elsewhere, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    words = ["evaluate", LINE_GRID, "--policy", "random", "--run", "a folder"]
    with monkeypatch.context() as patch:
        patch.setattr("cpomdp_ppl.cli.evaluate.take_stock", interrupted)
        assert main(words) == 130
    err = capsys.readouterr().err
    assert "stopped, before anything was written; to begin again: cpomdp evaluate" in err
    assert "--run 'a folder'" in err
    words = ["simulate", *words[1:], "--num-episodes", "4"]
    words[-3] = "other"
    with monkeypatch.context() as patch:
        patch.setattr("cpomdp_ppl.experiments.run_folder.RunFolder.write_table", interrupted)
        assert main(words) == 130
    assert "stopped; other has episodes.npz; to begin again: " in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_found_out_before_the_work(elsewhere, capsys, monkeypatch):
    words = ["evaluate", LINE_GRID, "--policy", "random", "--num-episodes", "4", "--run", "here"]
    assert main(words) == 0
    capsys.readouterr()

    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def worked(*_, **__):
        raise AssertionError("all that work")

    monkeypatch.setattr(os, "replace", denied)
    monkeypatch.setattr(Recipe, "made", worked)
    assert ": Permission denied" in refused(capsys, *words)


@pytest.mark.usefixtures("undrawn")
def test_warnings_are_plain_lines(elsewhere, capsys, monkeypatch):
    assert main(["fit", LINE_GRID, "horizon=2", *QUICK, "--run", "a run"]) == 0
    assert "next: cpomdp evaluate 'a run'" in capsys.readouterr().err
    monkeypatch.setattr(
        sys, "argv", ["cpomdp", "run", "a run", "--num-episodes", "2", "--likelihood", "exact"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as left:
            entry()
    assert left.value.code == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (
        sum(line.startswith("cpomdp: warning: the policy was learned for one prior") for line in lines) == 1
    )
    assert "UserWarning" not in err
    assert ".py:" not in err
    assert "± –" in out  # of a single run


def test_ctrl_c_while_torch_is_imported(elsewhere):
    Path("slow").mkdir()
    Path("slow/torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    left = subprocess.run(
        [
            sys.executable,
            "-c",
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
            "import cpomdp_command; cpomdp_command.entry()",
        ],
        env={**os.environ, "PYTHONPATH": f"{elsewhere / 'slow'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (left.returncode, left.stdout) == (130, "")
    assert left.stderr == "cpomdp: stopped, before anything was written\n"


def test_a_file_that_leaves(elsewhere, capsys):
    Path("leaves.py").write_text("raise SystemExit(3)\n")
    assert "leaves.py cannot be imported: SystemExit: 3" in refused(capsys, "check", "leaves.py:Coin")


def test_a_policy_in_a_run_folder(elsewhere, capsys):
    assert main(["simulate", LINE_GRID, "--policy", "random", "--num-episodes", "1", "--run", "here"]) == 0
    assert "         1 episode  return" in capsys.readouterr().out
    assert "here is a run folder, where its solution acts" in refused(
        capsys, "run", "here", "--policy", "random"
    )
