"""Sweeps: every point once, the same bits whoever computes it, and nothing lost that was finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pyro
import pytest
import torch
import xarray as xr

from cpomdp_ppl.experiments import sweep as sweeps
from cpomdp_ppl.experiments.sweep import SweepError, sweep
from cpomdp_ppl.experiments.sweep_folder import SweepFolderError
from cpomdp_ppl.models import ContextualTiger, LineGrid
from cpomdp_ppl.rng import generators
from tests.children import is_running, start_python, wait_for
from tests.tasks import Noting, begun, filtered, first_seed

HERE = {"workers": 1, "progress": False}
AXES = {"horizon": [2, 3], "seed": range(3)}


def product(a, b):
    return {"product": a * b, "both": [a, b]}


def test_every_point_is_where_it_belongs():
    found = sweep(product, {"a": [2, 3, 5], "b": [7, 11]}, **HERE)
    assert found["product"].dims == ("a", "b")
    assert found["product"].values.tolist() == [[14, 22], [21, 33], [35, 55]]
    assert found["both"].dims == ("a", "b", "both_dim_0")
    assert found["both"].sel(a=3, b=11).values.tolist() == [3, 11]
    assert found["product"].dtype.kind == "i"


def test_labels_stand_for_values():
    models = {"grid": LineGrid(), "tiger": ContextualTiger()}

    def actions(model, factor):
        return {"number": model.num_actions * (factor or 10)}

    found = sweep(actions, {"model": models, "factor": [None, 2]}, **HERE)
    assert found["number"].sel(model="tiger", factor="None") == 10 * models["tiger"].num_actions
    assert found["number"].sel(model="grid", factor="2") == 2 * models["grid"].num_actions


def test_outcomes_may_be_labelled_arrays():
    def curve(scale):
        x = xr.DataArray([1.0, 2.0], dims="x", coords={"x": [np.nan, 20]})
        return xr.Dataset({"y": scale * x, "name": ((), f"times {scale}")})

    found = sweep(curve, {"scale": np.array([1.0, 4.0])}, **HERE)
    assert found["y"].sel(scale=4.0, x=20) == 8.0
    assert found["name"].sel(scale=1.0).item() == "times 1.0"
    named = sweep(lambda scale: xr.DataArray(scale, name="z"), {"scale": torch.tensor([3])}, **HERE)
    assert named["z"].sel(scale=3) == 3


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "axes: expected"),
        ({"a": []}, "a: expected at least one value"),
        ({"a": [1, 1]}, "a: expected values that differ"),
        ({"a": "words"}, "a: expected a sequence"),
        ({"a": 3}, "a: expected a sequence"),
        ({"a": np.array(3)}, "a: expected a sequence"),
        ({"a": torch.tensor(3)}, "a: expected a sequence"),
        ({"a": {"one", "two"}}, "a: expected a sequence"),
        ({"a": ["a", "a\0"]}, "a: expected values that differ"),
        ({"a": [2**53, 2**53 + 1, 0.5]}, "a: expected values that differ"),
        ({"a": [float("nan"), float("nan")]}, "a: expected values that differ"),
        ({"a": [LineGrid()]}, "a: expected numbers or words; to anything else give a label"),
        ({"a": {1: 2}}, "a: expected labels that are words"),
        ({"not a name": [1]}, "axes: expected names of arguments"),
    ],
)
def test_axes_that_make_no_sense(axes, message):
    with pytest.raises(ValueError, match=message):
        sweep(product, axes, **HERE)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (3.0, "expected a function that returns numbers or arrays by name"),
        ({"x": object()}, "expected numbers, truth values, words or times"),
        ({"seed": 1.0}, "outcomes with other names than the axes"),
    ],
)
def test_outcomes_that_make_no_sense(outcome, message):
    with pytest.raises(SweepError, match=message):
        sweep(lambda seed: outcome, {"seed": [0]}, **HERE)


@pytest.mark.parametrize(
    "task",
    [
        lambda n: {"x": np.zeros(2 if n == 2 else 1)},
        lambda n: {"y" if n == 2 else "x": 0.0},
        lambda n: {"x": "two" if n == 2 else n},
        lambda n: xr.DataArray([1.0], dims="i", coords={"i": [n == 2]}, name="x"),
    ],
)
def test_an_outcome_that_does_not_fit_in_is_a_failure_of_its_point(task, tmp_path):
    with pytest.raises(SweepError, match=r"[xi] is not the same at n=1 and n=2") as caught:
        sweep(task, {"n": [1, 2, 3]}, folder=tmp_path, **HERE)
    assert set(caught.value.failures) == {(2,)}
    assert caught.value.partial["x"].sizes["n"] == 3
    assert len(list((tmp_path / "points").iterdir())) == 2


def test_when_the_machinery_breaks_what_there_is_is_not_lost(monkeypatch):
    def broken(function, items, **_):
        yield 0, function(items[0])
        raise ConnectionError("the scheduler is gone")

    monkeypatch.setattr(sweeps, "in_parallel", broken)
    with pytest.raises(SweepError, match="the scheduler is gone") as caught:
        sweep(product, {"a": [2, 3], "b": [5]}, **HERE)
    assert caught.value.partial["product"].values[0].item() == 10
    assert set(caught.value.failures) == {(3, 5)}


@pytest.mark.slow
def test_what_cannot_be_told_apart_or_sent_is_named(tmp_path):
    axes = {"value": {"one": 1, "lock": threading.Lock()}, "seed": [0]}
    with pytest.raises(ValueError, match="value=lock: a _thread:lock cannot be told from others"):
        sweep(first_seed, axes, folder=tmp_path / "new", **HERE)
    assert not (tmp_path / "new").exists()
    assert sweep(first_seed, axes, **HERE)["seed_"].sizes["value"] == 2
    pytest.importorskip("joblib")
    with pytest.raises(SweepError, match=r"cannot pickle '_thread\.lock' object"):
        sweep(first_seed, axes, workers=2, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers: expected"),
        ({"retries": -1}, "retries: expected"),
        ({"axes": {"c": [1]}}, "task"),
    ],
)
def test_nothing_is_made_if_arguments_make_no_sense(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep(product, folder=tmp_path / "new", **{"axes": {"a": [1], "b": [2]}, **HERE, **settings})
    assert not (tmp_path / "new").exists()


def test_a_task_that_raises_spoils_only_its_own_point(tmp_path):
    def quotient(a, b):
        return {"quotient": a // b, "word": "fine"}

    axes = {"a": [6, 8], "b": [0, 2]}
    with pytest.raises(SweepError, match=r"2 of 4 points failed: a=6, b=0; a=8, b=0; .* has the others") as c:
        sweep(quotient, axes, folder=tmp_path, **HERE)
    assert "ZeroDivisionError" in str(c.value)
    assert "in quotient" in str(c.value)  # the traceback
    assert set(c.value.failures) == {(6, 0), (8, 0)}
    assert c.value.partial["quotient"].sel(b=2).values.tolist() == [3, 4]
    assert c.value.partial["quotient"].sel(b=0).isnull().all()
    assert len(list((tmp_path / "points").iterdir())) == 2


def test_if_all_fail_there_are_still_labels():
    with pytest.raises(SweepError) as caught:
        sweep(lambda a: sys.exit(3), {"a": [1, 2]}, **HERE)
    assert caught.value.partial["a"].values.tolist() == [1, 2]


def test_a_task_that_forgets_to_seed_is_still_the_same(tmp_path):
    """Whatever comes before, and however many are at work."""
    torch.manual_seed(1)
    first = sweep(filtered, AXES, **HERE)
    torch.manual_seed(2)
    with pyro.get_param_store().scope():
        pyro.param("number", torch.tensor(99.0))  # not for tasks to see
        again = sweep(filtered, {**AXES, "seed": [2, 0, 1]}, **HERE).sortby("seed")
    assert first.identical(again)
    assert len(np.unique(first["drawn"])) == first["drawn"].size
    assert (first["threads"] == 1).all()


def test_the_caller_is_left_as_it_was(tmp_path):
    """Generators, params, threads, dtype, signals: in this process, and with others at work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def state():
        return (
            generators(),
            dict(pyro.get_param_store().items()),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            signal.getsignal(signal.SIGINT),
        )

    try:
        pytest.importorskip("joblib")
        before = state()
        results = [sweep(filtered, AXES, workers=workers, progress=False) for workers in (1, 2)]
        with pytest.raises(SweepError):
            sweep(lambda a: 1 / a, {"a": [0]}, **HERE)
        assert state() == before
    finally:
        torch.set_num_threads(threads)
    assert results[0].identical(results[1])


