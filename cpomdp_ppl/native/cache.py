"""Compiled libraries on disk: found by what they were made from, checked before use, and not too many.

Who can write a library can make this process run anything. So only a folder and regular files that belong
to the user, and that nobody else may write, are looked at; all access goes through the open folder, which
cannot be exchanged under our hands. The name of a file holds a digest of what it was made from and of its
content, so that a damaged or renamed one is noticed. Callers get bytes that were read once and then checked,
never a path.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_LIBRARIES = 512
MOST_BYTES = 256 * 2**20
"""Beyond either of these, the libraries that were not used for longest are removed."""

LIBRARY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{64}\.so")
PART = re.compile(r"\.[0-9a-f]{16}\.part")
PART_SECONDS = 3600.0
"""A part of a library that is older than this was left by a process that was killed."""

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger("cpomdp_ppl.native")


def cache_folder() -> Path:
    """Where compiled libraries are kept, whether it is there or not.

    It is `native` in `$CPOMDP_CACHE`, or in `$XDG_CACHE_HOME/cpomdp-ppl`, or in `~/.cache/cpomdp-ppl`.

    Raises:
        FileNotFoundError: If no variable names a place.
    """
    if own := os.environ.get("CPOMDP_CACHE"):
        return Path(own).absolute() / "native"
    for variable, inside in (("XDG_CACHE_HOME", "cpomdp-ppl"), ("HOME", ".cache/cpomdp-ppl")):
        place = Path(os.environ.get(variable, ""))
        if place.is_absolute():
            return place / inside / "native"
    raise FileNotFoundError(errno.ENOENT, "set CPOMDP_CACHE, because HOME is not set", "no cache folder")


def stored_libraries(source: str, compiler: str | None) -> list[bytes]:
    """The good libraries of a source; what is damaged or not ours is removed, if it can be.

    Args:
        source: Digest of the source, and of what else the result depends on.
        compiler: Digest of the compiler; None for any.

    Returns:
        The content of each.
    """
    prefix, found = _prefix(source, compiler or ""), []
    with suppress(OSError), _opened() as folder:  # without a folder that is ours alone, there are none
        _require_ours(os.fstat(folder), str(cache_folder()))
        for name in filter(LIBRARY.fullmatch, os.listdir(folder)):
            if name.startswith(prefix):
                try:
                    found.append(_checked(folder, name))
                except OSError as error:
                    log.info("a compiled library is made anew: %s", error)
                    _remove(folder, name)
    return found


def store_library(source: str, compiler: str, library: bytes) -> None:
    """Keep a library, completely or not at all; the least recently used give way.

    Args:
        source: Digest of the source, and of what else the result depends on.
        compiler: Digest of the compiler.
        library: Its content.

    Raises:
        OSError: If it cannot be kept.
    """
    name, part = _name(_prefix(source, compiler), library), f".{secrets.token_hex(8)}.part"
    with _opened(make=True) as folder:
        _close_to_others(folder)
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(part, new, 0o600, dir_fd=folder), "wb") as file:
                file.write(library)
            os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            error.filename, error.filename2 = str(cache_folder()), None  # the part's name says nothing
            raise
        finally:
            _remove(folder, part)
        _make_room(folder)


def cache_size() -> tuple[int, int]:
    """How many libraries are kept, and how many bytes they take.

    Raises:
        OSError: If the folder belongs to another user, or cannot be read.
    """
    sizes = []
    with suppress(FileNotFoundError), _opened() as folder:
        sizes = [size for _, size, _ in _entries(folder, LIBRARY)]
    return len(sizes), sum(sizes)


def clear_cache() -> tuple[int, int]:
    """Remove all libraries, and nothing else.

    Returns:
        How many there were, and how many bytes they took.

    Raises:
        OSError: If the folder belongs to another user, or cannot be written.
    """
    sizes = []
    with suppress(FileNotFoundError), _opened() as folder:
        for _, size, name in _entries(folder, LIBRARY):
            with suppress(FileNotFoundError):  # another process has removed it
                os.unlink(name, dir_fd=folder)
                sizes.append(size)
        _remove_old_parts(folder)
    return len(sizes), sum(sizes)


@contextmanager
def _opened(make: bool = False) -> Iterator[int]:
    """The folder, which belongs to the user; others may write to it, unless the caller looks after that."""
    path = cache_folder()
    if make:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        for place in (path.parent, path):
            with suppress(FileExistsError):
                place.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_ours(os.fstat(folder), str(path), alone=False)
        yield folder
    finally:
        os.close(folder)


def _close_to_others(folder: int) -> None:
    """Make a folder writable by its owner alone; if it was not, nothing in it can be trusted."""
    if os.fstat(folder).st_mode & OTHERS_MAY_WRITE:
        log.warning("others could write to %s: the libraries in it are removed", cache_folder())
        os.fchmod(folder, 0o700)
        for _, _, name in _entries(folder, LIBRARY):
            _remove(folder, name)
        _require_ours(os.fstat(folder), str(cache_folder()))  # some file systems have no such permissions


def _require_ours(status: os.stat_result, name: str, alone: bool = True) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", name)
    if alone and status.st_mode & OTHERS_MAY_WRITE:
        raise PermissionError(errno.EPERM, "others may write to it", name)


def _prefix(source: str, compiler: str) -> str:
    return f"{source[:32]}-{compiler[:16]}"


def _name(prefix: str, library: bytes) -> str:
    return f"{prefix}-{hashlib.sha256(prefix.encode() + library).hexdigest()}.so"


def _checked(folder: int, name: str) -> bytes:
    """The content of a library; an error if it is not regular, not ours alone, or damaged."""
    # Not to block: there may be a pipe in its place.
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(file)
        _require_ours(status, name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        with open(file, "rb", closefd=False) as content:
            library = content.read()
        if name != _name(name.rpartition("-")[0], library):
            raise OSError(errno.EIO, "it is damaged", name)
        with suppress(OSError):
            os.utime(file)  # which tells what was used last
        return library
    finally:
        os.close(file)


def _entries(folder: int, pattern: re.Pattern[str]) -> list[tuple[float, int, str]]:
    """When each file with such a name was used last, its size, and its name; the oldest first."""
    found = []
    for name in filter(pattern.fullmatch, os.listdir(folder)):
        with suppress(FileNotFoundError):  # another process has removed it
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                found.append((status.st_mtime, status.st_size, name))
    return sorted(found)


def _make_room(folder: int) -> None:
    entries = _entries(folder, LIBRARY)
    count, size = len(entries), sum(size for _, size, _ in entries)
    for _, freed, name in entries:
        if count <= MOST_LIBRARIES and size <= MOST_BYTES:
            break
        _remove(folder, name)
        count, size = count - 1, size - freed
    _remove_old_parts(folder)


def _remove_old_parts(folder: int) -> None:
    for written, _, name in _entries(folder, PART):
        if time.time() - written > PART_SECONDS:
            _remove(folder, name)


def _remove(folder: int, name: str) -> None:
    with suppress(OSError):  # it is gone already, or will be refused again
        os.unlink(name, dir_fd=folder)
