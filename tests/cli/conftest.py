"""A directory with a user's model, and a fit of it that tests share."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from pathlib import Path
from shutil import copytree

import pytest

from cpomdp_command import main
from cpomdp_ppl.cli import results

LINE_GRID = "cpomdp_ppl.models:LineGrid"
SMALL = ("--iterations", "4", "--batch-size", "8", "--likelihood", "exact", "--seed", "5")
"""Settings of a fit that takes no time."""

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
FIT_COIN = ("fit", "coin.py:Coin", "bias=0.8", *SMALL, "--run", "here")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The current directory: it has a user's model, which imports what lies beside it, and nothing else."""
    write_coin(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_coin(place):
    (place / "coin.py").write_text(COIN)
    (place / "sides.py").write_text("FAIR = 0.5\n")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """As if matplotlib were not installed, because drawing takes longest."""
    monkeypatch.setattr(results, "is_installed", lambda module: module != "matplotlib")


@pytest.fixture(scope="session")
def coin_fit(tmp_path_factory):
    """The folder of a fit, as FIT_COIN makes it."""
    place = tmp_path_factory.mktemp("coin")
    write_coin(place)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        patch.chdir(place)
        assert main(FIT_COIN) == 0
    return place / "here"


@pytest.fixture
def here(elsewhere, coin_fit):
    """The same fit in the current directory, as if it had been run there."""
    copytree(coin_fit, "here")
    change_record("here", source={**read("here/run.json")["source"], "path": str(elsewhere / "coin.py")})
    return elsewhere / "here"


def read(path):
    return json.loads(Path(path).read_text())


def rows_of(table):
    with open(table) as file:
        return list(csv.DictReader(file))


def change_record(folder, **entries):
    path = Path(folder, "run.json")
    path.write_text(json.dumps({**read(path), **entries}))


def data_of(page):
    """The data of a report."""
    text = Path(page).read_text()
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)[1])


def refused(capsys, *words):
    """What the command says when it refuses, in one sentence and without any result."""
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cpomdp: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def interrupted(*_, **__):
    """Something to call in place of what takes long, as if Ctrl-C came there."""
    raise KeyboardInterrupt
