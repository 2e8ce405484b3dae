"""Writes checkpoints now and then, and at the end; a bad disk is a warning, training goes on."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np

from p2pdrl.clock import Clock
from p2pdrl.config.node import CheckpointConfig
from p2pdrl.errors import CheckpointError, StorageError
from p2pdrl.node.counting.ledger import Ledger
from p2pdrl.node.events import EventLog
from p2pdrl.node.settings import StopSetting
from p2pdrl.node.states.checkpoints import Checkpoint, CheckpointStore, to_bytes
from p2pdrl.node.states.state_transfer import State, StateHead, params_hash
from p2pdrl.node.training import Training
from p2pdrl.tensors.board import BoardSpec

__all__ = ["Saving", "as_state"]


class Saving:
    """The checkpoints of this node's training.

    Args:
        store: where they go.
        config: how often.
        training: what is saved.
        ledger: counts and moments, saved too.
        clock: time.
        events: what is told.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        config: CheckpointConfig,
        training: Training,
        ledger: Ledger,
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._store = store
        self._config = config
        self._training = training
        self._ledger = ledger
        self._clock = clock
        self._events = events
        self._best: float | None = None
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

    def was_best(self, mean_return: float | None) -> None:
        """Set the mean return that a better one must beat, as an earlier boot left it."""
        self._best = mean_return

    async def run(self) -> None:
        """Write one each ``every_s`` seconds, for ever."""
        while self._config.every_s > 0:
            await asyncio.sleep(self._config.every_s)
            await self.try_save()
        await asyncio.Event().wait()

    async def try_save(self) -> bool:
        """Write one; return whether it worked. A failure is told once until it works again."""
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
            best = mean is not None and (self._best is None or mean > self._best)
            await asyncio.to_thread(self._store.save, checkpoint, best=best)
            if best:
                self._best = mean
            self._saved_s = self._clock.monotonic()
            return str(self._store.last)

    async def export(self) -> bytes:
        """Return the present state as the bytes of a checkpoint file.

        Raises:
            CheckpointError: there is no state yet.
        """
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

    def _known_means(self) -> list[float]:
        """The best mean return so far, and that of the state which is about to be saved."""
        return [mean for mean in (self._best, self.mean_return) if mean is not None]

    def _meta(self) -> dict[str, Any]:
        training = self._training
        total = self._ledger.total()
        return {
            "layout": training.spec.layout.to_wire(),
            "task": msgspec.to_builtins(training.task),
            "task_hash": training.task_hash,
            "lineage": training.lineage,
            "env_steps": total.env_steps,
            "counts": msgspec.to_builtins(self._ledger.counts()),
            "moments": _text(msgspec.msgpack.encode(self._ledger.moments_since({}))),
            "others_moments": _text(msgspec.msgpack.encode(self._ledger.others_moments())),
            "stop": None if self.stop_setting is None else msgspec.to_builtins(self.stop_setting),
            "mean_return": self.mean_return,
            "best_mean_return": max(self._known_means(), default=None),
            "saved_at": self._clock.wall(),
        }


def as_state(checkpoint: Checkpoint, spec: BoardSpec) -> State:
    """Return a checkpoint as a state to begin from.

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
    return State(head, checkpoint.params, dict(checkpoint.sidecar) if fits else None)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
