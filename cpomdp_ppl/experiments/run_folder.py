"""What a run leaves behind: a folder with a record of what was run, and the results beside it."""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import shlex
import subprocess
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.experiments.files import CheckpointError, jsonable, load_json
from cpomdp_ppl.experiments.fingerprint import require_same
from cpomdp_ppl.experiments.store import Store
from cpomdp_ppl.rng import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from matplotlib.figure import Figure

FORMAT = 1
"""Version of what `run.json` holds, and of the files beside it."""

RECORD, FIGURES = "run.json", "figures"
PACKAGES = ("torch", "pyro-ppl", "numpy", "arviz", "cpomdp-ppl")

RECORD_TYPES: dict[str, type] = {
    **dict.fromkeys(("command", "model", "started"), str),
    **dict.fromkeys(("arguments", "settings", "versions", "added"), dict),
    **{"seed": int, "finished": bool},
}


class RunFolderError(CheckpointError):
    """A folder is not that of a run, or not of this one, or is damaged."""


class RunFolder(Store):
    """A folder with `run.json`, which says what was run, and the results beside it.

    `run.json` holds: `format`; `command`; `model` and its constructor's `arguments`; `settings` and `seed`;
    `source`, where the model's code was, and its hash; `versions` of Python and of packages; `commit` of the
    package's own repository, if it is run from one; `started`; `finished`; and `added`: what later commands
    added to the results, by command.

    Made by `create` or `open`, not directly.

    Attributes:
        path: Path of the folder.
        record: Content of `run.json`.

    Examples:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "first"
        >>> folder = RunFolder.create(place, "fit", model="models:Mine", settings={"iterations": 5}, seed=1)
        >>> folder.write_table("history.csv", {"iteration": [1, 2], "return": [-1.0, 0.5]})
        >>> folder.finish()
        >>> RunFolder.open(place).read_table("history.csv")["return"]
        ['-1.0', '0.5']
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        super().__init__(path)
        self.record = record

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        command: str,
        *,
        model: str,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int | None = None,
        source: Mapping[str, str] | None = None,
        **further: Any,
    ) -> RunFolder:
        """Begin a run in a folder, or go on with the very same run.

        Args:
            path: Path of a folder that does not exist, or is empty, or is that of the same run.
            command: Name of what is run.
            model: Model as `module:Class` or `file.py:Class`.
            arguments: Arguments of its constructor.
            settings: Settings of the command.
            seed: Seed of all random numbers. Left out, it is the recorded one, or fresh.
            source: The `path` of the model's code, and its `sha256`; with other code it is another run.
            further: Further entries of the record.

        Raises:
            RunFolderError: If something else is there.
            OSError: If the folder cannot be made.
        """
        path = Path(path)
        asked = jsonable(
            {
                **{"command": command, "model": model, "arguments": arguments or {}},
                **{"settings": settings or {}, "source": source, "seed": seed},
            }
        )
        if (path / RECORD).exists():
            folder = cls.open(path, unfinished=True)
            if seed is None:
                asked["seed"] = folder.seed
            require_same(path, _identity(folder.record), _identity(asked), RunFolderError)
            return folder
        asked["seed"] = fresh_seed(seed)
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file, where a run folder should be")
        if path.is_dir() and any(path.iterdir()):
            raise RunFolderError(f"{path} is not empty, and is no run folder: choose another")
        path.mkdir(parents=True, exist_ok=True)
        made = {"versions": versions(), "commit": commit(), "started": now(), "finished": False, "added": {}}
        folder = cls(path, {"format": FORMAT, **asked, **jsonable(further), **made})
        folder.write_json(RECORD, folder.record)
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, unfinished: bool = False) -> RunFolder:
        """A run's folder, to read from or to add to.

        Args:
            path: Path of the folder.
            unfinished: Whether a run that was not finished will do.

        Raises:
            RunFolderError: If it is no run folder, or of another format, or half-written.
        """
        path = Path(path)
        if not (path / RECORD).is_file():
            why = f"it has no {RECORD}" if path.is_dir() else "there is no such folder"
            raise RunFolderError(f"{path} is not a run folder: {why}")
        try:
            record = load_json(path / RECORD)
        except CheckpointError as error:
            raise RunFolderError(str(error)) from error
        if record.get("format") != FORMAT:
            raise RunFolderError(
                f"{path} is of format {record.get('format')!r}, and this version of cpomdp-ppl reads format "
                f"{FORMAT}: use the version it was made with, or run its command again into another folder"
            )
        for name, kind in RECORD_TYPES.items():
            if not isinstance(record.get(name), kind):
                raise RunFolderError(f"{path / RECORD} is damaged: {name} is {record.get(name)!r}")
        folder = cls(path, record)
        if not unfinished and not folder.finished:
            left = ", ".join(folder.contents) or "nothing else"
            raise RunFolderError(
                f"{path} is half-written: its '{record['command']}', started {record['started']}, was not "
                f"finished, and left {left}; repeat that command with --run {shlex.quote(str(path))}, or "
                "delete the folder"
            )
        return folder

    @property
    def finished(self) -> bool:
        """Whether the run got to its end."""
        return bool(self.record["finished"])

    @property
    def seed(self) -> int:
        """Seed of all random numbers."""
        return int(self.record["seed"])

    @property
    def contents(self) -> tuple[str, ...]:
        """Names of what is there beside `run.json`; those of folders end in a slash."""
        there = sorted(path for path in self.path.iterdir() if not path.name.startswith("."))
        return tuple(path.name + "/" * path.is_dir() for path in there if path.name != RECORD)

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures, without `.svg`."""
        return tuple(sorted(path.stem for path in (self.path / FIGURES).glob("*.svg")))

    def write_figure(self, name: str, figure: Figure, *, dpi: int = 120) -> None:
        """Write a figure as PNG and SVG to the folder `figures`."""
        (self.path / FIGURES).mkdir(exist_ok=True)
        super().write_figure(f"{FIGURES}/{name}", figure, dpi=dpi)

    def add(self, command: str, *, settings: Mapping[str, Any], seed: int | None, **further: Any) -> None:
        """Note in `run.json` what a later command has added, once it has; the last of its kind is kept."""
        entry = {"settings": settings, "seed": seed, **further, "versions": versions(), "finished": now()}
        with self._latest() as record:
            record["added"][command] = entry

    def withdraw(self, command: str) -> None:
        """Take back what `add` noted, because the results it speaks of are about to be replaced."""
        if command in self.record["added"]:
            with self._latest() as record:
                record["added"].pop(command, None)

    def finish(self, in_force: Mapping[str, Any] | None = None) -> None:
        """Note that all is there, and what settings that were left out came to."""
        if not self.finished:
            with self._latest() as record:
                record["finished"] = True
                if in_force:
                    record["in_force"] = in_force

    def require_writable(self) -> None:
        """Raise unless files can be written here: better before hours of work than after."""
        probe = f"probe-{secrets.token_hex(4)}"
        self.write(probe, lambda file: file.touch())
        (self.path / probe).unlink()

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, if they are there."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the folder of a run that never got anywhere: one with no other file than `run.json`."""
        inside = sorted(self.path.rglob("*"), reverse=True)  # what is in a folder comes before it
        if [path for path in inside if not path.is_dir()] == [self.path / RECORD]:
            (self.path / RECORD).unlink()
            for folder in [path for path in inside if path.is_dir()]:
                folder.rmdir()
            self.path.rmdir()

    @contextmanager
    def _latest(self) -> Iterator[dict[str, Any]]:
        """The record as it is now, to change, while no other command can: it may have noted something."""
        with _locked(self.path):
            record = self.open(self.path, unfinished=True).record
            yield record
            self.record = jsonable(record)
            self.write_json(RECORD, self.record)


