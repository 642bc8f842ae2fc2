"""Units of work, each done once: a task, and the folder that its outcome is kept in."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from examples.paper import work
from solvers.checkpoint import load_json, save_json

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("cpomdp_ppl", "solvers", "baselines")
LIBRARIES = ("torch", "pyro-ppl", "numpy", "pomdp-py")
RESULT, SECONDS, DESCRIPTION = "result.json", "seconds.json", "task.json"

Work: TypeAlias = Callable[[Mapping[str, Any], Path, Sequence[Path]], dict[str, Any]]
"""From settings, a folder of its own and the folders of the tasks it needs, to what it found out."""


@dataclass(frozen=True, eq=False)
class Task:
    """A fit, an evaluation, some trajectories.

    Attributes:
        name: For people.
        work: A function that other processes can import.
        settings: All that it depends on besides other tasks: plain numbers and words.
        needs: Tasks whose folders it reads.
        seconds: About how long it takes on a core; only the order of work depends on it.
    """

    name: str
    work: Work
    settings: Mapping[str, Any]
    needs: tuple[Task, ...] = ()
    seconds: float = 1.0

    def key(self, source: str) -> str:
        """A hash of everything that decides the outcome."""
        what = f"{self.work.__module__}.{self.work.__qualname__}"
        parts = [source, what, dict(self.settings), [need.key(source) for need in self.needs]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def source_hash(root: Path = ROOT) -> str:
    """A hash of the code that outcomes depend on, and of the versions of what it stands on."""
    digest = hashlib.sha256()
    files = [path for package in SOURCES for path in (root / package).rglob("*.py")]
    for path in sorted([*files, Path(work.__file__)]):
        name = path.relative_to(root) if path.is_relative_to(root) else path.name
        digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for library in LIBRARIES:
        try:
            digest.update(f"{library} {importlib.metadata.version(library)}\0".encode())
        except importlib.metadata.PackageNotFoundError:  # an extra that is not there
            digest.update(f"{library} –\0".encode())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Store:
    """Where outcomes are kept: one folder a task, named by what decides its outcome.

    Attributes:
        folder: Of all of them.
        source: Hash of the code; other code has other folders.
    """

    folder: Path
    source: str

    def place(self, task: Task) -> Path:
        """The task's folder."""
        readable = re.sub(r"\W+", "_", task.name).strip("_")
        return self.folder / f"{readable}-{task.key(self.source)}"

    def finished(self, task: Task) -> bool:
        """Whether there is an outcome."""
        return (self.place(task) / RESULT).is_file()

    def result(self, task: Task) -> dict[str, Any]:
        """The outcome."""
        return load_json(self.place(task) / RESULT)

    def seconds(self, task: Task) -> float:
        """How long it took, counted from when it was last started."""
        return float(load_json(self.place(task) / SECONDS)["seconds"])

    def carry_out(self, task: Task) -> float:
        """Do it, and keep the outcome; the seconds it took."""
        place = self.place(task)
        place.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        result = task.work(task.settings, place, [self.place(need) for need in task.needs])
        seconds = time.perf_counter() - began
        save_json(place / DESCRIPTION, {"name": task.name, "settings": dict(task.settings)})
        save_json(place / SECONDS, {"seconds": seconds})
        save_json(place / RESULT, result)  # the last, as it says that all the rest is there
        return seconds


def distinct(tasks: Sequence[Task], source: str) -> list[Task]:
    """Tasks and all that they need, each once, needs first."""
    found: dict[str, Task] = {}
    for task in tasks:
        for each in (*distinct(task.needs, source), task):
            found.setdefault(each.key(source), each)
    return list(found.values())
