"""Libraries on disk: what is found again, what never is, and what gives way."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from pathlib import Path

import pytest

from cpomdp_ppl.native import cache
from cpomdp_ppl.native.cache import cache_folder, cache_size, clear_cache, store_library, stored_libraries

SOURCE, COMPILER, CONTENT = "5" * 64, "c" * 64, bytes(range(256)) * 4


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CPOMDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def stored(folder):
    """The file of a library that was found."""
    store_library(SOURCE, COMPILER, CONTENT)
    assert stored_libraries(SOURCE, COMPILER) == [CONTENT]
    (path,) = folder.iterdir()
    return path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_where_it_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("CPOMDP_CACHE", "/mine")
    assert cache_folder() == Path("/mine/native")
    monkeypatch.setenv("CPOMDP_CACHE", "")
    assert cache_folder() == Path("/caches/cpomdp-ppl/native")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == Path("/home/me/.cache/cpomdp-ppl/native")
    monkeypatch.delenv("HOME")
    with pytest.raises(FileNotFoundError, match="CPOMDP_CACHE"):
        cache_folder()
    assert stored_libraries(SOURCE, COMPILER) == []


def test_a_library_is_found_by_its_source_and_compiler(stored):
    assert stored_libraries(SOURCE, None) == [CONTENT]
    assert stored_libraries("6" * 64, COMPILER) == []
    assert stored_libraries(SOURCE, "d" * 64) == []
    store_library(SOURCE, "d" * 64, b"of another compiler")
    assert stored_libraries(SOURCE, COMPILER) == [CONTENT]
    assert sorted(stored_libraries(SOURCE, None)) == sorted([CONTENT, b"of another compiler"])


def test_it_is_private_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        store_library(SOURCE, COMPILER, CONTENT)
    finally:
        os.umask(before)
    assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)
    assert [mode(path) for path in folder.iterdir()] == [0o600]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def change_the_digest(path):
    """The last digit of the digest, which is a part of the name."""
    stem = path.stem
    path.rename(path.with_name(f"{stem[:-1]}{'0' if stem[-1] != '0' else '1'}.so"))


def put_a_link(path):
    elsewhere = path.parent.parent / "same.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def put_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def let_the_group_write(path):
    path.chmod(0o620)


def let_all_write(path):
    path.chmod(0o602)


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


DAMAGE = {
    flip_a_byte: "it is damaged",
    cut: "it is damaged",
    empty: "it is damaged",
    change_the_digest: "it is damaged",
    put_a_link: "symbolic link",
    put_a_pipe: "it is not a regular file",
    let_the_group_write: "others may write to it",
    let_all_write: "others may write to it",
    give_away: "it belongs to another user",
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_what_is_damaged_or_foreign_is_not_found_and_makes_place(stored, folder, caplog, harm):
    caplog.set_level(logging.INFO, "cpomdp_ppl.native")
    harm(stored)
    assert stored_libraries(SOURCE, COMPILER) == []
    assert DAMAGE[harm] in caplog.text
    assert list(folder.iterdir()) == []
    store_library(SOURCE, COMPILER, CONTENT)
    assert stored_libraries(SOURCE, COMPILER) == [CONTENT]


def test_a_library_under_the_name_of_another_is_not_found(stored):
    store_library("6" * 64, COMPILER, b"another")
    (other,) = stored.parent.glob("666*")
    other.rename(stored.with_name(other.name.replace("6" * 32, "5" * 32)))
    assert stored_libraries(SOURCE, COMPILER) == [CONTENT]


def test_a_folder_in_its_place_does_no_harm(stored):
    stored.unlink()
    stored.mkdir()
    assert stored_libraries(SOURCE, COMPILER) == []
    assert cache_size() == (0, 0)
    with pytest.raises(OSError, match=r"directory|exists"):
        store_library(SOURCE, COMPILER, CONTENT)
    assert list(stored.parent.iterdir()) == [stored]


@pytest.mark.parametrize("loose", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_emptied_before_it_is_used(stored, folder, caplog, loose):
    folder.chmod(loose)
    assert stored_libraries(SOURCE, COMPILER) == []
    assert stored.exists()
    store_library("6" * 64, COMPILER, b"another")
    assert mode(folder) == 0o700
    assert stored_libraries(SOURCE, COMPILER) == []
    assert stored_libraries("6" * 64, COMPILER) == [b"another"]
    assert "others could write" in caplog.text


def test_a_file_system_without_permissions_is_not_used(stored, folder, monkeypatch):
    folder.chmod(0o777)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    with pytest.raises(PermissionError, match="others may write"):
        store_library("6" * 64, COMPILER, b"another")
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_not_used(stored, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: stored.stat().st_uid + 1)
        assert stored_libraries(SOURCE, COMPILER) == []
        for use in (cache_size, clear_cache, lambda: store_library("6" * 64, COMPILER, b"another")):
            with pytest.raises(PermissionError, match="another user"):
                use()
    assert list(stored.parent.iterdir()) == [stored]
    assert stored_libraries(SOURCE, COMPILER) == [CONTENT]


def test_a_link_in_place_of_the_folder_is_not_followed(stored, folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert stored_libraries(SOURCE, COMPILER) == []
    with pytest.raises(OSError, match=r"[Dd]irectory|symbolic"):
        store_library("6" * 64, COMPILER, b"another")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_full_disk_leaves_no_parts(stored, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match=f"No space left.*'{stored.parent}'"):
            store_library("6" * 64, COMPILER, b"another")
    assert list(stored.parent.iterdir()) == [stored]


def test_the_least_recently_used_give_way(folder, monkeypatch):
    monkeypatch.setattr(cache, "MOST_LIBRARIES", 3)
    now = time.time()
    for age, source in ((30, "a"), (20, "b"), (10, "c")):
        store_library(source * 64, COMPILER, CONTENT)
        (path,) = folder.glob(f"{source}*")
        os.utime(path, (now - age, now - age))
    assert stored_libraries("a" * 64, COMPILER) == [CONTENT]  # which is a use of it
    store_library("d" * 64, COMPILER, CONTENT)
    assert sorted(path.name[0] for path in folder.iterdir()) == ["a", "c", "d"]

    monkeypatch.setattr(cache, "MOST_LIBRARIES", 100)
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * len(CONTENT) + 10)
    store_library("e" * 64, COMPILER, b"little")
    assert sorted(path.name[0] for path in folder.iterdir()) == ["a", "d", "e"]
    assert cache_size() == (3, 2 * len(CONTENT) + 6)


def test_clearing_removes_what_is_ours_by_name(stored):
    kept = [stored.parent / name for name in ("notes.txt", "other.so", f".{'a' * 16}.part")]
    old = stored.parent / f".{'b' * 16}.part"
    for path in (*kept, old):
        path.write_text("x")
    os.utime(old, (0, 0))  # of a process that was killed; the other may be one that is at work
    assert clear_cache() == (1, len(CONTENT))
    assert sorted(stored.parent.iterdir()) == sorted(kept)
    assert clear_cache() == (0, 0)


def test_nothing_is_made_by_looking(folder, caplog):
    caplog.set_level(logging.INFO)
    assert stored_libraries(SOURCE, COMPILER) == []
    assert cache_size() == clear_cache() == (0, 0)
    assert not folder.parent.exists()
    assert caplog.text == ""