def next_folder(model: str, command: str, parent: str | os.PathLike[str] = "runs") -> Path:
    """Make the first of `runs/<model>-<command>-1`, `-2`, … that is not there yet: nobody else gets it.

    Args:
        model: Model as `module:Class`, of which the class's name is taken.
        command: Name of what is run.
        parent: Folder in which it is made.

    Raises:
        OSError: If it cannot be made.
    """
    Path(parent).mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        path = Path(parent) / f"{model.rpartition(':')[2]}-{command}-{n}"
        try:
            path.mkdir()
            return path
        except FileExistsError:  # perhaps made this very moment
            continue
    raise AssertionError("numbers do not end")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # from a source tree, perhaps
            found[package] = "unknown"
    return found


def commit() -> str | None:
    """The commit of the source tree that this package runs from, if it does; with `-dirty` if it changed."""
    tree = Path(__file__).resolve().parents[2]
    if not (tree / ".git").exists():  # the user's own repository is not ours
        return None
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def now() -> str:
    """The time, to the second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What tells runs apart; the same code in another place is the same."""
    parts = {name: record[name] for name in ("command", "model", "arguments", "settings", "seed")}
    source = record.get("source")
    return parts | {"code of the model (sha256)": source.get("sha256") if isinstance(source, dict) else None}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds this folder, and hold it; where the system cannot, go ahead."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    held = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
