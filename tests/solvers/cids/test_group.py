"""Fits by two processes, against the same fit by one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from torch import nn

from cpomdp_command import main
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.models import LightDark, LineGrid
from solvers import cids, commands
from solvers.cids import shards, training
from solvers.cids.estimator import ActorCritic, Reinforce
from solvers.cids.group import ROOM, Processes, ProcessFailedError, alone, joined
from solvers.cids.objective import Information

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch has no gloo here",
)

ROOT = Path(__file__).parents[3]
SMALL = 5  # episodes in a shard
SHORT = dict(
    iterations=5, batch_size=23, seed=3, progress=False
)  # shards of 5, 5, 5, 4 and 4: 9 and 14 episodes
SIZE = 2


class Table(nn.Module):
    """A policy that a critic cannot read, and that begins elsewhere in every process."""

    def __init__(self, model, rank=0):
        super().__init__()
        start = torch.full((model.horizon, model.num_actions), float(rank))
        self.table = nn.Parameter(start * torch.arange(model.num_actions))

    def start(self, prior):
        return None

    def act(self, history, memory):
        return dist.Categorical(logits=self.table[history.time].expand(history.num_episodes, -1)), None


CASES = {
    "critic": lambda rank: (LineGrid(), dict(likelihood="exact")),
    "Light-Dark, Kalman": lambda rank: (LightDark(6), dict(likelihood="ekf")),
    "as printed": lambda rank: (LightDark(6), dict(likelihood="ekf", objective="variational")),
    "amortised, particles": lambda rank: (
        LineGrid(),
        dict(likelihood=ParticleFilter(32), prior="dirichlet", estimator=ActorCritic(warm_up=0.3)),
    ),
    "own policy": lambda rank: (LineGrid(), dict(likelihood="exact", policy=Table(LineGrid(), rank))),
    "means over the batch": lambda rank: (
        LineGrid(),
        dict(likelihood="exact", objective=Centred(), estimator=Scaled()),
    ),
}


def fitted(model, **settings):
    """What came of a fit, as tensors, numbers and words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = cids.fit(model, **{**SHORT, **settings})
    history = solution.history
    return {
        "weights": dict(solution.policy.state_dict()),
        "history": {str(name): torch.as_tensor(history[name].values) for name in history.data_vars},
        "finished": solution.finished,
        "warnings": [str(warning.message) for warning in caught],
    }


