"""What writes a node's figures: some here, some in processes of their own that hold nobody up.

A writer that fails costs its charts and nothing else: an event tells it, and a process is started again, with
the same run, a few times. What it can't take in time is dropped, oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.node import LogConfig
from p2pdrl.config.task import TaskConfig, task_hash
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children.child_process import ProcessLink
from p2pdrl.node.events import EventLog
from p2pdrl.telemetry.writers import (
    CsvWriter,
    RunInfo,
    ServedKind,
    TensorBoardWriter,
    open_tensorboard,
    require_writer,
)
from p2pdrl.workers.protocol import (
    OpenRun,
    PrepareWriter,
    RunOpened,
    RunPoint,
    WriterReady,
    decode_from_run_writer,
    frame,
)

__all__ = ["RunWriterProcess", "RunWriters", "run_info"]

CSV = "metrics.csv"
MOST_POINTS = 1000
"""That wait for a process; at one each five seconds those of an hour and more."""
MOST_STARTS = 5
AGAIN_S = 60.0
IMPORT_S = 60.0
"""Longest wait for a package; mlflow's takes seconds."""
LAST_S = 5.0
"""Longest wait for what is left to be written when the node leaves."""


class RunWriterLink(ProcessLink):
    """A running process that writes figures."""

    NAME = "run writer"

    @classmethod
    async def spawn(cls) -> RunWriterLink:
        """Start the process.

        Raises:
            WorkerError: it can't be started.
        """
        return cls(*await cls.launch("p2pdrl.workers.run_writer", {}, os.environ))

    def end(self) -> None:
        """Send no more."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)


class RunWriterProcess:
    """A writer in a process of its own, through all its restarts.

    Args:
        again_s: rest before it is started again.
        last_s: longest wait for it when the node leaves.
    """

    def __init__(
        self,
        kind: ServedKind,
        clock: Clock,
        events: EventLog,
        *,
        again_s: float = AGAIN_S,
        last_s: float = LAST_S,
    ) -> None:
        self.kind = kind
        self._clock, self._events = clock, events
        self._again_s, self._last_s = again_s, last_s
        self._points: deque[RunPoint] = deque(maxlen=MOST_POINTS)
        self._news = asyncio.Event()
        self._closing = self._resting = False
        self._told_slow = False
        self._run: RunInfo | None = None
        self._link: RunWriterLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._imported: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        return None if self._link is None else self._link.pid

    def start(self) -> asyncio.Task[None]:
        """Start it; return what ends when it does."""
        self._imported = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(), name=f"{self.kind} writer")
        return self._task

    async def ready(self) -> None:
        """Wait until its package is imported, but not for ever.

        Raises:
            ConfigError: it can't be.
        """
        if self._imported is None:
            raise WorkerError("it isn't started")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IMPORT_S):
                await asyncio.shield(self._imported)

    def begin(self, run: RunInfo) -> None:
        """Say what is written: once."""
        self._run = self._run or run
        self._news.set()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Have a point written as soon as may be."""
        if len(self._points) == MOST_POINTS and not self._told_slow:
            self._told_slow = True
            text = f"{self.kind} takes figures too slowly; the oldest are left out"
            self._events.emit("run-writer-slow", text, level="warning")
        self._points.append(RunPoint(step, self._clock.wall(), dict(values)))
        self._news.set()

    async def close(self) -> None:
        """Let it write what is left, for a moment, and end it."""
        self._closing = True
        self._news.set()
        task = self._task
        if task is None:
            return
        await asyncio.wait([task], timeout=0.0 if self._resting else self._last_s)
        if not task.done():
            if self._run is not None and self._link is not None:
                text = f"{self.kind} wasn't done after {self._last_s:g} s; what it has not sent may be lost"
                self._events.emit("run-writer-failed", text, level="warning")
            task.cancel()
            await asyncio.wait([task])

    async def _live(self) -> None:
        for start in range(MOST_STARTS):
            try:
                await self._serve()
                return
            except ConfigError as error:
                if self._imported is not None and not self._imported.done():
                    self._imported.set_exception(error)
                    return
                self._tell(f"{error}; it is given up")
                return
            except WorkerError as error:
                if self._imported is not None and not self._imported.done():
                    self._imported.set_result(None)  # nobody waits for what may come later
                again = "it is given up" if start + 1 == MOST_STARTS else "it is started again"
                self._tell(f"{error}; {again}, training goes on")
            finally:
                await self._kill()
            if self._closing:
                return
            self._resting = True
            await asyncio.sleep(self._again_s)
            self._resting = False

    def _tell(self, why: str) -> None:
        text = f"no figures are written to {self.kind}: {why}"
        self._events.emit("run-writer-failed", text, level="warning")

    async def _kill(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.kill()

    async def _serve(self) -> None:
        link = self._link = await RunWriterLink.spawn()
        try:
            await link.send(frame(PrepareWriter(self.kind)))
            hearing = asyncio.create_task(self._hear(link))
            sending = asyncio.create_task(self._send(link))
            try:
                await asyncio.wait([hearing, sending], return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and not hearing.done():
                    sending.result()
                    await hearing
            finally:
                for task in (hearing, sending):
                    task.cancel()
                await asyncio.wait([hearing, sending])
            if not hearing.cancelled():
                hearing.result()
        except WorkerError as error:
            death = await link.ended()
            self._link = None
            if self._closing and death.code == 0:
                return
            raise WorkerError(f"its process {death.how}") from error

    async def _hear(self, link: RunWriterLink) -> None:
        """Hear what it says until it is gone."""
        while True:
            for body in await link.receive():
                message = decode_from_run_writer(body)
                if isinstance(message, WriterReady):
                    if self._imported is not None and not self._imported.done():
                        self._imported.set_result(None)
                elif isinstance(message, RunOpened):
                    text = f"figures are written to {self.kind}: {message.where}"
                    self._events.emit("run-writer", text, where=message.where)
                else:
                    link.says_its_end(message)

    async def _send(self, link: RunWriterLink) -> None:
        """Send points as they come, until the node leaves."""
        opened = False
        while True:
            if not opened and self._run is not None:
                await link.send(frame(OpenRun(self._run)))
                opened = True
            while opened and self._points:
                await link.send(frame(self._points[0]))
                self._points.popleft()
            if self._closing:
                link.end()
                return
            self._news.clear()
            await self._news.wait()


class RunWriters:
    """All writers of one node.

    Args:
        folder: of this node's data.

    Raises:
        UsageError: an extra isn't installed.
        StorageError: TensorBoard's folder can't be written to.
    """

    def __init__(self, config: LogConfig, folder: Path, clock: Clock, events: EventLog) -> None:
        kinds = dict.fromkeys(config.writers)
        if config.tensorboard_dir is not None:
            kinds["tensorboard"] = None
        for kind in kinds:
            require_writer(kind)
        self._config = config
        self._folder = folder
        self._here: list[CsvWriter | TensorBoardWriter] = []
        if "csv" in kinds:
            self._here.append(CsvWriter(folder / CSV, clock))
        if "tensorboard" in kinds:
            self._here.append(open_tensorboard(config.tensorboard_dir or folder / "tensorboard", clock))
        served = [kind for kind in get_args(ServedKind) if kind in kinds]
        self._processes = [RunWriterProcess(kind, clock, events) for kind in served]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start what has a process of its own."""
        self._tasks = [process.start() for process in self._processes]

    async def ready(self) -> None:
        """Wait until their packages are imported.

        Raises:
            ConfigError: one can't be.
        """
        for process in self._processes:
            await process.ready()

    async def watch(self) -> None:
        """Wait for ever; raise what ended a writer: a bug of ours."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        await asyncio.Event().wait()

    def begin(self, make_info: Callable[[LogConfig, Path], RunInfo]) -> None:
        """Say what the run is."""
        for process in self._processes:
            process.begin(make_info(self._config, self._folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point.

        Args:
            step: environment steps of the swarm.
            values: by tag.
        """
        for writer in (*self._here, *self._processes):
            writer.scalars(step, values)

    async def close(self) -> None:
        """Write what is left, for a moment."""
        for writer in self._here:
            writer.close()
        await asyncio.gather(*(process.close() for process in self._processes))


def run_info(
    config: LogConfig, folder: Path, *, node_id: str, name: str, swarm_id: str, task: TaskConfig
) -> RunInfo:
    """Describe a node's run: the same one as long as it trains the same task on the same data folder."""
    digest = hashlib.sha256(f"{node_id} {task_hash(task)}".encode()).hexdigest()
    return RunInfo(
        run_id=digest[:16],
        name=name,
        group=swarm_id,
        project=config.project,
        folder=str(folder),
        mode=config.wandb_mode,
        uri=config.mlflow_uri or "",
        settings=_texts(msgspec.to_builtins(task)),
    )


def _texts(table: Mapping[str, Any], before: str = "task.") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table.items():
        nested = isinstance(value, dict) and value
        found |= _texts(value, f"{before}{key}.") if nested else {f"{before}{key}": str(value)}
    return found
