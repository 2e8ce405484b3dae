"""Settings of the whole swarm: signed, last writer wins by (epoch, proposer id) within a lineage.

The core spreads them with everything else; the daemon proposes them and is told of changes. A node holds
the settings of its own lineage only, and passes over those of others: when two swarms meet, whoever adopts
the other lineage's state takes its settings with it (`SwarmRecords.follow`).

Who may write what, in a swarm whose key names operators:

| record | by | counts |
|---|---|---|
| ``operators`` | a root operator | yes |
| any other | an operator | yes, whatever others wrote before |
| ``mode``, ``stop`` of epoch 1 | the lineage's founder, which its id shows | yes |
| ``halt`` | any member | for whom the stop condition is met; see `node.record_follower` |
| any other | anybody else | refused |

Without operators every member may write all of them, but ``operators``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2pdrl.config.fields import without_defaults
from p2pdrl.ids import founded_by
from p2pdrl.membership.identity import Signer, Verify
from p2pdrl.membership.messages import SwarmEntry
from p2pdrl.membership.operators import Ban, BansSetting, Operator, OperatorsSetting
from p2pdrl.membership.records import (
    LINEAGE_KEYS,
    MAX_EPOCH,
    MAX_FIRST_EPOCH,
    RECORD_KEYS,
    BadRecordError,
    SwarmRecord,
    Verifier,
    sign_swarm_record,
)
from p2pdrl.transport import codec

__all__ = ["MAX_CLAIM_EPOCH", "MAX_EPOCH_JUMP", "MAX_TRUSTED_EPOCH", "SwarmRecords", "records_told"]

MAX_EPOCH_JUMP = 1000
MAX_TRUSTED_EPOCH = MAX_FIRST_EPOCH + MAX_EPOCH // 4
"""Those who join are told of one that others have come to by jumps from the highest first one."""
MAX_CLAIM_EPOCH = 2**32
"""A member's ``halt`` in a swarm with operators has no higher one, so that theirs always find a next."""

_Rank = tuple[bool, int, str]
_Passed = Annotated[int, Meta(ge=0, le=MAX_TRUSTED_EPOCH)]


