"""Things done side by side: the same bits however many are at work, and none lost when one is killed."""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import pkgutil
import subprocess
import sys

import pyro
import pytest
import torch
import xarray as xr
from pyro.distributions import constraints

import baselines
import cpomdp_ppl
import solvers
from cpomdp_ppl import RandomPolicy, compare, evaluate
from cpomdp_ppl.errors import ModelError, ResolutionError
from cpomdp_ppl.experiments import execute as parallel
from cpomdp_ppl.experiments.execute import WorkerKilledError, in_parallel
from cpomdp_ppl.experiments.files import DiskFullError
from cpomdp_ppl.experiments.sweep import SweepError
from cpomdp_ppl.models import LightDark, LineGrid
from solvers.cids.policy import LSTMPolicy
from tests.programs import Learnable
from tests.tasks import (
    Counting,
    KilledOnce,
    Remembering,
    changing,
    device_of,
    failing,
    nested,
    nothing_quickly,
    surroundings,
)

joblib = pytest.importorskip("joblib")
from joblib.externals.loky.process_executor import TerminatedWorkerError  # noqa: E402


class Deadly:
    """In place of processes: of n at work at a time, in order, all die with the first that is deadly.

    Args:
        deaths: How often an item is deadly, by index.
    """

    def __init__(self, deaths):
        self.deaths = deaths
        self.begun = []

    def __call__(self, n, call, items):
        for i, (k, item) in enumerate(items):
            self.begun.append([index for index, _ in items[i : i + n]])
            for other in self.begun[-1]:
                if self.deaths.get(other, 0) > 0:
                    self.deaths[other] -= 1
                    raise TerminatedWorkerError
            yield k, call.function(item)


@pytest.fixture
def deadly(monkeypatch):
    def make(**deaths):
        processes = Deadly({int(name[1:]): times for name, times in deaths.items()})
        monkeypatch.setattr(parallel, "_once", processes)
        return processes

    return make


def test_whoever_is_killed_is_replaced(deadly):
    deadly(_2=1, _5=2)
    with pytest.warns(RuntimeWarning, match="a process was killed"):
        done = dict(in_parallel(abs, [-k for k in range(8)], workers=3))
    assert done == {k: k for k in range(8)}


def test_a_deadly_item_takes_nobody_with_it(deadly):
    """All others are done, although each time that one is taken up all processes go down with it."""
    processes = deadly(_1=99)
    done = {}
    outcomes = (done.update([each]) for each in in_parallel(abs, [-k for k in range(6)], workers=3))
    with pytest.warns(RuntimeWarning), pytest.raises(WorkerKilledError, match="item 1 was killed") as caught:
        list(outcomes)
    assert done == {k: k for k in (0, 2, 3, 4, 5)}
    assert caught.value.missing == (1,)
    assert sum(1 in begun for begun in processes.begun) == 1 + parallel.RETRIES
    assert [1] in processes.begun  # the last time by itself


def test_everywhere_the_same_surroundings():
    """One thread, the caller's dtype, device and params, in whichever process."""
    before = torch.get_num_threads()
    with pyro.get_param_store().scope():
        pyro.param("gain", torch.tensor(2.0), constraint=constraints.positive)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        try:
            for workers in (1, 2):
                for _, (*seen, process) in in_parallel(surroundings, range(2), workers=workers):
                    assert seen == [1, "torch.float64", pytest.approx(2.0)]
                    assert (process == os.getpid()) == (workers == 1)
                assert torch.get_num_threads() == 2
                with torch.device("meta"):
                    assert set(dict(in_parallel(device_of, range(2), workers=workers)).values()) == {"meta"}
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_num_threads(before)
    assert set(dict(in_parallel(device_of, range(2), workers=2)).values()) == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_function_is_the_callers(workers):
    with pytest.raises(ModelError, match="M has 1 fault:"):
        list(in_parallel(failing, ["of a model"] * 2, workers=workers))
    with pytest.raises(Exception, match=r"unplugged|un-serialize"):
        list(in_parallel(failing, ["two arguments"] * 2, workers=workers))  # which cannot be unpickled


