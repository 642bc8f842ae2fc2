"""What a run leaves behind: a folder of plain files, each written at once or not at all."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import platform
import secrets
import shlex
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from cpomdp_ppl.experiments.files import DiskFullError, is_disk_full, write_atomic
from cpomdp_ppl.rng import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import xarray as xr
    from arviz import InferenceData
    from matplotlib.figure import Figure

FORMAT = 1
"""Of `run.json`, and of what lies beside it."""

RECORD = "run.json"
FIGURES = "figures"
PACKAGES = ("torch", "pyro-ppl", "numpy", "arviz", "cpomdp-ppl")

KEYS: dict[str, type] = {
    "command": str,
    "model": str,
    "arguments": dict,
    "settings": dict,
    "seed": int,
    "versions": dict,
    "started": str,
    "finished": bool,
    "added": dict,
}


class RunFolderError(ValueError):
    """A folder is not that of a run, or not of this one, or cannot be written; in one sentence."""


class RunFolder:
    """A folder with `run.json`, which says what was run, and the results beside it.

    `run.json` holds: `format`; `command`; `model` and its constructor's `arguments`; `settings` and `seed`;
    `source`, where the model's code was, and its hash; `versions` of Python and of packages; `commit`, of the
    package's own repository, if it is run from one;
    `started`; `finished`; and `added`: what later commands added to the results, by command.

    Made by `create` or `open`, not directly.

    Attributes:
        path: Where it is.
        record: What `run.json` says.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "first"
        >>> folder = RunFolder.create(place, "fit", model="models:Mine", settings={"iterations": 5}, seed=1)
        >>> folder.write_table("history.csv", {"iteration": [1, 2], "return": [-1.0, 0.5]})
        >>> folder.finish()
        >>> RunFolder.open(place).read_table("history.csv")["return"]
        ['-1.0', '0.5']
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path = path
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
            path: A folder that is not there, or empty, or that of the same run.
            command: What is run.
            model: Which model, as `module:Class` or `file.py:Class`.
            arguments: Of its constructor.
            settings: Of the command.
            seed: Of everything random. Left out, it is the one that is recorded there, or fresh.
            source: The `path` of the model's code, and its `sha256`; with other code it is another run.
            further: Whatever else there is to say, in numbers and words.

        Raises:
            RunFolderError: If something else is there, or the folder cannot be made.
        """
        path = Path(path)
        asked = plain(
            {"command": command, "model": model, "arguments": arguments or {}, "settings": settings or {}}
        )
        asked["source"] = plain(source)
        if (path / RECORD).exists():
            folder = cls.open(path, unfinished=True)
            if seed is not None:
                asked["seed"] = plain(seed)
            folder._require_same(asked)
            return folder
        number = fresh_seed(seed)
        with _writing(path):
            _make_empty(path)
        record = {
            "format": FORMAT,
            **asked,
            "seed": number,
            **plain(further),
            "versions": versions(),
            "commit": commit(),
            "started": now(),
            "finished": False,
            "added": {},
        }
        folder = cls(path, record)
        folder._write_record()
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, unfinished: bool = False) -> RunFolder:
        """A run's folder, to read from or to add to.

        Args:
            path: Where it is.
            unfinished: Whether a run that was not finished will do.

        Raises:
            RunFolderError: If it is no run folder, or of another format, or half-written.
        """
        path = Path(path)
        if not path.is_dir():
            raise RunFolderError(f"{path} is not a run folder: there is no such folder")
        if not (path / RECORD).is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no {RECORD}")
        record = _read_json(path / RECORD)
        found = record.get("format") if isinstance(record, dict) else None
        if found is None:
            raise RunFolderError(f"{path} is not a run folder: {path / RECORD} does not say its format")
        if found != FORMAT:
            raise RunFolderError(
                f"{path} is of format {found!r}, and this version of cpomdp-ppl reads format {FORMAT}: "
                "use the version it was made with, or run its command again into another folder"
            )
        for name, kind in KEYS.items():
            if not isinstance(record.get(name), kind):
                raise RunFolderError(f"{path / RECORD} is damaged: {name} is {record.get(name)!r}")
        folder = cls(path, record)
        if not unfinished and not folder.finished:
            raise RunFolderError(folder._half_written())
        return folder

    @property
    def finished(self) -> bool:
        """Whether the run got to its end."""
        return bool(self.record["finished"])

    @property
    def seed(self) -> int:
        """Of everything random."""
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

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        return (self.path / name).exists()

    def write_json(self, name: str, content: Any) -> None:
        """Write numbers and words; dataclasses, arrays and tensors become such, and NaN becomes null."""
        text = json.dumps(plain(content), indent=1, allow_nan=False)
        self.write(name, lambda file: _write_text(file, text + "\n"))

    def read_json(self, name: str) -> Any:
        """Read what `write_json` wrote.

        Raises:
            RunFolderError: If it is not there, or damaged.
        """
        return _read_json(self.path / name)

    def write_table(self, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write a CSV file of columns, all of one length; None and NaN become empty cells."""
        rows = [["" if cell != cell else cell for cell in row] for row in zip(*columns.values(), strict=True)]

        def save(file: Path) -> None:
            with file.open("w", newline="", encoding="utf-8") as lines:
                writer = csv.writer(lines, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(rows)

        self.write(name, save)

    def read_table(self, name: str) -> dict[str, list[str]]:
        """Columns of a CSV file, as text.

        Raises:
            RunFolderError: If it is not there, or damaged.
        """
        try:
            with (self.path / name).open(newline="", encoding="utf-8") as lines:
                header, *rows = csv.reader(lines)
            return {title: [row[k] for row in rows] for k, title in enumerate(header)}
        except (OSError, UnicodeDecodeError, csv.Error, ValueError, IndexError) as error:
            raise RunFolderError(f"{self.path / name} cannot be read as a table: {error}") from error

    def write_figure(self, name: str, figure: Figure) -> None:
        """Write a figure as PNG and as SVG, to the folder `figures`."""
        import matplotlib

        with _writing(self.path):
            (self.path / FIGURES).mkdir(exist_ok=True)
        # Without a date and with names that chance has no part in, the same figure is the same file.
        with matplotlib.rc_context({"svg.hashsalt": "cpomdp-ppl"}):
            self.write(
                f"{FIGURES}/{name}.svg",
                lambda file: figure.savefig(file, format="svg", metadata={"Date": None}),
            )
        self.write(f"{FIGURES}/{name}.png", lambda file: figure.savefig(file, format="png", dpi=120))

    def write_data(self, name: str, data: xr.Dataset | xr.DataTree | InferenceData) -> None:
        """Write a dataset, or ArviZ data with all their groups, as NetCDF."""
        self.write(name, lambda file: _write_netcdf(file, data))

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Write any file at once or not at all: whoever reads it, even after a crash, finds a whole one.

        Args:
            name: Of the file.
            save: Writes to the path it is given.

        Raises:
            RunFolderError: If the disk is full, or the folder cannot be written to.
        """
        path = self.path / name
        with _writing(path):
            write_atomic(path, save)

    def add(self, command: str, *, settings: Mapping[str, Any], seed: int | None, **further: Any) -> None:
        """Note in `run.json` what a later command has added, once it has; the last of its kind is kept."""
        entry = {"settings": settings, "seed": seed, **further, "versions": versions(), "finished": now()}
        with self._latest() as record:
            record["added"][command] = plain(entry)

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
                    record["in_force"] = plain(in_force)

    def require_writable(self) -> None:
        """Raise, unless files can be written here: better before hours of work than after.

        Raises:
            RunFolderError: If the disk is full, or the folder cannot be written to.
        """
        name = f"probe-{secrets.token_hex(4)}"
        self.write(name, lambda file: _write_text(file, "x"))
        (self.path / name).unlink()

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, if they are there."""
        with _writing(self.path):
            for name in names:
                (self.path / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the folder, if `run.json` is the only file in it: of a run that never got anywhere."""
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
            self.record = record
            self._write_record()

    def _write_record(self) -> None:
        self.write_json(RECORD, self.record)

    def _require_same(self, asked: Mapping[str, Any]) -> None:
        mine, other = self._flat(self.record), self._flat(asked)
        if "seed" not in asked:
            mine.pop("seed", None)
        for name in [*other, *(name for name in mine if name not in other)]:
            if mine.get(name) != other.get(name):
                raise RunFolderError(
                    f"{self.path} is of another run: its {name} is {mine.get(name)!r}, not "
                    f"{other.get(name)!r}; choose another folder, or repeat that run to go on with it"
                )

    @staticmethod
    def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
        """What tells runs apart, with names for a message."""
        parts = {name: record[name] for name in ("command", "model", "seed") if name in record}
        if isinstance(record.get("source"), dict):  # the same code elsewhere is the same
            parts["code of the model (sha256)"] = record["source"].get("sha256")
        parts |= {f"argument {name}": value for name, value in record["arguments"].items()}
        return parts | {f"setting {name}": value for name, value in record["settings"].items()}

    def _half_written(self) -> str:
        there = ", ".join(self.contents) or "nothing else"
        command, started = self.record["command"], self.record["started"]
        return (
            f"{self.path} is half-written: its '{command}', started {started}, was not finished, and left "
            f"{there}; repeat that command with --run {shlex.quote(str(self.path))}, or delete the folder"
        )


def next_folder(model: str, command: str, parent: str | os.PathLike[str] = "runs") -> Path:
    """Make the first of `runs/<model>-<command>-1`, `-2`, … that is not there yet: nobody else gets it.

    Args:
        model: Which model, as `module:Class`; the class's name is taken.
        command: What is run.
        parent: Where the folders are.

    Raises:
        RunFolderError: If it cannot be made.
    """
    name = model.rpartition(":")[2]
    with _writing(Path(parent)):
        Path(parent).mkdir(parents=True, exist_ok=True)
        for n in itertools.count(1):
            path = Path(parent) / f"{name}-{command}-{n}"
            try:
                path.mkdir()
                return path
            except FileExistsError:  # perhaps made this very moment
                continue
    raise AssertionError("numbers do not end")


def plain(part: Any) -> Any:
    """Anything as JSON has it: tuples become lists, tensors and NumPy's numbers Python's, NaN and ∞ None.

    Example:
        >>> plain({"a": (1, float("nan")), "b": np.float64(0.5)})
        {'a': [1, None], 'b': 0.5}
    """
    if isinstance(part, Tensor | np.ndarray | np.generic):
        return plain(part.tolist())
    if isinstance(part, float):
        return part if math.isfinite(part) else None
    if part is None or isinstance(part, bool | int | str):
        return part
    if isinstance(part, dict):
        return {str(name): plain(each) for name, each in part.items()}
    if isinstance(part, list | tuple | set | frozenset):
        return [plain(each) for each in part]
    if is_dataclass(part) and not isinstance(part, type):
        return plain(asdict(part))
    return str(part)


def versions() -> dict[str, str]:
    """Of Python, and of those packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # from a source tree, perhaps
            found[package] = "unknown"
    return found


def commit() -> str | None:
    """The commit of the source tree that this package runs from, if it does; with `-dirty` if it changed."""
    tree = Path(__file__).resolve().parent.parent
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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if is_disk_full(error):
            raise RunFolderError(str(DiskFullError(path))) from error
        if isinstance(error, OSError) and error.errno is not None:
            raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error
        raise


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


def _make_empty(path: Path) -> None:
    """Make a folder, unless there is an empty one."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file, where a run folder should be")
    if path.is_dir() and any(path.iterdir()):
        raise RunFolderError(f"{path} is not empty, and is no run folder: choose another")
    path.mkdir(parents=True, exist_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_netcdf(path: Path, data: Any) -> None:
    data.to_netcdf(str(path), engine="h5netcdf")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise RunFolderError(f"{path} is damaged: it cannot be read as JSON") from error
