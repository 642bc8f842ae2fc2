"""Processes of a fit killed at any moment: torchrun restarts them, and the end is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed

from cpomdp_ppl.cli.model import ModelSpec
from solvers import cids
from tests.abuse.effort import TRIED, times
from tests.children import environment, python

pytestmark = [
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch has no gloo here",
    ),
    pytest.mark.long,
]

MODEL = """
import os
from pathlib import Path
from cpomdp_ppl.models import LineGrid

class Slow(LineGrid):
    pass

if "RANK" in os.environ:
    Path("process-" + os.environ["RANK"]).write_text(str(os.getpid()))
"""
FIT = dict(likelihood="exact", batch_size=301, seed=1, iterations=60)
KILLS = 2
"""In each fit; the last of them may come too late."""


def process(rank: int) -> int | None:
    """Its number, if it has begun."""
    with suppress(OSError, ValueError):
        return int(Path(f"process-{rank}").read_text())
    return None


def test_ranks_killed_at_any_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(MODEL)
    model = ModelSpec.of(["slow.py:Slow"]).build()
    one = cids.fit(model, **FIT, progress=False)
    rng = np.random.default_rng(int(os.environ.get("CPOMDP_ABUSE_SEED", "0")))
    for k in range(times(1)):
        fit_with_kills(f"run-{k}", rng)
        two = cids.load(f"run-{k}/solution", model)
        assert two.finished
        assert two.settings == one.settings
        for name in ("return", "objective", "gradient_norm", "information_lower"):
            np.testing.assert_allclose(two.history[name], one.history[name], rtol=1e-3, atol=1e-4)
        theirs = two.policy.state_dict()
        for name, weight in one.policy.state_dict().items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def fit_with_kills(folder: str, rng: np.random.Generator) -> None:
    """Run a fit in two processes, and kill one of them, whichever, now and then."""
    for file in Path().glob("process-*"):
        file.unlink()
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in FIT.items()]
    command = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command += [f"--max-restarts={KILLS}", "-m", "cpomdp_ppl", "fit", "slow.py:Slow", *settings]
    command += ["--checkpoint-every=5", "--folder", folder]
    with Path(f"{folder}.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    killed: set[int] = set()
    try:
        while len(killed) < KILLS and running.poll() is None:
            chosen = process(int(rng.integers(2)))
            if chosen is None or chosen in killed:
                time.sleep(0.02)
                continue
            time.sleep(float(rng.uniform(0, 2.5)))  # from before the processes meet to the last iterations
            with suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
                TRIED["ranks killed"] += 1
            killed.add(chosen)
        assert running.wait(120) == 0, Path(f"{folder}.log").read_text()
    finally:
        running.kill()
