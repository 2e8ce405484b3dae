"""Push-pull: two members compare views by a digest, and each sends what the other lacks.

Gossip tells each record a limited number of times; what it missed, a push-pull mends. It runs every
30 s with a random member, after each join, and with each dead member that answers again. Equal
views cost two small messages.
"""

from __future__ import annotations

import hashlib
import struct

from p2pdrl.membership.events import Answered, Respond, SendFailed, State
from p2pdrl.membership.kernel import Kernel
from p2pdrl.membership.messages import Delta, Digest, DigestEntry, GossipMessage, Sync
from p2pdrl.membership.records import BadRecordError, Record
from p2pdrl.membership.rumours import Rumours
from p2pdrl.membership.table import Member

__all__ = ["Syncer"]

_CODE: dict[State, int] = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}
_DEAD = 2
_LIVING = (0, 1)


class Syncer:
    """Compares and mends views.

    Args:
        kernel: what the core's parts share.
        rumours: takes the records that come back.
    """

    def __init__(self, kernel: Kernel, rumours: Rumours) -> None:
        self._kernel = kernel
        self._rumours = rumours
        self._hash = b""
        self._hash_version = -1

    def view_hash(self) -> bytes:
        """16 bytes that agree between two nodes exactly when their living members do."""
        kernel = self._kernel
        if self._hash_version != kernel.table.version or not self._hash:
            digest = hashlib.blake2b(digest_size=16)
            living = [kernel.me, *(member.record for member in kernel.table.living)]
            for record in sorted(living, key=lambda record: record.id):
                digest.update(record.id.encode() + struct.pack(">QQ", *record.incarnation))
            for entry in kernel.swarm.digest():
                digest.update(f"{entry.key} {entry.epoch} {entry.proposer} {entry.lineage};".encode())
            self._hash, self._hash_version = digest.digest(), kernel.table.version
        return self._hash

    # The side that asks

    def run(self, member: Member) -> None:
        """Start a push-pull with ``member``."""
        kernel = self._kernel
        node_id = member.record.id
        kernel.send(
            member,
            Sync(self.view_hash(), kernel.load()),
            4 * kernel.config.probe_interval_s,
            lambda result: self._compared(node_id, result),
        )

    def _compared(self, node_id: str, result: Answered | SendFailed) -> None:
        kernel = self._kernel
        member = kernel.table.get(node_id)
        if member is None or not isinstance(result, Answered) or not isinstance(result.message, Digest):
            return
        digest = result.message
        if digest.same:
            return
        give, want = self.compare(digest.members)
        give_swarm, want_swarm = kernel.swarm.compare(digest.swarm)
        if give or want or give_swarm or want_swarm:
            delta = Delta((*give_swarm, *give), want, want_swarm)
            kernel.send(member, delta, 8 * kernel.config.probe_interval_s, self._mended)

    def _mended(self, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, GossipMessage):
            self._rumours.apply(result.message.records, result.told_by)

    def compare(self, theirs: tuple[DigestEntry, ...]) -> tuple[tuple[Record, ...], tuple[str, ...]]:
        """Return what the other side lacks, and the ids of what we lack.

        A dead or left member that the other side doesn't know stays unknown to it: tombstones
        would otherwise be handed round for ever.
        """
        kernel = self._kernel
        other = {entry.id.hex(): (entry.incarnation, entry.state) for entry in theirs}
        give: list[Record] = []
        want: list[str] = []
        mine = other.pop(kernel.me.id, None)
        if mine is None or mine[0] < kernel.me.incarnation:
            give.append(kernel.me)
        elif mine[1] in (1, _DEAD) or mine[0] > kernel.me.incarnation:
            want.append(kernel.me.id)
        for member in kernel.table:
            held = (member.record.incarnation, _CODE[member.state])
            their = other.pop(member.record.id, None)
            if their is None:
                if member.living:
                    give.append(member.record)
            elif held[0] != their[0]:
                if held[0] > their[0]:
                    give.append(member.record)
                else:
                    want.append(member.record.id)
            elif held[1] > their[1]:
                give.extend((member.record,) if member.state == "left" else self._rumours.evidence(member))
            elif held[1] < their[1]:
                want.append(member.record.id)
        want.extend(node_id for node_id, (_, state) in other.items() if state in _LIVING)
        return tuple(give[: kernel.config.max_records_per_answer]), tuple(want[:8192])

    # The side that is asked

    def answer_sync(self, token: int, sync: Sync, told_by: str) -> None:
        """Answer with our digest, or with ``same``."""
        self._rumours.apply(sync.records, told_by)
        kernel = self._kernel
        if sync.view_hash == self.view_hash():
            kernel.effects.append(Respond(token, Digest(True)))
            return
        entries = [DigestEntry(bytes.fromhex(kernel.me.id), kernel.me.incarnation, 0)]
        entries += [
            DigestEntry(bytes.fromhex(member.record.id), member.record.incarnation, _CODE[member.state])
            for member in kernel.table
        ]
        kernel.effects.append(Respond(token, Digest(False, tuple(entries), kernel.swarm.digest())))

    def answer_delta(self, token: int, delta: Delta, told_by: str) -> BadRecordError | None:
        """Take what we lacked, and answer with what was wanted."""
        kernel = self._kernel
        bad = self._rumours.apply(delta.records, told_by)
        records: list[Record] = []
        for key in delta.want_swarm:
            setting = kernel.swarm.get(key)
            if setting is not None:
                records.append(setting)
        for node_id in delta.want_members[: kernel.config.max_records_per_answer]:
            records.extend(self._about(node_id))
        kernel.effects.append(Respond(token, GossipMessage(kernel.me.incarnation, tuple(records))))
        return bad

    def _about(self, node_id: str) -> tuple[Record, ...]:
        kernel = self._kernel
        if node_id == kernel.me.id:
            return (kernel.me,)
        member = kernel.table.get(node_id)
        if member is None:
            return ()
        return (member.record, *self._rumours.evidence(member))

    def view(self) -> tuple[Record, ...]:
        """Every living member's record and every setting: what a newcomer is given."""
        kernel = self._kernel
        living = [member.record for member in kernel.table.living]
        everything: tuple[Record, ...] = (*kernel.swarm.all(), kernel.me, *living)
        return everything[: kernel.config.max_records_per_answer]
