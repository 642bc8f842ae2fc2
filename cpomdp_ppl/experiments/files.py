"""Files that are written completely or not at all, and that hold numbers and text, never code."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import zipfile
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.errors import invalid, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_MESSAGES = ("No space left on device", "PytorchStreamWriter failed writing", ". unexpected pos ")
"""How HDF5, which quotes the system, and torch, which is not where it should be in its file, say it."""


class DiskFullError(OSError):
    """There is no space for a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(
            f"the disk is full: {path} could not be written; what was there before is intact, "
            "so make space and repeat the command"
        )
        self.path, self.errno = str(path), errno.ENOSPC

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)


class CheckpointError(ValueError):
    """A file or directory does not hold what it should."""


def write_atomic(path: str | os.PathLike[str], save: Callable[[Path], object]) -> None:
    """Write a file completely or not at all: readers never see a part of it, even after a crash.

    Args:
        path: Path of the file.
        save: Function that writes to the path it is given, a temporary name in the same directory.

    Raises:
        DiskFullError: If there is no space; what was there before is intact.
        OSError: If the file cannot be written for another reason.

    Examples:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "a.txt"
        >>> write_atomic(place, lambda file: print(file.write_text("all of it")))
        9
        >>> place.read_text()
        'all of it'
    """
    path = Path(path)
    # Not by `tempfile`, whose files nobody else may read.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if is_disk_full(error):
            raise DiskFullError(path) from error
        if isinstance(error, OSError) and error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write text in UTF-8, completely or not at all; see `write_atomic`."""

    def save(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    write_atomic(path, save)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error was caused by a full disk, however the library that was writing puts it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in NO_SPACE:
            return True
        if any(message in str(cause) for message in DISK_FULL_MESSAGES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def save_tensors(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain numbers by name."""
    write_atomic(path, lambda file: torch.save(dict(content), file))


def load_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    """Read what `save_tensors` wrote. Anything but tensors and plain numbers is refused.

    Raises:
        CheckpointError: If the file is missing, damaged, or something else.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch, pickle and zipfile raise all kinds
        raise CheckpointError(
            f"{path} holds something else than weights and numbers, or is damaged"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, but expected a dict")
    return content


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain numbers and text by name; NaN and ∞ are written as Python does."""
    write_text_atomic(path, json.dumps(content, indent=1, allow_nan=True))


def load_json(path: Path) -> dict[str, Any]:
    """Read what `save_json` wrote.

    Raises:
        CheckpointError: If the file is damaged, or something else.
        OSError: If it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(f"{path} is damaged: it cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, but expected an object")
    return content


def jsonable(value: Any) -> Any:
    """A value as JSON has it: tuples become lists, arrays and tensors plain numbers, NaN and ∞ null.

    Examples:
        >>> jsonable({"a": (1, float("nan")), "b": np.float64(0.5)})
        {'a': [1, None], 'b': 0.5}
    """
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(name): jsonable(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    return str(value)


def as_directory(argument: str, directory: str | os.PathLike[str]) -> Path:
    """A path that is a directory, or may become one."""
    require(isinstance(directory, str | os.PathLike), argument, directory, "a path")
    path = Path(directory)
    try:
        free = path.is_dir() or not path.exists()
    except OSError:
        free = False
    require(free, argument, str(directory), "a directory, or a name for one")
    return path


def made_directory(argument: str, directory: str | os.PathLike[str]) -> Path:
    """A directory that exists, created if necessary."""
    path = as_directory(argument, directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(argument, str(directory), f"a directory that can be made ({error.strerror})") from error
    return path


def remove_folders(parent: Path, names: Iterable[str]) -> None:
    """Remove folders with all that is in them, and their parent if nothing is left in it."""
    for name in names:
        shutil.rmtree(parent / name, ignore_errors=True)
    with suppress(OSError):  # something else is in it, or it is not there
        parent.rmdir()
