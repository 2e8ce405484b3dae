"""The swarm key's file: 32 random bytes as one line of base64, readable by its owner only.

``p2pdrl keygen`` writes it; the daemon and every command with ``--swarm-key-file`` read it. While a key is
replaced (``p2pdrl key rotate``) it holds two:

    NEW from=1790000000 swarm=0e27fcf7e5231f75        taken at once, shown from then on
    OLD until=1790003600                              shown until then, taken until this

so the file can be copied from machine to machine meanwhile, in any order.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from p2pdrl.atomic import write_atomic
from p2pdrl.errors import UsageError
from p2pdrl.ids import swarm_id_from_key

__all__ = [
    "KEY_BYTES",
    "SwarmKeys",
    "TimedKey",
    "read_swarm_keys",
    "rotate_swarm_key",
    "write_swarm_key",
]

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


def rotate_swarm_key(path: Path, overlap_s: float, wall_s: float) -> SwarmKeys:
    """Put a new key into ``path``, beside the one that is shown now.

    Args:
        path: a key file.
        overlap_s: how long the old key is shown yet, so that the file can be copied to every machine; and
            how long it is taken after that.
        wall_s: wall time.

    Raises:
        UsageError: no such file, not a key file, a rotation is under way already, or it can't be written.
    """
    keys = read_swarm_keys(path)
    if len(keys.good(wall_s)) > 1:
        raise UsageError(f"{path} is being rotated already: wait until {_iso(keys.settled_s)}")
    old = keys.good(wall_s)[0]
    new = secrets.token_bytes(KEY_BYTES)
    made = SwarmKeys(
        keys.swarm_id,
        (TimedKey(new, from_s=wall_s + overlap_s), TimedKey(old, until_s=wall_s + 2 * overlap_s)),
    )
    lines = [
        f"{base64.b64encode(new).decode()} from={made.keys[0].from_s:.0f} swarm={keys.swarm_id}",
        f"{base64.b64encode(old).decode()} until={made.keys[1].until_s:.0f}",
    ]
    try:
        write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise UsageError(f"can't write the key to {path}: {error.strerror}") from None
    return made


@dataclass(frozen=True, slots=True)
class TimedKey:
    """One key, and from when on it is shown, and until when it is taken; wall times."""

    key: bytes = field(repr=False)
    from_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class SwarmKeys:
    """All keys of a swarm, newest first.

    Attributes:
        swarm_id: stays the same while keys come and go.
    """

    swarm_id: str
    keys: tuple[TimedKey, ...]

    def good(self, wall_s: float) -> tuple[bytes, ...]:
        """The keys that are taken at ``wall_s``, the one that we show first."""
        taken = [key for key in self.keys if wall_s < key.until_s] or [self.keys[0]]
        shown = next((key for key in taken if wall_s >= key.from_s), taken[-1])
        return (shown.key, *(key.key for key in taken if key is not shown))

    @property
    def settled_s(self) -> float:
        """When the last of the old keys is refused; 0 where there are none."""
        return max((key.until_s for key in self.keys if math.isfinite(key.until_s)), default=0.0)


def read_swarm_keys(path: str | Path) -> SwarmKeys:
    """Read a key file, refusing one that other users of the machine can read.

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
        return _parse(data.decode("ascii"))
    except ValueError:
        raise UsageError(f"{path} isn't a swarm key: make one with `p2pdrl keygen`") from None


def _parse(text: str) -> SwarmKeys:
    """Read lines of a key in base64, with ``from=`` and ``until=`` (seconds since 1970) and ``swarm=``."""
    swarm_id, keys = "", []
    for line in text.split("\n"):
        if not line.strip():
            continue
        word, *facts = line.split()
        named = dict(fact.split("=", 1) for fact in facts)
        key = base64.b64decode(word, validate=True)
        if len(key) != KEY_BYTES or named.keys() - {"from", "until", "swarm"}:
            raise ValueError(line)
        until_s = float(named["until"]) if "until" in named else math.inf
        keys.append(TimedKey(key, float(named.get("from", 0.0)), until_s))
        swarm_id = swarm_id or named.get("swarm", "")
    if not keys:
        raise ValueError(text)
    return SwarmKeys(swarm_id or swarm_id_from_key(keys[0].key), tuple(keys))


def _iso(wall_s: float) -> str:
    return dt.datetime.fromtimestamp(wall_s, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _open_to_others(status: os.stat_result) -> bool:
    """Nobody but the owner may read it, except through a group when somebody else gave it to us.

    Kubernetes mounts secrets as root's with group access (``fsGroup``).
    """
    if not stat.S_ISREG(status.st_mode):
        return False
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o007
    return bool(status.st_mode & forbidden)
