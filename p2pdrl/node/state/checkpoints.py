"""Checkpoints on a node's own disk, written now and then and at the end: always one whole one.

Files of one folder: ``last.safetensors``, ``best.safetensors``, and a bounded history of
``checkpoint-<number>.safetensors``. Each is written beside, flushed, and renamed over, so that a process
killed, a power cut or a full disk at any instant leaves the previous one loadable. A file that turns out
damaged is passed over for the next older one.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from p2pdrl.atomic import fsync_folder, remove_leftovers, storage_error, write_beside
from p2pdrl.clock import Clock
from p2pdrl.config.node import CheckpointConfig
from p2pdrl.errors import CheckpointError, StorageError
from p2pdrl.node.accounting.evaluations import EvaluationLog
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.events import EventLog
from p2pdrl.node.settings import StopSetting
from p2pdrl.node.state.state_transfer import StateHead, TransferredState, params_hash
from p2pdrl.node.training import Training
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.checkpoint import Checkpoint, chunks, from_bytes, to_bytes

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Checkpointer",
    "Loaded",
    "as_state",
    "from_bytes",
    "load",
    "to_bytes",
]

LAST = "last.safetensors"
BEST = "best.safetensors"
_NUMBERED = "checkpoint-{:08d}.safetensors"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The newest whole checkpoint and its file; None when there is none."""

    checkpoint: Checkpoint | None
    path: Path | None
    skipped: tuple[str, ...]
    """Why newer files couldn't be used, one each."""


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: if the file is missing, damaged, truncated or something else.
        StorageError: if the disk can't read it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except OSError as error:
        raise storage_error("read the checkpoint", path, error) from error
    try:
        return from_bytes(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


class CheckpointStore:
    """Checkpoints of one node, in a folder that only this store uses.

    Args:
        keep: how many numbered checkpoints stay besides ``last`` and ``best``; 0 keeps none.

    Raises:
        StorageError: if the folder can't be made or read.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder = folder
        self._keep = keep
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(folder)
            self._number = max((number for number, _ in self._history()), default=0)
        except OSError as error:
            raise storage_error("use the checkpoint folder", folder, error) from error

    @property
    def last(self) -> Path:
        """Where the newest checkpoint is, once one was saved."""
        return self._folder / LAST

    @property
    def best(self) -> Path:
        """Where the best checkpoint is, once one was saved as such."""
        return self._folder / BEST

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> Path:
        """Write a checkpoint as the newest, and as the best if ``best``; return the path of the newest.

        Raises:
            CheckpointError: if the checkpoint holds NaN, or doesn't fit its layout; nothing is written.
            StorageError: if the disk is full, read-only or failing; the previous one stays.
        """
        content = chunks(checkpoint)
        with self._lock:
            try:
                temporary = write_beside(self.last, content)
                try:
                    if self._keep > 0:
                        self._number += 1
                        self._twin(temporary, self._folder / _NUMBERED.format(self._number))
                    if best:
                        self._twin(temporary, self.best)
                    temporary.replace(self.last)
                finally:
                    temporary.unlink(missing_ok=True)
                fsync_folder(self._folder)
                self._prune()
            except OSError as error:
                raise storage_error("write the checkpoint", self.last, error) from error
        return self.last

    def save_best(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint as the best, and nothing else; return its path; raises as `save`."""
        content = chunks(checkpoint)
        with self._lock:
            try:
                write_beside(self.best, content).replace(self.best)
                fsync_folder(self._folder)
            except OSError as error:
                raise storage_error("write the best checkpoint", self.best, error) from error
        return self.best

    def load_latest(self, accept: Callable[[Checkpoint], None] | None = None) -> Loaded:
        """Find the newest whole checkpoint: ``last``, then the history from its end, then ``best``.

        A file that is damaged or unreadable, or for which ``accept`` raises CheckpointError, is skipped.
        """
        skipped: list[str] = []
        history = [path for _, path in sorted(self._history(), reverse=True)]
        for path in (self.last, *history, self.best):
            if not path.exists():
                continue
            try:
                checkpoint = load(path)
            except StorageError as error:
                skipped.append(str(error))
                continue
            try:
                if accept is not None:
                    accept(checkpoint)
            except CheckpointError as error:
                skipped.append(f"{path}: {error}")
                continue
            return Loaded(checkpoint, path, tuple(skipped))
        return Loaded(None, None, tuple(skipped))

    def _history(self) -> list[tuple[int, Path]]:
        found = []
        for path in self._folder.glob("checkpoint-*.safetensors"):
            number = path.name.removeprefix("checkpoint-").removesuffix(".safetensors")
            if number.isascii() and number.isdigit() and len(number) <= 15:
                found.append((int(number), path))
        return found

    def _twin(self, source: Path, target: Path) -> None:
        """Let ``target`` hold what ``source`` holds, in one step: a link, or a copy where none can be."""
        temporary = source.with_name(source.name.removesuffix(".tmp") + f".{target.stem}.tmp")
        try:
            try:
                os.link(source, temporary)
            except OSError:
                with source.open("rb") as original, temporary.open("wb") as copy:
                    shutil.copyfileobj(original, copy, 1 << 20)
                    copy.flush()
                    os.fsync(copy.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def _prune(self) -> None:
        history = sorted(self._history(), reverse=True)
        for _, path in history[self._keep :]:
            path.unlink(missing_ok=True)


class Checkpointer:
    """Writes checkpoints of this node's training now and then.

    Args:
        evaluations: tells the learning curve as it is now, which a checkpoint keeps.
        best: the mean return that a better one must beat, as an earlier boot left it.
        judged: evaluations decide on the best one (`keep_best`), not the training episodes.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        config: CheckpointConfig,
        training: Training,
        progress_tracker: ProgressTracker,
        clock: Clock,
        events: EventLog,
        evaluations: Callable[[], EvaluationLog] = EvaluationLog,
        best: float | None = None,
        judged: bool = False,
    ) -> None:
        self._store = store
        self._config = config
        self._training = training
        self._progress_tracker = progress_tracker
        self._clock = clock
        self._events = events
        self._evaluations = evaluations
        self._best = best
        self._judged = judged
        self._saved_s: float | None = None
        self._lock = asyncio.Lock()
        self.stop_setting: StopSetting | None = None
        self.mean_return: float | None = None
        self.error: str | None = None
        """Why the last one couldn't be written."""
        self.failures = 0

    @property
    def age_s(self) -> float | None:
        """Seconds since the last one was written; None before the first."""
        return None if self._saved_s is None else self._clock.monotonic() - self._saved_s

    @property
    def path(self) -> str | None:
        """Where the last one is; None before the first."""
        return None if self._saved_s is None else str(self._store.last)

    @property
    def best_path(self) -> str | None:
        """Where the best one of this node's is, without one the last; None before the first."""
        return str(self._store.best) if self._store.best.exists() else self.path

    async def run(self) -> None:
        """Write one each ``every_s`` seconds, for ever."""
        while self._config.every_s > 0:
            await asyncio.sleep(self._config.every_s)
            await self.try_save()
        await asyncio.Event().wait()

    async def try_save(self) -> bool:
        """Write one; return whether it worked. A failure is told once, until it works again."""
        try:
            await self.save()
        except (StorageError, CheckpointError) as error:
            self.failures += 1
            if self.error is None:
                self._events.emit(
                    "checkpoint-failed", f"{error}; training goes on without checkpoints", level="warning"
                )
            self.error = str(error)
            return False
        if self.error is not None:
            self._events.emit("checkpoint-works", "checkpoints can be written again")
            self.error = None
        return True

    async def save(self) -> str:
        """Write one now; return its path.

        Raises:
            StorageError: the disk doesn't take it.
            CheckpointError: there is no state yet, or it holds NaN.
        """
        async with self._lock:
            mean = self.mean_return
            checkpoint = await self.snapshot()
            best = not self._judged and mean is not None and (self._best is None or mean > self._best)
            await asyncio.to_thread(self._store.save, checkpoint, best=best)
            if best:
                self._best = mean
            self._saved_s = self._clock.monotonic()
            return str(self._store.last)

    async def keep_best(self, checkpoint: Checkpoint, mean_return: float) -> bool:
        """Write an evaluated checkpoint as the best if none was better; tell whether it is.

        Raises:
            StorageError: the disk doesn't take it.
        """
        if self._config.every_s <= 0 or (self._best is not None and mean_return <= self._best):
            return False
        meta = {**checkpoint.meta, "mean_return": mean_return, "best_mean_return": mean_return}
        await asyncio.to_thread(self._store.save_best, dataclasses.replace(checkpoint, meta=meta))
        self._best = mean_return
        return True

    async def export(self) -> bytes:
        """Return the present state as the bytes of a checkpoint file."""
        return await asyncio.to_thread(to_bytes, await self.snapshot())

    async def snapshot(self) -> Checkpoint:
        """Return the present state as a checkpoint.

        Raises:
            CheckpointError: there is no state yet.
        """
        if not self._training.ready:
            raise CheckpointError("this node has no state yet; wait until it trains")
        meta = self._meta()
        return await asyncio.to_thread(self._gather, meta)

    def _gather(self, meta: dict[str, Any]) -> Checkpoint:
        spec = self._training.spec
        vector = np.empty(spec.layout.size, np.float32)
        meta["policy_version"] = self._training.board.now(vector).policy_version
        meta["params_hash"] = params_hash(vector)
        sidecar = self._training.board.sidecar()
        if sidecar is not None:
            meta["sidecar_layout"] = spec.sidecar.to_wire()
        return Checkpoint(vector, sidecar or {}, meta)

    def _meta(self) -> dict[str, Any]:
        training = self._training
        self._progress_tracker.sign()
        total = self._progress_tracker.total()
        candidates = (self._best, None if self._judged else self.mean_return)
        means = [mean for mean in candidates if mean is not None]
        return {
            "layout": training.spec.layout.to_wire(),
            "task": msgspec.to_builtins(training.task),
            "task_hash": training.task_hash,
            "spaces": training.supervisor.spaces,
            "lineage": training.lineage,
            "env_steps": total.env_steps,
            "facts": _text(msgspec.msgpack.encode(self._progress_tracker.counts())),
            "moments": _text(msgspec.msgpack.encode(self._progress_tracker.moments_since({}))),
            "others_moments": _text(msgspec.msgpack.encode(self._progress_tracker.others_moments())),
            "stop": None if self.stop_setting is None else msgspec.to_builtins(self.stop_setting),
            "mean_return": self.mean_return,
            "best_mean_return": max(means, default=None),
            "evaluations": msgspec.to_builtins(self._evaluations().rows()),
            "saved_at": self._clock.wall(),
        }


def as_state(checkpoint: Checkpoint, spec: BoardSpec) -> TransferredState:
    """Make a state to begin from of a checkpoint.

    Raises:
        CheckpointError: it is of another layout than the task's.
    """
    if checkpoint.layout != spec.layout:
        raise CheckpointError(
            "the checkpoint in the data folder has another layout than the task's network; "
            "give another --data-dir, or the task it was made with"
        )
    meta = checkpoint.meta
    fits = bool(checkpoint.sidecar) and checkpoint.sidecar_layout == spec.sidecar
    head = StateHead(
        policy_version=int(meta.get("policy_version", 0)),
        lineage=str(meta.get("lineage", "")),
        lineage_steps=int(meta.get("env_steps", 0)),
        params_hash=params_hash(checkpoint.params),
        sidecar_hash="",
        params_bytes=checkpoint.params.nbytes,
        sidecar_bytes=0,
    )
    return TransferredState(head, checkpoint.params, dict(checkpoint.sidecar) if fits else None)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
