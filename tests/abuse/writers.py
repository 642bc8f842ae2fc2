"""Everything that writes files, each able to write one of two contents and to tell which one is there.

As a program, `python -m tests.abuse.writers DIRECTORY KILLS SEED` kills children in the middle of writing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from cpomdp_ppl import Episodes
from cpomdp_ppl.experiments import files
from cpomdp_ppl.experiments.fingerprint import describe_model
from cpomdp_ppl.models import LineGrid
from solvers import cids
from solvers.cids.policy import LSTMPolicy
from solvers.cids.solution import Solution

SIZE = 5000


def _batch(which: int) -> Episodes:
    noise = torch.rand(50, SIZE // 50, generator=torch.Generator().manual_seed(which))  # cannot be compressed
    actions = torch.full((50, SIZE // 50), which)
    return Episodes(actions, {"z": noise}, {"z": torch.ones_like(noise, dtype=torch.bool)})


def save_episodes(directory: Path, which: int) -> None:
    _batch(which).save(directory / "episodes.npz")


def read_episodes(directory: Path) -> int:
    """Which content is there, whole."""
    found = Episodes.load(directory / "episodes.npz")
    which = int(found.actions[0, 0])
    assert torch.equal(found.observations["z"], _batch(which).observations["z"])
    assert bool((found.actions == which).all())
    return which


def _tensors(which: int) -> dict:
    return {
        "which": which,
        "weights": [torch.full((SIZE,), float(which)), torch.full((SIZE,), which)],
        "settings": {"seed": which},
    }


def save_checkpoint(directory: Path, which: int) -> None:
    files.save_tensors(directory / "checkpoint.pt", _tensors(which))


def read_checkpoint(directory: Path) -> int:
    found = files.load_tensors(directory / "checkpoint.pt", torch.device("cpu"))
    expected = _tensors(found["which"])
    assert all(map(torch.equal, found["weights"], expected["weights"]))
    assert found["settings"] == expected["settings"]
    return found["which"]


def save_settings(directory: Path, which: int) -> None:
    files.save_json(directory / "settings.json", {"which": which, "history": [which] * SIZE})


def read_settings(directory: Path) -> int:
    found = files.load_json(directory / "settings.json")
    assert found["history"] == [found["which"]] * SIZE
    return found["which"]


MODEL = LineGrid(horizon=2)


def save_solution(directory: Path, which: int) -> None:
    net = LSTMPolicy(MODEL, 16, seed=0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(float(which))
    history = xr.Dataset({"return": ("iteration", np.full(SIZE, float(which)))})
    prior = torch.tensor([0.5, 0.5], dtype=torch.float64)
    settings = describe_model(MODEL)
    Solution(MODEL, net, prior, history, settings, True).save(directory)


def read_solution(directory: Path) -> int:
    """Which solution is there: weights and settings are two files, but of one and the same."""
    found = cids.load(directory, MODEL)
    values = {float(x) for weight in found.policy.parameters() for x in weight.detach().flatten()}
    assert values in ({0.0}, {1.0})
    assert set(found.history["return"].values) == values
    return int(values.pop())


WRITERS = {
    "Episodes.save": (save_episodes, read_episodes),
    "save_tensors": (save_checkpoint, read_checkpoint),
    "save_json": (save_settings, read_settings),
    "Solution.save": (save_solution, read_solution),
}


def write_for_ever(directory: Path) -> None:
    """One content after the other, by every writer in turn."""
    torch.set_num_threads(1)
    for k in range(10**9):
        for save, _ in WRITERS.values():
            save(directory, k % 2)


def kill_writers(directory: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill a child in the middle of writing, over and over; afterwards every file is whole.

    Returns:
        How often each writer's file held the second content, and how often a child left its own file behind.
    """
    rng = np.random.default_rng(seed)
    for save, _ in WRITERS.values():
        save(directory, 0)
    counts = dict.fromkeys([*WRITERS, "left behind"], 0)
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(directory)
            finally:
                os._exit(1)
        time.sleep(float(rng.uniform(0.005, 0.06)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        for name, (_, read) in WRITERS.items():
            counts[name] += read(directory)
        left = list(directory.glob(".*"))
        counts["left behind"] += bool(left)
        for file in left:
            file.unlink()
    number = len(list(directory.iterdir()))
    for save, _ in WRITERS.values():
        save(directory, 0)
    assert len(list(directory.iterdir())) <= number, "weights of no solution are still there"
    return counts


if __name__ == "__main__":
    print(json.dumps(kill_writers(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