def test_tasks_can_learn_wherever_they_are_called():
    def slope(a):
        x = torch.tensor(float(a), requires_grad=True)
        (x * x).backward()
        return {"slope": x.grad}

    with torch.no_grad():
        assert sweep(slope, {"a": [3]}, **HERE)["slope"].item() == 6.0
    with torch.inference_mode():
        assert sweep(slope, {"a": [3]}, **HERE)["slope"].item() == 6.0


def test_a_folder_has_what_was_finished(tmp_path):
    notes, folder = tmp_path / "notes", tmp_path / "sweep"
    notes.mkdir()
    task = Noting(notes)
    first = sweep(task, AXES, folder=folder, **HERE)
    assert sweep(task, AXES, folder=folder, **HERE).identical(first)
    assert begun(notes)[0] == {(h, s): 1 for h in (2, 3) for s in range(3)}
    more = sweep(task, {"horizon": [2, 3, 4], "seed": range(4)}, folder=folder, **HERE)
    assert begun(notes)[0] == {(h, s): 1 for h in (2, 3, 4) for s in range(4)}
    assert more.sel(horizon=[2, 3], seed=range(3)).identical(first)
    one = sweep(task, {"horizon": [4], "seed": [3]}, folder=folder, **HERE)
    assert one.identical(more.sel(horizon=[4], seed=[3]))


