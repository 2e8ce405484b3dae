"""Scalars as TensorBoard event files, when the ``tensorboard`` extra is installed.

The daemon opens one writer if ``node.log.tensorboard_dir`` is set. It uses the record format and
messages of the ``tensorboard`` package itself: neither torch nor TensorFlow is imported (its
``EventFileWriter`` would import TensorFlow where that is installed, and starts a thread).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2pdrl.clock import Clock
from p2pdrl.errors import StorageError, UsageError
from p2pdrl.telemetry.logging import get_logger

__all__ = ["TensorBoardWriter", "open_writer"]


class TensorBoardWriter:
    """Appends scalars to one event file. Not thread-safe.

    A disk that fills up costs the charts and nothing else: the first failure is logged, and the
    writer falls silent.

    Args:
        flush_every_s: longest time that written scalars stay in memory.

    Raises:
        ImportError: if the ``tensorboard`` package is missing.
        OSError: if the file can't be made.
    """

    def __init__(self, folder: Path, clock: Clock, *, flush_every_s: float = 5.0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._clock = Event, Summary, clock
        self._flush_every_s = flush_every_s
        self._flushed_s = clock.monotonic()
        self._log = get_logger("p2pdrl.telemetry.tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{int(clock.wall()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = _free(folder, f"events.out.tfevents.{stamp}")
        self._records: Any = RecordWriter(self.path.open("xb"))
        self._write(Event(wall_time=clock.wall(), file_version="brain.Event:2"))
        self.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each named chart; NaN and infinity are left out.

        Args:
            step: the x axis, such as environment steps of the swarm.
            values: by tag; a slash groups charts (``loss/policy``).
        """
        entries = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if math.isfinite(value)
        ]
        if entries:
            summary = self._summary(value=entries)
            self._write(self._event(wall_time=self._clock.wall(), step=step, summary=summary))
        if self._clock.monotonic() - self._flushed_s >= self._flush_every_s:
            self.flush()

    def flush(self) -> None:
        """Hand what is in memory to the operating system."""
        self._flushed_s = self._clock.monotonic()
        self._attempt("flush")

    def close(self) -> None:
        """Flush and close; more than once does no harm."""
        self._attempt("close")
        self._records = None

    def _write(self, event: Any) -> None:
        self._attempt("write", event.SerializeToString())

    def _attempt(self, action: str, *arguments: bytes) -> None:
        if self._records is None:
            return
        try:
            getattr(self._records, action)(*arguments)
        except OSError as error:
            records, self._records = self._records, None
            with contextlib.suppress(OSError):
                records.close()  # what is still in memory can't be written either
            self._log.warning("no more TensorBoard events are written", path=str(self.path), error=str(error))


def _free(folder: Path, name: str) -> Path:
    """A file name that isn't taken: two writers may be opened within one second."""
    number = 0
    while (path := folder / f"{name}.{number}").exists():
        number += 1
    return path


def open_writer(folder: str | Path, clock: Clock) -> TensorBoardWriter:
    """Open a writer on ``folder``, which is made if missing.

    Raises:
        UsageError: if the ``tensorboard`` extra isn't installed.
        StorageError: if the folder can't be written to.
    """
    try:
        return TensorBoardWriter(Path(folder), clock)
    except ImportError as error:
        raise UsageError(
            "node.log.tensorboard_dir wants the tensorboard extra: pip install 'p2pdrl[tensorboard]'"
        ) from error
    except OSError as error:
        raise StorageError(
            f"can't write TensorBoard events to {folder}: {error.strerror or error}; "
            "choose another node.log.tensorboard_dir"
        ) from error
