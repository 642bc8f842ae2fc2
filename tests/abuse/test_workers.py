"""Processes of a sweep killed at any moment, on joblib's own and on a Dask cluster: no outcome is lost."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from cpomdp_ppl.experiments.sweep import sweep
from tests.abuse.effort import TRIED, times
from tests.tasks import Noting

joblib = pytest.importorskip("joblib")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
]

AXES = {"horizon": [2, 3, 4], "seed": range(8)}
KILLS = 4
"""In each sweep, if it takes long enough."""


@contextmanager
def kills(processes, rng):
    """Inside, one of the processes is killed now and then, wherever it is."""
    over = threading.Event()

    def kill():
        for _ in range(KILLS):
            if over.wait(float(rng.uniform(0.3, 3.0))):
                return
            running = processes()
            if running:
                with suppress(ProcessLookupError):
                    os.kill(int(rng.choice(running)), signal.SIGKILL)
                    TRIED["workers killed"] += 1

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        yield
    finally:
        over.set()
        killing.join()


@pytest.fixture
def expected(tmp_path):
    return sweep(Noting(tmp_path), AXES, workers=1, progress=False)


def assert_nothing_is_lost(found, expected, folder):
    assert found.drop_vars("python").identical(expected.drop_vars("python"))  # Dask draws from that, too
    assert len(list(folder.glob("points/*.npz"))) == expected.sizes["horizon"] * expected.sizes["seed"]
    TRIED["points of sweeps with kills, none lost"] += found.sizes["horizon"] * found.sizes["seed"]


def test_processes_of_this_machine(expected, tmp_path):
    def processes():
        from joblib.externals.loky import reusable_executor

        executor = reusable_executor._executor
        return list(executor._processes) if executor is not None and executor._processes else []

    rng = np.random.default_rng(0)
    for k in range(times(1)):
        with kills(processes, rng):
            slowly = Noting(tmp_path, slow=0.3)
            found = sweep(slowly, AXES, folder=tmp_path / f"{k}", workers=2, retries=20, progress=False)
        assert_nothing_is_lost(found, expected, tmp_path / f"{k}")


def test_a_dask_cluster(expected, tmp_path):
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    rng = np.random.default_rng(0)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 20}),
        distributed.LocalCluster(**settings, silence_logs=50) as local,
        distributed.Client(local),
        joblib.parallel_config(backend="dask"),
    ):

        def processes():
            """Those that have begun: who is killed before that is not replaced, and there may be no other."""
            there = set(local.scheduler.workers)
            return [nanny.pid for nanny in local.workers.values() if nanny.worker_address in there]

        for k in range(times(1)):
            with kills(processes, rng):
                found = sweep(Noting(tmp_path, slow=0.3), AXES, folder=tmp_path / f"dask-{k}", progress=False)
            assert_nothing_is_lost(found, expected, tmp_path / f"dask-{k}")
