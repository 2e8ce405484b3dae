"""The checkpoints on a node's own disk: always one whole one to go on from.

Files of one folder: ``last.safetensors``, ``best.safetensors``, and a bounded history of
``checkpoint-<number>.safetensors``. Each is written beside, flushed, and renamed over, so that a
process killed, a power cut or a full disk at any instant leaves the previous one loadable. A file that
turns out damaged is passed over for the next older one. Blocking: the daemon calls it in threads.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from p2pdrl.errors import CheckpointError, StorageError
from p2pdrl.node.states.atomic import fsync_folder, remove_leftovers, storage_error, write_beside
from p2pdrl.tensors.checkpoint import Checkpoint, chunks, from_bytes, to_bytes

__all__ = ["Checkpoint", "CheckpointStore", "Loaded", "from_bytes", "load", "to_bytes"]

LAST = "last.safetensors"
BEST = "best.safetensors"
_NUMBERED = "checkpoint-{:08d}.safetensors"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `CheckpointStore.load_latest` found.

    Attributes:
        checkpoint: the newest whole checkpoint; None when there is none.
        path: its file.
        skipped: newer files that couldn't be used, each with the reason.
    """

    checkpoint: Checkpoint | None
    path: Path | None
    skipped: tuple[str, ...]


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
    """Checkpoints of one node in one folder.

    Args:
        folder: created when missing; used by this store alone.
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
        """Write a checkpoint as the newest; and as the best, if ``best``.

        Returns:
            Path of ``last.safetensors``.

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

    def load_latest(self, accept: Callable[[Checkpoint], None] | None = None) -> Loaded:
        """Find the newest whole checkpoint: ``last``, then the history from its end, then ``best``.

        Never raises for a file that is damaged or unreadable; it is passed over and told.

        Args:
            accept: looks at each candidate, and raises CheckpointError for one that is of no use.
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
