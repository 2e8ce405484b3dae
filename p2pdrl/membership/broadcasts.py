"""Records that ride on outgoing messages, each a limited number of times (memberlist's TransmitLimitedQueue).

The least often sent goes first, the newest among equals; each batch is bounded in count and in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pdrl.membership.records import MemberRecord, Record, Suspicion, approx_bytes

__all__ = ["BroadcastQueue"]

Key = tuple[str, ...]


@dataclass(slots=True)
class _Item:
    record: Record
    sent: int
    number: int
    nbytes: int


class BroadcastQueue:
    """Records still to be sent."""

    def __init__(self) -> None:
        self._items: dict[Key, _Item] = {}
        self._accusations: dict[str, set[Key]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, record: Record) -> None:
        """Send ``record`` from now on, in place of what it makes untrue."""
        if isinstance(record, MemberRecord):
            self.forget_suspicions(record.id)
        key = _key(record)
        if isinstance(record, Suspicion):
            self._accusations.setdefault(record.subject, set()).add(key)
        self._count += 1
        self._items[key] = _Item(record, 0, self._count, approx_bytes(record))

    def forget_suspicions(self, subject: str) -> None:
        """Stop sending accusations against ``subject``."""
        for key in self._accusations.pop(subject, ()):
            self._items.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
        self._accusations.clear()

    def take(self, limit: int, max_bytes: int, transmissions: int) -> tuple[Record, ...]:
        """Return the records for one message and count them as sent once more.

        Args:
            limit: most records.
            max_bytes: most bytes, by estimate.
            transmissions: a record sent this often is dropped.
        """
        if not self._items or limit <= 0:
            return ()
        ordered = sorted(self._items.items(), key=lambda entry: (entry[1].sent, -entry[1].number))
        taken: list[Record] = []
        room = max_bytes
        for key, item in ordered:
            if len(taken) == limit:
                break
            if item.nbytes > room:
                continue
            room -= item.nbytes
            taken.append(item.record)
            item.sent += 1
            if item.sent >= transmissions:
                self._drop(key, item.record)
        return tuple(taken)

    def _drop(self, key: Key, record: Record) -> None:
        del self._items[key]
        if isinstance(record, Suspicion):
            accusations = self._accusations.get(record.subject, set())
            accusations.discard(key)
            if not accusations:
                self._accusations.pop(record.subject, None)


def _key(record: Record) -> Key:
    if isinstance(record, MemberRecord):
        return ("m", record.id)
    if isinstance(record, Suspicion):
        return ("s", record.subject, record.accuser)
    return ("r", record.key)
