from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

from p2pdrl import atomic
from p2pdrl.errors import CheckpointError, StorageError
from p2pdrl.node.state import checkpoints
from p2pdrl.node.state.checkpoints import Checkpoint, CheckpointStore, from_bytes, load, to_bytes
from p2pdrl.tensors.layout import Layout, TensorEntry

LAYOUT = Layout((TensorEntry("w", (4096,)),))


def make(version: int) -> Checkpoint:
    return Checkpoint(
        np.full(4096, version, np.float32),
        {},
        {"layout": LAYOUT.to_wire(), "policy_version": version},
    )


def version(checkpoint: Checkpoint | None) -> int | None:
    return None if checkpoint is None else checkpoint.meta["policy_version"]


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_loaded_and_the_history_is_bounded(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    for number in range(1, 6):
        assert store.save(make(number), best=number == 2) == store.last
    assert names(tmp_path / "c") == [
        "best.safetensors",
        "checkpoint-00000004.safetensors",
        "checkpoint-00000005.safetensors",
        "last.safetensors",
    ]
    loaded = store.load_latest()
    assert (version(loaded.checkpoint), loaded.path, loaded.skipped) == (5, store.last, ())
    assert version(load(store.best)) == 2
    assert stat.S_IMODE(store.last.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700


def test_numbers_go_on_after_a_restart(tmp_path):
    CheckpointStore(tmp_path, keep=9).save(make(1))
    CheckpointStore(tmp_path, keep=9).save(make(2))
    assert "checkpoint-00000002.safetensors" in names(tmp_path)


def test_without_history(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    store.save(make(1))
    assert names(tmp_path) == ["last.safetensors"]


def test_an_empty_folder_has_nothing(tmp_path):
    loaded = CheckpointStore(tmp_path).load_latest()
    assert (loaded.checkpoint, loaded.path, loaded.skipped) == (None, None, ())
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(tmp_path / "last.safetensors")


def damage(path, how: str) -> None:
    # `last` shares its bytes with its numbered twin: break the link first.
    data = path.read_bytes()
    path.unlink()
    middle = len(data) // 2
    path.write_bytes(
        {
            "empty": b"",
            "truncated": data[:middle],
            "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "foreign": b"\x80\x04\x95" + b"x" * 1000,
        }[how]
    )


@pytest.mark.parametrize("how", ["empty", "truncated", "flipped", "foreign"])
def test_damaged_files_are_passed_over_and_told(tmp_path, how):
    store = CheckpointStore(tmp_path, keep=3)
    for number in (1, 2, 3):
        store.save(make(number))
    damage(store.last, how)
    damage(tmp_path / "checkpoint-00000003.safetensors", how)
    loaded = store.load_latest()
    assert version(loaded.checkpoint) == 2
    assert [reason.split(":")[0] for reason in loaded.skipped] == [
        str(store.last),
        str(tmp_path / "checkpoint-00000003.safetensors"),
    ]


def test_what_the_caller_cant_use_is_passed_over_and_told(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for number in (1, 2, 3):
        store.save(make(number))

    def accept(checkpoint: Checkpoint) -> None:
        if checkpoint.meta["policy_version"] > limit:
            raise CheckpointError("its counts can't be read")

    limit = 2
    loaded = store.load_latest(accept)
    assert (version(loaded.checkpoint), loaded.path) == (2, tmp_path / "checkpoint-00000002.safetensors")
    assert loaded.skipped == (
        f"{store.last}: its counts can't be read",
        f"{tmp_path / 'checkpoint-00000003.safetensors'}: its counts can't be read",
    )
    limit = 0
    assert store.load_latest(accept).checkpoint is None


def test_the_best_is_the_last_resort(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    store.save(make(1), best=True)
    store.save(make(2))
    damage(store.last, "truncated")
    assert version(store.load_latest().checkpoint) == 1
    damage(store.best, "truncated")
    loaded = store.load_latest()
    assert loaded.checkpoint is None
    assert len(loaded.skipped) == 2


def test_a_poisoned_checkpoint_replaces_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(make(1))
    before = names(tmp_path)
    poisoned = make(2)
    poisoned.params[7] = np.nan
    with pytest.raises(CheckpointError, match="NaN"):
        store.save(poisoned, best=True)
    assert names(tmp_path) == before
    assert version(store.load_latest().checkpoint) == 1


@pytest.mark.parametrize("call", ["fsync", "link", "mkstemp", "replace"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "system log"),
    ],
)
def test_a_failing_disk_is_a_storage_error_and_the_previous_one_stays(
    tmp_path, monkeypatch, call, number, words
):
    store = CheckpointStore(tmp_path)
    store.save(make(1))
    before = names(tmp_path)

    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        match call:
            case "fsync":
                patched.setattr(atomic.os, "fsync", fail)
            case "mkstemp":
                patched.setattr(atomic.tempfile, "mkstemp", fail)
            case "link":
                patched.setattr(checkpoints.os, "link", fail)
                patched.setattr(checkpoints.shutil, "copyfileobj", fail)
            case "replace":
                patched.setattr(atomic.Path, "replace", fail)
        with pytest.raises(StorageError, match=words):
            store.save(make(2), best=True)
        assert names(tmp_path) == before
        assert version(store.load_latest().checkpoint) == 1
    store.save(make(3))
    assert version(store.load_latest().checkpoint) == 3


def test_where_nothing_can_be_linked_it_is_copied(tmp_path, monkeypatch):
    def fail(*_args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(checkpoints.os, "link", fail)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(make(1), best=True)
    assert names(tmp_path) == ["best.safetensors", "checkpoint-00000001.safetensors", "last.safetensors"]
    assert version(load(store.best)) == 1
    assert store.best.stat().st_nlink == 1


def test_a_disk_that_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=0)
    store.save(make(1))

    def fail(_path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints.Path, "read_bytes", fail)
    loaded = store.load_latest()
    assert loaded.checkpoint is None
    assert "can't read the checkpoint" in loaded.skipped[0]


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="checkpoint folder"):
        CheckpointStore(tmp_path / "file" / "c")


KILLED_WRITER = """
import os, pathlib, signal, sys
import numpy as np
from p2pdrl import atomic
from p2pdrl.node.state import checkpoints
from p2pdrl.tensors.layout import Layout, TensorEntry

folder, when = pathlib.Path(sys.argv[1]), sys.argv[2]

def checkpoint(version):
    layout = Layout((TensorEntry("w", (4096,)),))
    return checkpoints.Checkpoint(
        np.full(4096, version, np.float32), {}, {"layout": layout.to_wire(), "policy_version": version}
    )

store = checkpoints.CheckpointStore(folder, keep=2)
store.save(checkpoint(1))

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if when == "half-way":
    whole = checkpoints.chunks
    def half(checkpoint):
        head, data = whole(checkpoint)
        def broken():
            yield head
            yield data[: data.nbytes // 2]
            die()
        return broken()
    checkpoints.chunks = half
elif when == "before fsync":
    atomic.os.fsync = die
elif when == "before rename":
    checkpoints.Path.replace = die
elif when == "before folder fsync":
    checkpoints.fsync_folder = die
store.save(checkpoint(2), best=True)
"""


@pytest.mark.parametrize(
    ("when", "survivor"),
    [("half-way", 1), ("before fsync", 1), ("before rename", 1), ("before folder fsync", 2)],
)
def test_a_writer_killed_at_any_point_leaves_a_whole_one(tmp_path, when, survivor):
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path), when], check=False, timeout=60)
    assert done.returncode == -9
    store = CheckpointStore(tmp_path, keep=2)
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
    loaded = store.load_latest()
    assert (version(loaded.checkpoint), loaded.skipped) == (survivor, ())
    store.save(make(3))
    assert version(store.load_latest().checkpoint) == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs wants root on Linux")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_really_full_disk(small_disk):
    store = CheckpointStore(small_disk / "c", keep=3)
    store.save(make(1))
    (small_disk / "ballast").write_bytes(b"\0" * 224 * 1024)
    with pytest.raises(StorageError, match="the disk is full"):
        store.save(make(2))
    assert version(store.load_latest().checkpoint) == 1
    assert not [name for name in names(small_disk / "c") if name.endswith(".tmp")]
    (small_disk / "ballast").unlink()
    store.save(make(3))
    assert version(store.load_latest().checkpoint) == 3


def test_a_really_read_only_disk(small_disk):
    store = CheckpointStore(small_disk / "c", keep=3)
    store.save(make(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="read-only"):
        store.save(make(2))
    assert version(store.load_latest().checkpoint) == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    store.save(make(3))
    assert version(store.load_latest().checkpoint) == 3


def test_bytes_for_the_api_are_the_file(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(make(4))
    assert store.last.read_bytes() == to_bytes(make(4))
    assert version(from_bytes(to_bytes(make(4)))) == 4
