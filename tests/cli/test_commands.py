"""What commands do, compared with the functions behind them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from shutil import copytree

import arviz as az
import pytest
import torch

from cpomdp_command import main
from cpomdp_ppl import Episodes, RandomPolicy, evaluate, simulate
from cpomdp_ppl.cli import COMMANDS, compare, results
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.results import is_installed
from cpomdp_ppl.models import LineGrid
from cpomdp_ppl.native.cache import store_library
from solvers import cids
from tests.cli.conftest import LINE_GRID, SMALL, read, refused, rows_of


@pytest.fixture(autouse=True)
def own_cache(elsewhere, monkeypatch):
    """Compiled kernels of tests: not those of whoever runs them."""
    monkeypatch.setenv("CPOMDP_CACHE", str(elsewhere / "cache"))
    return elsewhere / "cache" / "native"


@pytest.mark.slow
def test_a_users_model_from_check_to_report(here, capsys, monkeypatch):
    coin = ("coin.py:Coin", "bias=0.8")
    assert main(["check", *coin]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Coin: no faults in 2 contexts, 3 actions, 4 steps",
        "engine: native; the particle filter runs these programs compiled",
    ]

    words = ["--policy", "random", "--num-episodes", "50", "--contexts", "loaded", "--seed", "1"]
    assert main(["simulate", *coin, *words]) == 0
    played = Episodes.load("runs/Coin-simulate-1/episodes.npz")
    model = ModelSpec.of(coin).build()
    mine = simulate(model, RandomPolicy(3), 50, contexts="loaded", seed=1)
    assert torch.equal(played.rewards, mine.rewards)
    (row,) = rows_of("runs/Coin-simulate-1/returns.csv")
    assert row["context"] == "loaded"
    assert float(row["return"]) == pytest.approx(float(mine.returns.mean()))

    fitted = cids.fit(model, iterations=4, batch_size=8, likelihood="exact", seed=5, progress=False)
    kept = cids.load("here/solution", model)
    for name, weight in fitted.policy.state_dict().items():
        assert torch.equal(kept.policy.state_dict()[name], weight), name
    returns = [float(row["return"]) for row in rows_of("here/history.csv")]
    assert returns == fitted.history["return"].values.tolist()
    record = read("here/run.json")
    assert (record["command"], record["seed"], record["finished"]) == ("fit", 5, True)
    assert (record["model"], record["arguments"]) == ("coin.py:Coin", {"bias": "0.8"})
    assert (record["settings"]["iterations"], record["settings"]["objective"]) == (4, "information")

    words = ["--num-episodes", "64", "--likelihood", "auto"]  # as if left out
    assert main(["evaluate", "here", *words, "--seed", "2"]) == 0
    found, expected = read("here/evaluation.json"), fitted.evaluate(64, seed=2)
    assert found["returns"]["mean"] == expected.returns.mean
    assert found["entropy"]["mean"] == expected.entropy.mean
    assert found["likelihood"] == "exact"

    if is_installed("matplotlib"):
        monkeypatch.setattr(results, "is_installed", is_installed)
    words = ["--num-episodes", "4", "--draws", "20", "--calibrate", "40", "--likelihood", "exact"]
    assert main(["diagnose", "here", *words]) == 0
    data = az.from_netcdf("here/episodes.nc")
    assert set(data.groups()) >= {"posterior", "sample_stats", "observed_data"}
    assert read("here/calibration.json")["calibrated"] is True
    rows = {row["quantity"]: row for row in rows_of("here/rhat.csv")}
    posterior = data.posterior["is_context"].mean(("chain", "draw"))
    assert float(rows["is_context[0, fair]"]["mean"]) == pytest.approx(float(posterior[0, 0]), abs=1e-5)
    names = ("solution", "contexts", "states", "filter", "calibration")
    drawn = {path.name for path in Path("here/figures").iterdir()}
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert set(read("here/run.json")["added"]) == {"evaluate", "diagnose"}

    capsys.readouterr()
    assert main(["report", "here", "--num-episodes", "2"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert "call loaded" in page.read_text()


@pytest.mark.slow
def test_algorithm_1(capsys, monkeypatch):
    coin = ["fit", "coin.py:Coin", "bias=0.8", *SMALL, "--prior", "dirichlet", "--run", "here", "--quiet"]
    assert main(coin) == 0
    words = ["run", "here", "--context", "loaded", "--num-episodes", "3", "--num-runs", "5", "--seed", "4"]
    words += ["--likelihood", "exact"]
    assert main(words) == 0
    model = ModelSpec.of(["coin.py:Coin", "bias=0.8"]).build()
    settings = {
        "solution": cids.load("here/solution", model),
        "num_runs": 5,
        "likelihood": "exact",
        "seed": 4,
    }
    done = cids.run(model, "loaded", 3, **settings, progress=False)
    rows = rows_of("here/algorithm_1.csv")
    assert [float(row["return"]) for row in rows] == done.returns.flatten().tolist()
    assert [float(row["P(loaded)"]) for row in rows] == done.posteriors[:, 1:, 1].flatten().tolist()
    assert {row["true_context"] for row in rows} == {"loaded"}
    assert "run" in az.from_netcdf("here/algorithm_1.nc").groups()
    assert read("here/run.json")["added"]["run"]["settings"]["context"] == "loaded"

    shorter = cids.run(model, "loaded", 3, **settings, stop_at=0.6, progress=False)
    assert not shorter.played.all()
    for option in ("--stop-at", "--settled"):
        assert main([*words, option, "0.6", "--quiet"]) == 0
        played = [row["played"] == "True" for row in rows_of("here/algorithm_1.csv")]
        assert played == shorter.played.flatten().tolist()

    def interrupted(*_, **__):
        raise cids.RunInterrupted(done)

    monkeypatch.setattr(cids, "run", interrupted)
    capsys.readouterr()
    assert main([*words[:4], "--num-episodes", "9"]) == 130
    assert "stopped after 3 of 9 episodes" in capsys.readouterr().err


def test_a_comparison_measures_nobody_twice(capsys, monkeypatch):
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
    rows = {row["policy"]: row for row in rows_of("runs/LineGrid-compare-1/comparison.csv")}
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

class Reads:  # calls what was likelier from the start
    amortised = True

    def start(self, prior):
        return torch.where(prior.amax(1) > 0.5, prior.argmax(1) + 1, 0)

    def act(self, history, memory):
        return memory, memory

reads = Reads()
made = Recipe(lambda model, budget: FunctionPolicy(lambda history: torch.zeros(history.num_episodes).long()))
"""


