from __future__ import annotations

import errno
import fcntl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdrl import atomic
from p2pdrl.atomic import write_beside
from p2pdrl.errors import DataDirLockedError, DataDirUnusableError, StorageError, UsageError
from p2pdrl.node.bootstrap import datadir
from p2pdrl.node.bootstrap.datadir import DataDir


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_named_folder_is_made_private_and_locked(tmp_path):
    with DataDir.acquire(tmp_path / "a" / "b") as data:
        assert data.path == tmp_path / "a" / "b"
        assert mode(data.path) == 0o700
        assert not data.picked_other
        with pytest.raises(DataDirLockedError, match=r"in use by another node \(process \d+\)") as caught:
            DataDir.acquire(data.path)
        assert "--data-dir" in str(caught.value)
    DataDir.acquire(tmp_path / "a" / "b").release()


def test_a_folder_is_told_so_that_others_find_it_from_wherever_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with DataDir.acquire("a") as data, DataDir.acquire(None, "root") as other:
        assert (data.path, other.path) == (tmp_path / "a", tmp_path / "root" / "node-1")
    with DataDir.acquire(environ={"P2PDRL_DATA_ROOT": "root"}) as data:
        assert data.path == tmp_path / "root" / "node-1"


def test_an_existing_folder_keeps_its_permissions(tmp_path):
    tmp_path.chmod(0o755)
    DataDir.acquire(tmp_path).release()
    assert mode(tmp_path) == 0o755


def test_without_a_name_the_first_free_one_is_taken(tmp_path):
    first = DataDir.acquire(None, tmp_path)
    second = DataDir.acquire(None, tmp_path)
    assert [first.path.name, second.path.name] == ["node-1", "node-2"]
    assert [first.picked_other, second.picked_other] == [False, True]
    first.release()
    first.release()
    with DataDir.acquire(None, tmp_path) as again:
        assert again.path.name == "node-1"
    second.release()


def test_the_root_comes_from_the_environment_or_the_user(tmp_path, monkeypatch):
    environ = {"P2PDRL_DATA_ROOT": str(tmp_path / "root")}
    with DataDir.acquire(environ=environ) as data:
        assert data.path == tmp_path / "root" / "node-1"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        with DataDir.acquire(environ={}) as data:
            assert data.path == tmp_path / "xdg" / "p2pdrl" / "node-1"


def test_when_all_are_in_use_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(datadir, "_MOST_NODES", 1)
    with DataDir.acquire(None, tmp_path), pytest.raises(DataDirLockedError, match="all of"):
        DataDir.acquire(None, tmp_path)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = (
        "import os, sys\n"
        "from p2pdrl.node.bootstrap.datadir import DataDir\n"
        "data = DataDir.acquire(sys.argv[1])\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(DataDirLockedError, match=f"process {holder.pid}"):
            DataDir.acquire(tmp_path)
        holder.kill()
        holder.wait()
        DataDir.acquire(tmp_path).release()


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    for name in ("token", "swarm.json", "identity.key", "notes"):
        write_beside(tmp_path / name, (b"half",))
    DataDir.acquire(tmp_path).release()
    assert {path.name[:6] for path in tmp_path.iterdir()} == {"lock", ".notes"}


def test_a_folder_that_lets_nothing_be_removed_is_a_storage_error(tmp_path, monkeypatch):
    write_beside(tmp_path / "token", (b"half",))

    def refused(path, **_):
        raise PermissionError(errno.EACCES, "no", str(path))

    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", refused)
        with pytest.raises(StorageError, match="--data-dir"):
            DataDir.acquire(tmp_path)
    DataDir.acquire(tmp_path).release()  # nothing holds the lock


def test_the_token_is_private_and_stays(tmp_path):
    with DataDir.acquire(tmp_path) as data:
        token = data.token()
        assert len(bytes.fromhex(token)) == 32
        assert mode(tmp_path / "token") == 0o600
        (tmp_path / "token").chmod(0o644)
        assert data.token() == token
        assert mode(tmp_path / "token") == 0o600


@pytest.mark.parametrize("damage", [b"", b"short\n", b"\xff" * 64, b"0" * 65])
def test_a_damaged_token_is_made_anew(tmp_path, damage):
    with DataDir.acquire(tmp_path) as data:
        (tmp_path / "token").write_bytes(damage)
        assert len(data.token()) == 64


def test_a_file_in_the_way_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="can't use the data folder"):
        DataDir.acquire(tmp_path / "file")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        DataDir.acquire(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EACCES, "permission denied"), (errno.EROFS, "read-only"), (errno.ENOSPC, "disk is full")],
)
def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path, monkeypatch, number, words):
    def refuse(*_args, **_kwargs):
        raise OSError(number, "refused")

    with monkeypatch.context() as patched:
        patched.setattr(datadir.os, "open", refuse)
        with pytest.raises(StorageError, match=words) as caught:
            DataDir.acquire(tmp_path)
    assert not isinstance(caught.value, DataDirLockedError)
    with DataDir.acquire(tmp_path) as data, monkeypatch.context() as patched:
        patched.setattr(atomic.os, "fsync", refuse)
        with pytest.raises(StorageError, match=words):
            data.token()


def test_a_place_where_no_folder_can_be_is_the_callers_fault(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "below", "/proc/nope"):
        with pytest.raises(DataDirUnusableError) as caught:
            DataDir.acquire(place)
        assert caught.value.exit_code == 2

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "refused")

    monkeypatch.setattr(datadir.os, "open", full)
    with pytest.raises(StorageError) as caught:
        DataDir.acquire(tmp_path)
    assert caught.value.exit_code == 1


def start(folder, *, fails: bool, keep: bool = False, leaves: str = "") -> None:
    with DataDir.acquire(folder) as data:
        data.token()
        (folder / "identity.key").touch()
        if leaves:
            (folder / leaves).touch()
        data.keep = data.keep or keep
        if fails:
            raise UsageError("the port is taken")


def test_a_refused_start_leaves_no_folder_behind(tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(UsageError):
        start(folder, fails=True)
    assert not folder.exists()


@pytest.mark.parametrize("case", ["was there", "trained", "holds more", "went well"])
def test_any_other_folder_stays(tmp_path, case):
    folder = tmp_path / "data"
    if case == "was there":
        folder.mkdir()
    if case == "went well":
        start(folder, fails=False)
    else:
        with pytest.raises(UsageError):
            start(folder, fails=True, keep=case == "trained", leaves="notes" if case == "holds more" else "")
    assert (folder / "identity.key").exists()
    assert (folder / "token").exists()
    DataDir.acquire(folder).release()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        with pytest.raises(StorageError, match="no locks"):
            DataDir.acquire(tmp_path)
    DataDir.acquire(tmp_path).release()
