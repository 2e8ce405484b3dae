"""Settings of the whole swarm: signed, last writer wins by (epoch, proposer id).

The core spreads them with everything else; the daemon proposes them and is told of changes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdrl.membership.identity import Signer
from p2pdrl.membership.messages import SwarmEntry
from p2pdrl.membership.records import BadRecordError, SwarmRecord, Verifier, sign_swarm_record

__all__ = ["MAX_EPOCH_JUMP", "SwarmRecords"]

MAX_EPOCH_JUMP = 1000
MAX_KEYS = 64


class SwarmRecords:
    """The swarm's settings as this node knows them.

    Args:
        verifier: checks signatures.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._records: dict[str, SwarmRecord] = {}

    def get(self, key: str) -> SwarmRecord | None:
        """The record under ``key``."""
        return self._records.get(key)

    def value(self, key: str) -> Any:
        """The decoded value under ``key``, or None."""
        record = self._records.get(key)
        return None if record is None else msgspec.msgpack.decode(record.value)

    def all(self) -> tuple[SwarmRecord, ...]:
        """Every record, by key."""
        return tuple(self._records[key] for key in sorted(self._records))

    def compose(self, key: str, value: Any, signer: Signer) -> SwarmRecord:
        """Return a signed record that beats the present one; it isn't stored yet.

        Raises:
            ValueError: the encoded value is longer than 8 KiB, or the key is malformed.
        """
        held = self._records.get(key)
        plain = SwarmRecord(
            key,
            1 if held is None else held.epoch + 1,
            signer.node_id,
            msgspec.msgpack.encode(value),
            signer.public_key,
        )
        try:
            msgspec.convert(msgspec.to_builtins(plain), SwarmRecord)
        except msgspec.ValidationError as error:
            raise ValueError(f"swarm record {key!r}: {error}") from error
        return sign_swarm_record(signer, self._verifier.swarm_id, plain)

    def merge(self, record: SwarmRecord, trusted: bool = False) -> bool:
        """Take ``record`` when it wins; True when it did.

        Args:
            record: as received.
            trusted: it came from the member through which we join, or was our own in an earlier run, so any
                epoch goes.

        Raises:
            BadRecordError: forged, or a jump of more than 1,000 epochs.
        """
        held = self._records.get(record.key)
        if held is not None and (record.epoch, record.proposer) <= (held.epoch, held.proposer):
            return False
        if held is None and len(self._records) >= MAX_KEYS:
            raise BadRecordError(429, f"the swarm has {MAX_KEYS} records already")
        if not trusted and record.epoch - (0 if held is None else held.epoch) > MAX_EPOCH_JUMP:
            raise BadRecordError(409, f"record {record.key!r} jumps to epoch {record.epoch}")
        self._verifier.check_swarm_record(record)
        self._records[record.key] = record
        return True

    def digest(self) -> tuple[SwarmEntry, ...]:
        """What is held, in short."""
        return tuple(SwarmEntry(record.key, record.epoch, record.proposer) for record in self.all())

    def compare(self, theirs: tuple[SwarmEntry, ...]) -> tuple[tuple[SwarmRecord, ...], tuple[str, ...]]:
        """Return the records that the other side lacks, and the keys that we lack."""
        other = {entry.key: (entry.epoch, entry.proposer) for entry in theirs}
        give = tuple(
            record
            for record in self.all()
            if other.get(record.key, (0, "")) < (record.epoch, record.proposer)
        )
        want = []
        for key, rank in other.items():
            held = self._records.get(key)
            if held is None or (held.epoch, held.proposer) < rank:
                want.append(key)
        return give, tuple(want)
