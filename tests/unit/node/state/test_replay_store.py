"""Where a replay's rows lie: in memory, or in a file that is trusted or not."""

from __future__ import annotations

import errno
import os

import pytest

from p2pdrl.errors import ConfigError, StorageError
from p2pdrl.node.state.replay_store import ReplayStore


def write(path, *, close, nbytes=5000) -> None:
    store = ReplayStore(path)
    region = store.region(nbytes)
    region.buf[:3] = b"row"
    if close:
        store.close()


def first_bytes(path, nbytes=5000) -> bytes:
    store = ReplayStore(path)
    found = bytes(store.region(nbytes).buf[:3])
    store.close()
    return found


def test_in_memory_it_is_one_region_of_zeros_until_it_is_closed():
    store = ReplayStore(None)
    region = store.region(5000)
    assert (region.nbytes, bytes(region.buf[:3])) == (5000, b"\0\0\0")
    assert store.region(5000) is region
    store.close()
    store.close()
    assert region.fd == -1


def test_a_file_is_taken_up_again(tmp_path):
    path = tmp_path / "deep" / "replay"
    write(path, close=True)
    assert first_bytes(path) == b"row"
    assert path.stat().st_size == 5000
    assert path.stat().st_mode & 0o777 == 0o600


def test_one_that_wasn_t_closed_is_good_while_the_machine_has_run_on(tmp_path, monkeypatch):
    write(tmp_path / "replay", close=False)
    assert first_bytes(tmp_path / "replay") == b"row"
    write(tmp_path / "other", close=False)
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr("p2pdrl.node.state.replay_store._BOOT_ID", boot)
    assert first_bytes(tmp_path / "other") == b"\0\0\0"
    assert first_bytes(tmp_path / "replay") == b"row"  # this one was closed


def test_without_boot_ids_only_closed_files_are_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("p2pdrl.node.state.replay_store._BOOT_ID", tmp_path / "none")
    write(tmp_path / "replay", close=False)
    assert first_bytes(tmp_path / "replay") == b"\0\0\0"
    write(tmp_path / "replay", close=True)
    assert first_bytes(tmp_path / "replay") == b"row"


@pytest.mark.parametrize("spoil", ["size", "trust"])
def test_a_file_of_another_size_or_without_its_record_begins_anew(tmp_path, spoil):
    path = tmp_path / "replay"
    write(path, close=True)
    if spoil == "trust":
        path.with_suffix(".json").write_text("{")
    assert first_bytes(path, 6000 if spoil == "size" else 5000) == b"\0\0\0"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves no space")
def test_a_disk_that_is_too_small_is_told_before_anything_runs(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="keep the replay memory in"):
        ReplayStore(tmp_path / "replay").region(5000)


def test_more_than_the_node_may_take_is_refused_unless_it_is_on_disk(tmp_path):
    with pytest.raises(
        ConfigError, match=r"takes 5001 bytes, more than the 5000 .* or keep the memory on disk"
    ):
        ReplayStore(None, 5000).region(5001)
    for store, nbytes in (
        (ReplayStore(None, 5000), 5000),
        (ReplayStore(None), 5001),
        (ReplayStore(tmp_path / "replay", 5000), 5001),
    ):
        assert store.region(nbytes).nbytes == nbytes
        store.close()
