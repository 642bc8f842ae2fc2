from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import arviz as az
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.figure import Figure

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.diagnostics import to_inference_data
from cpomdp_ppl.experiments import run_folder
from cpomdp_ppl.experiments.files import CheckpointError, jsonable
from cpomdp_ppl.experiments.run_folder import RunFolder, RunFolderError, next_folder
from cpomdp_ppl.models import LineGrid


def made(path, **changes):
    asked = dict(model="models:Mine", arguments={"walls": (1, 2)}, settings={"iterations": 5}, seed=3)
    asked["source"] = {"path": "/a/m.py", "sha256": "1"}
    return RunFolder.create(path, "fit", **{**asked, **changes})


def files(path):
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


def test_the_record_says_what_was_run(tmp_path):
    made(tmp_path / "a" / "run")
    record = json.loads((tmp_path / "a" / "run" / "run.json").read_text())
    assert record["format"] == 1
    assert (record["command"], record["model"], record["seed"]) == ("fit", "models:Mine", 3)
    assert (record["arguments"], record["settings"]) == ({"walls": [1, 2]}, {"iterations": 5})
    assert record["finished"] is False
    assert set(record["versions"]) == {"python", "torch", "pyro-ppl", "numpy", "arviz", "cpomdp-ppl"}
    assert record["versions"]["torch"] == torch.__version__
    assert record["started"].endswith("+00:00")


def test_the_commit_is_that_of_the_source_tree():
    tree = Path(run_folder.__file__).parents[2]
    if not (tree / ".git").exists():
        assert run_folder.commit() is None
        return
    head = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert run_folder.commit().removesuffix("-dirty") == head.stdout.strip()