class SwarmRecords:
    """The swarm's settings as this node knows them.

    Args:
        roots: the operators that the swarm's key names; without any, every member may command.

    Attributes:
        lineage: whose settings these are; empty while the node has no state.
        bans: the nodes that are refused, by id.
    """

    def __init__(self, verifier: Verifier, roots: Iterable[Operator] = ()) -> None:
        self._verifier = verifier
        self._records: dict[str, SwarmRecord] = {}
        self._passed: dict[str, int] = {}
        self._roots = tuple(roots)
        self._by_key: dict[bytes, Operator] = {}
        self._by_id: dict[str, Operator] = {}
        self.bans: Mapping[str, Ban] = {}
        self.lineage = ""
        self._renew()

    # Who may command

    @property
    def swarm_id(self) -> str:
        """The swarm for which they are signed."""
        return self._verifier.swarm_id

    @property
    def roots(self) -> tuple[Operator, ...]:
        """The operators that the swarm's key names; none where every member may command."""
        return self._roots

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators, the roots first."""
        return tuple(self._by_key.values())

    def operator(self, proposer: str) -> Operator | None:
        """The operator with that id; None for a node's."""
        return self._by_id.get(proposer)

    def why_banned(self, node_id: str) -> str | None:
        """Why a node is refused, in words; None for one that isn't."""
        ban = self.bans.get(node_id)
        return None if ban is None else ban.words

    def use_roots(self, roots: Iterable[Operator]) -> bool:
        """Take these root operators from now on, and drop what nobody signed who may; True for a change."""
        roots = tuple(roots)
        if roots == self._roots:
            return False
        self._roots = roots
        self._renew()
        return True

    def _renew(self) -> None:
        """Learn anew who is an operator and who is banned; drop what isn't signed by who may."""
        self._name(self._roots)
        self._drop_refused("operators")
        listed = self._decoded("operators", OperatorsSetting)
        self._name((*self._roots, *(() if listed is None else listed.operators)))
        for key in RECORD_KEYS - {"operators"}:
            self._drop_refused(key)
        found = self._decoded("bans", BansSetting)
        self.bans = {} if found is None else {ban.id: ban for ban in found.bans}

    def _name(self, operators: Iterable[Operator]) -> None:
        self._by_key = {}
        for operator in operators:
            self._by_key.setdefault(operator.public_key, operator)
        self._by_id = {operator.id: operator for operator in self._by_key.values()}

    def _drop_refused(self, key: str) -> None:
        held = self._records.get(key)
        if held is None:
            return
        try:
            self._check_author(held)
        except BadRecordError:
            del self._records[key]
            self.pass_over(key, held.epoch)

    def _decoded(self, key: str, kind: type[Any]) -> Any:
        held = self._records.get(key)
        return None if held is None else msgspec.msgpack.decode(held.value, type=kind)

    def _check_author(self, record: SwarmRecord) -> None:
        """Accept a record that its proposer may write.

        Raises:
            BadRecordError: it may not.
        """
        key, author = record.key, record.public_key
        if key == "operators":
            if all(author != root.public_key for root in self._roots):
                raise BadRecordError(403, "only operators that the swarm's key names may name others")
            return
        founds = key in ("mode", "stop") and record.epoch == 1
        if not self._roots or author in self._by_key or (founds and founded_by(record.lineage, author)):
            return
        if key != "halt":
            raise BadRecordError(
                403, f"a record {key!r} by {record.proposer[:8]}, who is no operator of this swarm"
            )
        if record.epoch > MAX_CLAIM_EPOCH:
            raise BadRecordError(409, f"a member's record {key!r} of epoch {record.epoch}")

    # What is held

    def follow(self, lineage: str) -> bool:
        """Hold the settings of ``lineage`` from now on; True when another's were held until now."""
        if lineage == self.lineage:
            return False
        self.lineage = lineage
        for key in LINEAGE_KEYS:
            self._records.pop(key, None)
            self._passed.pop(key, None)
        return True

    def get(self, key: str) -> SwarmRecord | None:
        """The record under ``key``."""
        return self._records.get(key)

    def value(self, key: str) -> Any:
        """The decoded value under ``key``, or None."""
        record = self._records.get(key)
        return None if record is None else msgspec.msgpack.decode(record.value)

    def all(self) -> tuple[SwarmRecord, ...]:
        """Every record, by key, but ``operators`` first: others may be signed by who is named there."""
        return tuple(
            self._records[key] for key in sorted(self._records, key=lambda key: (key != "operators", key))
        )

    def pass_over(self, key: str, epoch: int) -> None:
        """Take no record under ``key`` up to this epoch any more: it has had its effect."""
        self._passed[key] = max(epoch, self._passed.get(key, 0))

    def compose(self, key: str, value: Any, signer: Signer, at_s: float = 0.0) -> SwarmRecord:
        """Return a signed record that beats the present one; it isn't stored yet.

        Args:
            signer: a node's identity, or an operator's.
            at_s: wall time.

        Raises:
            ValueError: the encoded value is longer than 8 KiB, or there is no such setting.
        """
        if key not in RECORD_KEYS:
            raise ValueError(f"no swarm has a setting {key!r}")
        held = self._records.get(key)
        epoch = max(0 if held is None else held.epoch, self._passed.get(key, 0)) + 1
        if signer.public_key in self._by_key:
            epoch = max(epoch, 2)  # the first is the founder's
        plain = SwarmRecord(
            key,
            epoch,
            signer.node_id,
            msgspec.msgpack.encode(without_defaults(value)),
            signer.public_key,
            lineage=self._home(key),
            at_ms=max(0, round(at_s * 1000)),
        )
        try:
            msgspec.convert(msgspec.to_builtins(plain), SwarmRecord)
        except msgspec.ValidationError as error:
            raise ValueError(f"swarm record {key!r}: {error}") from error
        return sign_swarm_record(signer, self._verifier.swarm_id, plain)

    def merge(self, record: SwarmRecord, trusted: bool = False) -> bool:
        """Take ``record`` when it wins; True when it did.

        One of another lineage is passed over, and so is one under a key that this release doesn't know.

        Args:
            trusted: it came from the member through which we join, or was our own in an earlier run, so any
                epoch goes.

        Raises:
            BadRecordError: forged, by somebody who may not write it, a list of operators or bans that can't
                be read, or a jump of more than 1,000 epochs.
        """
        key = record.key
        if key not in RECORD_KEYS or record.lineage != self._home(key):
            return False
        held = self._records.get(key)
        rank = self._rank(record)
        if (held is not None and rank <= self._rank(held)) or record.epoch <= self._passed.get(key, 0):
            return False
        # whatever somebody wrote who may write no more, there is a next one
        limit = max(0 if held is None else held.epoch, self._passed.get(key, 0)) + MAX_EPOCH_JUMP
        if trusted:
            limit = max(limit, MAX_TRUSTED_EPOCH)
        elif held is None or rank[0]:
            limit = max(limit, MAX_FIRST_EPOCH)
        if record.epoch > limit:
            raise BadRecordError(409, f"record {key!r} jumps to epoch {record.epoch}")
        self._check_author(record)
        self._verifier.check_swarm_record(record)
        if key in ("operators", "bans"):
            _check_readable(record)
        self._records[key] = record
        if key in ("operators", "bans"):
            self._renew()
        return True

    def _home(self, key: str) -> str:
        """The lineage of records under ``key``."""
        return self.lineage if key in LINEAGE_KEYS else ""

    def _rank(self, record: SwarmRecord | SwarmEntry) -> _Rank:
        """An operator's stands above all others'."""
        return (record.proposer in self._by_id, record.epoch, record.proposer)

    def document(self) -> dict[str, Any]:
        """All of it as JSON types: what `records_told` makes the same of elsewhere."""
        roots = {operator.public_key for operator in self._roots}
        return {
            "swarm_id": self.swarm_id,
            "lineage": self.lineage,
            "passed": dict(self._passed),
            "operators": [
                {
                    "name": operator.name,
                    "id": operator.id,
                    "public_key": operator.public_key.hex(),
                    "root": operator.public_key in roots,
                }
                for operator in self.operators
            ],
            "records": [
                {
                    "key": record.key,
                    "epoch": record.epoch,
                    "by": record.proposer,
                    "operator": getattr(self.operator(record.proposer), "name", None),
                    "at": record.at_ms / 1000 or None,
                    "record": base64.b64encode(msgspec.msgpack.encode(record)).decode(),
                }
                for record in self.all()
            ],
        }

    def digest(self) -> tuple[SwarmEntry, ...]:
        """What is held, in short."""
        return tuple(
            SwarmEntry(record.key, record.epoch, record.proposer, record.lineage) for record in self.all()
        )

    def compare(self, theirs: tuple[SwarmEntry, ...]) -> tuple[tuple[SwarmRecord, ...], tuple[str, ...]]:
        """Return the records that the other side lacks, and the keys that we lack.

        Of a lineage's settings, whoever holds another's is given none and asked for none.
        """
        other = {entry.key: entry for entry in theirs if entry.key in RECORD_KEYS}
        keys = RECORD_KEYS
        if any(key in LINEAGE_KEYS and entry.lineage != self.lineage for key, entry in other.items()):
            keys = RECORD_KEYS - LINEAGE_KEYS
        nothing: _Rank = (False, 0, "")
        ranks = {key: self._rank(other[key]) if key in other else nothing for key in keys}
        give = tuple(
            record for record in self.all() if record.key in keys and ranks[record.key] < self._rank(record)
        )
        want = []
        for key in sorted(keys & other.keys()):
            held = self._records.get(key)
            mine = nothing if held is None else self._rank(held)
            if mine < ranks[key] and other[key].epoch > self._passed.get(key, 0):
                want.append(key)
        return give, tuple(want)