@pytest.mark.parametrize("settings", [{"workers": 1.5}, {"workers": True}])  # 0 and retries: see sweeps
def test_numbers_that_make_no_sense(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
        in_parallel(abs, [-1], **{"workers": 1, **settings})


def test_inside_one_of_many_there_is_one_process():
    for _, (inner, process) in in_parallel(nested, [2, 2], workers=2):
        assert process != os.getpid()
        assert {seen[-1] for _, seen in inner} == {process}


def test_the_active_configuration_of_joblib_decides():
    def processes(workers):
        return {seen[-1] for _, seen in in_parallel(surroundings, range(4), workers=workers)}

    with joblib.parallel_config(n_jobs=2):
        assert os.getpid() not in processes(None)
        assert processes(1) == {os.getpid()}
    with joblib.parallel_config(backend="sequential"):
        assert processes(None) == {os.getpid()}
    for backend in ("threading", "multiprocessing"):  # the second waits for ever for those who are killed
        with joblib.parallel_config(backend=backend), pytest.raises(ValueError, match="loky or dask, got"):
            processes(2)


def test_joblib_is_asked_for_when_it_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    assert dict(in_parallel(abs, [-1], workers=1)) == {0: 1}
    for workers in (None, 2):
        with pytest.raises(ValueError, match=r"cpomdp-ppl\[parallel\]"):
            in_parallel(abs, [-1], workers=workers)
    with pytest.raises(ValueError, match=r"cpomdp-ppl\[parallel\]"):
        evaluate(LineGrid(), RandomPolicy(3), 10, workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_items_and_params_are_the_functions_own_to_change(workers):
    """However many are at work, each item is as it was given, and the caller's stay as they are."""
    shared = [torch.zeros(2)]
    with pyro.get_param_store().scope():
        pyro.param("gain", torch.tensor(2.0))
        seen = dict(in_parallel(changing, (shared for _ in range(3)), workers=workers))
        assert seen == dict.fromkeys(range(3), (1, 1.0, 3.0, 2))
        assert list(pyro.get_param_store()) == ["gain"]
        assert pyro.param("gain").item() == 2.0
    assert len(shared) == 1
    assert shared[0].tolist() == [0.0, 0.0]


def error_classes():
    for package in (cpomdp_ppl, solvers, baselines):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.rpartition(".")[2] == "__main__":
                continue
            try:
                content = vars(importlib.import_module(module.name))
            except ImportError:  # an extra that is not installed
                continue
            for each in content.values():
                own = isinstance(each, type) and each.__module__ == module.name
                if own and issubclass(each, Exception):  # interruptions stay where they are
                    yield each


def test_errors_survive_the_way_between_processes():
    special = {
        ModelError: ("M", ["one", "two"]),
        ResolutionError: ("why", 1000),
        WorkerKilledError: ([1, 2],),
        DiskFullError: ("/somewhere",),
        SweepError: ("why", {(1,): "why"}, xr.Dataset(coords={"a": [1]})),
    }
    classes = set(error_classes())
    assert set(special) < classes
    for kind in classes:
        error = kind(*special.get(kind, ("why",)))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error)
        assert repr(vars(again)) == repr(vars(error))
    assert pickle.loads(pickle.dumps(DiskFullError("a"))).errno == errno.ENOSPC


@pytest.mark.slow
def test_who_leaves_early_leaves_nothing_running():
    outcomes = in_parallel(nothing_quickly, [0] * 50, workers=2)
    assert next(outcomes)[1] == 0
    outcomes.close()
    assert dict(in_parallel(abs, [-1, -3], workers=2)) == {0: 1, 1: 3}


@pytest.mark.slow
def test_who_begins_when_the_caller_is_gone_ends():
    """A process takes seconds to import what it needs, and the caller may be killed in the meantime."""
    code = """if True:
        import os, time
        from cpomdp_ppl.experiments.execute import RemoteCall
        call = RemoteCall(time.sleep)
        call.caller = os.getpid()  # anybody but the parent
        call(0, 60)
    """
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 1


def numbers(evaluation):
    content = evaluation.as_dict()
    del content["seconds_per_decision"]
    return content


@pytest.mark.slow
def test_evaluation_has_the_same_bits_however_many_play():
    """In this process torch has two threads outside."""
    model = LightDark()
    policy = LSTMPolicy(model, seed=0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one, two = [
            numbers(evaluate(model, policy, 300, batch_size=60, likelihood="ekf", workers=workers, seed=1))
            for workers in (1, 2)
        ]
    finally:
        torch.set_num_threads(before)
    assert one == two


def test_what_a_policy_counts_is_there_afterwards():
    """If it was in this process; a copy would have it otherwise."""
    policy = Counting()
    evaluate(LineGrid(), policy, 60, batch_size=20)
    assert policy.starts == 3
    evaluate(LineGrid(), policy, 60, batch_size=20, workers=2)
    assert policy.starts == 3


def test_comparison_runs_where_joblib_is_configured_to():
    model, policies = LineGrid(), {"random": RandomPolicy(3), "process": Remembering()}
    with joblib.parallel_config(backend="loky", n_jobs=2):
        table = compare(model, policies, 40, batch_size=20, workers=None)
    here = compare(model, policies, 40, batch_size=20)
    assert numbers(table.evaluations["random"]) == numbers(here.evaluations["random"])
    assert table.evaluations["process"].returns != here.evaluations["process"].returns


@pytest.mark.slow
def test_evaluation_survives_a_killed_process(tmp_path):
    model, settings = LineGrid(), {"batch_size": 20, "seed": 4}
    with pytest.warns(RuntimeWarning, match="a process was killed"):
        survived = evaluate(model, KilledOnce(tmp_path / "killed"), 80, workers=2, **settings)
    assert numbers(survived) == numbers(evaluate(model, KilledOnce(None), 80, **settings))


@pytest.mark.slow
def test_evaluation_in_other_processes_sees_learned_constants():
    """What Pyro's param store has learned decides the return, in whichever process."""
    model, settings = Learnable(), {"batch_size": 20, "seed": 2, "likelihood": "ekf"}
    unlearned = numbers(evaluate(model, RandomPolicy(2), 60, **settings))
    with pyro.get_param_store().scope():
        pyro.param("drift", torch.tensor(5.0), constraint=constraints.positive)
        one, two = (numbers(evaluate(model, RandomPolicy(2), 60, workers=w, **settings)) for w in (1, 2))
    assert one == two
    assert one["returns"] != unlearned["returns"]
