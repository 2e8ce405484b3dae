from __future__ import annotations

import errno
import stat

import pytest

from p2pdrl import atomic
from p2pdrl.atomic import (
    fsync_folder,
    remove_leftovers,
    storage_error,
    write_atomic,
    write_beside,
    write_new,
)
from p2pdrl.errors import StorageError


def test_a_file_is_replaced_whole_and_private(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")

    def broken():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_beside(path, broken())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_is_written_over_no_other(tmp_path):
    path = tmp_path / "f"
    write_new(path, b"new", 0o600, "write")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    with pytest.raises(FileExistsError):
        write_new(path, b"newer", 0o600, "write")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("broken", "raised"),
    [(OSError(errno.ENOSPC, "no"), StorageError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_of_a_new_file_that_cannot_be_written_nothing_is_left(tmp_path, monkeypatch, broken, raised):
    def fail(_descriptor):
        raise broken

    monkeypatch.setattr(atomic.os, "fsync", fail)
    with pytest.raises(raised):
        write_new(tmp_path / "f", b"new", 0o600, "write")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_and_other_files_stay(tmp_path):
    write_beside(tmp_path / "f", (b"killed before the rename",))
    (tmp_path / "mine.tmp").write_text("")
    assert remove_leftovers(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tmp"]


def test_leftovers_of_some_files_alone_are_removed(tmp_path):
    for name in ("f", "g", "f.json"):
        write_beside(tmp_path / name, (b"killed before the rename",))
    assert remove_leftovers(tmp_path, "f", "h") == 1
    assert sorted(path.name.rsplit(".", 2)[0] for path in tmp_path.iterdir()) == [".f.json", ".g"]


@pytest.mark.parametrize(("number", "raises"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_flushed_is_excused_but_a_broken_disk_is_not(
    tmp_path, monkeypatch, number, raises
):
    def fail(_descriptor):
        raise OSError(number, "no")

    monkeypatch.setattr(atomic.os, "fsync", fail)
    if raises:
        with pytest.raises(OSError, match="no"):
            fsync_folder(tmp_path)
    else:
        fsync_folder(tmp_path)


def test_errors_say_what_to_do(tmp_path):
    full = storage_error("write the checkpoint", tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert str(full) == f"can't write the checkpoint {tmp_path}: the disk is full: free some space"
    other = storage_error("read", tmp_path, OSError(errno.EMFILE, "Too many open files"))
    assert "Too many open files" in str(other)
