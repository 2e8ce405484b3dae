"""What a node remembers of the swarm between runs: its last boot, and where others lived.

Kept in ``members.json`` in the data folder. At the next start the addresses serve as seeds until the swarm is
met. A damaged file is as good as none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from p2pdrl.atomic import storage_error, write_atomic
from p2pdrl.membership.events import MemberView

__all__ = ["KnownMember", "KnownMembers", "living"]

MEMBERS_FILE = "members.json"
MAX_KNOWN = 256


class KnownMember(msgspec.Struct, frozen=True):
    """Where a member lived."""

    id: str
    name: str
    address: str


def living(members: Iterable[MemberView]) -> tuple[KnownMember, ...]:
    """Return those worth remembering: the living, without ourselves."""
    return tuple(
        KnownMember(member.id, member.name, member.address)
        for member in members
        if not member.is_self and member.state in ("alive", "suspect")
    )


class _KnownMembersFile(msgspec.Struct, frozen=True):
    boot_ms: int
    members: tuple[KnownMember, ...]


class KnownMembers:
    """The file, read once at start.

    Args:
        folder: the data folder; None keeps nothing.

    Attributes:
        members: who was living when the file was last written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / MEMBERS_FILE
        self._boot_ms = 0
        self._lock = threading.Lock()
        self.members: tuple[KnownMember, ...] = ()
        if self._path is not None and self._path.exists():
            try:
                content = msgspec.json.decode(self._path.read_bytes(), type=_KnownMembersFile)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return  # as good as none
            self._boot_ms = content.boot_ms
            self.members = content.members[:MAX_KNOWN]

    def next_boot_ms(self, wall_s: float, future_s: float = 600.0) -> int:
        """A boot id greater than every earlier one, even when the clock was set back a little.

        One that lies further in the future than others accept is forgotten.
        """
        now_ms = int(wall_s * 1000)
        if self._boot_ms > now_ms + future_s * 1000:
            return now_ms
        return max(now_ms, self._boot_ms + 1)

    def save(self, boot_ms: int, members: tuple[KnownMember, ...]) -> None:
        """Write the file whole or not at all.

        Raises:
            StorageError: the disk doesn't take it.
        """
        with self._lock:
            self._boot_ms, self.members = boot_ms, members[:MAX_KNOWN]
            if self._path is None:
                return
            content = msgspec.json.format(msgspec.json.encode(_KnownMembersFile(boot_ms, self.members)))
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path, content)
            except OSError as error:
                raise storage_error("write", self._path, error) from error
