"""Files that are written at once or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FULL = ("No space left on device", "PytorchStreamWriter failed writing", ". unexpected pos ")
"""What libraries say when there is no space, if not in the system's own way."""


class DiskFullError(OSError):
    """There is no space for a file; in one sentence."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(
            f"the disk is full: {path} could not be written; what was there before is whole, "
            "so make space and repeat the command"
        )
        self.path, self.errno = str(path), errno.ENOSPC

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)


def write_atomic(path: str | os.PathLike[str], save: Callable[[Path], None]) -> None:
    """Write a file at once or not at all: whoever reads it, even after a crash, finds a whole one.

    Args:
        path: Of the file.
        save: Writes to the path it is given, which is beside it.

    Raises:
        DiskFullError: If there is no space; what was there before is whole.
        OSError: If it cannot be written for another reason.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "a.txt"
        >>> write_whole(place, lambda file: print(file.write_text("all of it")))
        9
        >>> place.read_text()
        'all of it'
    """
    path = Path(path)
    # Not by `tempfile`, whose files are for nobody else to read.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        if is_disk_full(error):
            raise DiskFullError(path) from error
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write words, in UTF-8, at once or not at all; see `write_atomic`."""

    def save(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    write_atomic(path, save)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error comes of a full disk, however the library that wrote puts it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in NO_SPACE:
            return True
        # HDF5 quotes the system's error; torch says that it is not where it should be in its file.
        if any(words in str(seen) for words in FULL):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
