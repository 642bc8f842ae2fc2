"""Units of work, each done once: a task, and the run folder that its outcome is kept in."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from cpomdp_ppl.experiments.execute import WorkerKilledError, in_parallel
from cpomdp_ppl.experiments.files import CheckpointError, load_json, save_json
from cpomdp_ppl.experiments.fingerprint import file_hash, fingerprint, name_of
from cpomdp_ppl.experiments.run_folder import PACKAGES, RECORD, RunFolder, versions

ROOT = Path(__file__).resolve().parents[2]
CODE = ("cpomdp_ppl/**/*.py", "solvers/**/*.py", "baselines/**/*.py", "examples/paper/work.py")
NOT_USED = ("cpomdp_ppl/cli", "cpomdp_ppl/report")
RESULT = "result.json"

Work: TypeAlias = Callable[[Mapping[str, Any], Path, Path | None], dict[str, Any]]
"""From settings, a folder of its own and that of the task it needs, if any, to what it found out."""


@dataclass(frozen=True, eq=False)
class Task:
    """A fit, an evaluation, some trajectories."""

    name: str  # name for people
    work: Work  # a function that other processes can import
    settings: Mapping[str, Any]  # all that it depends on besides other tasks: plain numbers and text
    need: Task | None = None  # a task whose folder it reads, if any
    seconds: float = 1.0  # about how long it takes on a core; only the order of work depends on it

    @property
    def key(self) -> str:
        """A hash of everything that decides the outcome but the code."""
        need = None if self.need is None else self.need.key
        return fingerprint([name_of(self.work), dict(self.settings), need])


class ChangedCodeError(RuntimeError):
    """The code is not what it was when the run began."""


def source_hash() -> str:
    """A hash of the code that outcomes may depend on, and of the versions of the libraries it uses."""
    paths = {str(path.relative_to(ROOT)): path for pattern in CODE for path in ROOT.glob(pattern)}
    hashes = {name: file_hash(path) for name, path in paths.items() if not name.startswith(NOT_USED)}
    return fingerprint([hashes, versions((*PACKAGES, "pomdp-py"))])


@dataclass(frozen=True)
class Results:
    """Outcomes of tasks, each in a run folder that is named by what decides it."""

    folder: Path
    source: str = field(default_factory=source_hash)  # hash of the code; other code has other folders

    def place(self, task: Task) -> Path:
        """Path of the task's folder."""
        readable = re.sub(r"\W+", "_", task.name).strip("_")
        return self.folder / f"{readable}-{fingerprint([self.source, task.key])}"

    def finished(self, task: Task) -> bool:
        """Whether there is an outcome that can be read; one that is damaged is as good as none."""
        try:
            return RunFolder.open(self.place(task)).finished and isinstance(self.seconds(task), float)
        except (CheckpointError, OSError, KeyError):
            return False

    def result(self, task: Task) -> dict[str, Any]:
        """What the task found out."""
        return dict(load_json(self.place(task) / RESULT)["result"])

    def seconds(self, task: Task) -> float:
        """How long it took, counted from when it was last started."""
        return float(load_json(self.place(task) / RESULT)["seconds"])

    def carry_out(self, task: Task) -> float:
        """Do it, and keep the outcome; the seconds it took.

        Raises:
            ChangedCodeError: If the outcome would be of other code than its folder's name says.
        """
        self._require_same_code()  # which this process may have imported long after the run began
        folder = RunFolder.create(
            self.place(task),
            name_of(task.work),
            model=str(task.settings.get("model", "")),
            settings=task.settings,
            seed=task.settings.get("seed", 0),
            source={"path": str(ROOT), "sha256": self.source},
        )
        began = time.perf_counter()
        need = None if task.need is None else self.place(task.need)
        result = task.work(task.settings, folder.path, need)
        seconds = time.perf_counter() - began
        self._require_same_code()  # some of which is imported late
        save_json(folder.path / RESULT, {"result": result, "seconds": seconds})
        folder.finish()
        return seconds

    def _require_same_code(self) -> None:
        if source_hash() != self.source:
            raise ChangedCodeError(
                "the code has changed since the run began, and what it comes to would be taken for the old "
                "code's; the same command begins again with the new code"
            )

    def unused(self, tasks: Iterable[Task]) -> list[str]:
        """Names of the folders of tasks that are not among these: of other code, mostly."""
        used = {self.place(task).name for task in tasks}
        return sorted(p.parent.name for p in self.folder.glob(f"*/{RECORD}") if p.parent.name not in used)


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """Tasks and all that they need, each once, needs first."""
    found: dict[str, Task] = {}
    for task in tasks:
        for each in (*distinct([] if task.need is None else [task.need]), task):
            found.setdefault(each.key, each)
    return list(found.values())


def first_of(task: Task) -> Task:
    """What must be done first for a task: what it needs, or itself."""
    return task if task.need is None else first_of(task.need)


def run(
    tasks: Sequence[Task], results: Results, workers: int, progress: Callable[[str], None]
) -> dict[str, str]:
    """Do what is not done yet, in several processes, the longest first.

    A task that fails stops only those that need it. What needs a task is done after it in the same process.
    Returned is what went wrong, by the names of tasks.
    """
    chains: dict[str, list[Task]] = {}
    for task in tasks:
        if not results.finished(task):
            chains.setdefault(first_of(task).key, []).append(task)
    jobs = sorted(chains.values(), key=lambda chain: -sum(task.seconds for task in chain))
    left = sum(map(len, jobs))
    failures: dict[str, str] = {}
    try:
        with closing(in_parallel(_carry_out, [(results, job) for job in jobs], workers=workers)) as outcomes:
            for _, chain in outcomes:
                for name, outcome in chain:
                    left -= 1
                    failed = isinstance(outcome, str)
                    failures |= {name: outcome} if isinstance(outcome, str) else {}
                    progress(f"{name}: {'failed' if failed else f'{outcome:.0f} s'}; {left} left")
    except WorkerKilledError as error:
        lost = [task for k in error.missing for task in jobs[k] if not results.finished(task)]
        failures |= {task.name: "each process that took it up was killed" for task in lost}
    return failures


def _carry_out(job: tuple[Results, Sequence[Task]]) -> list[tuple[str, float | str]]:
    """Seconds, or what went wrong, of tasks that build on each other, by name."""
    results, tasks = job
    outcomes: list[tuple[str, float | str]] = []
    for task in tasks:
        if results.finished(task) or (task.need is not None and not results.finished(task.need)):
            continue  # a process before this one did it, or what it needs has failed
        try:
            outcomes.append((task.name, results.carry_out(task)))
        except Exception:
            outcomes.append((task.name, traceback.format_exc()))
    return outcomes
