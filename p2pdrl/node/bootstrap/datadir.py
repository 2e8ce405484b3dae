"""The data folder of one node: taken for as long as the process lives, private to its user.

Holds the identity key, the boot id, the known members, the mode, the checkpoints, the API token, the state of
rates that are bounded, and the lock.
The lock is ``flock`` on ``<folder>/lock``: the kernel lets go of it however the process ends. The
daemon acquires the folder first of all; blocking, before its loop runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import platformdirs

from p2pdrl.atomic import remove_leftovers, storage_error, write_atomic
from p2pdrl.errors import DataDirLockedError, DataDirUnusableError, StorageError

__all__ = ["RATES_FILE", "SWARM_FILE", "DataDir"]

RATES_FILE = "rates"
"""What a node's processes share to keep to `node.limits.upload_bytes_s`; see `transport.rate`."""
SWARM_FILE = "swarm.json"
"""What is remembered of swarms; see `node.state.swarm_memory`."""

_MOST_NODES = 1000
_TOKEN = re.compile(rb"[0-9a-f]{64}")
_LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)
"""Not the fault of whoever named the folder."""
_FROM_THE_START = (RATES_FILE, "members.json", "token", "identity.key", "lock")
"""Files that are there before a node trains."""


class DataDir:
    """A locked data folder; make one with `acquire`."""

    def __init__(self, path: Path, lock: int, *, picked_other: bool, existed: bool = True) -> None:
        self.path = path
        self.picked_other = picked_other
        """No folder was named, and the first one was in use by another node."""
        self.keep = existed
        """To be set once the node trains; a folder that wasn't there before a start that fails goes again."""
        self._lock: int | None = lock

    @classmethod
    def acquire(
        cls,
        path: str | Path | None = None,
        root: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> DataDir:
        """Create (0700) and lock a data folder, whose path is absolute from then on.

        Args:
            path: this very folder; None takes the first unlocked one of ``node-1``, ``node-2`` … in the root.
            root: where those are; None is ``P2PDRL_DATA_ROOT``, else the user's data folder.

        Raises:
            DataDirLockedError: if ``path`` is in use by another node.
            DataDirUnusableError: if there can be none, or we may not write there.
            StorageError: if the disk is full or fails.
        """
        if path is not None:
            folder = Path(path).expanduser().absolute()
            existed = folder.exists()
            lock = _lock(folder)
            if lock is None:
                raise DataDirLockedError(
                    f"{folder} is in use by another node{_holder(folder)}: stop that one with "
                    "`p2pdrl leave`, or name another folder with --data-dir"
                )
            return cls(folder, lock, picked_other=False, existed=existed)
        parent = _root(root, os.environ if environ is None else environ)
        for number in range(1, _MOST_NODES + 1):
            folder = parent / f"node-{number}"
            existed = folder.exists()
            lock = _lock(folder)
            if lock is not None:
                return cls(folder, lock, picked_other=number > 1, existed=existed)
        raise DataDirLockedError(
            f"all of {parent}/node-1 … node-{_MOST_NODES} are in use: name a folder with --data-dir"
        )

    def token(self) -> str:
        """Return the API token (64 hex digits), made on first use and kept in ``token`` (0600).

        Raises:
            StorageError: if the file can't be read or written.
        """
        path = self.path / "token"
        try:
            if path.exists():
                path.chmod(0o600)
                text = path.read_bytes()[:128].strip()
                if _TOKEN.fullmatch(text):
                    return text.decode()
            token = secrets.token_hex(32)
            write_atomic(path, f"{token}\n".encode())
        except OSError as error:
            raise storage_error("keep the API token in", path, error) from error
        return token

    def release(self) -> None:
        """Let go of the lock; the folder stays. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> DataDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.keep:
            self._remove()
        self.release()

    def _remove(self) -> None:
        """Remove the folder, unless something is in it that we haven't put there; the lock goes last."""
        try:
            if {entry.name for entry in self.path.iterdir()} <= set(_FROM_THE_START):
                for name in _FROM_THE_START:
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
        except OSError:
            pass  # a folder too many does no harm


def _root(root: str | Path | None, environ: Mapping[str, str]) -> Path:
    if root is not None:
        return Path(root).expanduser().absolute()
    if named := environ.get("P2PDRL_DATA_ROOT"):
        return Path(named).expanduser().absolute()
    return platformdirs.user_data_path("p2pdrl", appauthor=False)


def _lock(folder: Path) -> int | None:
    """Create the folder and lock it; None when another process holds it.

    The permissions of a folder that exists already are left alone: it may be one that others share,
    and every secret in it is a 0600 file.
    """
    path = folder / "lock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        told = storage_error("use the data folder", folder, error)
        raise (told if error.errno in _DISK else DataDirUnusableError(str(told))) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _LOCKED:
                os.close(descriptor)
                return None
            if error.errno == errno.ENOLCK:
                raise StorageError(
                    f"can't lock {path}: its file system has no locks; name a local folder with --data-dir"
                ) from error
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        remove_leftovers(folder, *_FROM_THE_START, SWARM_FILE)  # others may have theirs here
    except OSError as error:
        os.close(descriptor)
        raise storage_error("lock the data folder", folder, error) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _holder(folder: Path) -> str:
    """`` (process 123)``, as the holder wrote it into the lock file; empty when that can't be read."""
    try:
        text = (folder / "lock").read_text("ascii", "replace")[:20].strip()
    except OSError:
        return ""
    return f" (process {text})" if text.isdigit() else ""