def test_the_same_run_goes_on_with_its_seed(tmp_path):
    first = made(tmp_path / "run", seed=None)
    again = made(tmp_path / "run", seed=None)
    assert again.record == first.record
    moved = {"path": "/b/m.py", "sha256": "1"}
    assert made(tmp_path / "run", seed=first.seed, source=moved).seed == first.seed
    assert made(tmp_path / "other", seed=None).seed != first.seed


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "models:Other"}, "model = 'models:Mine', but expected 'models:Other'"),
        ({"arguments": {"walls": (1, 3)}}, "arguments = {'walls': [1, 2]}, but expected {'walls': [1, 3]}"),
        ({"settings": {"iterations": 6}}, "settings = {'iterations': 5}, but expected {'iterations': 6}"),
        ({"settings": {"iterations": 5, "prior": [1.0]}}, "settings = {}, but expected {'prior': [1.0]}"),
        ({"seed": 4}, "seed = 3, but expected 4"),
        (
            {"source": {"path": "/a/m.py", "sha256": "2"}},
            "code of the model (sha256) = '1', but expected '2'",
        ),
    ],
)
def test_another_run_in_the_same_folder_is_refused(tmp_path, changes, named):
    made(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(RunFolderError, match=re.escape(f"was made with {named}; use another folder")):
        made(tmp_path / "run", **changes)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_what_is_no_run_folder_is_not_touched(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    with pytest.raises(RunFolderError, match="is not empty, and is no run folder"):
        made(tmp_path / "letters")
    with pytest.raises(RunFolderError, match="is a file"):
        made(tmp_path / "letters" / "a.txt")
    with pytest.raises(NotADirectoryError):
        made(tmp_path / "letters" / "a.txt" / "below")
    with pytest.raises(RunFolderError, match="there is no such folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"it has no run\.json"):
        RunFolder.open(tmp_path / "letters")
    assert files(tmp_path) == ["letters/a.txt"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is damaged: it cannot be read as JSON"),
        ("[]", "holds a list, but expected an object"),
        ("{}", "is of format None"),
        ('{"format": 99}', "is of format 99, and this version of cpomdp-ppl reads format 1"),
        ('{"format": 1, "command": 5}', "is damaged: command is 5"),
    ],
)
def test_a_record_that_cannot_be_read(tmp_path, text, named):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunFolderError, match=named):
        RunFolder.open(tmp_path)


def test_half_written(tmp_path):
    folder = made(tmp_path / "run")
    folder.write_table("history.csv", {"iteration": [1]})
    with pytest.raises(RunFolderError, match=rf"half-written: .* left history\.csv; .* --run {tmp_path}/run"):
        RunFolder.open(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run", unfinished=True).record == folder.record
    folder.finish()
    assert RunFolder.open(tmp_path / "run").finished


def test_what_later_commands_add_is_noted(tmp_path):
    folder = made(tmp_path / "run")
    folder.finish()
    folder.add("evaluate", settings={"num_episodes": 10}, seed=1)
    folder.add("evaluate", settings={"num_episodes": 20}, seed=1)
    added = RunFolder.open(tmp_path / "run").record["added"]
    assert list(added) == ["evaluate"]
    assert added["evaluate"]["settings"] == {"num_episodes": 20}
    made(tmp_path / "run")  # what was added does not make it another run


@dataclass
class Pair:
    left: float
    right: float


def test_json_is_plain(tmp_path):
    folder = made(tmp_path / "run")
    folder.write_json("a.json", {"pair": Pair(1.0, float("nan")), "x": torch.ones(2), "n": np.int64(3)})
    assert json.loads((tmp_path / "run" / "a.json").read_text(), parse_constant=pytest.fail) == {
        "pair": {"left": 1.0, "right": None},
        "x": [1.0, 1.0],
        "n": 3,
    }
    assert jsonable([float("inf"), np.nan, True, None, "∞"]) == [None, None, True, None, "∞"]


def test_tables(tmp_path):
    folder = made(tmp_path / "run")
    folder.write_table("t.csv", {"name": ['a, "b"', "line\nbreak"], "x": [0.1, None], "y": [np.nan, 2]})
    assert folder.read_table("t.csv") == {"name": ['a, "b"', "line\nbreak"], "x": ["0.1", ""], "y": ["", "2"]}
    with pytest.raises(ValueError, match="shorter"):
        folder.write_table("t.csv", {"a": [1, 2], "b": [1]})
    (tmp_path / "run" / "short.csv").write_text("a,b\n1\n")
    for name in ("missing.csv", "short.csv"):
        with pytest.raises(CheckpointError, match="cannot be read as a table"):
            folder.read_table(name)


def test_figures_are_the_same_every_time(tmp_path):
    folder = made(tmp_path / "run")
    contents = []
    for _ in range(2):
        figure = Figure()
        figure.subplots().plot([1, 3, 2], label="curve")
        folder.write_figure("curve", figure)
        contents.append((tmp_path / "run" / "figures" / "curve.svg").read_bytes())
    assert contents[0] == contents[1]
    assert (tmp_path / "run" / "figures" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert folder.figures == ("curve",)
    assert folder.contents == ("figures/",)


@pytest.mark.slow
def test_data_come_back(tmp_path):
    folder = made(tmp_path / "run")
    model = LineGrid()
    data = to_inference_data(model, simulate(model, RandomPolicy(3), 3, seed=0), "exact", draws=5, seed=0)
    folder.write_data("episodes.nc", data)
    back = az.from_netcdf(str(tmp_path / "run" / "episodes.nc"))
    assert set(back.groups()) == set(data.groups())
    assert back.posterior.equals(data.posterior)
    history = xr.Dataset({"return": ("iteration", [0.5, 1.5])}, {"iteration": [1, 2]})
    folder.write_data("history.nc", history)
    with xr.open_dataset(tmp_path / "run" / "history.nc", engine="h5netcdf") as found:
        assert found.load().equals(history)


def test_a_run_that_got_nowhere_can_be_discarded(tmp_path):
    folder = made(tmp_path / "run")
    folder.write_json("a.json", 1)
    folder.discard()
    assert files(tmp_path) == ["run/a.json", "run/run.json"]
    (tmp_path / "run" / "a.json").unlink()
    (tmp_path / "run" / "b" / "c").mkdir(parents=True)
    folder.discard()
    assert not (tmp_path / "run").exists()


def test_the_next_folder(tmp_path):
    parent = tmp_path / "runs"
    assert next_folder("a/b.py:Maze", "fit", parent) == parent / "Maze-fit-1"
    assert next_folder("a.b:Maze", "fit", parent) == parent / "Maze-fit-2"  # the first is taken
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        next_folder("a.b:Maze", "fit", tmp_path / "file")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: next_folder("a.b:Maze", "fit", parent), range(16)))
    assert set(found) == {parent / f"Maze-fit-{n}" for n in range(3, 19)}


def test_many_at_once_note_what_they_added(tmp_path):
    made(tmp_path / "run").finish()
    folders = [RunFolder.open(tmp_path / "run") for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda k: folders[k].add(f"command-{k}", settings={}, seed=k), range(16)))
    added = RunFolder.open(tmp_path / "run").record["added"]
    assert set(added) == {f"command-{k}" for k in range(16)}
    folders[0].withdraw("command-0")
    assert set(RunFolder.open(tmp_path / "run").record["added"]) == {f"command-{k}" for k in range(1, 16)}


def test_writability_is_found_out_at_once(tmp_path, monkeypatch):
    folder = made(tmp_path / "run")
    folder.require_writable()
    assert files(tmp_path / "run") == ["run.json"]

    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "temporary")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*/run/probe-\w+'"):
        folder.require_writable()
    assert files(tmp_path / "run") == ["run.json"]


def test_a_seed_that_is_none_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="seed: expected None or an integer"):
        RunFolder.create(tmp_path / "run", "fit", model="models:Mine", seed=-1)
    assert not (tmp_path / "run").exists()
