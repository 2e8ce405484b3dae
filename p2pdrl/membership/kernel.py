"""What the parts of the membership core share: the view, our own record, timers, pending calls.

`Rumours`, `Prober` and `Syncer` are built on one `Kernel`; `Membership` drives it. There is no I/O:
calls and answers leave as effects, and time comes in with each input.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import msgspec

from p2pdrl.membership.addresses import AddressPolicy
from p2pdrl.membership.broadcasts import BroadcastQueue
from p2pdrl.membership.events import Answered, Effect, EventKind, MemberEvent, Notified, Send, SendFailed
from p2pdrl.membership.identity import Signer
from p2pdrl.membership.messages import Message
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import Incarnation, MemberRecord, Record, Verifier, sign_member
from p2pdrl.membership.suspicion import Awareness
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.membership.table import Member, MemberTable, view_of

__all__ = ["Kernel", "Outcome"]

Outcome = Callable[[Answered | SendFailed], None]


class Kernel:
    """State and small tools that every part of the core uses.

    Args:
        config: the protocol's constants.
        signer: signs in our name.
        verifier: checks what others signed.
        policy: judges addresses that others claim.
        rng: every random choice.
        wall: seconds since the Unix epoch, to refuse incarnations from the future.
        record: our own record, unsigned.
        now: monotonic time.

    The hooks are set by `Membership`: ``on_news`` when there is something to gossip, ``on_joined``
    with each member that is new or came back, ``on_suspect`` when somebody else's word made a
    member suspect, ``on_expired`` when a suspicion ran out.
    """

    def __init__(
        self,
        *,
        config: MembershipConfig,
        signer: Signer,
        verifier: Verifier,
        policy: AddressPolicy,
        rng: random.Random,
        wall: Callable[[], float],
        record: MemberRecord,
        now: float,
    ) -> None:
        self.config = config
        self.signer = signer
        self.verifier = verifier
        self.policy = policy
        self.rng = rng
        self.wall = wall
        self.now = now
        self.me = sign_member(signer, verifier.swarm_id, record)
        self.table = MemberTable(config.max_members)
        self.queue = BroadcastQueue()
        self.awareness = Awareness(config.awareness_max)
        self.swarm = SwarmRecords(verifier)
        self.calls: dict[int, tuple[str, Outcome]] = {}
        self.effects: list[Effect] = []
        self.leaving = False
        self.refused_records = 0
        self.on_news: Callable[[], None] = lambda: None
        self.on_joined: Callable[[Member], None] = lambda member: None
        self.on_suspect: Callable[[Member], None] = lambda member: None
        self.on_expired: Callable[[Member], None] = lambda member: None
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    # Timers

    def arm(self, delay_s: float, run: Callable[[], None]) -> None:
        """Call ``run`` after ``delay_s``. There is no cancelling: ``run`` checks what it finds."""
        self._count += 1
        heapq.heappush(self._timers, (self.now + delay_s, self._count, run))

    def jitter(self, seconds: float) -> float:
        """``seconds`` ± the probe jitter."""
        spread = self.config.probe_jitter
        return seconds * self.rng.uniform(1 - spread, 1 + spread)

    def next_due(self) -> float | None:
        """When the earliest timer is due."""
        return self._timers[0][0] if self._timers else None

    def run_due(self) -> None:
        """Run every timer that is due."""
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()

    def shift_timers(self, seconds: float) -> None:
        """Move every timer into the future: time in which we were held up doesn't count."""
        self._timers = [(due + seconds, number, run) for due, number, run in self._timers]
        for member in self.table:
            if member.timer is not None:
                member.timer.started += seconds

    def stop_timers(self) -> None:
        """Forget every timer."""
        self._timers.clear()

    # Calls

    def send(self, member: Member, message: Message, deadline_s: float, outcome: Outcome) -> None:
        """Call ``member``; ``outcome`` gets the answer or the failure."""
        self._count += 1
        record = member.record
        self.calls[self._count] = (record.id, outcome)
        self.effects.append(Send(self._count, record.address, record.id, message, deadline_s))

    def finish(self, result: Answered | SendFailed) -> Member | None:
        """Give ``result`` to whoever made the call; return the member that answered."""
        call = self.calls.pop(result.call_id, None)
        if call is None:
            return None
        target, outcome = call
        outcome(result)
        member = self.table.get(target)
        if member is None or isinstance(result, SendFailed):
            return None
        member.last_seen = self.now
        return member

    # News

    def tell(self, kind: EventKind, member: Member, reason: str) -> None:
        """Tell the subscribers."""
        self.effects.append(Notified(MemberEvent(kind, view_of(member, self.now), reason)))

    def broadcast(self, record: Record) -> None:
        """Spread ``record``, once there is somebody to tell."""
        self.queue.put(record)
        self.on_news()

    def load(self, *first: Record) -> tuple[Record, ...]:
        """The records for one message: ``first``, then what is due in the queue."""
        config = self.config
        rest = self.queue.take(
            config.piggyback_records - len(first),
            config.piggyback_bytes,
            config.transmissions(self.table.living_total),
        )
        return (*first, *(record for record in rest if record not in first)) if first else rest

    # Ourselves

    def renew(self, at_least: Incarnation | None = None, **changes: object) -> None:
        """Raise our incarnation above ``at_least``, sign and spread our record."""
        held = self.me.incarnation
        base = held if at_least is None else max(held, at_least)
        raised = Incarnation(base.boot_ms, base.counter + 1)
        self.me = sign_member(
            self.signer,
            self.verifier.swarm_id,
            msgspec.structs.replace(self.me, incarnation=raised, **changes),
        )
        self.table.touch()
        self.broadcast(self.me)

    def name_of(self, node_id: str) -> str:
        """What people call that member."""
        if node_id == self.me.id:
            return self.me.name
        member = self.table.get(node_id)
        return node_id[:8] if member is None or not member.record.name else member.record.name
