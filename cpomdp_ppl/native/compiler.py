"""C text to a loaded library, by the system's C compiler, once for each text."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from cpomdp_ppl.errors import CompilerError
from cpomdp_ppl.native.cache import log, store_library, stored_libraries

NATIVE = "-march=native"
# Nothing that changes what arithmetic means (NaN, ∞, the order of sums): results are to be those of the text.
FLAGS = (
    "-O3",
    NATIVE,
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fopenmp-simd",
    "-Wno-unknown-pragmas",
)
LIBRARIES = ("-lm",)
FORMAT = 1
"""Part of every key: a change of it makes all libraries anew."""

TIME_LIMIT = 120.0
"""Seconds that the compiler may take."""

LINES_SHOWN = 12
WITHOUT_IT = "the eager engine serves without one"
PROCESSOR = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "Features",
    "CPU implementer",
    "CPU part",
    "CPU variant",
    "isa",
    "cpu",
)
"""Lines of /proc/cpuinfo that say which instructions there are; others change from moment to moment."""

_loaded: dict[str, ctypes.CDLL] = {}
_failures: dict[tuple[str, tuple[str, ...]], str] = {}
_without_native: set[tuple[str, ...]] = set()
_lock = threading.RLock()


def _renew_lock() -> None:
    """In a child process the thread that holds the lock does not exist, and would never let go of it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def compiled(source: str) -> ctypes.CDLL:
    """The library of a C text: the one in memory, or on disk, or else a new one.

    The compiler is `$CC`, which may have arguments, or `cc`. Libraries are kept in the cache folder; where
    that is not possible, they are made anew in each process. One that is there needs no compiler.

    Args:
        source: A complete C text. Its functions should be static but for those that are called, because the
            names of others may already stand for something else in the process.

    Returns:
        The loaded library; the very same for the same text.

    Raises:
        CompilerError: If there is no compiler, or it failed. A failure is not tried again in this process.
    """
    with _lock:
        if source not in _loaded:
            _loaded[source] = _library(source)
        return _loaded[source]


def compiler_version() -> str:
    """What the compiler says of its version.

    Raises:
        CompilerError: If there is no compiler, or it does not say.
    """
    command = _command()
    if not (said := _version(command)):
        raise CompilerError(f"the C compiler {command[0]} does not say its version")
    return said


def _library(source: str) -> ctypes.CDLL:
    content = _digest(FORMAT, source, FLAGS, _words()[1:], LIBRARIES, _processor())
    try:
        command = _command()
    except CompilerError:
        found = _kept(content, None)  # one of any compiler was made for this text and this processor
        if found is None:
            raise
        return found
    compiler = _digest(command, _version(command))
    return _kept(content, compiler) or _new(source, command, content, compiler)


def _kept(content: str, compiler: str | None) -> ctypes.CDLL | None:
    for library in stored_libraries(content, compiler):
        with suppress(OSError):  # it was made on a system with another C library, perhaps
            return _load(library)
    return None


