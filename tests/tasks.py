"""What tests have other processes do; little is imported here, as each of them imports it again."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pyro
import torch

from cpomdp_ppl import RandomPolicy, evaluate
from cpomdp_ppl.errors import ModelError
from cpomdp_ppl.experiments.execute import in_parallel
from cpomdp_ppl.models import LineGrid


def surroundings(_):
    store = pyro.get_param_store()
    learned = store["gain"].tolist() if "gain" in store else None
    return torch.get_num_threads(), str(torch.get_default_dtype()), learned, os.getpid()


def nested(number):
    return sorted(in_parallel(surroundings, range(number), workers=None)), os.getpid()


def nothing_quickly(number):
    time.sleep(0.02)
    return number


def changing(values):
    """Changes all that it is given, and says what it finds then."""
    number = len(values)
    values[0] += 1
    values.append(None)
    pyro.param("gain").data += 1
    pyro.param("another", torch.zeros(()))
    return number, float(values[0][0]), pyro.param("gain").item(), len(pyro.get_param_store())


def device_of(_):
    return str(torch.ones(1).device)


class Awkward(Exception):  # noqa: N818
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def failing(kind):
    if kind == "two arguments":
        raise Awkward(3, "unplugged")
    raise ModelError("M", ["a fault"])


def first_seed(value, seed):
    return {"seed_": seed}


class Counting(RandomPolicy):
    """Acts by how often it has started."""

    def __init__(self):
        super().__init__(3)
        self.starts = 0

    def start(self, prior):
        self.starts += 1
        return super().start(prior)

    def act(self, history, memory):
        return torch.full((history.num_episodes,), self.starts % 3), memory


class Remembering(RandomPolicy):
    """Does something else in other processes than the one it was made in."""

    def __init__(self):
        super().__init__(3)
        self.process = os.getpid()

    def act(self, history, memory):
        action = 2 if os.getpid() == self.process else 0
        return torch.full((history.num_episodes,), action), memory


class KilledOnce(RandomPolicy):
    """Kills the process that it is in, unless a file says that this has happened."""

    def __init__(self, marker):
        super().__init__(3)
        self.marker = marker

    def act(self, history, memory):
        if self.marker is not None and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().act(history, memory)


def filtered(horizon, seed):
    """Something real: an evaluation, with numbers from all three generators, and a param of its own."""
    found = evaluate(LineGrid(horizon=horizon), RandomPolicy(3), 60, likelihood="smc", seed=seed)
    drawn = torch.cat([torch.randn(2), torch.tensor([np.random.rand()])])
    number = pyro.param("number", lambda: torch.randn(()))
    return {
        "return": found.returns.mean,
        "entropy": found.entropy.mean,
        "drawn": drawn,
        "python": random.random(),
        "param": number.detach(),
        "threads": torch.get_num_threads(),
    }


class Noting:
    """A task that notes each time that it begins, in a folder; it can be killed once, or wait for a file.

    Args:
        folder: Where it notes.
        killed: The horizon at which, with seed 0, the process is killed the first time.
        slow: How long it takes, in seconds.
    """

    def __init__(self, folder, killed=None, slow=0.0):
        self.folder, self.killed, self.slow = str(folder), killed, slow

    def __call__(self, horizon, seed):
        folder = Path(self.folder)
        (folder / f"{horizon},{seed},{os.getpid()},{time.monotonic_ns()}").touch()
        if horizon == self.killed and seed == 0 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.slow)
        return filtered(horizon, seed)


def begun(folder):
    """How often each point was begun, and in which processes."""
    times, processes = {}, set()
    for note in Path(folder).iterdir():
        if note.name.count(",") == 3:
            horizon, seed, process, _ = map(int, note.name.split(","))
            times[horizon, seed] = times.get((horizon, seed), 0) + 1
            processes.add(process)
    return times, processes


def deadly(number):
    if number == 1:
        time.sleep(0.5)  # until the others are done
        os.kill(os.getpid(), signal.SIGKILL)
    return number
