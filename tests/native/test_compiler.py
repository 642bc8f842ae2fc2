"""The compiler: at its best, missing, failing, killed, hanging, interrupted, and twice at once."""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from cpomdp_ppl.errors import CompilerError
from cpomdp_ppl.native import cache, compiler
from cpomdp_ppl.native.compiler import compiled, compiler_version
from tests.children import environment, run_python, start_python, wait_for

ANSWER = "int answer(void) { return 42; }"
BROKEN = "int answer(void) { return nonsense; }"
LOG = 'case " $* " in *" --version "*) echo "fake 1.0"; exit 0;; esac\necho "$@" >> "$0.log"\n'


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A process that has compiled nothing, with a cache and a temporary folder of its own."""
    for name in ("_loaded", "_failures"):
        monkeypatch.setattr(compiler, name, {})
    monkeypatch.setattr(compiler, "_without_native", set())
    compiler._say_once.cache_clear()
    compiler._version.cache_clear()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it was remembered
    monkeypatch.setenv("CPOMDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    yield
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not list(tmp_path.glob("cache/native/.*"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "native"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Sets a script as the compiler; it is asked for the path of the script."""

    def install(script, name="fakecc"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return path

    return install


@pytest.fixture
def counting(fake):
    """The real compiler, behind a script that notes each call; returns how many there were so far."""
    path = fake(f'{LOG}exec cc "$@"')
    noted = path.with_name("fakecc.log")
    return lambda: len(noted.read_text().splitlines()) if noted.exists() else 0


def forget(monkeypatch):
    """As a new process would: nothing is in memory."""
    for name in ("_loaded", "_failures"):
        monkeypatch.setattr(compiler, name, {})


def returning(number):
    return f"int answer(void) {{ return {number}; }}"


def test_a_function_is_compiled_once_and_called(counting, monkeypatch):
    library = compiled(ANSWER)
    assert library.answer() == 42
    assert compiled(ANSWER) is library
    assert counting() == 1
    assert compiled(returning(7)).answer() == 7
    assert library.answer() == 42
    assert counting() == 2
    forget(monkeypatch)
    assert compiled(ANSWER).answer() == 42
    assert compiled(returning(7)).answer() == 7
    assert counting() == 2


def test_arithmetic_is_that_of_the_text():
    """What fast-math or a fused multiply-add would get wrong."""
    library = compiled(
        """
        #include <math.h>
        int nan_is_nan(double x) { return isnan(x) && x != x; }
        int infinite(double x) { return isinf(x); }
        int order_of_sums(double a, double b) { return (a + b) - a == 0.0; }
        int unfused(double a, double b) { return a * a - b == 0.0; }
        """
    )
    double = compiler.ctypes.c_double
    assert library.nan_is_nan(double(math.nan))
    assert library.infinite(double(math.inf))
    assert library.order_of_sums(double(1e17), double(1.0))
    x = 1.0 + 2.0**-30
    assert library.unfused(double(x), double(x * x))


@pytest.mark.slow
def test_a_new_process_needs_no_compiler(counting):
    assert compiled(ANSWER).answer() == 42
    script = f"""
    from cpomdp_ppl.native.compiler import compiled
    print(compiled({ANSWER!r}).answer())
    """
    assert run_python(script, env=environment(CC="/nowhere/cc")) == "42\n"
    assert counting() == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("/nowhere/cc", r"/nowhere/cc, named by \$CC, is not a program"),
        ("'cc", "CC='cc cannot be read as a command"),
        (None, "cc, the default, is not a program"),
    ],
)
def test_without_a_compiler(given, sentence, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere") if given is None else patch.setenv("CC", given)
        for ask in (lambda: compiled(ANSWER), compiler_version):
            with pytest.raises(
                CompilerError, match=f"{sentence}.*; the eager engine serves without"
            ) as raised:
                ask()
            assert "\n" not in str(raised.value)
    assert compiled(ANSWER).answer() == 42  # there is one now


def test_a_text_that_is_wrong_is_tried_once(counting):
    for _ in range(3):
        with pytest.raises(CompilerError, match=r"failed with exit code 1\n(.*\n)*.*nonsense") as raised:
            compiled(BROKEN)
        assert len(str(raised.value).splitlines()) <= 1 + compiler.LINES_SHOWN
    assert counting() == 1
    assert compiled(ANSWER).answer() == 42


def test_a_compiler_that_is_killed(fake):
    script = fake(f"{LOG}echo about to die >&2; kill -SEGV $$")
    for _ in range(2):
        with pytest.raises(CompilerError, match=r"fakecc was killed by SIGSEGV\n  about to die"):
            compiled(ANSWER)
    assert len(Path(f"{script}.log").read_text().splitlines()) == 1


def test_a_compiler_that_makes_nothing(fake, folder):
    fake(f"{LOG}echo nothing to do")
    with pytest.raises(CompilerError, match=r"made nothing.*\n  nothing to do"):
        compiled(ANSWER)
    assert not folder.exists()


def test_a_compiler_that_makes_something_else(fake, folder):
    fake(LOG + 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"')
    with pytest.raises(CompilerError, match="cannot be kept or loaded"):
        compiled(ANSWER)
    assert not folder.exists()


def test_a_compiler_that_cannot_be_started(fake):
    fake("").write_text("#!/nowhere/sh\n")
    with pytest.raises(CompilerError, match="cannot be started: No such file"):
        compiled(ANSWER)
    with pytest.raises(CompilerError, match="does not say its version"):
        compiler_version()


def processes(path):
    """Numbers of processes that have the path among their words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [entry.parent.name] if str(path) in entry.read_text(errors="replace") else []
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_compiler_that_hangs_is_ended_with_its_children(fake, monkeypatch):
    monkeypatch.setattr(compiler, "TIME_LIMIT", 0.3)
    script = fake(f'{LOG}sh -c "sleep 60; : $0"')
    for _ in range(2):
        with pytest.raises(CompilerError, match=r"took longer than 0\.3 seconds"):
            compiled(ANSWER)
    assert len(Path(f"{script}.log").read_text().splitlines()) == 1
    assert processes(script) == []


@pytest.mark.slow
def test_an_interrupt_ends_the_compiler_and_leaves_nothing(fake, folder):
    """The fixture looks for what was left in the temporary folder and in the cache."""
    script = fake(f'{LOG}touch "$TMPDIR/mess"; sh -c "sleep 60; : $0"')
    noted = Path(f"{script}.log")

    def interrupt():
        wait_for(noted.exists)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compiled(ANSWER)
    thread.join()
    assert processes(script) == []
    assert not folder.exists()
    fake('exec cc "$@"')
    assert compiled(ANSWER).answer() == 42  # an interrupt is not a failure


def test_a_compiler_without_march_native(fake):
    refusal = "error: bad value for -march="
    script = fake(f'{LOG}case "$*" in *-march=native*) echo "{refusal}" >&2; exit 1;; esac\nexec cc "$@"')
    assert compiled(ANSWER).answer() == 42
    assert compiled(returning(7)).answer() == 7
    calls = Path(f"{script}.log").read_text().splitlines()
    assert ["-march=native" in call for call in calls] == [True, False, False]


def test_arguments_of_the_compiler(monkeypatch):
    source = "int answer(void) { return NUMBER; }"
    monkeypatch.setenv("CC", "cc -DNUMBER=5")
    assert compiled(source).answer() == 5
    forget(monkeypatch)
    monkeypatch.setenv("CC", "/nowhere/cc -DNUMBER=5")
    assert compiled(source).answer() == 5
    forget(monkeypatch)
    monkeypatch.setenv("CC", "/nowhere/cc -DNUMBER=6")  # what was made with other arguments will not do
    with pytest.raises(CompilerError, match="there is no C compiler"):
        compiled(source)


def test_the_flags(counting, tmp_path):
    compiled(ANSWER)
    (call,) = (tmp_path / "fakecc.log").read_text().splitlines()
    words = call.split()
    assert set(compiler.FLAGS) <= set(words)
    assert words[-1] == "-lm"
    assert not any("fast" in word or "unsafe" in word or "finite" in word for word in words)


def test_what_a_library_depends_on(counting, fake, monkeypatch):
    def is_compiled_anew():
        before = counting()
        forget(monkeypatch)
        assert compiled(ANSWER).answer() == 42
        return counting() > before

    assert is_compiled_anew()
    assert not is_compiled_anew()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DOTHER"))
        assert is_compiled_anew()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_processor", lambda: ("another",))
        assert is_compiled_anew()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FORMAT", compiler.FORMAT + 1)
        assert is_compiled_anew()
    assert not is_compiled_anew()
    path = fake(f'{LOG.replace("1.0", "2.0")}exec cc "$@"')
    assert not is_compiled_anew()  # its version is asked for once in a process
    compiler._version.cache_clear()
    assert compiler_version() == "fake 2.0"
    assert is_compiled_anew()
    monkeypatch.setenv("CC", f"{path} -DOTHER")
    assert is_compiled_anew()


def test_the_processor_is_the_same_at_any_moment():
    first = compiler._processor()
    compiler._processor.cache_clear()
    assert compiler._processor() == first
    assert not any("MHz" in line for line in first)
    if Path("/proc/cpuinfo").exists() and compiler.platform.machine() == "x86_64":
        assert any(line.startswith("flags") for line in first)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:4000])


def no_library(path):
    """Good by name, but nothing that can be loaded."""
    path.unlink()
    source, made_by, _ = path.stem.split("-")
    cache.store_library(source, made_by, b"no library")


@pytest.mark.parametrize("harm", [flip_a_byte, cut, no_library])
def test_what_cannot_be_loaded_is_compiled_anew(counting, folder, monkeypatch, harm):
    compiled(ANSWER)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    harm(path)
    forget(monkeypatch)
    assert compiled(ANSWER).answer() == 42
    assert counting() == 2
    assert path.read_bytes() == good
    forget(monkeypatch)
    assert compiled(ANSWER).answer() == 42
    assert counting() == 2


def by_a_link(path, hostile):
    """To a library that is elsewhere; its digest is right."""
    elsewhere = path.parent.parent / "hostile.so"
    hostile.rename(elsewhere)
    hostile.symlink_to(elsewhere)


def in_an_open_folder(path, hostile):
    path.parent.chmod(0o777)


def as_another_user(path, hostile):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(hostile, 12345, -1)


@pytest.mark.parametrize("plant", [by_a_link, in_an_open_folder, as_another_user])
def test_hostile_libraries_are_never_loaded(counting, folder, monkeypatch, plant):
    compiled(returning(666))
    (hostile,) = folder.iterdir()
    content = hostile.read_bytes()
    hostile.unlink()
    compiled(ANSWER)
    (path,) = folder.iterdir()
    path.unlink()
    source, made_by, _ = path.stem.split("-")
    cache.store_library(source, made_by, content)
    forget(monkeypatch)
    assert compiled(ANSWER).answer() == 666  # what is about to be prevented
    (hostile,) = folder.iterdir()

    plant(path, hostile)
    forget(monkeypatch)
    assert compiled(ANSWER).answer() == 42
    assert [each.name for each in folder.iterdir()] == [path.name]
    forget(monkeypatch)
    assert compiled(ANSWER).answer() == 42
    assert counting() == 3


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


def no_home(tmp_path, patch):
    for variable in ("CPOMDP_CACHE", "XDG_CACHE_HOME", "HOME"):
        patch.delenv(variable, raising=False)


def a_file_in_its_place(tmp_path, patch):
    (tmp_path / "cache").write_text("a file")


def a_full_disk(tmp_path, patch):
    patch.setattr(cache.os, "replace", full)


def a_read_only_disk(tmp_path, patch):
    """As Linux has it: even to remove what is not there is refused."""

    def refusing(function):
        def refuse(path, *rest, **where):
            if str(path).endswith(".part"):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return function(path, *rest, **where)

        return refuse

    patch.setattr(cache.os, "open", refusing(os.open))
    patch.setattr(cache.os, "unlink", refusing(os.unlink))


def another_owner(tmp_path, patch):
    (tmp_path / "cache" / "native").mkdir(parents=True)
    patch.setattr(cache.os, "geteuid", lambda: os.getuid() + 1)


WHERE = {
    no_home: "no cache folder: set CPOMDP_CACHE",
    a_file_in_its_place: "{}/cache/native: Not a directory",
    a_full_disk: "{}/cache/native: No space left on device",
    a_read_only_disk: "{}/cache/native: Read-only file system",
    another_owner: "{}/cache/native: it belongs to another user",
}


@pytest.mark.parametrize("trouble", WHERE)
def test_without_a_cache_it_is_compiled_all_the_same(tmp_path, monkeypatch, caplog, trouble):
    caplog.set_level(logging.INFO, "cpomdp_ppl.native")
    trouble(tmp_path, monkeypatch)
    assert compiled(ANSWER).answer() == 42
    assert compiled(returning(7)).answer() == 7
    (record,) = caplog.records
    assert record.name == "cpomdp_ppl.native"
    assert "serve this process only" in record.message
    assert WHERE[trouble].format(tmp_path) in record.message


def test_a_temporary_folder_where_nothing_can_be_run(monkeypatch):
    """Files in memory serve, each under a name of its own."""
    load = compiler.ctypes.CDLL

    def refuse(path):
        if not path.startswith("/proc/"):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(compiler.ctypes, "CDLL", refuse)
    libraries = [compiled(returning(number)) for number in range(3)]
    assert [library.answer() for library in libraries] == [0, 1, 2]


def test_no_temporary_folder_at_all(monkeypatch, tmp_path):
    compiled(ANSWER)
    forget(monkeypatch)
    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", full)
    assert compiled(ANSWER).answer() == 42  # from the cache, by way of memory
    with pytest.raises(CompilerError, match=r"cannot be kept or loaded: .*No space left"):
        compiled(returning(7))


@pytest.mark.slow
def test_two_processes_at_once(fake, folder, tmp_path):
    """Both are in the middle of compiling before either goes on."""
    fake(
        f"{LOG}touch {tmp_path}/here.$$\n"
        f'while [ "$(ls {tmp_path}/here.* | wc -l)" -lt 2 ]; do sleep 0.01; done\nexec cc "$@"'
    )
    script = f"""
    from cpomdp_ppl.native.compiler import compiled
    print(compiled({ANSWER!r}).answer())
    """
    children = [start_python(script) for _ in range(2)]
    assert [child.communicate(timeout=120)[0] for child in children] == ["42\n", "42\n"]
    (path,) = folder.iterdir()
    content, made_by, _ = path.stem.split("-")
    assert cache.stored_libraries(content, made_by) == [path.read_bytes()]


def test_threads_share_one_library(counting):
    found = []
    threads = [threading.Thread(target=lambda: found.append(compiled(ANSWER))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(library is found[0] for library in found)
    assert counting() == 1


def in_a_child(work):
    """Whether work, in a forked process, ends well and soon."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_process_uses_what_was_loaded_and_compiles_more(counting):
    library = compiled(ANSWER)
    assert in_a_child(lambda: compiled(ANSWER) is library and library.answer() == 42)
    assert in_a_child(lambda: compiled(returning(7)).answer() == 7)
    assert not in_a_child(lambda: library.answer() == 7)
    assert compiled(returning(7)).answer() == 7
    assert counting() == 2  # the child has left it in the cache


@pytest.mark.slow
def test_a_process_forked_while_a_thread_compiles(fake, tmp_path):
    """The child does not wait for a thread that it does not have."""
    go = tmp_path / "go"
    script = fake(
        f'{LOG}while grep -q 42 "$TMPDIR/kernel.c" && [ ! -e {go} ]; do sleep 0.01; done\nexec cc "$@"'
    )
    found = []
    thread = threading.Thread(target=lambda: found.append(compiled(ANSWER).answer()))
    thread.start()
    wait_for(Path(f"{script}.log").exists)
    assert in_a_child(lambda: compiled(returning(7)).answer() == 7)
    assert not found
    go.touch()
    thread.join()
    assert found == [42]


def test_the_version_is_that_of_the_compiler():
    assert any(name in compiler_version().lower() for name in ("gcc", "cc (", "clang"))
