"""Fits by two processes, against the same fit by one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from torch import nn

from cpomdp_command import main
from cpomdp_ppl.cli.results import Results
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import SMC, ObservableOperator, ParticleFilter
from cpomdp_ppl.models import LightDark, LineGrid
from solvers import cids, commands
from solvers.cids import experience
from solvers.cids.estimator import ActorCritic
from solvers.cids.group import alone, joined, process_group, single_process
from solvers.cids.objective import Information
from solvers.cids.policy import LSTMPolicy
from tests.solvers.cids.knobs import Knob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch has no gloo here",
    ),
]

SIZE = 2
SMALL = 5  # episodes in a shard
SHORT = dict(iterations=5, batch_size=23, seed=3, progress=False)
"""Shards of 5, 5, 5, 4 and 4 episodes: 9 for the first process, and 14 for the second."""


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


class Centred(Information):
    """An objective whose payoffs depend on the mean over all episodes."""

    def payoffs(self, batch, log_probs, temperature):
        payoffs = super().payoffs(batch, log_probs, temperature)
        return payoffs * payoffs.sign() - batch.mean(payoffs)


class Scaled(ActorCritic):
    """An estimator with a term that needs a mean over all episodes."""

    def terms(self, step):
        size = step.batch.mean(step.batch.episodes.returns.abs())
        return {name: term / (1 + size) for name, term in super().terms(step).items()}


POLICIES = ("belief", "lstm")

CASES = {
    **{
        policy: lambda rank, policy=policy: (LineGrid(), dict(likelihood="exact", policy=policy))
        for policy in POLICIES
    },
    "as printed": lambda rank: (LightDark(6), dict(likelihood="ekf", objective="variational")),
    **{
        f"{policy}, amortised, particles": lambda rank, policy=policy: (
            LineGrid(),
            dict(
                likelihood=ParticleFilter(32),
                policy=policy,
                prior="dirichlet",
                estimator=ActorCritic(warm_up=0.3, told=0.2 if policy == "belief" else 0.0),
            ),
        )
        for policy in POLICIES
    },
    "a box, and ends": lambda rank: (Knob(), dict(likelihood=ParticleFilter(16))),
    "a box, by histories": lambda rank: (
        Knob(),
        dict(likelihood=ParticleFilter(16), policy=LSTMPolicy(Knob(), 8, distribution="beta")),
    ),
    "led, with practice": lambda rank: (LightDark(3), dict(likelihood="ekf")),
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
        "warnings": [str(warning.message) for warning in caught],
    }


def refused(model, **settings):
    """The error of a fit."""
    try:
        fitted(model, **settings)
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def by_one(monkeypatch, model, **settings):
    monkeypatch.setattr(experience, "SHARD", SMALL)
    return fitted(model, **settings)


def assert_same(one, other, tolerance=0.0):
    """Weights and all that was measured but the time it took."""
    for part in ("weights", "history"):
        assert one[part].keys() == other[part].keys()
        for name, values in one[part].items():
            if not name.startswith("seconds"):
                torch.testing.assert_close(
                    values, other[part][name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
                )


class Mortal(ObservableOperator):
    """A backend whose second process is killed in the third iteration, of three shards each.

    It is asked once a shard: to filter a batch after an LSTM has played it, or to begin inside a policy. A
    policy of beliefs has asked once before, when it was made.
    """

    def __init__(self, policy):
        self.last = {"lstm": 8, "belief": 9}[policy]
        self.calls = 0

    def asked(self):
        self.calls += 1
        second = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        if second and self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def recursion(self, model):
        self.asked()  # `run` does, too
        return super().recursion(model)


class Dying(ObservableOperator):
    """A backend whose particles die in one process, now and then."""

    def run(self, model, episodes, *, seed=None, moments=True):
        if torch.distributed.get_rank() == 1 and seed % 3 == 0:
            raise DegenerateWeightsError("time 3 of episode 2: nothing is left")
        return super().run(model, episodes, seed=seed, moments=moments)


class DyingInside(ParticleFilter):
    """The same inside a policy: in the second process, three shards die after every batch that was used.

    Those are the next batch; of the first one, they are two, as the policy has begun once when it was made.
    """

    def recursion(self, model):
        return DyingParticles(model, self)


class DyingParticles(SMC):
    started = 0
    """Since a batch was used."""

    def start(self, num_episodes):
        DyingParticles.started += 1
        self.dies = torch.distributed.get_rank() == 1 and DyingParticles.started <= 3
        return super().start(num_episodes)

    def step(self, cloud, observed):
        cloud, increment = super().step(cloud, observed)
        return cloud, torch.full_like(increment, -torch.inf) if self.dies else increment


class Using(Information):
    """Notes that a batch is used."""

    def payoffs(self, batch, log_probs, temperature):
        DyingParticles.started = 0
        return super().payoffs(batch, log_probs, temperature)


class Odd(Information):
    """An objective with which something goes wrong in the second process, in the middle of the third step."""

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
                time.sleep(5)
            return payoffs * float("nan")
        return payoffs


def stop_after_two(iteration, measured, policy):
    if iteration == 2:
        raise KeyboardInterrupt


def moments(rank):
    """Numbers of which the second process has others, and fewer."""
    values = torch.arange(30.0).reshape(5, 3, 2).square()
    own = values[:3] if rank == 0 else values[3:]
    weight = nn.Parameter(torch.zeros(2))
    unused, mine = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))
    ((weight * own).mean((0, 1)).sum() + (mine if rank else 0.0)).backward()
    with process_group(torch.device("cpu")) as group:
        losses = group.average_gradients(torch.arange(7.0) + rank, [weight, unused, mine], len(own))
        said = [None, "wörter" if rank else None, f"of {rank}"]
        return {
            "mean": group.mean(own),
            "losses": losses,
            "over all": list(group.spread(own)),
            "by column": list(group.spread(own, axes=2)),
            "gradients": [weight.grad, unused.grad, mine.grad],
            "messages": [group.first_message(words) for words in said],
            "broadcast": dict(group.broadcast({"rank": rank, "tensor": own})),
        }


def everything(rank, place):
    """All that one group of processes can be asked, one after the other: to start them takes longest."""
    experience.SHARD = SMALL
    grid, exact, told, nested = LineGrid(), dict(likelihood="exact"), [], []
    found = {"moments": moments(rank)}
    for name, case in CASES.items():
        model, settings = case(rank)
        found[name] = fitted(model, **settings)
    found["fresh seed"] = fitted(grid, **exact, seed=None, iterations=1)
    found["too many"] = refused(grid, **exact, batch_size=SMALL)
    found["other settings"] = refused(grid, **exact, batch_size=20 + rank)
    found["other seed"] = refused(grid, **exact, seed=rank)
    table = Table(grid)
    table.second = nn.Parameter(torch.zeros(1), requires_grad=rank == 0)
    found["frozen"] = refused(grid, **exact, policy=table)
    found["checkpoint of one"] = refused(grid, **exact, checkpoint=None if rank else place / "of one")
    found["no model"] = refused("no model" if rank else grid, **exact)
    for wrong in ("raises", "pressed", "nan"):
        found[wrong] = refused(grid, **exact, objective=Odd(wrong))
    found["lost"] = {
        "lstm": fitted(grid, likelihood=Dying(), policy="lstm"),
        "belief": fitted(grid, likelihood=DyingInside(32, engine="eager"), objective=Using()),
    }
    (place / "broken").mkdir(exist_ok=True)
    (place / "broken" / "checkpoint.pt").write_bytes(b"something else")
    found["broken checkpoint"] = refused(grid, **exact, checkpoint=place / "broken")
    found["stopped"], found["resumed"] = {}, {}
    for policy in POLICIES:
        kept = dict(checkpoint=place / f"kept {policy}", checkpoint_every=4, policy=policy)
        found["stopped"][policy] = refused(grid, **exact, **kept, callbacks=[stop_after_two])
        noting = [lambda k, *_, policy=policy: told.append([policy, k])]
        found["resumed"][policy] = fitted(grid, **exact, **kept, callbacks=noting)
    found["told"] = told
    within = [lambda *_: nested.append(fitted(grid, **exact, iterations=1, seed=9))]
    found["with another in it"] = fitted(grid, **exact, callbacks=within)
    found["nested"] = nested
    with single_process():
        found["single"] = fitted(grid, **exact, iterations=1, seed=rank)
    resolve = dict(iterations=1, batch_size=8)
    run = cids.run(grid, 0, 2, solution=Table(grid), **exact, resolve=resolve, seed=rank, progress=False)
    found["run"] = run.posteriors
    words = ["fit", "cpomdp_ppl.models:LineGrid", "horizon=4", "--batch-size=23", "--quiet"]
    found["command"] = main([*words, "--iterations=2", "--folder", str(place / "command")])
    (place / "0.txt").write_text("not a folder")
    found["misspelt"] = main([*words, "--folder", str(place / "0.txt")])
    return found


def killed(place, policy):
    """A fit in which the second process is killed."""
    kept = dict(checkpoint=place / f"mortal {policy}", checkpoint_every=1)
    return refused(LineGrid(), likelihood=Mortal(policy), policy=policy, **kept)


def member(rank, place, policy):
    """One process of a group: writes down what came of everything, and is killed."""
    found = everything(rank, place)
    torch.save(found, place / f"{rank}.pt")
    found["killed"] = killed(place, policy)
    torch.save(found, place / f"{rank}.pt")


def victim(rank, place, policy):
    """One process of a group that is killed at once."""
    experience.SHARD = SMALL
    torch.save({"killed": killed(place, policy)}, place / f"{rank}.pt")


def started(rank, environment, target, *arguments):
    """One process of a group, as torchrun starts it."""
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank))
    with joined():
        target(rank, *arguments)


def in_a_group(target, *arguments):
    """Have two processes do something."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(SIZE),
        "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["solvers.cids", "cpomdp_command", "cpomdp_ppl.models"])
    processes = [
        context.Process(target=started, args=(rank, environment, target, *arguments)) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes made of everything, and where they did it."""
    place = tmp_path_factory.mktemp("group")
    in_a_group(member, place, "belief")
    return place, [torch.load(place / f"{rank}.pt", weights_only=True) for rank in range(SIZE)]


def test_moments_are_of_all_episodes(found):
    values = torch.arange(30.0).reshape(5, 3, 2).square()
    for each in found[1]:
        ours = each["moments"]
        torch.testing.assert_close(ours["mean"], values.mean())
        torch.testing.assert_close(ours["losses"], torch.arange(7.0).double() + 2 / 5)
        torch.testing.assert_close(ours["over all"], [values.std(correction=0), values.mean()])
        torch.testing.assert_close(ours["by column"], [*torch.std_mean(values, (0, 1), correction=0)])
        of_all, of_none, of_second = ours["gradients"]
        torch.testing.assert_close(of_all, values.mean((0, 1)))
        assert of_none is None
        torch.testing.assert_close(of_second, torch.tensor(2 / 5))
        assert ours["messages"] == [None, "wörter", "of 0"]
        assert ours["broadcast"]["rank"] == 0
        assert torch.equal(ours["broadcast"]["tensor"], values[:3])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_get_where_one_gets(found, monkeypatch, name):
    _, (first, second) = found
    model, settings = CASES[name](0)
    one = by_one(monkeypatch, model, **settings)
    assert_same(first[name], second[name])
    assert_same(one, first[name], tolerance=5e-5)  # Adam makes more of what is rounding in a tiny gradient
    assert first[name]["history"]["seconds_rollout"].equal(second[name]["history"]["seconds_rollout"])


@pytest.mark.slow
def test_the_shards_matter(monkeypatch):
    """Or the comparison above could not tell whether they were played."""
    model, settings = CASES["belief"](0)
    one = by_one(monkeypatch, model, **settings)
    monkeypatch.setattr(experience, "SHARD", SHORT["batch_size"])
    assert not torch.equal(one["history"]["return"], fitted(model, **settings)["history"]["return"])


def test_a_fresh_seed_is_the_same_for_all(found):
    _, (first, second) = found
    assert_same(first["fresh seed"], second["fresh seed"])


def test_too_many_processes_are_refused(found):
    for each in found[1]:
        assert each["too many"].startswith("ValueError: batch_size: expected at least 6 episodes for a world")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("other settings", "ValueError: batch_size: expected what the first process has, 20, got 21"),
        ("other seed", "ValueError: seed: expected what the first process has, 0, got 1"),
        ("frozen", "ValueError: requires_grad: expected what the first process has"),
        ("checkpoint of one", "ValueError: checkpoint: expected what the first process has, True, got False"),
        ("no model", "ValueError: model: expected an instance of a CPOMDP, got no model"),
        ("raises", "ZeroDivisionError: halfway"),
        ("pressed", "Interrupted: stopped after 2 of 5 iterations"),
    ],
)
def test_what_goes_wrong_in_one_process_is_the_end_for_all(found, what, expected):
    _, (first, second) = found
    assert second[what].startswith(expected)
    assert first[what] == "ProcessFailedError: another process failed, or is gone"


def test_what_goes_wrong_in_the_first_process_is_the_end_for_all(found):
    _, (first, second) = found
    gone = "ProcessFailedError: another process failed, or is gone"
    assert first["broken checkpoint"].startswith("CheckpointError: ")
    assert second["broken checkpoint"] == gone
    for policy in POLICIES:
        assert first["stopped"][policy] == "Interrupted: stopped after 2 of 5 iterations"
        assert second["stopped"][policy] == gone


def test_what_diverges_in_one_process_diverges_in_all(found):
    for each in found[1]:
        assert each["nan"] == "DivergedError: iteration 3: the policy loss is nan"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_whose_particles_died_in_one_process_is_left_out_by_all(found, policy):
    first, second = (each["lost"][policy] for each in found[1])
    assert_same(first, second)
    lost = first["history"]["entropy"].isnan()
    assert 0 < int(lost.sum()) < SHORT["iterations"]
    assert int((first["history"]["objective"].isnan() ^ lost).sum()) == 0
    said = [words for words in first["warnings"] if "left out" in words]
    assert len(said) == 1
    if policy == "lstm":
        assert bool(first["history"]["return"].isfinite().all())
        assert "(time 3: nothing is left)" in said[0]  # not the episode, which is counted within the shard
    else:
        assert torch.equal(first["history"]["return"].isnan(), lost)
        assert lost.tolist() == [False, True, False, True, False]
    assert second["warnings"] == []  # the first has told


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fit_that_was_stopped_goes_on_to_the_very_same_end(found, policy, monkeypatch):
    place, (first, second) = found
    assert [k for name, k in first["told"] if name == policy] == [3, 4, 5]
    assert second["told"] == []
    for each in (first, second):
        assert_same(each["resumed"][policy], each[policy])
    kept = place / f"kept {policy}"
    assert [path.name for path in kept.iterdir()] == ["checkpoint.pt"]
    rest = by_one(monkeypatch, LineGrid(), likelihood="exact", policy=policy, checkpoint=kept)
    assert_same(rest, first[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_process_that_is_killed_ends_all_and_nothing_is_lost(found, policy, monkeypatch, tmp_path):
    place, (first, _) = found
    if policy == "lstm":  # a group can be killed but once
        place = tmp_path
        in_a_group(victim, place, policy)
        said = torch.load(place / "0.pt", weights_only=True)["killed"]
    else:
        said = first["killed"]
    assert said == "ProcessFailedError: another process failed, or is gone"
    told = []
    kept = dict(checkpoint=place / f"mortal {policy}", callbacks=[lambda k, *_: told.append(k)])
    rest = by_one(monkeypatch, LineGrid(), likelihood=Mortal(policy), policy=policy, **kept)
    assert told == [3, 4, 5]
    assert_same(rest, first[policy], tolerance=1e-5)


def test_the_command_line_of_several_processes(found):
    place, (first, second) = found
    assert (first["command"], second["command"]) == (0, 0)
    kept = cids.load(place / "command", LineGrid(horizon=4))
    assert kept.finished
    assert kept.history.sizes["iteration"] == 2
    assert (first["misspelt"], second["misspelt"]) == (2, 2)


def test_fits_of_one_process_in_a_group(found, monkeypatch):
    _, (first, second) = found
    settings = dict(likelihood="exact", iterations=1)
    for rank, each in enumerate((first, second)):
        assert_same(each["with another in it"], each["belief"])
        assert_same(each["single"], by_one(monkeypatch, LineGrid(), **settings, seed=rank))
        assert each["run"].shape == (1, 3, 2)
    assert not torch.equal(first["run"], second["run"])  # other seeds
    assert len(first["nested"]) == SHORT["iterations"]
    assert second["nested"] == []
    assert_same(first["nested"][0], by_one(monkeypatch, LineGrid(), **settings, seed=9))
    assert alone is single_process  # as it used to be called


class ByShard(ObservableOperator):
    """A backend that may draw, as far as anybody knows."""


class AtOnce(ObservableOperator):
    """The same, but it says that it does not."""

    draws = False


@pytest.mark.slow
def test_shards_are_filtered_at_once_where_nothing_is_drawn(monkeypatch):
    real, calls = ObservableOperator.run, []
    monkeypatch.setattr(ObservableOperator, "run", lambda *args, **kw: calls.append(1) or real(*args, **kw))
    by_shard = by_one(monkeypatch, LineGrid(), likelihood=ByShard(), policy="lstm")
    assert len(calls) == 5 * 5
    assert_same(by_one(monkeypatch, LineGrid(), likelihood=AtOnce(), policy="lstm"), by_shard)
    assert len(calls) == 5 * 5 + 5


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(1, [1]), (250, [250]), (251, [126, 125]), (1000, [250] * 4)]
)
def test_shards_make_up_the_batch(batch_size, sizes):
    parts = experience.split(batch_size)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in range(batch_size)[part.rows]] == list(range(batch_size))
    assert len({part.seed(7) for part in parts}) == len(parts)
    assert parts[0].seed(7) == 7


def test_the_command_that_goes_on_is_torchruns(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    options = SimpleNamespace(command_line=["m.py:Mine", "--seed", "1"], run=None)
    results = Results(SimpleNamespace(path=Path("runs/mine")), "fit", {}, 1, options)
    again = commands._again(results, SimpleNamespace(size=4))
    words = "-m cpomdp_ppl fit m.py:Mine --seed 1 --folder runs/mine"
    assert again == f"torchrun --nproc-per-node=4 {words}"


def test_a_restart_without_a_folder_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(["fit", "cpomdp_ppl.models:LineGrid", "--quiet"]) == 2
    assert "--folder: expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
