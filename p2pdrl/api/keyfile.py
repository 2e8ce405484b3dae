"""The swarm key's file: 32 random bytes as one line of base64, readable by its owner only.

``p2pdrl keygen`` writes it; the daemon and every command with ``--swarm-key-file`` read it.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
from pathlib import Path

from p2pdrl.errors import UsageError

__all__ = ["KEY_BYTES", "read_swarm_key", "write_swarm_key"]

KEY_BYTES = 32
"""Length of a swarm key."""

_LONGEST_FILE = 4096


def write_swarm_key(path: Path) -> None:
    """Make a new key and write it to ``path`` with mode 0600.

    Raises:
        UsageError: the file exists already, or can't be written.
    """
    line = base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already, and a key is never overwritten: name another file"
        ) from None
    except OSError as error:
        raise UsageError(f"can't write the key to {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_swarm_key(path: str | Path) -> bytes:
    """Read a key, refusing a file that other users of the machine can read.

    Raises:
        UsageError: no such file, open to others, or not a key.
    """
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_LONGEST_FILE)
    except FileNotFoundError:
        raise UsageError(f"no swarm key at {path}: make one with `p2pdrl keygen {path}`") from None
    except OSError as error:
        raise UsageError(f"can't read the swarm key {path}: {error.strerror}") from None
    if _open_to_others(status):
        raise UsageError(f"other users can read the swarm key {path}: run `chmod 600 {path}`")
    try:
        key = base64.b64decode(data.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{path} isn't a swarm key: make one with `p2pdrl keygen`")
    return key


def _open_to_others(status: os.stat_result) -> bool:
    """Nobody but the owner may read it, except through a group when somebody else gave it to us.

    Kubernetes mounts secrets as root's with group access (``fsGroup``).
    """
    if not stat.S_ISREG(status.st_mode):
        return False
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o007
    return bool(status.st_mode & forbidden)
