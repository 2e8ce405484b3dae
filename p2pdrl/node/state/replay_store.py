"""Where the rows of a node's replay memory lie: the daemon's memory, or a file in its data folder.

Learners map it, one after another: one that was killed leaves everything but the unroll that it was just
appending (`replay.memory`). A file outlives the node as well, and may be larger than the machine's memory.

Beside the file stands whether it can be trusted: a process that is killed leaves a file whole, as the kernel
holds what was written; a machine that loses power may have written some of it and not the rest. So a file is
taken up again when the node closed it in good order, or when the machine has run without a break since.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from p2pdrl.atomic import storage_error, write_atomic
from p2pdrl.errors import ConfigError
from p2pdrl.tensors.shared_memory import SharedRegion

__all__ = ["ReplayStore"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Trust(msgspec.Struct):
    closed: bool
    boot_id: str
    """Of the machine when the file was opened; empty where the system has none."""


class ReplayStore:
    """The memory of one replay.

    Args:
        path: of the file; None keeps it in memory that ends with the daemon.
        most_nbytes: of memory that the node may take; 0 is no bound. A file doesn't count.
    """

    def __init__(self, path: Path | None, most_nbytes: int = 0) -> None:
        self._path = path
        self._most_nbytes = most_nbytes
        self._region: SharedRegion | None = None
        self._fd = -1

    def region(self, nbytes: int) -> SharedRegion:
        """Return the memory, the same at each call; zeros, or what the file held.

        Raises:
            ConfigError: it is more memory than the node may take.
            StorageError: the disk doesn't take a file of that size.
            TensorError: the system gives no such memory.
        """
        if self._region is None:
            if self._path is None:
                self._check(nbytes)
                self._region = SharedRegion.create(nbytes, "replay")
            else:
                try:
                    self._region = self._open(self._path, nbytes)
                except OSError as error:
                    raise storage_error("keep the replay memory in", self._path, error) from error
        return self._region

    def _check(self, nbytes: int) -> None:
        if 0 < self._most_nbytes < nbytes:
            raise ConfigError(
                f"node.limits.memory_bytes: the replay memory alone takes {nbytes} bytes, more than the "
                f"{self._most_nbytes} that this node may take; raise it, lower task.algorithm.buffer_size, "
                "or keep the memory on disk (node.learner.replay_on_disk = true)"
            )

    def close(self) -> None:
        """Let go of it; no learner may use it any more. A file is complete then."""
        if self._region is None:
            return
        self._region.close()
        self._region = None
        if self._path is not None:
            with contextlib.suppress(OSError):  # what isn't on the disk for sure isn't trusted, that is all
                os.fsync(self._fd)
                self._trust(self._path, closed=True)
            os.close(self._fd)

    def _open(self, path: Path, nbytes: int) -> SharedRegion:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size != nbytes or not self._trusted(path):
                os.ftruncate(fd, 0)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)  # a disk that is full later would end the learner
            else:
                os.ftruncate(fd, nbytes)
            self._trust(path, closed=False)
            self._fd = os.dup(fd)
        except BaseException:
            os.close(fd)
            raise
        return SharedRegion.attach(fd, nbytes)

    def _trusted(self, path: Path) -> bool:
        try:
            known = msgspec.json.decode(_beside(path).read_bytes(), type=_Trust)
        except (OSError, msgspec.DecodeError):
            return False
        return known.closed or known.boot_id == _boot_id() != ""

    def _trust(self, path: Path, *, closed: bool) -> None:
        write_atomic(_beside(path), msgspec.json.encode(_Trust(closed, _boot_id())))


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
