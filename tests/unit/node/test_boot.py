from __future__ import annotations

import errno

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import StorageError
from p2pdrl.node import atomic
from p2pdrl.node.boot import ahead_s, next_boot


def test_it_is_the_wall_clock_in_milliseconds(tmp_path):
    assert next_boot(tmp_path, ManualClock(wall_s=1000.5)) == 1_000_500
    assert next_boot(tmp_path, ManualClock(wall_s=1001.0)) == 1_001_000


def test_it_grows_when_the_clock_stands_still_or_goes_back(tmp_path):
    clock = ManualClock(wall_s=1000.0)
    boots = [next_boot(tmp_path, clock), next_boot(tmp_path, clock)]
    boots.append(next_boot(tmp_path, ManualClock(wall_s=5.0)))
    assert boots == [1_000_000, 1_000_001, 1_000_002]
    assert ahead_s(boots[-1], ManualClock(wall_s=5.0)) == pytest.approx(995.002)
    assert ahead_s(boots[-1], ManualClock(wall_s=2000.0)) == 0.0


@pytest.mark.parametrize("content", [b"", b"garbage", b"-5\n", b"\xff\xfe", b"9" * 40])
def test_a_damaged_file_is_started_over(tmp_path, content):
    (tmp_path / "boot").write_bytes(content)
    assert next_boot(tmp_path, ManualClock(wall_s=1.0)) == 1000


def test_a_full_disk_is_a_storage_error_and_keeps_the_old_id(tmp_path, monkeypatch):
    next_boot(tmp_path, ManualClock(wall_s=1.0))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, "fsync", full)
        with pytest.raises(StorageError, match="the disk is full"):
            next_boot(tmp_path, ManualClock(wall_s=2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["boot"]
    assert next_boot(tmp_path, ManualClock(wall_s=0.0)) == 1001