def refused(model, **settings):
    """The error of a fit."""
    try:
        fitted(model, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def by_one(monkeypatch, model, **settings):
    monkeypatch.setattr(shards, "SHARD", SMALL)
    return fitted(model, **settings)


def assert_same(one, other, tolerance=0.0):
    """Weights and all that was measured but the time it took."""
    assert one["weights"].keys() == other["weights"].keys()
    assert one["history"].keys() == other["history"].keys()
    for part in ("weights", "history"):
        for name, values in one[part].items():
            if not name.startswith("seconds"):
                torch.testing.assert_close(
                    values, other[part][name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
                )


class Guilty(ObservableOperator):
    """A backend that raises in one process, at its fourth shard."""

    def run(self, *arguments, **settings):
        if torch.distributed.get_rank() == 1:
            calls = vars(type(self)).get("calls", 0) + 1
            type(self).calls = calls
            if calls == 4:
                raise ZeroDivisionError("of the second process")
        return super().run(*arguments, **settings)


class Dying(ObservableOperator):
    """A backend whose particles die in one process, now and then."""

    def run(self, model, episodes, *, seed=None, moments=True):
        if torch.distributed.get_rank() == 1 and seed % 3 == 0:
            raise DegenerateWeightsError("time 3 of episode 2: nothing is left")
        return super().run(model, episodes, seed=seed, moments=moments)


class Odd(Information):
    """An objective with which something goes wrong in one process, in the middle of the third step."""

    def __init__(self, wrong):
        super().__init__()
        object.__setattr__(self, "wrong", wrong)
        object.__setattr__(self, "calls", [])

    def payoffs(self, batch, log_probs, temperature):
        self.calls.append(1)
        payoffs = super().payoffs(batch, log_probs, temperature)
        if torch.distributed.get_rank() == 1 and len(self.calls) == 3:
            if self.wrong == "raises":
                raise ZeroDivisionError("halfway")
            if self.wrong == "in no encoding":
                raise ZeroDivisionError("caf\udce9")
            if self.wrong == "unspeakable":
                raise UnspeakableError
            if self.wrong == "pressed":
                os.kill(os.getpid(), signal.SIGINT)
            if self.wrong == "nan":
                return payoffs * float("nan")
        return payoffs


class Centred(Information):
    """An objective whose payoffs depend on the mean over all episodes."""

    def payoffs(self, batch, log_probs, temperature, *, whole):
        payoffs = super().payoffs(batch, log_probs, temperature)
        return payoffs * payoffs.sign() - whole.mean(payoffs)[0]


class Unequal(Information):
    """An objective that asks for a sum of more numbers in one process than in the other."""

    def payoffs(self, batch, log_probs, temperature, **further):
        further["whole"].total(torch.ones(3 + torch.distributed.get_rank()))
        return super().payoffs(batch, log_probs, temperature)


class Scaled(ActorCritic):
    """An estimator with a term that needs a mean over all episodes."""

    def terms(self, step):
        size = step.whole.mean(step.batch.episodes.returns.abs())[0]
        return {name: term / (1 + size) for name, term in super().terms(step).items()}


class Renamed(Reinforce):
    """An estimator whose term is called differently in every process."""

    def terms(self, step):
        return {f"policy {torch.distributed.get_rank()}": term for term in super().terms(step).values()}


class UnspeakableError(Exception):
    """An error that cannot be put in words."""

    def __str__(self):
        raise ZeroDivisionError


class OfOneProcess(Reinforce):
    """An estimator that knows nothing of others."""

    def advantages(self, payoffs, before):
        return super().advantages(payoffs, before)


def stop_after_two(iteration, measured, policy):
    if iteration == 2:
        raise KeyboardInterrupt


def alarmed(rank, model, **settings):
    """A signal in the second process between the halves of an exchange, whose handler raises."""
    real = torch.distributed.all_reduce

    def all_reduce(tensor, **further):
        if rank == 1 and tensor.numel() > 2 * ROOM:
            signal.raise_signal(signal.SIGALRM)
        return real(tensor, **further)

    def handler(number, frame):
        raise TimeoutError("of the user's own")

    signal.signal(signal.SIGALRM, handler)
    torch.distributed.all_reduce = all_reduce
    try:
        return refused(model, **settings), signal.getsignal(signal.SIGALRM) is handler
    finally:
        torch.distributed.all_reduce = real
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def pressed_late(rank, model, **settings):
    """Ctrl-C in the second process, when there is nothing left to stop."""
    real = training.Fitting.share

    def share(self, whole):
        if rank == 1 and self.learner.iteration == self.learner.iterations:
            signal.raise_signal(signal.SIGINT)
        real(self, whole)

    training.Fitting.share = share
    try:
        return fitted(model, **settings)
    finally:
        training.Fitting.share = real


def broken(words):
    """What becomes of an error of the library that carries messages."""

    def how(tensor):
        raise RuntimeError(words)

    try:
        Processes(torch.device("cpu"))._exchange(how, torch.zeros(()))
    except ProcessFailedError as error:
        return str(error)


def everything(rank, place):
    """All that one group of processes can be asked, one after the other: to start them takes longest."""
    shards.SHARD = SMALL
    grid, told = LineGrid(), []
    exact = dict(likelihood="exact")
    found = {}
    for name, case in CASES.items():
        model, settings = case(rank)
        found[name] = fitted(model, **settings)
    found["fresh seed"] = fitted(grid, **exact, seed=None, iterations=1)
    found["too many"] = refused(grid, **exact, batch_size=SMALL)
    found["other settings"] = refused(grid, **exact, batch_size=20 + rank)
    found["other seed"] = refused(grid, **exact, seed=rank)
    found["own estimator"] = refused(grid, **exact, estimator=OfOneProcess())
    found["error"] = refused(grid, likelihood=Guilty())
    found["error halfway"] = refused(grid, **exact, objective=Odd("raises"))
    found["diverged"] = refused(grid, **exact, objective=Odd("nan"))
    found["pressed"] = fitted(grid, **exact, objective=Odd("pressed"))
    found["handler is back"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    found["lost"] = fitted(grid, likelihood=Dying())
    (place / "broken").mkdir(exist_ok=True)
    (place / "broken" / "checkpoint.pt").write_bytes(b"something else")
    found["broken checkpoint"] = refused(grid, **exact, checkpoint=place / "broken")
    found["stopped"] = fitted(
        grid, **exact, checkpoint=place / "stopped", checkpoint_every=1, callbacks=[stop_after_two]
    )
    found["resumed"] = fitted(
        grid, **exact, checkpoint=place / "stopped", callbacks=[lambda k, *_: told.append(k)]
    )
    found["told"] = told
    found["lengths"] = refused(grid, **exact, objective=Unequal())
    found["terms"] = refused(grid, **exact, estimator=Renamed())
    table = Table(grid)
    table.second = nn.Parameter(torch.zeros(1), requires_grad=rank == 0)
    found["frozen"] = refused(grid, **exact, policy=table)
    found["checkpoint of one"] = refused(grid, **exact, checkpoint=None if rank else place / "of one")
    found["no model"] = refused("no model" if rank else grid, **exact)
    found["in no encoding"] = refused(grid, **exact, objective=Odd("in no encoding"))
    with suppress(ZeroDivisionError):  # it cannot be put in words here, either
        found["unspeakable"] = refused(grid, **exact, objective=Odd("unspeakable"))
    found["alarm"] = alarmed(rank, grid, **exact)
    found["pressed late"] = pressed_late(rank, grid, **exact)
    nested = []
    found["with another in it"] = fitted(
        grid, **exact, callbacks=[lambda *_: nested.append(fitted(grid, **exact, iterations=1, seed=9))]
    )
    found["nested"] = nested
    with alone():
        found["alone"] = fitted(grid, **exact, iterations=1, seed=rank)
    resolve = dict(iterations=1, batch_size=8)
    run = cids.run(grid, 0, 2, solution=Table(grid), **exact, resolve=resolve, seed=rank, progress=False)
    found["run"] = run.posteriors
    found["late"] = broken("Timed out waiting 1000ms for recv operation to complete")
    found["gone"] = broken("Connection closed by peer")
    return found


def member(rank, place, work, arguments):
    """One process of a group: does its work, and writes down what came of it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place / 'rendezvous'}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=60),
    )
    torch.save(work(rank, place, *arguments), place / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def finish(processes, within):
    """Run processes to their end, whatever that is."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(within)
    waiting = [process for process in processes if process.is_alive()]
    for process in waiting:
        process.kill()
    assert not waiting, "a process waits for ever"


def on_processes(place, work, *arguments):
    """What each process of a group made of some work; None for one that did not get to the end."""
    place.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["solvers.cids", "cpomdp_ppl.cli", "cpomdp_ppl.models"])
    processes = [context.Process(target=member, args=(rank, place, work, arguments)) for rank in range(SIZE)]
    finish(processes, within=90)
    files = [place / f"{rank}.pt" for rank in range(SIZE)]
    return [torch.load(file, weights_only=True) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("group") / "place"
    both = on_processes(place, everything)
    assert None not in both
    return place, both


@pytest.mark.parametrize("name", CASES)
def test_two_processes_get_where_one_gets(found, monkeypatch, name):
    _, (first, second) = found
    model, settings = CASES[name](0)
    one = by_one(monkeypatch, model, **settings)
    assert one["finished"]
    assert_same(first[name], second[name])
    assert all(
        torch.equal(first[name]["history"][each], second[name]["history"][each]) for each in one["history"]
    )
    assert_same(one, first[name], tolerance=1e-5)


def test_the_shards_matter(monkeypatch):
    """Or the comparison above could not tell whether they were played."""
    model, settings = CASES["critic"](0)
    one = by_one(monkeypatch, model, **settings)
    monkeypatch.setattr(shards, "SHARD", SHORT["batch_size"])
    assert not torch.equal(one["history"]["return"], fitted(model, **settings)["history"]["return"])


def test_a_fresh_seed_is_the_same_for_all(found):
    _, (first, second) = found
    assert_same(first["fresh seed"], second["fresh seed"])


def test_too_many_processes_are_refused(found):
    for each in found[1]:
        assert each["too many"].startswith("ValueError: batch_size: expected at least 6 episodes for a world")
        assert "world size of 2" in each["too many"]


@pytest.mark.parametrize(("what", "named"), [("other settings", "batch_size"), ("other seed", "seed")])
def test_processes_that_are_asked_for_different_things(found, what, named):
    _, (first, second) = found
    assert second[what].startswith(f"ValueError: {named}: expected ")
    assert first[what].startswith(f"ProcessFailedError: process 1 of 2 failed: ValueError: {named}")


def test_an_estimator_that_knows_of_one_process_only(found, monkeypatch):
    for each in found[1]:
        assert each["own estimator"].startswith("ValueError: estimator: expected one whose `advantages`")
    alone = by_one(monkeypatch, LineGrid(), likelihood="exact", estimator=OfOneProcess())
    assert_same(alone, by_one(monkeypatch, LineGrid(), likelihood="exact", estimator=Reinforce()))


@pytest.mark.parametrize(
    ("what", "message"), [("error", "of the second process"), ("error halfway", "halfway")]
)
def test_an_error_in_one_process_is_the_end_for_all(found, what, message):
    _, (first, second) = found
    assert second[what] == f"ZeroDivisionError: {message}"
    assert first[what] == f"ProcessFailedError: process 1 of 2 failed: ZeroDivisionError: {message}"


def test_what_diverges_in_one_process_diverges_in_all(found):
    for each in found[1]:
        assert each["diverged"] == "DivergedError: iteration 3: the policy loss is nan"


def test_a_broken_checkpoint_is_the_end_for_all(found):
    _, (first, second) = found
    assert first["broken checkpoint"].startswith("CheckpointError: ")
    assert second["broken checkpoint"].startswith(
        "ProcessFailedError: process 0 of 2 failed: CheckpointError"
    )


def test_ctrl_c_in_one_process_stops_all_with_the_same_policy(found):
    """A real signal, in the second process."""
    _, (first, second) = found
    assert_same(first["pressed"], second["pressed"])
    for each in (first, second):
        assert not each["pressed"]["finished"]
        assert len(each["pressed"]["history"]["return"]) == 2
        assert each["handler is back"]


def test_a_batch_whose_particles_died_in_one_process_is_left_out_by_all(found):
    _, (first, second) = found
    assert_same(first["lost"], second["lost"])
    lost = int(first["lost"]["history"]["entropy"].isnan().sum())
    assert 0 < lost < SHORT["iterations"]
    assert bool(first["lost"]["history"]["return"].isfinite().all())
    (said,) = first["lost"]["warnings"]
    assert "left out" in said
    assert (
        "(time 3: nothing is left)" in said
    )  # and not which episode of the shard, as if it were the batch's
    assert second["lost"]["warnings"] == []  # the first has told


def test_there_is_one_checkpoint_and_one_set_of_callbacks(found):
    place, (first, second) = found
    assert not first["stopped"]["finished"]
    assert not second["stopped"]["finished"]
    assert_same(first["stopped"], second["stopped"])
    assert [path.name for path in (place / "stopped").iterdir()] == ["checkpoint.pt"]
    assert (first["told"], second["told"]) == ([2, 3, 4, 5], [])  # stopped before the second was kept


def test_a_fit_that_was_stopped_goes_on_to_the_very_same_end(found):
    for each in found[1]:
        assert_same(each["resumed"], each["critic"])


def test_one_process_can_go_on_where_two_were_stopped(found, monkeypatch):
    place, (first, _) = found
    monkeypatch.setattr(shards, "SHARD", SMALL)
    rest = fitted(LineGrid(), likelihood="exact", checkpoint=place / "stopped")
    assert_same(rest, first["critic"], tolerance=1e-5)


def test_those_who_are_at_different_things_all_find_out(found):
    for rank, each in enumerate(found[1]):
        assert each["lengths"].startswith("ProcessFailedError: the processes are not at the same thing")
        assert (
            f"process 0 at a sum of [3] numbers, process {rank} at a sum of [{3 + rank}]" in each["lengths"]
        )
        assert each["terms"].startswith("ProcessFailedError: the processes are not at the same thing")
        assert f"numbers (policy 0), process {rank} at" in each["terms"]
        assert f"numbers (policy {rank});" in each["terms"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("frozen", "requires_grad: expected what the first process has"),
        ("checkpoint of one", "checkpoint: expected what the first process has, True, got False"),
        ("no model", "model: expected an instance of a CPOMDP, got no model"),
    ],
)
def test_what_is_wrong_in_one_process_before_the_fit_is_the_end_for_all(found, what, named):
    _, (first, second) = found
    assert second[what].startswith(f"ValueError: {named}")
    assert first[what].startswith(f"ProcessFailedError: process 1 of 2 failed: ValueError: {named}")


def test_errors_that_cannot_be_put_in_words(found):
    _, (first, second) = found
    assert second["in no encoding"] == "ZeroDivisionError: caf\udce9"
    assert (
        first["in no encoding"] == "ProcessFailedError: process 1 of 2 failed: ZeroDivisionError: caf\\udce9"
    )
    assert first["unspeakable"] == "ProcessFailedError: process 1 of 2 failed: UnspeakableError"
    assert "unspeakable" not in second


def test_a_signal_between_the_halves_of_an_exchange_waits_for_its_end(found):
    _, (first, second) = found
    assert second["alarm"] == ("TimeoutError: of the user's own", True)
    failed = "ProcessFailedError: process 1 of 2 failed: TimeoutError: of the user's own"
    assert first["alarm"] == (failed, True)


def test_ctrl_c_after_the_last_iteration_comes_too_late(found):
    for each in found[1]:
        assert each["pressed late"]["finished"]
        assert_same(each["pressed late"], each["critic"])


def test_fits_of_one_process_in_a_group(found, monkeypatch):
    _, (first, second) = found
    settings = dict(likelihood="exact", iterations=1)
    for rank, each in enumerate((first, second)):
        assert_same(each["with another in it"], each["critic"])
        assert_same(each["alone"], by_one(monkeypatch, LineGrid(), **settings, seed=rank))
        assert each["run"].shape == (1, 3, 2)
    assert not torch.equal(first["run"], second["run"])  # other seeds
    assert len(first["nested"]) == SHORT["iterations"]
    assert second["nested"] == []
    for nested in first["nested"]:
        assert_same(nested, by_one(monkeypatch, LineGrid(), **settings, seed=9))


def test_who_is_late_is_told_from_who_is_gone(found):
    for each in found[1]:
        assert each["late"].startswith("another process did not answer in time: Timed out")
        assert each["gone"].startswith("another process is gone: Connection closed")


class ByShard(ObservableOperator):
    """A backend that may draw, as far as anybody knows."""

    calls = 0

    def run(self, *arguments, **settings):
        type(self).calls += 1
        return super().run(*arguments, **settings)


class AtOnce(ByShard):
    """The same, but it says that it does not."""

    draws = False


def test_shards_are_filtered_at_once_where_nothing_is_drawn(monkeypatch):
    by_shard = by_one(monkeypatch, LineGrid(), likelihood=ByShard())
    at_once = by_one(monkeypatch, LineGrid(), likelihood=AtOnce())
    assert_same(at_once, by_shard)
    assert (ByShard.calls, AtOnce.calls) == (5 * 5, 5 * 1 + 5 * 5)  # counted on from what the first had


class Mortal(ObservableOperator):
    """A backend whose second process is killed at its seventh shard, that is, in the fourth iteration."""

    doomed = False
    calls = 0

    def run(self, *arguments, **settings):
        type(self).calls += 1
        if self.doomed and torch.distributed.get_rank() == 1 and self.calls == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*arguments, **settings)


def mortal(rank, place, doomed):
    shards.SHARD = SMALL
    Mortal.doomed = doomed
    told = []
    settings = dict(likelihood=Mortal(), checkpoint=place.parent / "kept", checkpoint_every=2)
    if doomed:
        return refused(LineGrid(), **settings)
    return fitted(LineGrid(), **settings, callbacks=[lambda k, *_: told.append(k)]) | {"told": told}


def test_a_process_that_is_killed_ends_all_and_they_go_on_to_the_very_same_end(found, tmp_path):
    _, (uninterrupted, _) = found
    first, second = on_processes(tmp_path / "one", mortal, True)
    assert first.startswith("ProcessFailedError: another process is gone")
    assert second is None
    first, second = on_processes(tmp_path / "two", mortal, False)
    assert first["told"] == [3, 4, 5]  # the checkpoint was of iteration 2
    assert_same(first, uninterrupted["critic"])
    assert_same(second, uninterrupted["critic"])
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["checkpoint.pt"]


LAST = 2


def restarted(rank, place, attempt, environment):
    """A process that torchrun started, and that is killed, if it is the second, once it has been heard."""
    os.environ.update(environment, RANK=str(rank), TORCHELASTIC_RESTART_COUNT=str(attempt))
    with joined():
        whole = Processes(torch.device("cpu"))
        total = whole.total(torch.ones(()))
        (place / f"{attempt} {rank}").write_text(str(float(total)))
        whole.agree()
        if rank == 1 and attempt < LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and attempt == LAST:
            time.sleep(0.5)
            (place / "written").write_text("by the first process, before anybody leaves")
    (place / f"{attempt} {rank} left").write_text(str((place / "written").exists()))


def test_restarted_processes_do_not_look_for_their_predecessors(tmp_path):
    """In the store, which is torchrun's and outlives them, there are addresses of those that were killed."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(SIZE),
        "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    context = multiprocessing.get_context("forkserver")
    for attempt in range(LAST + 1):
        arguments = tmp_path, attempt, environment
        finish(
            [context.Process(target=restarted, args=(rank, *arguments)) for rank in range(SIZE)], within=30
        )
        said = [(tmp_path / f"{attempt} {rank}").read_text() for rank in range(SIZE)]
        assert said == ["2.0", "2.0"]
    # In the last attempt, in which nobody is killed, no process leaves before the first has written.
    assert [(tmp_path / f"{LAST} {rank} left").read_text() for rank in range(SIZE)] == ["True", "True"]


MODEL = """
import os, shutil, signal
from pathlib import Path
from cpomdp_ppl.models import LineGrid

class Deadly(LineGrid):
    def initial(self, context):
        # The second process is killed as soon as there is a checkpoint to go on from.
        once = os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        checkpoint = Path("two/checkpoint/checkpoint.pt")
        if once and checkpoint.exists():
            shutil.copy(checkpoint, "before.pt")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().initial(context)
"""


def test_torchrun_restarts_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deadly.py").write_text(MODEL)
    command = ["fit", "deadly.py:Deadly", "--likelihood", "exact", "--batch-size", "301", "--seed", "1"]
    command += ["--iterations", "8", "--checkpoint-every", "2", "--folder"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "--max-restarts=1", "-m", "cpomdp_ppl", *command, "two"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "exitcode: -9" in done.stderr
    assert done.stdout.count("8 iterations; over the last 8") == 1
    model = ModelSpec.of(["deadly.py:Deadly"]).build()
    one = cids.fit(model, likelihood="exact", batch_size=301, seed=1, iterations=8, progress=False)
    two = cids.load("two/solution", model)
    assert two.settings == one.settings
    assert two.finished
    for name in ("return", "objective", "gradient_norm", "information_lower"):
        np.testing.assert_allclose(two.history[name], one.history[name], rtol=1e-4, atol=1e-5)
    theirs, ours = two.policy.state_dict(), one.policy.state_dict()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-4, atol=1e-5, msg=name)
    # The time that iterations took is not the same twice: those before the restart were not done again.
    before = torch.load("before.pt", weights_only=True)["measured"]["seconds_rollout"].numpy()
    assert np.array_equal(two.history["seconds_rollout"][: len(before)], before)
    assert 2 <= len(before) < 8
    assert [path.name for path in Path.cwd().iterdir() if (path / "run.json").exists()] == ["two"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WORLD_SIZE", "two", "a number from 1 to"),
        ("RANK", "2", "a number from 0 to 1"),
        ("MASTER_ADDR", None, "the address of the first process"),
        ("MASTER_PORT", "70000", "a number from 0 to 65535"),
    ],
)
def test_an_environment_of_several_processes_must_be_whole(monkeypatch, capsys, name, value, expected):
    whole = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for each, word in (whole | {name: value}).items():
        if word is None:
            monkeypatch.delenv(each, raising=False)
        else:
            monkeypatch.setenv(each, word)
    assert main(["fit", "cpomdp_ppl.models:LineGrid", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"cpomdp: {name}: expected {expected}")
    assert said.endswith(f"got {value}\n")


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    whole = {
        "WORLD_SIZE": "3",
        "RANK": "2",
        "LOCAL_RANK": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, word in whole.items():
        monkeypatch.setenv(name, word)
    assert main(["fit", "cpomdp_ppl.models:LineGrid", "--quiet"]) == 2
    assert "LOCAL_RANK: expected less than the number of GPUs, 2" in capsys.readouterr().err


def test_the_command_that_goes_on_is_torchruns(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    options = SimpleNamespace(command_line=["m.py:Mine", "--seed", "1"], run=None)
    results = SimpleNamespace(options=options, folder=SimpleNamespace(path=Path("runs/mine")))
    again = commands._again(results, SimpleNamespace(size=4))
    words = "-m cpomdp_ppl fit m.py:Mine --seed 1 --folder runs/mine"
    assert again == f"torchrun --nproc-per-node=4 {words}"


def test_a_restart_without_a_folder_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(["fit", "cpomdp_ppl.models:LineGrid", "--quiet"]) == 2
    assert "--folder: expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(1, [1]), (250, [250]), (251, [126, 125]), (1000, [250] * 4)]
)
def test_shards_make_up_the_batch(batch_size, sizes):
    parts = shards.split(batch_size)
    assert [len(part) for part in parts] == sizes
    rows = [row for part in parts for row in range(batch_size)[part.rows]]
    assert rows == list(range(batch_size))
    assert len({part.seed(7) for part in parts}) == len(parts)
    assert parts[0].seed(7) == 7


def moments(rank, place):
    """Numbers of which the second process has others, and fewer."""
    whole = Processes(torch.device("cpu"))
    values = torch.arange(30.0).reshape(5, 3, 2).square()
    own = values[:3] if rank == 0 else values[3:]
    weight = nn.Parameter(torch.zeros(2))
    unused, mine = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))
    ((weight * own).mean((0, 1)).sum() + (mine if rank else 0.0)).backward()
    losses = torch.arange(70.0) + rank
    averaged = whole.average(losses, [weight, unused, mine], len(own) / len(values))
    return {
        "mean": whole.mean(own, own.square()),
        "losses": averaged,
        "many": whole.total(torch.arange(100.0) + rank),
        "over all": list(whole.std_mean(own)),
        "by column": list(whole.std_mean(own, axes=2)),
        "total": whole.total(own.sum((0, 1))),
        "gradient": weight.grad,
        "unused": unused.grad,
        "mine": mine.grad,
        "heard": [whole.heard(None), whole.heard("words" if rank else None), whole.heard(f"of {rank}")],
    }


def test_moments_are_of_all_episodes(tmp_path):
    values = torch.arange(30.0).reshape(5, 3, 2).square()
    for found in on_processes(tmp_path / "group", moments):
        torch.testing.assert_close(found["mean"], torch.stack([values.mean(), values.square().mean()]))
        torch.testing.assert_close(found["losses"], torch.arange(70.0).double() + 2 / 5)
        torch.testing.assert_close(found["many"], 2 * torch.arange(100.0).double() + 1)
        torch.testing.assert_close(found["over all"], [values.std(correction=0), values.mean()])
        spread, mean = torch.std_mean(values, (0, 1), correction=0)
        torch.testing.assert_close(found["by column"], [spread, mean])
        torch.testing.assert_close(found["total"], values.sum((0, 1)).double())
        torch.testing.assert_close(found["gradient"], values.mean((0, 1)))
        assert found["unused"] is None
        torch.testing.assert_close(found["mine"], torch.tensor(2 / 5))
        assert found["heard"] == [None, "words", "of 0"]