def records_told(document: Mapping[str, Any], roots: Iterable[Operator], verify: Verify) -> SwarmRecords:
    """Return what a node has told by `SwarmRecords.document`, every signature checked.

    Args:
        roots: the operators that our own copy of the swarm's key names; without any, those that are told.

    Raises:
        BadRecordError: a record is forged, or by somebody who may not write it.
        ValueError: it isn't such a document.
    """
    try:
        told = [
            Operator(bytes.fromhex(row["public_key"]), row["name"])
            for row in document["operators"]
            if row["root"]
        ]
        data = [base64.b64decode(row["record"], validate=True) for row in document["records"]]
        swarm_id, lineage = str(document["swarm_id"]), str(document["lineage"])
        passed = msgspec.convert(document.get("passed", {}), dict[str, _Passed])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"these are no records: {error}") from error
    records = SwarmRecords(Verifier(swarm_id, verify), tuple(roots) or told)
    records.follow(lineage)
    for one in data:
        record: SwarmRecord = codec.decode(one, SwarmRecord, "swarm record")
        records.merge(record, trusted=True)
    for key in passed.keys() & RECORD_KEYS:
        records.pass_over(key, passed[key])
    return records


def _check_readable(record: SwarmRecord) -> None:
    """See that a list that everybody has to follow can be read.

    Raises:
        BadRecordError: it can't.
    """
    kind: type[Any] = OperatorsSetting if record.key == "operators" else BansSetting
    try:
        msgspec.msgpack.decode(record.value, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise BadRecordError(400, f"the record {record.key!r} can't be read: {error}"[:200]) from error
