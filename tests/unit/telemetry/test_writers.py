"""Figures as CSV, and as event files that TensorBoard reads, without torch, TensorFlow or threads."""

from __future__ import annotations

import builtins
import csv
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import StorageError, UsageError
from p2pdrl.telemetry.writers import CsvWriter, open_tensorboard, require_writer

tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="wants p2pdrl[tensorboard]")


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, event.wall_time, value.simple_value))
    return found


@tensorboard
def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    clock = ManualClock(wall_s=1000.0)
    writer = open_tensorboard(tmp_path / "new" / "folder", clock)
    writer.scalars(10, {"return/mean": 1.5, "loss/policy": math.nan})
    clock.advance(2.0)
    writer.scalars(20, {"return/mean": 2.5, "loss/policy": math.inf})
    writer.scalars(30, {})
    writer.close()
    writer.close()
    writer.scalars(40, {"return/mean": 0.0})
    assert read(tmp_path / "new" / "folder") == {"return/mean": [(10, 1000.0, 1.5), (20, 1002.0, 2.5)]}


@tensorboard
def test_it_flushes_by_the_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    writer = open_tensorboard(tmp_path, clock)
    empty = writer.path.stat().st_size
    writer.scalars(1, {"a": 1.0})
    assert writer.path.stat().st_size == empty
    clock.advance(6.0)
    writer.scalars(2, {"a": 1.0})
    assert writer.path.stat().st_size > empty
    writer.close()


@tensorboard
def test_two_writers_of_one_second_have_two_files(tmp_path: Path) -> None:
    clock = ManualClock()
    one, two = open_tensorboard(tmp_path, clock), open_tensorboard(tmp_path, clock)
    assert one.path != two.path
    one.close()
    two.close()


@tensorboard
def test_numbers_beyond_float32_do_no_harm(tmp_path: Path) -> None:
    writer = open_tensorboard(tmp_path, ManualClock())
    writer.scalars(1, {"a": 1e300})
    writer.scalars(2, {"a": 1.0})
    writer.close()
    assert read(tmp_path)["a"][-1][2] == 1.0


@tensorboard
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

    writer = open_tensorboard(tmp_path, ManualClock())
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


@tensorboard
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="tensorboard_dir"):
        open_tensorboard(tmp_path / "file" / "sub", ManualClock())


@tensorboard
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("tensorboard."):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[tensorboard\]'"):
        open_tensorboard(tmp_path, ManualClock())


@tensorboard
def test_no_torch_and_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, threading; from p2pdrl.clock import SystemClock; "
        "from p2pdrl.telemetry.writers import open_tensorboard; "
        f"w = open_tensorboard({str(tmp_path)!r}, SystemClock()); w.scalars(1, {{'a': 1.0}}); w.close(); "
        "print(threading.active_count(), sorted({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1 []"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_a_point_and_grows_columns(tmp_path: Path) -> None:
    clock = ManualClock(wall_s=1000.0)
    path = tmp_path / "data" / "metrics.csv"
    writer = CsvWriter(path, clock)
    assert not path.parent.exists(), "a node that never trains leaves nothing"
    writer.scalars(10, {"return/mean": 1.5, "loss": math.nan})
    clock.advance(5.0)
    writer.scalars(20, {"loss": 0.25, "return/mean": 2.5})
    writer.scalars(30, {})
    assert rows(path) == [
        {"time": "1000.0", "env_steps": "10", "return/mean": "1.5", "loss": ""},
        {"time": "1005.0", "env_steps": "20", "return/mean": "2.5", "loss": "0.25"},
    ]


def test_csv_goes_on_where_an_earlier_run_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    CsvWriter(path, ManualClock(wall_s=1.0)).scalars(10, {"a": 1.0})
    path.write_bytes(path.read_bytes()[:-4])  # a power cut
    CsvWriter(path, ManualClock(wall_s=2.0)).scalars(20, {"b": 2.0, "a": 3.0})
    assert [row["a"] for row in rows(path)][1:] == ["3.0"]
    assert rows(path)[1]["b"] == "2.0"


def test_csv_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdrl.telemetry.writers.MOST_CSV_BYTES", 2000)
    monkeypatch.setattr("p2pdrl.telemetry.writers.MOST_REWRITTEN_BYTES", 1000)
    writer = CsvWriter(tmp_path / "metrics.csv", ManualClock())
    for step in range(500):
        writer.scalars(step, {"a": float(step)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.1.csv", "metrics.csv"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4200
    assert rows(tmp_path / "metrics.csv")[-1]["env_steps"] == "499"


def test_csv_on_a_disk_that_fails_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.csv").mkdir()
    writer = CsvWriter(tmp_path / "metrics.csv", ManualClock())
    writer.scalars(1, {"a": 1.0})
    writer.scalars(2, {"a": 1.0})
    writer.close()
    assert len(caplog.records) == 1


def test_a_writer_whose_package_is_missing_is_refused_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("wandb", "mlflow", "tensorboard"):
        with pytest.raises(UsageError, match=rf"{kind}.*pip install 'p2pdrl\[{kind}\]'"):
            require_writer(kind)
    require_writer("csv")