def _new(source: str, command: tuple[str, ...], content: str, compiler: str) -> ctypes.CDLL:
    if (source, command) in _failures:
        raise CompilerError(_failures[source, command])
    try:
        library = _compile(source, command)
        loaded = _load(library)
    except (CompilerError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            message = f"what the C compiler {command[0]} makes cannot be kept or loaded: {error}"
        _failures[source, command] = message
        raise CompilerError(message) from error
    try:
        store_library(content, compiler, library)
    except OSError as error:
        _say_once(f"compiled libraries serve this process only: {error.filename}: {error.strerror}")
    return loaded


def _compile(source: str, command: tuple[str, ...]) -> bytes:
    """The content of the library; an error says why there is none."""
    with tempfile.TemporaryDirectory(prefix="cpomdp-", ignore_cleanup_errors=True) as folder:
        text, library = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        text.write_text(source, encoding="utf-8")
        flags = [flag for flag in FLAGS if flag != NATIVE or command not in _without_native]
        words = [*command, *flags, "-o", str(library), str(text), *LIBRARIES]
        code, said = _run(words, folder, TIME_LIMIT)
        if code > 0 and NATIVE in words and "-march" in said:
            words.remove(NATIVE)
            code, said = _run(words, folder, TIME_LIMIT)
            if code == 0:
                _without_native.add(command)
        shown = "".join(f"\n  {line}" for line in said.splitlines()[-LINES_SHOWN:])
        if code < 0:
            raise CompilerError(f"the C compiler {command[0]} was killed by {_signal_name(-code)}{shown}")
        if code > 0:
            raise CompilerError(f"the C compiler {command[0]} failed with exit code {code}{shown}")
        if not library.is_file():
            raise CompilerError(f"the C compiler {command[0]} made nothing, and says that all is well{shown}")
        return library.read_bytes()


def _load(library: bytes) -> ctypes.CDLL:
    """Load what was checked, not what may have come to its place since: a copy in a folder of our own."""
    try:
        with tempfile.TemporaryDirectory(prefix="cpomdp-", ignore_cleanup_errors=True) as folder:
            path = Path(folder, "kernel.so")
            path.write_bytes(library)
            return ctypes.CDLL(str(path))
    except OSError:
        if not hasattr(os, "memfd_create"):
            raise
    # The temporary folder is full, or nothing in it may be run. The file in memory stays open: the loader
    # takes two libraries for one if they have the same name, and here the number is the name.
    memory = os.memfd_create("kernel")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(library)
        loaded = ctypes.CDLL(f"/proc/self/fd/{memory}")
    except BaseException:
        os.close(memory)
        raise
    return loaded


def _run(words: list[str], folder: str, limit: float) -> tuple[int, str]:
    """Exit code of a command (negative: a signal), and what it said; its children end with it."""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "TMPDIR": folder, "LC_ALL": "C"},
            encoding="utf-8",
            errors="replace",
            process_group=0,
        )
    except OSError as error:
        raise CompilerError(f"the C compiler {words[0]} cannot be started: {error.strerror}") from error
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise CompilerError(
            f"the C compiler {words[0]} took longer than {limit:g} seconds and was ended"
        ) from error
    except BaseException:  # Ctrl-C
        _end(process)
        raise
    return process.returncode, said


def _end(process: subprocess.Popen[str]) -> None:
    """End a compiler and the programs that it has started, and wait until they are gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5.0)  # the last of them closes the pipe


def _words() -> list[str]:
    """The compiler as it was asked for: a name, and its arguments if it has some."""
    given = os.environ.get("CC", "")
    try:
        return shlex.split(given) or ["cc"]
    except ValueError as error:
        raise CompilerError(f"CC={given} cannot be read as a command: {error}; {WITHOUT_IT}") from error


def _command() -> tuple[str, ...]:
    """The compiler as it can be run: an absolute path, and its arguments."""
    name, *arguments = _words()
    found = shutil.which(name) if os.name == "posix" else None
    if found is None:
        raise CompilerError(
            f"there is no C compiler: {name}, {'named by $CC' if os.environ.get('CC') else 'the default'}, "
            f"is not a program on the path; {WITHOUT_IT}"
        )
    return (os.path.abspath(found), *arguments)


@cache
def _version(command: tuple[str, ...]) -> str:
    """What a compiler says of its version; nothing if it cannot be run, as will be seen when it compiles."""
    try:
        with tempfile.TemporaryDirectory(prefix="cpomdp-", ignore_cleanup_errors=True) as folder:
            code, said = _run([*command, "--version"], folder, min(TIME_LIMIT, 10.0))
    except (CompilerError, OSError):
        return ""
    return said.strip() if code == 0 else ""


@cache
def _processor() -> tuple[str, ...]:
    """What `-march=native` depends on; the machine's name where the system does not tell of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine(), platform.node()
    return platform.machine(), *sorted(
        {line for line in lines if line.partition(":")[0].strip() in PROCESSOR}
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of real time
        return f"signal {number}"


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)
