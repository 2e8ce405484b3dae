"""Files that are either wholly there or not: write beside, flush to disk, rename over.

Used by the data folder, the identity, the known members and the checkpoints. A process killed at any
instruction leaves the previous file in place and at most one leftover ``*.tmp``, which `remove_leftovers`
clears away. Blocking; daemons call it in threads or before their loop runs.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from p2pdrl.errors import StorageError

__all__ = ["fsync_folder", "remove_leftovers", "storage_error", "write_atomic", "write_beside", "write_new"]

_TMP_SUFFIX = ".tmp"
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EROFS: "the disk is read-only: remount it, or name another folder with --data-dir",
    errno.EACCES: "permission denied: mend the folder's owner, or name another one with --data-dir",
    errno.EPERM: "permission denied: mend the folder's owner, or name another one with --data-dir",
    errno.EIO: "the disk reports an error: look at the system log, and name a folder on another disk",
    errno.ENOENT: "there can be no such folder: name another one with --data-dir",
    errno.ENOTDIR: "a part of the path is a file: name another folder with --data-dir",
}


def storage_error(doing: str, path: Path, error: OSError) -> StorageError:
    """Return the package's error for a failed file operation; ``doing`` as in "write the checkpoint"."""
    advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
    return StorageError(f"can't {doing} {path}: {advice}")


def write_beside(path: Path, chunks: Iterable[bytes | memoryview], mode: int = 0o600) -> Path:
    """Write ``chunks`` to a new temporary file beside ``path``, flushed to disk; return it, to be renamed.

    Raises:
        OSError: as the operating system says; the temporary file is gone then.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TMP_SUFFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def write_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``content`` so that a reader or a crash sees the old or the new, whole.

    Raises:
        OSError: as the operating system says; ``path`` is unchanged then.
    """
    temporary = write_beside(path, (content,), mode)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_new(path: Path, content: bytes, mode: int, doing: str) -> None:
    """Write a file that isn't there yet, flushed to disk.

    Args:
        doing: for the message, as "write the key to".

    Raises:
        OSError: it can't be made; FileExistsError where it is there.
        StorageError: it can't be written, and isn't there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(doing, path, error) from error
        raise


def fsync_folder(folder: Path) -> None:
    """Flush a folder's list of names, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, *names: str) -> int:
    """Delete the temporary files that killed processes left in ``folder``; return how many.

    Args:
        names: the files that they were to become; by default any.
    """
    patterns = [f".{name}.{'?' * 8}{_TMP_SUFFIX}" for name in names] or [f".*{_TMP_SUFFIX}"]
    leftovers = [leftover for pattern in patterns for leftover in folder.glob(pattern)]
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return len(leftovers)
