"""What a sweep keeps: found again by whoever asks for just that, and nothing of others taken for it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from cpomdp_ppl.experiments.sweep import sweep
from cpomdp_ppl.experiments.sweep_folder import KEPT, POINTS, RECORD, SweepFolder, SweepFolderError

IDENTITY = {"task": "tests:task", "task_digest": "0", "labels": {"a": 1}, "values": {"a": "1"}}
OUTCOME = xr.Dataset({"y": ("x", [1.0, 2.0]), "word": ((), "fine")}, {"x": [10, 20]})
HERE = {"workers": 1, "progress": False}


def opened(path):
    return SweepFolder(path, "tests:task", ["a"])


def test_an_outcome_is_found_again(tmp_path):
    folder = opened(tmp_path / "sweep")
    assert folder.read(IDENTITY) is None
    folder.write(IDENTITY, OUTCOME)
    assert opened(tmp_path / "sweep").read(IDENTITY).identical(OUTCOME)
    with pytest.raises(SweepFolderError, match=r"its values is \{'a': '1'\}, but expected \{'a': '2'\}"):
        folder.read({**IDENTITY, "values": {"a": "2"}})


def test_labels_may_be_nan(tmp_path):
    folder, identity = opened(tmp_path), {**IDENTITY, "labels": {"a": math.nan}}
    folder.write(identity, OUTCOME)
    assert folder.read({**identity, "labels": {"a": float("nan")}}).identical(OUTCOME)
    with pytest.raises(SweepFolderError, match=r"its task_digest is '0', but expected '1'"):
        folder.read({**identity, "task_digest": "1"})


def test_labels_are_compared_as_they_are_written(tmp_path):
    folder = opened(tmp_path)
    folder.write(IDENTITY, OUTCOME)
    for other in (1.0, True, "1"):
        assert folder.read({**IDENTITY, "labels": {"a": other}}) is None


def moving(seed):
    os.chdir("/")
    return {"x": seed}


def test_a_task_may_change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sweep(moving, {"seed": range(3)}, folder="relative", **HERE)
    assert found["x"].values.tolist() == [0, 1, 2]
    assert len(list((tmp_path / "relative" / POINTS).iterdir())) == 3


def test_a_folder_that_is_whole_is_not_written_to(tmp_path):
    opened(tmp_path)
    record = tmp_path / RECORD
    os.utime(record, (1, 1))
    opened(tmp_path)
    assert record.stat().st_mtime == 1
    record.write_text("{")
    with pytest.warns(RuntimeWarning, match="written anew"):
        opened(tmp_path)
    assert json.loads(record.read_text())["task"] == "tests:task"


def change(path, record=None, **members):
    """Write a point's file anew with some of its members or its record changed."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    whole = json.loads(str(arrays.pop("record")[()]))
    if record is not None:
        whole = record(whole)
    with Path(path).open("wb") as file:
        np.savez(file, record=np.array(json.dumps(whole)), **{**arrays, **members})


def content(**changes):
    return lambda record: {**record, "content": [{**each, **changes} for each in record["content"]]}


def second(**changes):
    def changed(record):
        first, *others = record["content"]
        return {**record, "content": [{**first, **changes}, *others]}

    return changed


DAMAGE = {
    "no format": {"record": lambda record: {k: v for k, v in record.items() if k != "format"}},
    "a word for a format": {"record": lambda record: {**record, "format": "1"}},
    "no mapping": {"record": lambda record: [record]},
    "a list for an identity": {"record": lambda record: {**record, "identity": []}},
    "no identity": {"record": lambda record: {k: v for k, v in record.items() if k != "identity"}},
    "the name of an axis": {"record": second(name="a")},
    "the same name twice": {"record": content(name="y", dims=[])},
    "a number for a name": {"record": second(name=3)},
    "a dimension named like an axis": {"record": second(dims=["a"])},
    "dimensions that do not fit": {"record": second(dims=[])},
    "a list for a dimension": {"record": second(dims=[["x"]])},
    "no dimensions": {"record": second(dims=None)},
    "a structured array": {"0": np.zeros(2, dtype=[("f", "f4"), ("g", "f4")])},
    "raw bytes": {"0": np.zeros(2, dtype="V3")},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_what_others_wrote_is_computed_again(tmp_path, damage):
    folder = opened(tmp_path)
    folder.write(IDENTITY, OUTCOME)
    change(folder.file(IDENTITY["labels"]))
    assert folder.read(IDENTITY).identical(OUTCOME)  # it is the change that matters
    change(folder.file(IDENTITY["labels"]), **damage)
    with pytest.warns(RuntimeWarning, match="is damaged, and is computed again"):
        assert folder.read(IDENTITY) is None


def test_another_format_is_left_alone(tmp_path):
    folder = opened(tmp_path)
    folder.write(IDENTITY, OUTCOME)
    change(folder.file(IDENTITY["labels"]), record=lambda record: {**record, "format": 2, "content": [3]})
    with pytest.raises(SweepFolderError, match="its format is 2, but expected 1"):
        folder.read(IDENTITY)


def test_all_kinds_that_are_kept_come_back(tmp_path):
    dtypes = ("?", "i2", "u4", "f4", "c8", "U3", "S3", "m8[s]", "M8[s]")
    outcome = xr.Dataset({f"kind {k}": ("n", np.zeros(2, dtype)) for k, dtype in enumerate(dtypes)})
    folder = opened(tmp_path)
    folder.write(IDENTITY, outcome)
    found = folder.read(IDENTITY)
    assert found.identical(outcome)
    assert {found[name].dtype.kind for name in found} == set(KEPT)
