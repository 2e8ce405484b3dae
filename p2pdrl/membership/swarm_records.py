"""Settings of the whole swarm: signed, last writer wins by (epoch, proposer id) within a lineage.

The core spreads them with everything else; the daemon proposes them and is told of changes. A node holds
the settings of its own lineage only, and passes over those of others: when two swarms meet, whoever adopts
the other lineage's state takes its settings with it (`SwarmRecords.follow`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdrl.membership.identity import Signer
from p2pdrl.membership.messages import SwarmEntry
from p2pdrl.membership.records import (
    MAX_FIRST_EPOCH,
    RECORD_KEYS,
    BadRecordError,
    SwarmRecord,
    Verifier,
    sign_swarm_record,
)

__all__ = ["MAX_EPOCH_JUMP", "SwarmRecords"]

MAX_EPOCH_JUMP = 1000


class SwarmRecords:
    """The swarm's settings as this node knows them.

    Attributes:
        lineage: whose settings these are; empty while the node has no state.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._records: dict[str, SwarmRecord] = {}
        self.lineage = ""

    def follow(self, lineage: str) -> bool:
        """Hold the settings of ``lineage`` from now on; True when another's were held until now."""
        if lineage == self.lineage:
            return False
        self.lineage = lineage
        self._records.clear()
        return True

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
            ValueError: the encoded value is longer than 8 KiB, or there is no such setting.
        """
        if key not in RECORD_KEYS:
            raise ValueError(f"no swarm has a setting {key!r}")
        held = self._records.get(key)
        plain = SwarmRecord(
            key,
            1 if held is None else held.epoch + 1,
            signer.node_id,
            msgspec.msgpack.encode(value),
            signer.public_key,
            lineage=self.lineage,
        )
        try:
            msgspec.convert(msgspec.to_builtins(plain), SwarmRecord)
        except msgspec.ValidationError as error:
            raise ValueError(f"swarm record {key!r}: {error}") from error
        return sign_swarm_record(signer, self._verifier.swarm_id, plain)

    def merge(self, record: SwarmRecord, trusted: bool = False) -> bool:
        """Take ``record`` when it wins; True when it did. One of another lineage is passed over.

        Args:
            trusted: it came from the member through which we join, or was our own in an earlier run, so any
                epoch goes.

        Raises:
            BadRecordError: forged, under an unknown key, or a jump of more than 1,000 epochs.
        """
        if record.key not in RECORD_KEYS:
            raise BadRecordError(400, f"no swarm has a setting {record.key!r}")
        if record.lineage != self.lineage:
            return False
        held = self._records.get(record.key)
        if held is not None and (record.epoch, record.proposer) <= (held.epoch, held.proposer):
            return False
        limit = MAX_FIRST_EPOCH if held is None or trusted else held.epoch + MAX_EPOCH_JUMP
        if record.epoch > limit:
            raise BadRecordError(409, f"record {record.key!r} jumps to epoch {record.epoch}")
        self._verifier.check_swarm_record(record)
        self._records[record.key] = record
        return True

    def digest(self) -> tuple[SwarmEntry, ...]:
        """What is held, in short."""
        return tuple(
            SwarmEntry(record.key, record.epoch, record.proposer, record.lineage) for record in self.all()
        )

    def compare(self, theirs: tuple[SwarmEntry, ...]) -> tuple[tuple[SwarmRecord, ...], tuple[str, ...]]:
        """Return the records that the other side lacks, and the keys that we lack.

        Whoever holds another lineage's settings is given nothing and asked for nothing.
        """
        if any(entry.lineage != self.lineage for entry in theirs):
            return (), ()
        other = {entry.key: (entry.epoch, entry.proposer) for entry in theirs if entry.key in RECORD_KEYS}
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
