"""Interrupted writes: what is there afterwards is the old content or the new one, whole."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import resource
import sys
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from tests.abuse.effort import TRIED, times
from tests.abuse.writers import WRITERS
from tests.children import run_python


@contextmanager
def full_disk(limit: int):
    """No file may grow beyond so many bytes: a write that wants to fails in the kernel, at that byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Interrupted:
    """Ctrl-C at the n-th line of Python that runs inside; without n, lines are counted."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.lines = 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(self.before)
                raise KeyboardInterrupt
        return self.trace


@pytest.fixture(params=WRITERS)
def writer(request, tmp_path):
    """A writer that has written its first content: how to save, how to read, where, and which files."""
    save, read = WRITERS[request.param]
    save(tmp_path, 0)
    return save, read, tmp_path, sorted(tmp_path.iterdir())


@pytest.mark.slow
def test_a_full_disk(writer):
    save, read, directory, files = writer
    sizes = sorted(file.stat().st_size for file in files)
    smallest, largest = sizes[0] // 2, sizes[-1]  # a history of zeros is shorter than one of ones
    rng = np.random.default_rng(0)
    for limit in [0, 1, largest // 2, *rng.integers(0, largest, times(6)).tolist()]:
        before = read(directory)
        with full_disk(limit), suppress(OSError, RuntimeError):  # torch reports it as the latter
            save(directory, 1 - before)
        TRIED["writes interrupted: full disk"] += 1
        assert read(directory) in ((before,) if limit < smallest else (0, 1))
        assert len(list(directory.iterdir())) == len(files)  # nothing is left behind


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_the_last_steps(writer, function, error, monkeypatch):
    save, read, directory, files = writer
    real = getattr(os, function)

    def failing(at):
        calls = itertools.count(1)

        def step(*arguments, **named):
            if next(calls) == at:
                raise error
            return real(*arguments, **named)

        return step

    before = {file: file.read_bytes() for file in files}
    for at in range(1, len(files) + 1):  # Solution.save has two files, so two last steps
        with monkeypatch.context() as patched:
            patched.setattr(os, function, failing(at))
            with pytest.raises(type(error)):
                save(directory, 1)
        TRIED[f"writes interrupted: {function}"] += 1
        assert read(directory) == 0
        assert {file: file.read_bytes() for file in directory.iterdir()} == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # archives left half open
def test_interrupted_at_any_line(writer):
    save, read, directory, files = writer
    with Interrupted() as counted:
        save(directory, 0)
    rng = np.random.default_rng(1)
    for at in rng.integers(1, counted.lines, times(12)).tolist():
        before = read(directory)
        # NumPy closes its archive on the way out, which may object that it is being written to.
        with suppress(KeyboardInterrupt, ValueError), Interrupted(at):
            save(directory, 1 - before)
        TRIED["writes interrupted: Ctrl-C"] += 1
        assert read(directory) in (0, 1)
        for file in directory.glob(".*"):  # interrupted in the very act of cleaning up
            file.unlink()
    save(directory, 1)
    assert read(directory) == 1  # and it still works
    assert len(list(directory.iterdir())) == len(files)
    gc.collect()


def test_killed_writers(tmp_path):
    """SIGKILL, from a process of its own, since forks of this one would have its threads' locks."""
    kills = times(12)
    words = ["-m", "tests.abuse.writers", str(tmp_path), str(kills), "0"]
    counts = json.loads(run_python(*words, timeout=60 + 2 * kills).splitlines()[-1])
    assert set(counts) == {*WRITERS, "left behind"}
    assert all(0 <= count <= kills for count in counts.values())
    TRIED["writes interrupted: SIGKILL"] += kills
    TRIED["writes interrupted: SIGKILL, a temporary file left"] += counts["left behind"]


def test_the_test_can_tell_a_torn_file(tmp_path):
    """A writer that writes in place is found out."""
    save, read = WRITERS["save_json"]
    save(tmp_path, 0)
    file = tmp_path / "settings.json"
    text = file.read_text().replace("0", "1")
    with full_disk(100), suppress(OSError), file.open("w") as torn:
        torn.write(text)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        read(tmp_path)
