"""What users type, and what they are told when it will not do."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest

from cpomdp_command import entry, main
from tests.cli.conftest import FIT_COIN, LINE_GRID, SMALL, refused


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
        (["fit", "coin.py"], "model: expected module:Class or file.py:Class, got coin.py"),
        (["fit", "coin.py:Coin"], "Coin needs the argument 'bias': add bias=…"),
        (["fit", "coin.py:Coin", "bais=0.9"], "Coin takes no argument 'bais'; it takes bias, horizon"),
        (["fit", "coin.py:Broken", "name=3"], "Broken takes no argument 'name'; it takes none"),
        (["fit", "coin.py:Coin", "0.9"], "arguments: expected key=value after the model, got 0.9"),
        (["fit", "coin.py:Coin", "bias=1", "bias=2"], "expected each once, got bias twice"),
        (["fit", "coin.py:Picky", "size=3"], "cannot be made: ValueError: a size of 3 will not do"),
        (["fit", LINE_GRID, "--iterations", "0"], "--iterations: expected a positive integer, got 0"),
        (["fit", LINE_GRID, "--batch-size", "many"], "--batch-size: expected a positive integer, got many"),
        (["fit", LINE_GRID, "--learning-rate", "nan"], "--learning-rate: expected a positive number"),
        (["fit", LINE_GRID, "--temperature=-1"], "--temperature: expected a number, not negative, got -1"),
        (["fit", LINE_GRID, "--seed", "-3"], "--seed: expected an integer from 0 to 2**32 - 1, got -3"),
        (["fit", LINE_GRID, "--prior", "0.5,0.6"], "--prior: expected probabilities that sum to 1"),
        (["fit", LINE_GRID, "--prior", "0.2,0.3,0.5", "--quiet"], "prior: expected"),
        (
            ["fit", LINE_GRID, "--likelihood", "magic"],
            "--likelihood: likelihood: expected one of auto, smc, ekf",
        ),
        (["fit", LINE_GRID, "--likelihood", "smc,num_particles=0"], "num_particles: expected a positive"),
        (["fit", LINE_GRID, "--likelihood", "exact,speed=3"], "exact: expected no settings, got speed"),
        (["fit", LINE_GRID, "--likelihood", "smc,foo=3"], "smc: expected settings out of num_particles, "),
        (
            ["fit", "cpomdp_ppl.models:LightDark", "--likelihood", "exact", "--quiet"],
            "exact: LightDark does not say that it has finitely many states",
        ),
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
        (["compare", LINE_GRID, "--policies", "sides.py:rule"], "sides.py has no policy 'rule'; it has no"),
        (
            ["compare", LINE_GRID, "--policies", "coin.py:Coin"],
            "coin.py:Coin is the class Coin, but expected a function of a History, an object with `start`",
        ),
        (["compare", LINE_GRID, "--policies", "sides.py:FAIR"], "sides.py:FAIR is a float, but expected"),
        (["simulate", LINE_GRID, "--policy", "random", "--contexts", "north"], "contexts: expected"),
        (["run", LINE_GRID, "--policy", "random", "--context", "north"], "expected one of detector"),
        (["compare", LINE_GRID], "whom to compare?"),
        (["compare", LINE_GRID, "--policies", "random,random"], "each once, got random,random"),
        (["compare", LINE_GRID, "--policies", ","], "expected names joined by commas"),
        (["compare", LINE_GRID, "--policies", "random qmdp"], "joined by commas, as in random,qmdp"),
        (
            ["compare", LINE_GRID, "horizon=3", "--policies", "random,", "qmdp", "a.py:rule"],
            "--policies: expected names joined by commas, without spaces: random,qmdp,a.py:rule",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(capsys, words, said):
    assert said in refused(capsys, *words)
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("class Coin(", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_what_goes_wrong_in_a_users_file_is_said(capsys, code, said):
    Path("users.py").write_text(code)
    assert f"users.py cannot be imported: {said}" in refused(capsys, "check", "users.py:Coin")
    assert main(["check", "users.py:Coin", "--traceback"]) == 2
    assert 'users.py", line 1' in capsys.readouterr().err


def test_a_module_of_the_current_directory_with_options_before_its_arguments():
    Path("module_beside.py").write_text("from cpomdp_ppl.models import LineGrid\n")
    before = list(sys.path)
    assert main(["check", "module_beside:LineGrid", "--quiet", "horizon=3"]) == 0
    assert sys.path == before


def test_a_model_with_faults(capsys):
    assert main(["check", "coin.py:Broken"]) == 1
    assert "reward" in capsys.readouterr().out
    assert main(["fit", "coin.py:Broken"]) == 2
    err = capsys.readouterr().err
    assert "Broken has 1 fault" in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_a_fault_in_a_program_keeps_its_traceback(capsys, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("cpomdp_ppl.cli.evaluate.take_stock", broken)
    assert main(["evaluate", LINE_GRID, "--policy", "random"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: by zero" in err


def test_version_and_usage(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("cpomdp-ppl")
    assert main([]) == 2
    assert "usage: cpomdp [-h] [--version] COMMAND" in capsys.readouterr().out


@pytest.fixture
def at_once(monkeypatch):
    """Lines on the progress without a wait."""
    for name in ("SECONDS_TO_FIRST_LINE", "SECONDS_BETWEEN_LINES"):
        monkeypatch.setattr(f"cpomdp_ppl.progress.{name}", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys):
    words = ["fit", "coin.py:Coin", "bias=0.8", *SMALL]
    assert main(words) == 0
    err = capsys.readouterr().err
    lines = re.findall(r"^C-IDS.*: \d of 4 iterations, return -?\d+\.\d\d, .*; .* left$", err, re.MULTILINE)
    assert len(lines) == 4
    assert "no figures: they need cpomdp-ppl[plot]" in err
    assert not Path("runs/Coin-fit-1/figures").exists()
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in Path("runs").iterdir()) == ["Coin-fit-1", "Coin-fit-2"]


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_planners_and_learners_tell_how_long_they_take_where_there_is_no_terminal(capsys):
    names, budget = "qmdp,pft,rdpg", ["--simulations", "3", "--training-episodes", "50"]
    episodes = ["--num-episodes", "6", "--planned-episodes", "2"]
    assert main(["compare", "coin.py:Coin", "bias=0.8", "--policies", names, *budget, *episodes]) == 0
    err = capsys.readouterr().err
    for name, decisions in (("qmdp", 6), ("pft", 2), ("rdpg", 6)):
        assert re.search(rf"^{name}: playing: {decisions} of \d+ decisions; .* left$", err, re.MULTILINE)
    assert re.search(r"^rdpg: RDPG: \d+ of 50 episodes, best return .*; .* left$", err, re.MULTILINE)


@pytest.mark.slow
def test_warnings_are_plain_lines(capsys, monkeypatch):
    assert main([*FIT_COIN[:-1], "a run", "--policy", "lstm"]) == 0
    assert "next: cpomdp evaluate 'a run'" in capsys.readouterr().err
    words = ["cpomdp", "run", "a run", "--num-episodes", "2", "--likelihood", "exact"]
    monkeypatch.setattr(sys, "argv", words)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as left:
            entry()
    assert left.value.code == 0
    out, err = capsys.readouterr()
    said = "cpomdp: warning: the policy was learned for one prior"
    assert sum(line.startswith(said) for line in err.splitlines()) == 1
    assert "UserWarning" not in err
    assert ".py:" not in err
    assert "± –" in out  # of a single run


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
    information = elsewhere / "site" / "other-1.0.dist-info"
    information.mkdir(parents=True)
    (elsewhere / "site" / "other_package.py").write_text(PLUGIN)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[cpomdp_ppl.commands]\ngreet = other_package:GREET\ngone = no_such_package:IT\n"
        "wrong = other_package:STILL\ncheck = other_package:GREET\n"
        "[cpomdp_ppl.policies]\nstill = other_package:STILL\n"
    )
    monkeypatch.syspath_prepend(elsewhere / "site")
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
    assert "the command 'wrong' is a Recipe, but expected a Command" in refused(capsys, "wrong")
    assert main(["check", LINE_GRID]) == 0  # what is ours stays ours
    assert main(["evaluate", LINE_GRID, "--policy", "still", "--num-episodes", "4"]) == 0
