"""A sweep on a real Dask cluster: two processes, of which one is killed in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from cpomdp_ppl import RandomPolicy, evaluate
from cpomdp_ppl.experiments.execute import WorkerKilledError, in_parallel
from cpomdp_ppl.experiments.sweep import sweep
from cpomdp_ppl.models import LineGrid
from solvers import sweep as solving
from tests.tasks import Noting, begun, deadly, surroundings

joblib = pytest.importorskip("joblib")
distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Dask's own, on its way out

AXES = {"horizon": [2, 3, 4], "seed": range(4)}


@pytest.fixture(scope="module")
def cluster():
    dask = pytest.importorskip("dask")
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    failures = {"distributed.scheduler.allowed-failures": 1}
    with (
        dask.config.set(failures),
        distributed.LocalCluster(**settings, silence_logs=50) as local,
        distributed.Client(local) as client,
        joblib.parallel_config(backend="dask"),
    ):
        yield client


def test_a_worker_is_killed_in_the_middle(cluster, tmp_path):
    """When some points are done and others are running; the bits are those of this process."""
    notes, folder = tmp_path / "notes", tmp_path / "sweep"
    notes.mkdir()
    slowly, killed = Noting(notes, slow=0.3), []

    def kill():
        while len(list(folder.glob("points/*.npz"))) < 3:
            time.sleep(0.02)
        killed.append(next(iter(cluster.run(os.getpid).values())))
        os.kill(killed[0], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    found = sweep(slowly, AXES, folder=folder, progress=False)
    killing.join()
    times, processes = begun(notes)
    assert len(times) == 12
    assert sum(times.values()) > 12  # something was in hand
    assert killed[0] in processes
    assert os.getpid() not in processes
    here = sweep(Noting(tmp_path), AXES, workers=1, progress=False)
    assert found.drop_vars("python").identical(here.drop_vars("python"))  # Dask draws from that, too


def test_fits_have_the_same_bits_there(cluster):
    quick = dict(likelihood="exact", iterations=3, batch_size=20, num_episodes=60, progress=False)
    there, here = (
        solving.sweep(LineGrid(horizon=3), seeds=2, temperature=[0.0, 1.0], workers=workers, **quick)
        for workers in (None, 1)
    )
    assert there.drop_vars("training_seconds").identical(here.drop_vars("training_seconds"))


def test_evaluation_runs_there(cluster):
    model, policy = LineGrid(), RandomPolicy(3)
    there, here = (evaluate(model, policy, 60, batch_size=20, workers=workers) for workers in (None, 1))
    assert (there.returns, there.entropy, there.identified) == (here.returns, here.entropy, here.identified)
    assert os.getpid() not in {seen[-1] for _, seen in in_parallel(surroundings, range(3))}


def test_a_cluster_in_this_process_is_refused():
    """Its tasks would run in threads of the caller, whose generators and params are not theirs."""
    settings = {"processes": False, "n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.Client(**settings, set_as_default=False) as client,
        joblib.parallel_config(backend="dask", client=client),
        pytest.raises(ValueError, match="client: expected one whose workers are other processes"),
    ):
        in_parallel(abs, [-1])


@pytest.mark.long
def test_what_dask_gives_up_is_said(cluster):
    """A deadly item is tried as often as the cluster allows; the others are done."""
    done = {}
    outcomes = (done.update([each]) for each in in_parallel(deadly, range(4)))
    with pytest.raises(WorkerKilledError, match="item 1 was killed"):
        list(outcomes)
    assert done == {0: 0, 2: 2, 3: 3}