def test_a_damaged_file_is_computed_again(tmp_path):
    axes = {"horizon": [2], "seed": range(3)}
    first = sweep(filtered, axes, folder=tmp_path, **HERE)
    files = sorted((tmp_path / "points").iterdir())
    content = files[0].read_bytes()
    flipped = bytearray(content)
    flipped[content.index(b"NUMPY") + 200] ^= 1
    for file, damage in zip(files, (content[: len(content) // 2], bytes(flipped), b""), strict=True):
        file.write_bytes(damage)
        with pytest.warns(RuntimeWarning, match=f"{file.name} is damaged, and is computed again"):
            assert sweep(filtered, axes, folder=tmp_path, **HERE).identical(first)
    assert sweep(filtered, axes, folder=tmp_path, **HERE).identical(first)


def test_files_of_another_sweep_are_noticed(tmp_path):
    def task(a, b=None):
        return {"x": a}

    sweep(task, {"a": [1]}, folder=tmp_path / "one", **HERE)
    with pytest.raises(SweepFolderError, match="made with axes"):
        sweep(task, {"a": [1], "b": [2]}, folder=tmp_path / "one", **HERE)
    with pytest.raises(SweepFolderError, match="made with task"):
        sweep(lambda a: {"x": a}, {"a": [1]}, folder=tmp_path / "one", **HERE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(SweepFolderError, match=r"has no sweep\.json"):
        sweep(task, {"a": [1]}, folder=tmp_path / "mine", **HERE)
    with pytest.raises(ValueError, match="folder: expected"):
        sweep(task, {"a": [1]}, folder=tmp_path / "mine" / "thesis.tex", **HERE)
    with torch.device("meta"), pytest.raises(SweepFolderError, match="made with device = 'cpu'"):
        sweep(task, {"a": [1]}, folder=tmp_path / "one", **HERE)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(SweepFolderError, match="made with dtype"):
            sweep(task, {"a": [1]}, folder=tmp_path / "one", **HERE)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_changed_task_or_value_is_not_the_old_one(tmp_path):
    """Each under the same name and labels."""

    def make_task(number):
        return lambda model: {"x": number}

    models = {"grid": LineGrid()}
    for _ in range(2):
        sweep(make_task(1), {"model": models}, folder=tmp_path, **HERE)
    with pytest.raises(SweepFolderError, match="made with task_fingerprint"):
        sweep(make_task(2), {"model": models}, folder=tmp_path, **HERE)
    with pytest.raises(SweepFolderError, match=r"made with values = \{'model'"):
        sweep(make_task(1), {"model": {"grid": LineGrid(horizon=7)}}, folder=tmp_path, **HERE)


@pytest.mark.slow
def test_a_killed_process_costs_only_what_it_had_in_hand(tmp_path):
    pytest.importorskip("joblib")
    notes = tmp_path / "notes"
    notes.mkdir()
    task = Noting(notes, killed=3)
    with pytest.warns(RuntimeWarning, match="a process was killed"):
        found = sweep(task, AXES, folder=tmp_path / "sweep", workers=2, progress=False)
    assert found.identical(sweep(filtered, AXES, **HERE))
    times, _ = begun(notes)
    assert times.pop((3, 0)) == 2
    assert set(times.values()) <= {1, 2}
    assert sum(times.values()) <= 5 + 3  # the other's, and what was ready but not yet heard of


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(tmp_path):
    """By SIGKILL, in the middle; its processes end with it."""
    pytest.importorskip("joblib")
    notes, folder, axes = tmp_path / "notes", tmp_path / "sweep", {"horizon": [2, 3], "seed": range(4)}
    notes.mkdir()
    script = f"""
    from cpomdp_ppl.experiments.sweep import sweep
    from tests.tasks import Noting

    axes = {{"horizon": [2, 3], "seed": range(4)}}
    sweep(Noting({str(notes)!r}, slow=0.5), axes, folder={str(folder)!r}, workers=2)
    """
    caller = start_python(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list(folder.glob("points/*.npz"))) >= 3)
    finally:
        caller.kill()
        caller.wait()
    processes = begun(notes)[1]
    wait_for(lambda: not any(map(is_running, processes)))
    finished = len(list(folder.glob("points/*.npz")))
    assert 3 <= finished < 8
    before = sum(begun(notes)[0].values())
    found = sweep(Noting(notes, slow=0.5), axes, folder=folder, **HERE)
    assert sum(begun(notes)[0].values()) - before == 8 - finished
    assert found.identical(sweep(filtered, axes, **HERE))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_goes_on_to_the_caller(tmp_path, workers):
    pytest.importorskip("joblib")
    notes, folder = tmp_path / "notes", tmp_path / "sweep"
    notes.mkdir()

    def press():
        wait_for(lambda: len(list(folder.glob("points/*.npz"))) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    axes = {"horizon": [2], "seed": range(50)}
    with pytest.raises(KeyboardInterrupt):
        sweep(Noting(notes, slow=0.2), axes, folder=folder, workers=workers, progress=False)
    pressing.join()
    assert 2 <= len(list(folder.glob("points/*.npz"))) < 50
    assert not list(folder.glob("points/.*"))


def test_the_documented_import_still_works():
    from cpomdp_ppl import sweep as earlier

    assert earlier.sweep is sweep
