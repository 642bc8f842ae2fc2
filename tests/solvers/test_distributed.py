"""Fits by two processes, against the same fit by one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from torch import nn

from cpomdp_ppl.cli import main
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.models import LightDark, LineGrid
from solvers import cids, shards
from solvers.estimators import ActorCritic, Reinforce
from solvers.objectives import Information
from solvers.processes import Processes, joined

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch has no gloo here",
)

ROOT = Path(__file__).parent.parent.parent
SMALL = 5  # episodes in a shard
SHORT = dict(
    iterations=5, batch_size=23, seed=3, progress=False
)  # shards of 5, 5, 5, 4 and 4: 14 and 9 episodes
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
            raise DegenerateWeightsError("nothing is left")
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
            if self.wrong == "pressed":
                os.kill(os.getpid(), signal.SIGINT)
            if self.wrong == "nan":
                return payoffs * float("nan")
        return payoffs


class OfOneProcess(Reinforce):
    """An estimator that knows nothing of others."""

    def advantages(self, payoffs, before):
        return super().advantages(payoffs, before)


def stop_after_two(iteration, measured, policy):
    if iteration == 2:
        raise KeyboardInterrupt


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
    assert [("left out" in each and "nothing is left" in each) for each in first["lost"]["warnings"]] == [
        True
    ]
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


def restarted(rank, place, attempt, environment):
    """A process that torchrun started, and that is killed, if it is the second, once it has been heard."""
    os.environ.update(environment, RANK=str(rank), TORCHELASTIC_RESTART_COUNT=str(attempt))
    with joined():
        whole = Processes(torch.device("cpu"))
        total = whole.total(torch.ones(()))
        (place / f"{attempt} {rank}").write_text(str(float(total)))
        whole.agree()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


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
    for attempt in range(4):
        arguments = tmp_path, attempt, environment
        finish(
            [context.Process(target=restarted, args=(rank, *arguments)) for rank in range(SIZE)], within=30
        )
        said = [(tmp_path / f"{attempt} {rank}").read_text() for rank in range(SIZE)]
        assert said == ["2.0", "2.0"]


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


def test_an_environment_of_several_processes_must_be_whole(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main(["fit", "cpomdp_ppl.models:LineGrid", "--quiet"]) == 2
    assert "WORLD_SIZE: expected 1, or an environment as torchrun makes it" in capsys.readouterr().err


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