def test_policies_of_a_user(capsys):
    """A function, a policy and a recipe, in a file or in a module."""
    Path("rules.py").write_text(RULES)
    names = ["random", "rules.py:rule", "rules:loaded", "./rules.py:made"]
    words = ["compare", "coin.py:Coin", "bias=0.8", "--policies", ",".join(names), "--run", "table"]
    assert main([*words, "--num-episodes", "40"]) == 0
    found = {
        name: each["evaluation"]["returns_by_context"] for name, each in read("table/comparison.json").items()
    }
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
    assert (
        read("table/comparison.json")["rules.py:rule"]["evaluation"]["returns_by_context"]["fair"]["mean"]
        == -4.0
    )
    Path("tools.py").write_text("def one(): pass\n\ndef other(): pass\n")
    said = refused(capsys, *words[:4], "tools.py:rule")
    assert "tools.py has no policy 'rule'; its functions are one, other" in said


def test_regret_in_a_comparison_is_against_who_reads_the_prior(capsys, monkeypatch):
    """Planners play fewer episodes; who was measured before the interruption has regret all the same."""
    rules = RULES.replace("num_episodes).long()))", "num_episodes).long()), plans=True)")
    Path("rules.py").write_text(rules)
    names = "rules.py:reads,rules.py:made,rules.py:rule"
    words = ["compare", "coin.py:Coin", "bias=0.8", "--policies", names]
    words += ["--num-episodes", "20", "--planned-episodes", "8", "--run", "table"]

    def interrupted_at_the_last(model, policy, *arguments, **settings):
        if type(policy).__name__ == "FunctionPolicy" and policy.function.__name__ == "rule":
            raise KeyboardInterrupt
        return evaluate(model, policy, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(compare, "evaluate", interrupted_at_the_last)
        assert main(words) == 130
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "rules.py:reads: measured before" in err
    rows = {row["policy"]: row for row in rows_of("table/comparison.csv")}
    assert {name: int(row["episodes"]) for name, row in rows.items()} == {
        "rules.py:reads": 20, "rules.py:made": 8, "rules.py:rule": 20,
    }  # fmt: skip
    # Told the coin, it is called rightly four times; to call "fair" always is right every other time.
    assert [float(row["regret"]) for row in rows.values()] == [4.0, 4.0, 4.0]
    assert {row["regret_against"] for row in rows.values()} == {"rules.py:reads, told the context"}
    assert {float(row["regret_at_most"]) for row in rows.values()} == {4.0}
    assert "regret: against rules.py:reads, told the context." in out


@pytest.mark.slow
def test_regret_of_a_run_is_against_the_policy_told_the_context(capsys):
    Path("rules.py").write_text(RULES)
    words = ["run", "coin.py:Coin", "bias=0.8", "--policy", "rules.py:reads", "--num-episodes", "2"]
    assert main([*words, "--num-runs", "3", "--run", "here"]) == 0
    assert "regret is against the same policy, told the context: fair 4.00 ± 0.00, loaded 4.00 ± 0.00" in (
        capsys.readouterr().err
    )
    for row in rows_of("here/algorithm_1.csv"):
        assert float(row["regret"]) == 4.0 - float(row["return"])
        assert float(row["context_known_standard_error"]) == 0.0
    assert main([*words[:4], "rules.py:rule", *words[5:], "--run", "there"]) == 0
    assert "regret" not in rows_of("there/algorithm_1.csv")[0]  # it reads no prior


@pytest.mark.slow
def test_a_filter_that_is_not_calibrated_is_a_failure(capsys):
    words = ["diagnose", "cpomdp_ppl.models:LightDark", "horizon=4", "--policy", "random"]
    words += ["--calibrate", "200", "--likelihood", "smc,num_particles=2", "--num-episodes", "3"]
    assert main([*words, "--draws", "20"]) == 1
    assert "smc is not calibrated" in capsys.readouterr().out
    assert read("runs/LightDark-diagnose-1/calibration.json")["calibrated"] is False


def test_compiled_kernels_are_shown_and_removed(own_cache, capsys):
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{own_cache}: 0 kernels, 0.0 MB\n"
    assert not own_cache.exists()

    for source in ("a", "b"):
        store_library(source * 32, "c" * 16, bytes(600_000))
    (own_cache / "notes.txt").write_text("not a kernel")
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{own_cache}: 2 kernels, 1.2 MB\n"

    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"{own_cache}: removed 2 kernels, 1.2 MB\n"
    assert [path.name for path in own_cache.iterdir()] == ["notes.txt"]


def test_a_cache_that_cannot_be_used_is_explained(own_cache, capsys, monkeypatch):
    own_cache.parent.mkdir()
    own_cache.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own_cache.stat().st_uid + 1)
        assert f"{own_cache}: it belongs to another user" in refused(capsys, "cache")
    for variable in ("CPOMDP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert "set CPOMDP_CACHE" in refused(capsys, "cache", "--clear")


OUR_COMMANDS = ("check", "simulate", "evaluate", "compare", "diagnose", "report", "cache", "fit", "run")

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
"""What replaces the settings of an example, or the defaults."""


@pytest.fixture(scope="module")
def light_dark_fit(tmp_path_factory):
    """The run that examples speak of."""
    place = tmp_path_factory.mktemp("examples") / "LightDark-fit-1"
    words = ["--iterations", "2", "--batch-size", "4", "--likelihood", "ekf", "--seed", "1", "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "is_installed", lambda module: module != "matplotlib")
        assert main(["fit", "cpomdp_ppl.models:LightDark", *words, "--run", str(place)]) == 0
    return place


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # there is too little of everything
@pytest.mark.parametrize("name", OUR_COMMANDS)
def test_examples_of_help_can_be_run(light_dark_fit, capsys, name):
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
