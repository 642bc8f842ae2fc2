"""What a sweep keeps: found again by whoever asks for just that, and nothing of others taken for it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from cpomdp_ppl.experiments.axes import ARRAY_KINDS
from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.experiments.sweep import sweep
from cpomdp_ppl.experiments.sweep_folder import POINTS, RECORD, SweepFolder, SweepFolderError

IDENTITY = {"task": "tests:task", "task_fingerprint": "0", "labels": {"a": 1}, "values": {"a": "1"}}
OUTCOME = xr.Dataset({"y": ("x", [1.0, 2.0]), "word": ((), "fine")}, {"x": [10, 20]})
HERE = {"workers": 1, "progress": False}


def opened(path):
    return SweepFolder(path, "tests:task", ["a"])


def test_an_outcome_is_found_again(tmp_path):
    folder = opened(tmp_path / "sweep")
    assert folder.read_point(IDENTITY) is None
    folder.write_point(IDENTITY, OUTCOME)
    assert opened(tmp_path / "sweep").read_point(IDENTITY).identical(OUTCOME)
    with pytest.raises(SweepFolderError, match=r"made with values = \{'a': '1'\}, but expected \{'a': '2'\}"):
        folder.read_point({**IDENTITY, "values": {"a": "2"}})


def test_labels_may_be_nan(tmp_path):
    folder, identity = opened(tmp_path), {**IDENTITY, "labels": {"a": math.nan}}
    folder.write_point(identity, OUTCOME)
    assert folder.read_point({**identity, "labels": {"a": float("nan")}}).identical(OUTCOME)
    for other in (1.0, True, "1"):  # labels are compared as they are written
        assert folder.read_point({**IDENTITY, "labels": {"a": other}}) is None


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
    with pytest.raises(CheckpointError, match=r"sweep\.json is damaged"):
        opened(tmp_path)


def change(path, record=None, **members):
    """Write a point's file anew with some of its members or its record changed."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    whole = json.loads(str(arrays.pop("record")[()]))
    if record is not None:
        whole = record(whole)
    with Path(path).open("wb") as file:
        np.savez(file, record=np.array(json.dumps(whole)), **{**arrays, **members})


def first(name="y", dims=("x",)):
    """The first array of a record under another name, or with other dimensions."""
    return lambda record: {**record, "content": [[name, dims, False], *record["content"][1:]]}


DAMAGE = {
    "no format": {"record": lambda record: {k: v for k, v in record.items() if k != "format"}},
    "no mapping": {"record": lambda record: [record]},
    "a list for an identity": {"record": lambda record: {**record, "identity": []}},
    "the name of an axis": {"record": first(name="a")},
    "a dimension named like an axis": {"record": first(dims=["a"])},
    "dimensions that do not fit": {"record": first(dims=[])},
    "no dimensions": {"record": first(dims=None)},
    "a structured array": {"0": np.zeros(2, dtype=[("f", "f4"), ("g", "f4")])},
    "raw bytes": {"0": np.zeros(2, dtype="V3")},
    "code": {"0": np.array([print], dtype=object)},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_what_others_wrote_is_computed_again(tmp_path, damage):
    folder = opened(tmp_path)
    folder.write_point(IDENTITY, OUTCOME)
    change(folder.file(IDENTITY["labels"]))
    assert folder.read_point(IDENTITY).identical(OUTCOME)  # it is the change that matters
    change(folder.file(IDENTITY["labels"]), **damage)
    with pytest.warns(RuntimeWarning, match="is damaged, and is computed again"):
        assert folder.read_point(IDENTITY) is None


def test_another_format_is_left_alone(tmp_path):
    folder = opened(tmp_path)
    folder.write_point(IDENTITY, OUTCOME)
    change(folder.file(IDENTITY["labels"]), record=lambda record: {**record, "format": 3, "content": [3]})
    with pytest.raises(SweepFolderError, match="made with format = 3, but expected 2"):
        folder.read_point(IDENTITY)


def test_all_kinds_that_are_kept_come_back(tmp_path):
    dtypes = ("?", "i2", "u4", "f4", "c8", "U3", "S3", "m8[s]", "M8[s]")
    outcome = xr.Dataset({f"kind {k}": ("n", np.zeros(2, dtype)) for k, dtype in enumerate(dtypes)})
    folder = opened(tmp_path)
    folder.write_point(IDENTITY, outcome)
    found = folder.read_point(IDENTITY)
    assert found.identical(outcome)
    assert {found[name].dtype.kind for name in found} == set(ARRAY_KINDS)
