"""Where a run's figures are written (``node.log.writers``): CSV, TensorBoard, Weights & Biases, MLflow.

| writer | of the extra | runs in |
|---|---|---|
| `CsvWriter` | none | the daemon |
| `TensorBoardWriter` | ``tensorboard`` | the daemon |
| `WandbWriter`, `MlflowWriter` | ``wandb``, ``mlflow`` | a process of its own (`workers.run_writer`) |

The last two are large, talk to servers, and may block. All take the same: points, each some figures by tag
(``loss/policy``) over the swarm's environment steps.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from p2pdrl.atomic import write_atomic
from p2pdrl.clock import Clock
from p2pdrl.errors import StorageError, UsageError
from p2pdrl.telemetry.logging import get_logger

__all__ = [
    "PACKAGES",
    "CsvWriter",
    "MlflowWriter",
    "RunInfo",
    "ServedKind",
    "TensorBoardWriter",
    "WandbWriter",
    "open_tensorboard",
    "require_writer",
    "served_writer",
]

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Top-level modules that a writer needs, which the extra of its name installs."""

ServedKind = Literal["wandb", "mlflow"]
"""Writers that have a process of their own."""


def require_writer(kind: str) -> None:
    """Check that the packages of a writer are installed.

    Raises:
        UsageError: one isn't.
    """
    missing = [name for name in PACKAGES.get(kind, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"node.log.writers: {kind} needs {' and '.join(missing)}, which isn't installed here; "
            f"run: pip install 'p2pdrl[{kind}]'"
        )


MOST_CSV_BYTES = 32 * 1024**2
"""A larger file becomes ``metrics.1.csv``, of which there is one."""
MOST_REWRITTEN_BYTES = 1024**2
"""A smaller file is written anew when there are new columns."""


class CsvWriter:
    """One line a point in a file, which pandas or a spreadsheet reads. Not thread-safe.

    Columns are ``time`` (seconds since 1970), ``env_steps`` and the tags; those that a point doesn't have
    stay empty. A run that goes on in the same folder goes on in the same file. A full disk costs the file and
    nothing else.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._columns: list[str] | None = None
        self._failed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point; NaN and infinity are left out."""
        known = {tag: value for tag, value in values.items() if math.isfinite(value)}
        if self._failed or not known:
            return
        row: dict[str, float] = {"time": round(self._clock.wall(), 3), "env_steps": step, **known}
        try:
            self._add(row)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            self._failed = True
            log = get_logger("p2pdrl.telemetry.writers")
            log.warning("no more figures are written as CSV", path=str(self.path), error=str(error))

    def close(self) -> None:
        """Nothing is open between two points."""

    def _add(self, row: Mapping[str, float]) -> None:
        columns = self._header() if self._columns is None else self._columns
        size = self.path.stat().st_size if self.path.exists() else 0
        new = [name for name in row if name not in columns]
        if new or size > MOST_CSV_BYTES:
            columns = self._widen([*columns, *new], size)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow([row.get(name, "") for name in columns])
        self._columns = columns

    def _header(self) -> list[str]:
        """Return the columns of the file as an earlier run left it, and end its last line."""
        if not self.path.exists():
            return []
        with self.path.open("r+b") as file:
            head = file.readline(1 << 16)
            if head:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\r\n")
        return next(csv.reader([head.decode()]), [])

    def _widen(self, columns: list[str], size: int) -> list[str]:
        """Begin a file with these columns, with the lines so far where they are few."""
        rows: list[list[str]] = []
        if 0 < size <= MOST_REWRITTEN_BYTES:
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
        elif size:
            self.path.replace(self.path.with_suffix(".1.csv"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        csv.writer(text).writerows([columns, *(row + [""] * (len(columns) - len(row)) for row in rows)])
        write_atomic(self.path, text.getvalue().encode())
        return columns


class TensorBoardWriter:
    """Appends scalars to one event file. Not thread-safe.

    It uses the record format and messages of the ``tensorboard`` package itself: neither torch nor
    TensorFlow is imported (its ``EventFileWriter`` would import TensorFlow where that is installed, and
    starts a thread).

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
        self._log = get_logger("p2pdrl.telemetry.writers")
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


def open_tensorboard(folder: str | Path, clock: Clock) -> TensorBoardWriter:
    """Open a writer on ``folder``, which is made if missing.

    Raises:
        UsageError: if the ``tensorboard`` extra isn't installed.
        StorageError: if the folder can't be written to.
    """
    try:
        return TensorBoardWriter(Path(folder), clock)
    except ImportError as error:
        raise UsageError(
            "TensorBoard files want the tensorboard extra: pip install 'p2pdrl[tensorboard]'"
        ) from error
    except OSError as error:
        raise StorageError(
            f"can't write TensorBoard events to {folder}: {error.strerror or error}; "
            "choose another node.log.tensorboard_dir"
        ) from error


class RunInfo(msgspec.Struct, frozen=True):
    """What a tracking service is told of a run.

    Attributes:
        run_id: the same whenever this node goes on with this task.
        name: of the node.
        group: of the nodes of one swarm.
        project: of W&B; MLflow's experiment.
        folder: of this node's data.
        mode: of W&B, ``auto`` for what the environment says.
        uri: MLflow's; empty for what the environment says, or a database in the folder.
        settings: of the task, by dotted key.
    """

    run_id: str
    name: str
    group: str
    project: str
    folder: str
    mode: str = "auto"
    uri: str = ""
    settings: dict[str, str] = {}


class WandbWriter:
    """A run of Weights & Biases; all charts are over ``env_steps``."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "online") if run.mode == "auto" else run.mode
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            group=run.group,
            dir=run.folder,
            mode=mode,
            resume=None if mode == "offline" else "allow",
            config=run.settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("env_steps", hidden=True)
        self._run.define_metric("*", step_metric="env_steps")
        self.where = str(self._run.dir if mode == "offline" else self._run.url or self._run.dir)

    def scalars(self, step: int, _wall_s: float, values: Mapping[str, float]) -> None:
        """Add a point."""
        self._run.log({**values, "env_steps": step})

    def close(self) -> None:
        """Wait until all is sent, or written."""
        self._run.finish()


MOST_PARAMETERS = 100
"""That MLflow takes at a time."""


class MlflowWriter:
    """A run of MLflow, found again by a tag when the node goes on with it."""

    TAG = "p2pdrl.run_id"

    def __init__(self, run: RunInfo) -> None:
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._metric: Any = entities.Metric
        folder = Path(run.folder).absolute()
        uri = run.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        client = self._client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(run.project)
        if found is None:
            place = (folder / "mlflow").as_uri() if uri.startswith("sqlite:") else None
            experiment = client.create_experiment(run.project, artifact_location=place)
        else:
            experiment = found.experiment_id
        earlier = client.search_runs([experiment], f"tags.`{self.TAG}` = '{run.run_id}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {self.TAG: run.run_id, "p2pdrl.group": run.group}
            self._run_id = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            params = [entities.Param(key, value[:500]) for key, value in run.settings.items()]
            for start in range(0, len(params), MOST_PARAMETERS):
                client.log_batch(self._run_id, params=params[start : start + MOST_PARAMETERS])
        self.where = f"{uri} (run {self._run_id})"

    def scalars(self, step: int, wall_s: float, values: Mapping[str, float]) -> None:
        """Add a point."""
        at_ms = int(wall_s * 1000)
        metrics = [self._metric(tag, float(value), at_ms, step) for tag, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Say that the run is over."""
        self._client.set_terminated(self._run_id)


def served_writer(kind: ServedKind) -> type[WandbWriter] | type[MlflowWriter]:
    """Return the class of a writer whose package can be imported.

    Raises:
        UsageError: it can't.
    """
    try:
        if kind == "wandb":
            import wandb

            del wandb
            return WandbWriter
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow.tracking import MlflowClient

        del MlflowClient
    except Exception as error:
        raise UsageError(
            f"node.log.writers: {kind} can't be imported ({type(error).__name__}: {error}); "
            f"try: pip install 'p2pdrl[{kind}]', or leave {kind} out"
        ) from error
    return MlflowWriter
