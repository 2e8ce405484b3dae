"""Event files that TensorBoard reads, without torch, TensorFlow or threads."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import StorageError, UsageError
from p2pdrl.telemetry.tensorboard import open_writer

pytest.importorskip("tensorboard")


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, event.wall_time, value.simple_value))
    return found


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    clock = ManualClock(wall_s=1000.0)
    writer = open_writer(tmp_path / "new" / "folder", clock)
    writer.scalars(10, {"return/mean": 1.5, "loss/policy": math.nan})
    clock.advance(2.0)
    writer.scalars(20, {"return/mean": 2.5, "loss/policy": math.inf})
    writer.scalars(30, {})
    writer.close()
    writer.close()
    writer.scalars(40, {"return/mean": 0.0})
    assert read(tmp_path / "new" / "folder") == {"return/mean": [(10, 1000.0, 1.5), (20, 1002.0, 2.5)]}


def test_it_flushes_by_the_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    writer = open_writer(tmp_path, clock)
    empty = writer.path.stat().st_size
    writer.scalars(1, {"a": 1.0})
    assert writer.path.stat().st_size == empty
    clock.advance(6.0)
    writer.scalars(2, {"a": 1.0})
    assert writer.path.stat().st_size > empty
    writer.close()


def test_two_writers_of_one_second_have_two_files(tmp_path: Path) -> None:
    clock = ManualClock()
    one, two = open_writer(tmp_path, clock), open_writer(tmp_path, clock)
    assert one.path != two.path
    one.close()
    two.close()


def test_numbers_beyond_float32_do_no_harm(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, ManualClock())
    writer.scalars(1, {"a": 1e300})
    writer.scalars(2, {"a": 1.0})
    writer.close()
    assert read(tmp_path)["a"][-1][2] == 1.0


def test_a_full_disk_is_told_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        closed = 0

        def write(self, _: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.closed += 1
            raise OSError(28, "No space left on device")

    writer = open_writer(tmp_path, ManualClock())
    writer._records.close()  # noqa: SLF001 - a full disk
    full: Any = Full()
    writer._records = full  # noqa: SLF001 - a full disk
    writer.scalars(1, {"a": 1.0})
    writer.scalars(2, {"a": 1.0})
    writer.flush()
    writer.close()
    assert full.closed == 1
    assert len(caplog.records) == 1
    assert "No space left" in str(caplog.records[0].msg)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="tensorboard_dir"):
        open_writer(tmp_path / "file" / "sub", ManualClock())


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("tensorboard."):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[tensorboard\]'"):
        open_writer(tmp_path, ManualClock())


def test_no_torch_and_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, threading; from p2pdrl.clock import SystemClock; "
        "from p2pdrl.telemetry.tensorboard import open_writer; "
        f"w = open_writer({str(tmp_path)!r}, SystemClock()); w.scalars(1, {{'a': 1.0}}); w.close(); "
        "print(threading.active_count(), sorted({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1 []"
