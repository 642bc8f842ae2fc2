"""Units of work, each done once: a task, and the folder that its outcome is kept in."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from cpomdp_ppl.experiments.files import CheckpointError, load_json, save_json
from examples.paper import work

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "pyro-ppl", "numpy", "pomdp-py")
KEPT = re.compile(r"-[0-9a-f]{12}$")  # how the name of a task's folder ends
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


class ChangedCodeError(RuntimeError):
    """The code is not what it was when the run began."""


def source_hash(start: Path = Path(work.__file__), root: Path = ROOT) -> str:
    """A hash of the code that outcomes depend on, and of the versions of what it stands on.

    Args:
        start: The module that does the work.
        root: What it imports from below here, however deep, counts as well.
    """
    return hash_of(reached(start, root), root)


def hash_of(files: Iterable[Path], root: Path) -> str:
    """A hash of files, and of the versions of libraries."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for library in LIBRARIES:
        try:
            digest.update(f"{library} {importlib.metadata.version(library)}\0".encode())
        except importlib.metadata.PackageNotFoundError:  # an extra that is not there
            digest.update(f"{library} –\0".encode())
    return digest.hexdigest()[:12]


def reached(start: Path, root: Path) -> set[Path]:
    """A module and all those below `root` that it imports, at once, later, or for types alone."""
    found, left = set(), [start]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [file for name in _imported(path) for file in _files(root, name)]
    return found


def _imported(path: Path) -> Iterator[str]:
    """Names that a module imports, of modules or of what is in them."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(root: Path, name: str) -> Iterator[Path]:
    """The files of a dotted name: the module, and the packages that it is in."""
    place = root
    for part in name.split("."):
        place = place / part
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                yield file


@dataclass(frozen=True)
class Store:
    """Where outcomes are kept: one folder a task, named by what decides its outcome.

    Attributes:
        folder: Of all of them.
        source: Hash of the code; other code has other folders.
        again: Reads that hash once more, as it is by now; None if nothing can have changed it.
    """

    folder: Path
    source: str
    again: Callable[[], str] | None = field(default=None, repr=False)

    @staticmethod
    def of_this_code(folder: Path) -> Store:
        """For outcomes of the code that is there now."""
        files = tuple(sorted(reached(Path(work.__file__), ROOT)))
        again = partial(hash_of, files, ROOT)  # which files these are cannot change unless one of them does
        return Store(folder, again(), again)

    def place(self, task: Task) -> Path:
        """The task's folder."""
        readable = re.sub(r"\W+", "_", task.name).strip("_")
        return self.folder / f"{readable}-{task.key(self.source)}"

    def finished(self, task: Task) -> bool:
        """Whether there is an outcome that can be read; one that is damaged is as good as none."""
        try:
            self.result(task), self.seconds(task)
        except (OSError, CheckpointError, KeyError, TypeError, ValueError):
            return False
        return True

    def result(self, task: Task) -> dict[str, Any]:
        """The outcome."""
        return load_json(self.place(task) / RESULT)

    def seconds(self, task: Task) -> float:
        """How long it took, counted from when it was last started."""
        return float(load_json(self.place(task) / SECONDS)["seconds"])

    def carry_out(self, task: Task) -> float:
        """Do it, and keep the outcome; the seconds it took.

        Raises:
            ChangedCodeError: If the outcome would be of other code than its folder's name says.
        """
        self.require_same_code()  # which this process may have imported long after the run began
        place = self.place(task)
        place.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        result = task.work(task.settings, place, [self.place(need) for need in task.needs])
        seconds = time.perf_counter() - began
        self.require_same_code()  # some of which is imported late
        save_json(place / DESCRIPTION, {"name": task.name, "settings": dict(task.settings)})
        save_json(place / SECONDS, {"seconds": seconds})
        save_json(place / RESULT, result)  # the last, as it says that all the rest is there
        return seconds

    def require_same_code(self) -> None:
        """Raise if the code has changed since the store was made."""
        if self.again is not None and self.again() != self.source:
            raise ChangedCodeError(
                "the code has changed since the run began, and what it comes to would be taken for the old "
                "code's; the same command begins again with the new code"
            )

    def unused(self, tasks: Iterable[Task]) -> list[Path]:
        """Folders of tasks that are not among these: of other code, mostly."""
        used = {self.place(task).name for task in tasks}
        kept = [place for place in self.folder.glob("*") if place.is_dir() and KEPT.search(place.name)]
        return sorted(place for place in kept if place.name not in used)


def distinct(tasks: Sequence[Task], source: str) -> list[Task]:
    """Tasks and all that they need, each once, needs first."""
    found: dict[str, Task] = {}
    for task in tasks:
        for each in (*distinct(task.needs, source), task):
            found.setdefault(each.key(source), each)
    return list(found.values())
