"""The view: every other member this node knows of, tombstones included.

The core's parts share one `MemberTable`. It is bounded; a full one gives up its oldest tombstone.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.ids import PROTOCOL_VERSION
from p2pdrl.membership.broadcasts import BroadcastQueue
from p2pdrl.membership.events import (
    Answered,
    Effect,
    EventKind,
    Input,
    MemberEvent,
    MemberView,
    Notified,
    Reject,
    Request,
    Respond,
    Send,
    SendFailed,
    State,
    SwarmChanged,
    Tick,
    TwinFound,
    Welcomed,
    proves_absence,
    shows_life,
)
from p2pdrl.membership.identity import Signer, verify
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.messages import (
    Ack,
    Delta,
    Digest,
    DigestEntry,
    GossipMessage,
    JoinRequest,
    Message,
    Nack,
    Ping,
    PingReq,
    Sync,
    Welcome,
)
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import (
    AddressPolicy,
    BadRecordError,
    Incarnation,
    MemberRecord,
    Record,
    Suspicion,
    SwarmRecord,
    Verifier,
    sign_member,
    sign_suspicion,
)
from p2pdrl.membership.suspicion import Awareness, SuspicionTimer
from p2pdrl.membership.swarm_records import SwarmRecords

__all__ = [
    "Kernel",
    "LastLooks",
    "Member",
    "MemberTable",
    "Membership",
    "Outcome",
    "Prober",
    "Rounds",
    "Rumours",
    "Syncer",
    "open_core",
    "own_record",
    "view_of",
]

RTT_WEIGHT = 0.2
"""Weight of the newest round trip in the running mean."""


@dataclass(slots=True)
class Member:
    """One other member.

    Attributes:
        since: when it came into its state.
        reason: plain words for that state, without the age.
        evidence: the accusations held against it while suspect or dead; told to it, so that it
            can refute them.
        generation: counts suspicions; a timer of an earlier one is stale.
        looking: the last probe before it is given up is under way.
    """

    record: MemberRecord
    state: State
    since: float
    reason: str
    timer: SuspicionTimer | None = None
    evidence: list[Suspicion] = field(default_factory=list)
    generation: int = 0
    looking: bool = False
    rtt_s: float | None = None
    last_seen: float | None = None

    @property
    def living(self) -> bool:
        """Alive or suspect."""
        return self.state in ("alive", "suspect")

    def measured(self, rtt_s: float) -> None:
        """Fold a round trip into the running mean."""
        held = self.rtt_s
        self.rtt_s = rtt_s if held is None else held + RTT_WEIGHT * (rtt_s - held)


class MemberTable:
    """The other members, by id.

    Args:
        max_members: bound on their number.
    """

    def __init__(self, max_members: int) -> None:
        self._members: dict[str, Member] = {}
        self._max_members = max_members
        self._living: list[Member] | None = None
        self.version = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, node_id: str) -> Member | None:
        """The member with that id."""
        return self._members.get(node_id)

    @property
    def living(self) -> list[Member]:
        """The living others; don't change the list."""
        if self._living is None:
            self._living = [member for member in self._members.values() if member.living]
        return self._living

    @property
    def living_total(self) -> int:
        """The living, ourselves included: N of every formula."""
        return len(self.living) + 1

    def add(self, member: Member) -> bool:
        """Add a member that isn't there; False when there is no room for it."""
        if len(self._members) >= self._max_members:
            tombstones = [held for held in self._members.values() if not held.living]
            if not tombstones:
                return False
            self.remove(min(tombstones, key=lambda held: held.since).record.id)
        self._members[member.record.id] = member
        self.touch()
        return True

    def remove(self, node_id: str) -> None:
        """Forget a member."""
        del self._members[node_id]
        self.touch()

    def touch(self) -> None:
        """Note that some member's state or incarnation changed."""
        self._living = None
        self.version += 1

    def sample(self, count: int, rng: random.Random, keep: Callable[[Member], bool]) -> list[Member]:
        """Up to ``count`` of the living that ``keep`` accepts, drawn without replacement."""
        fit = [member for member in self.living if keep(member)]
        return fit if len(fit) <= count else rng.sample(fit, count)


def view_of(member: Member, now: float) -> MemberView:
    """``member`` as told outside the core."""
    record = member.record
    reason = member.reason
    if member.state in ("suspect", "dead"):
        reason = f"{reason} ({max(0.0, now - member.since):.0f} s ago)"
    return MemberView(
        id=record.id,
        name=record.name,
        address=record.address,
        state=member.state,
        state_reason=reason,
        incarnation=record.incarnation,
        rtt_s=member.rtt_s,
        last_seen_s=None if member.last_seen is None else max(0.0, now - member.last_seen),
        tags=dict(record.tags),
        suspected_by=member.timer.accusers if member.timer is not None and member.state == "suspect" else (),
        protocol=record.protocol,
        public_key=record.public_key,
    )


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


MAX_CORRECTIONS = 4
"""Most records that correct the teller in one answer."""


class Rumours:
    """Applies records to the view.

    Args:
        kernel: what the core's parts share.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._corrections: dict[str, MemberRecord | SwarmRecord] = {}

    def apply(
        self, records: Iterable[Record], told_by: str = "", trusted: bool = False
    ) -> BadRecordError | None:
        """Take in ``records``; bad ones are skipped and counted.

        Args:
            records: in any order; member records are taken first, so accusers are known.
            told_by: IP address of the teller.
            trusted: it is our welcome into the swarm.

        Returns:
            The first bad record's error, if any.
        """
        bad: BadRecordError | None = None
        self._corrections.clear()
        for record in sorted(records, key=lambda record: isinstance(record, Suspicion)):
            try:
                if isinstance(record, MemberRecord):
                    self._member(record, told_by)
                elif isinstance(record, Suspicion):
                    self._suspicion(record)
                else:
                    self._setting(record, trusted)
            except BadRecordError as error:
                self._kernel.refused_records += 1
                bad = bad or error
        return bad

    def corrections(self) -> tuple[MemberRecord | SwarmRecord, ...]:
        """What the teller of the last batch didn't know yet; ride back on the answer."""
        return tuple(self._corrections.values())[:MAX_CORRECTIONS]

    def evidence(self, member: Member) -> tuple[Suspicion, ...]:
        """What to tell ``member`` so that it can refute; empty while it is alive."""
        return tuple(member.evidence[:2]) if member.state in ("suspect", "dead") else ()

    # Member records

    def _member(self, record: MemberRecord, told_by: str) -> None:
        kernel = self._kernel
        if record.id == kernel.me.id:
            self._about_me(record)
            return
        held = kernel.table.get(record.id)
        if held is not None and record.incarnation <= held.record.incarnation:
            if record.incarnation < held.record.incarnation:
                self._corrections[record.id] = held.record
            says_left = record.state == "left" and held.state != "left"
            if not (says_left and record.incarnation == held.record.incarnation):
                return
        kernel.verifier.check_member(record, kernel.wall())
        refusal = None if record.state == "left" else kernel.policy.refuse(record.address, told_by)
        if refusal is not None:
            raise BadRecordError(400, refusal)
        if held is None:
            self._newcomer(record)
        else:
            self._newer(held, record)
        kernel.broadcast(record)

    def _about_me(self, record: MemberRecord) -> None:
        kernel = self._kernel
        me = kernel.me
        if kernel.leaving or record.incarnation <= me.incarnation:
            return
        kernel.verifier.check_member(record, kernel.wall())
        is_twin = record.incarnation.boot_ms > me.incarnation.boot_ms and record.address != me.address
        if is_twin and record.state == "alive":
            kernel.effects.append(TwinFound(record.address))
            return
        kernel.renew(record.incarnation)

    def _newcomer(self, record: MemberRecord) -> None:
        kernel = self._kernel
        if record.state == "left":
            kernel.table.add(Member(record, "left", kernel.now, "left"))
            return
        member = Member(record, "alive", kernel.now, "joined")
        if not kernel.table.add(member):
            raise BadRecordError(429, f"the view is full: {len(kernel.table)} members")
        kernel.tell("joined", member, "joined")
        kernel.on_joined(member)

    def _newer(self, held: Member, record: MemberRecord) -> None:
        kernel = self._kernel
        before, state = held.record, held.state
        held.record, held.evidence, held.timer, held.looking = record, [], None, False
        kernel.table.touch()
        if record.state == "left":
            if state != "left":
                self._enter(held, "left", "left")
            return
        rebooted = record.incarnation.boot_ms > before.incarnation.boot_ms
        if state == "left" or rebooted:
            where = f" at {record.address}" if record.address != before.address else ""
            self._enter(held, "alive", "came back" if state == "left" else f"restarted{where}", kind="joined")
            kernel.on_joined(held)
        elif state != "alive":
            self._enter(held, "alive", f"refuted that it was {state}")
            kernel.on_joined(held)
        elif (record.name, record.address, record.tags) != (before.name, before.address, before.tags):
            moved = record.address != before.address
            kernel.tell("updated", held, f"moved to {record.address}" if moved else "changed its tags")

    def _enter(self, member: Member, state: State, reason: str, kind: EventKind | None = None) -> None:
        kernel = self._kernel
        member.state = state
        member.since = kernel.now
        member.reason = reason
        kernel.table.touch()
        kernel.tell(kind or state, member, reason)

    # Suspicions

    def _suspicion(self, suspicion: Suspicion) -> None:
        kernel = self._kernel
        if suspicion.subject == kernel.me.id:
            self._accused(suspicion)
            return
        member = kernel.table.get(suspicion.subject)
        if member is None or suspicion.incarnation != member.record.incarnation:
            if member is not None and suspicion.incarnation < member.record.incarnation:
                self._corrections[suspicion.subject] = member.record
            return
        if suspicion.accuser in (kernel.me.id, suspicion.subject) or member.state == "left":
            return
        if member.state == "dead":
            self._pass_on(member, suspicion)
            return
        timer = member.timer
        dead = suspicion.verdict == "dead"
        counted = timer is not None and (timer.settled or suspicion.accuser in timer.accusers)
        accuser = kernel.table.get(suspicion.accuser)
        if accuser is None or (counted and not dead):
            return
        kernel.verifier.check_suspicion(suspicion, accuser.record.public_key)
        self._count_accuser(member, suspicion)
        if dead:
            self._count_burier(member, suspicion)
        if timer is None:
            kernel.on_suspect(member)

    def _buriers_needed(self) -> int:
        """How many must have given a member up before we look at once."""
        kernel = self._kernel
        return max(2, min(kernel.config.suspicion_confirmations + 1, kernel.table.living_total - 2))

    def _pass_on(self, member: Member, suspicion: Suspicion) -> None:
        """We hold it dead already: help the verdicts of others reach those who don't."""
        kernel = self._kernel
        accuser = kernel.table.get(suspicion.accuser)
        known = {verdict.accuser for verdict in member.evidence}
        if accuser is None or suspicion.verdict != "dead" or suspicion.accuser in known:
            return
        if len(known) > self._buriers_needed():
            return
        kernel.verifier.check_suspicion(suspicion, accuser.record.public_key)
        member.evidence.append(suspicion)
        kernel.broadcast(suspicion)

    def _count_burier(self, member: Member, suspicion: Suspicion) -> None:
        kernel = self._kernel
        needed = self._buriers_needed()
        if member.timer is not None and member.timer.bury(suspicion.accuser, needed, kernel.now):
            kernel.broadcast(suspicion)
            self._arm(member)

    def _accused(self, suspicion: Suspicion) -> None:
        kernel = self._kernel
        if kernel.leaving or suspicion.incarnation != kernel.me.incarnation:
            self._corrections[kernel.me.id] = kernel.me
            return
        accuser = kernel.table.get(suspicion.accuser)
        if accuser is not None:
            kernel.verifier.check_suspicion(suspicion, accuser.record.public_key)
        kernel.awareness.add(1)
        kernel.renew()

    def accuse(self, member: Member, incarnation: Incarnation, reason: str) -> None:
        """Our own probe of ``member`` in ``incarnation`` failed."""
        timer = member.timer
        if not member.living or member.record.incarnation != incarnation:
            return
        if timer is not None and (timer.settled or self._kernel.me.id in timer.accusers):
            return
        self._count_accuser(member, self._signed(member, "suspect", reason))

    def _signed(self, member: Member, verdict: Literal["suspect", "dead"], reason: str) -> Suspicion:
        kernel = self._kernel
        record = member.record
        plain = Suspicion(record.id, record.incarnation, kernel.me.id, verdict, reason[:200])
        return sign_suspicion(kernel.signer, kernel.verifier.swarm_id, plain)

    def _count_accuser(self, member: Member, suspicion: Suspicion) -> None:
        kernel = self._kernel
        if member.timer is None:
            self._begin(member, suspicion)
        elif not member.timer.confirm(suspicion.accuser):
            return
        member.evidence.append(suspicion)
        kernel.broadcast(suspicion)
        self._arm(member)

    def _begin(self, member: Member, suspicion: Suspicion) -> None:
        kernel, config = self._kernel, self._kernel.config
        total = kernel.table.living_total
        needed = max(0, min(config.suspicion_confirmations, total - 2))
        member.generation += 1
        member.evidence = []
        member.timer = SuspicionTimer(
            suspicion.accuser,
            needed,
            config.suspicion_min_s(total),
            config.suspicion_max_s(total),
            kernel.now,
        )
        own = suspicion.accuser == kernel.me.id
        told = suspicion.reason if own else f"{kernel.name_of(suspicion.accuser)} says: {suspicion.reason}"
        self._enter(member, "suspect", told)

    def _arm(self, member: Member) -> None:
        timer = member.timer
        if timer is None:
            return
        node_id, generation = member.record.id, member.generation
        self._kernel.arm(
            max(0.0, timer.deadline - self._kernel.now), lambda: self._expired(node_id, generation)
        )

    def _suspect(self, node_id: str, generation: int) -> Member | None:
        """The member, if it is still under the suspicion of that generation."""
        member = self._kernel.table.get(node_id)
        if member is None or member.state != "suspect" or member.generation != generation:
            return None
        return member

    def _expired(self, node_id: str, generation: int) -> None:
        """The timer ran out: look once more ourselves, as whoever answers isn't dead."""
        kernel = self._kernel
        member = self._suspect(node_id, generation)
        if member is None or member.timer is None or member.looking:
            return
        if kernel.now < member.timer.deadline - 1e-9:
            return  # its deadline moved on; another timer stands there
        member.looking = True
        kernel.on_expired(member)

    def looked(self, node_id: str, generation: int, found: bool) -> None:
        """The last look at a suspect is over: give it up, or give it more time."""
        member = self._suspect(node_id, generation)
        if member is None or member.timer is None:
            return
        member.looking = False
        if found:
            member.timer.restart(self._kernel.now)
            self._arm(member)
        else:
            self._bury(member)

    def _bury(self, member: Member) -> None:
        kernel = self._kernel
        verdict = self._signed(member, "dead", member.reason)
        member.evidence = [verdict]
        member.timer = None
        self._enter(member, "dead", member.reason)
        kernel.queue.forget_suspicions(member.record.id)
        kernel.broadcast(verdict)

    # Settings

    def _setting(self, record: SwarmRecord, trusted: bool) -> None:
        kernel = self._kernel
        if kernel.swarm.merge(record, trusted):
            kernel.table.touch()
            kernel.broadcast(record)
            kernel.effects.append(SwarmChanged(record))
            return
        held = kernel.swarm.get(record.key)
        newer = held is not None and (held.epoch, held.proposer) > (record.epoch, record.proposer)
        if held is not None and newer and record.lineage == held.lineage:
            self._corrections[record.key] = held


@dataclass(slots=True)
class _Look:
    """One last look under way: answers still to come, and whether any showed life."""

    node_id: str
    generation: int
    open: int = 0
    over: bool = False


class LastLooks:
    """Looks at suspects before they are given up.

    Args:
        kernel: what the core's parts share.
        rumours: takes the verdict, and the records that ride on answers.
    """

    def __init__(self, kernel: Kernel, rumours: Rumours) -> None:
        self._kernel = kernel
        self._rumours = rumours

    def start(self, member: Member) -> None:
        """Look at ``member``, whose suspicion has run out."""
        look = _Look(member.record.id, member.generation)
        self._ping(member, lambda result: self._first(look, member, result))

    def _ping(self, member: Member, outcome: Outcome) -> None:
        kernel = self._kernel
        evidence = self._rumours.evidence(member)
        ping = Ping(kernel.me.incarnation, member.record.incarnation, kernel.load(*evidence))
        kernel.send(member, ping, self._deadline_s(), outcome)

    def _deadline_s(self) -> float:
        return self._kernel.awareness.scale(self._kernel.config.probe_timeout_s)

    def _first(self, look: _Look, member: Member, result: Answered | SendFailed) -> None:
        self._learn(result)
        if shows_life(result) or self._is_our_trouble(result):
            self._end(look, found=True)
        elif isinstance(result, SendFailed) and proves_absence(result):
            self._end(look, found=False)
        else:
            self._ask_around(look, member)

    def _ask_around(self, look: _Look, member: Member) -> None:
        kernel = self._kernel
        relays = kernel.table.sample(
            2 * kernel.config.indirect_probes, kernel.rng, lambda other: other.state == "alive"
        )
        look.open = len(relays) + 1
        self._ping(member, lambda result: self._second(look, result))
        for relay in relays:
            request = PingReq(look.node_id, member.record.incarnation, kernel.load())
            kernel.send(relay, request, self._deadline_s(), lambda result: self._second(look, result))

    def _second(self, look: _Look, result: Answered | SendFailed) -> None:
        self._learn(result)
        look.open -= 1
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._end(look, found=True)
        elif look.open == 0:
            self._end(look, found=False)

    def _learn(self, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, Ack | Nack):
            self._rumours.apply(result.message.records, result.told_by)

    @staticmethod
    def _is_our_trouble(result: Answered | SendFailed) -> bool:
        return isinstance(result, SendFailed) and result.kind == "local"

    def _end(self, look: _Look, found: bool) -> None:
        if not look.over:
            look.over = True
            self._rumours.looked(look.node_id, look.generation, found)


LOOK_AHEAD = 128
"""Members of the round among which the most silent is probed first."""


@dataclass(slots=True)
class _Probe:
    """One probe under way; ``failed`` once the direct ping did."""

    target: str
    incarnation: Incarnation
    started: float
    relays_asked: int = 0
    nacks: int = 0
    silent: int = 0
    indirect: bool = False
    failed: bool = False


class Prober:
    """Probes members in a shuffled round, and probes on behalf of others.

    Args:
        kernel: what the core's parts share.
        rumours: takes the records that ride on answers, and our accusations.
    """

    def __init__(self, kernel: Kernel, rumours: Rumours) -> None:
        self._kernel = kernel
        self._rumours = rumours
        self._ring: list[str] = []
        self._probes: dict[int, _Probe] = {}
        self._count = 0

    # Rounds

    def enter(self, member: Member) -> None:
        """Give a newcomer a random place in the present round."""
        self._ring.insert(self._kernel.rng.randint(0, len(self._ring)), member.record.id)

    def probe_next(self) -> None:
        """Probe the next living member of the round."""
        member = self._next()
        if member is not None:
            self.probe(member)

    def _next(self) -> Member | None:
        """Of the next few of the round, the one that we haven't heard from for longest.

        Everybody is probed once a round all the same; but who fell silent comes first, which cuts the
        tail of the time to the first probe that fails.
        """
        table = self._kernel.table
        for fresh in (False, True):
            if fresh:
                self._ring = [member.record.id for member in table.living]
                self._kernel.rng.shuffle(self._ring)
            while self._ring:
                node_id = min(self._ring[-LOOK_AHEAD:], key=self._heard)
                self._ring.remove(node_id)
                member = table.get(node_id)
                if member is not None and member.living:
                    return member
        return None

    def _heard(self, node_id: str) -> float:
        member = self._kernel.table.get(node_id)
        return 0.0 if member is None or member.last_seen is None else member.last_seen

    def second_opinion(self, member: Member) -> None:
        """Somebody accuses ``member``: maybe look ourselves, soon.

        About ``second_opinions`` of all members do, so that a death is confirmed, or refuted, fast.
        """
        kernel, config = self._kernel, self._kernel.config
        others = max(1, kernel.table.living_total - 2)
        if kernel.rng.random() * others >= config.second_opinions:
            return
        node_id, generation = member.record.id, member.generation

        def look() -> None:
            held = kernel.table.get(node_id)
            if held is None or held.timer is None or held.generation != generation:
                return
            if kernel.me.id not in held.timer.accusers:
                self.probe(held)

        kernel.arm(kernel.rng.uniform(0.0, 0.25) * config.probe_interval_s, look)

    def forget(self) -> None:
        """Drop every probe under way without a verdict: we were held up ourselves."""
        self._probes.clear()

    # One probe

    def probe(self, member: Member) -> None:
        """Start one probe of ``member``."""
        kernel, config = self._kernel, self._kernel.config
        self._count += 1
        number, record = self._count, member.record
        self._probes[number] = _Probe(record.id, record.incarnation, kernel.now)
        window_s = kernel.awareness.scale(config.probe_interval_s)
        ping = Ping(kernel.me.incarnation, record.incarnation, kernel.load(*self._rumours.evidence(member)))
        kernel.send(member, ping, window_s, lambda result: self._direct(number, result))
        kernel.arm(config.probe_timeout_s, lambda: self._ask_relays(number))
        kernel.arm(window_s, lambda: self._verdict(number))

    def _direct(self, number: int, result: Answered | SendFailed) -> None:
        probe = self._probes.get(number)
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            member = None if probe is None else self._kernel.table.get(probe.target)
            if probe is not None and member is not None:
                member.measured(self._kernel.now - probe.started)
            self._good(number, result, result.message)
            return
        if probe is None:
            return
        if isinstance(result, SendFailed) and proves_absence(result):
            del self._probes[number]
            member = self._kernel.table.get(probe.target)
            if member is not None:
                self._rumours.accuse(member, probe.incarnation, result.reason)
        elif shows_life(result):
            del self._probes[number]
        else:
            if isinstance(result, SendFailed) and result.kind == "local":
                self._kernel.awareness.add(1)
            probe.failed = True
            self._ask_relays(number)
            self._settle(number)

    def _ask_relays(self, number: int) -> None:
        kernel = self._kernel
        probe = self._probes.get(number)
        if probe is None or probe.indirect:
            return
        probe.indirect = True
        relays = kernel.table.sample(
            kernel.config.indirect_probes,
            kernel.rng,
            lambda member: member.state == "alive" and member.record.id != probe.target,
        )
        probe.relays_asked = len(relays)
        deadline_s = kernel.awareness.scale(kernel.config.probe_timeout_s)
        for relay in relays:
            request = PingReq(probe.target, probe.incarnation, kernel.load())
            kernel.send(relay, request, deadline_s, lambda result: self._relayed(number, result))

    def _relayed(self, number: int, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._good(number, result, result.message)
            return
        probe = self._probes.get(number)
        if isinstance(result, Answered) and isinstance(result.message, Nack):
            self._rumours.apply(result.message.records, result.told_by)
            if probe is not None:
                probe.nacks += 1
        elif probe is not None:
            probe.silent += 1
        self._settle(number)

    def _good(self, number: int, result: Answered, ack: Ack) -> None:
        probe = self._probes.pop(number, None)
        self._rumours.apply(ack.records, result.told_by)
        if probe is not None:
            self._kernel.awareness.add(-1)

    def _settle(self, number: int) -> None:
        """Judge early when nothing more can come."""
        probe = self._probes.get(number)
        if probe is not None and probe.failed and probe.nacks + probe.silent == probe.relays_asked > 0:
            self._verdict(number)

    def _verdict(self, number: int) -> None:
        kernel = self._kernel
        probe = self._probes.pop(number, None)
        if probe is None:
            return
        missing = probe.relays_asked - probe.nacks
        kernel.awareness.add(missing if probe.relays_asked else 1)
        member = kernel.table.get(probe.target)
        if member is None:
            return
        reason = "no answer to probe"
        if probe.relays_asked:
            reason += f"; {probe.nacks} of {probe.relays_asked} relays could not reach it either"
        self._rumours.accuse(member, probe.incarnation, reason)

    # Answering

    def answer_ping(self, token: int, sender: str, ping: Ping, told_by: str) -> None:
        """Answer a probe of ourselves: with our record when it is news, and with accusations."""
        kernel = self._kernel
        self._rumours.apply(ping.records, told_by)
        first = (kernel.me,) if ping.known < kernel.me.incarnation else ()
        kernel.effects.append(Respond(token, self.ack(sender, ping.incarnation, *first)))

    def ack(self, sender: str, incarnation: Incarnation, *first: Record) -> Ack:
        """An ack to ``sender``, who said that it is in ``incarnation``."""
        kernel = self._kernel
        member = kernel.table.get(sender)
        accusations: tuple[Suspicion, ...] = ()
        if member is not None and member.record.incarnation == incarnation:
            accusations = self._rumours.evidence(member)
        want = member is None or member.record.incarnation < incarnation
        records = kernel.load(*first, *self._rumours.corrections(), *accusations)
        return Ack(kernel.me.incarnation, records, want)

    def answer_ping_req(self, token: int, request: PingReq, told_by: str) -> None:
        """Probe ``request.target`` for somebody else; only at the address that we hold."""
        kernel = self._kernel
        self._rumours.apply(request.records, told_by)
        member = kernel.table.get(request.target)
        if member is None or member.state == "left":
            kernel.effects.append(Respond(token, Nack("not in my view", kernel.load())))
            return
        record = member.record
        if record.incarnation > request.known and member.state == "alive":
            kernel.effects.append(Respond(token, Ack(record.incarnation, kernel.load(record))))
            return
        if record.incarnation == request.known and member.state == "dead":
            kernel.effects.append(Respond(token, Nack("given up here too", kernel.load())))
            return
        known = min(request.known, record.incarnation)

        def relay(result: Answered | SendFailed) -> None:
            if isinstance(result, Answered) and isinstance(result.message, Ack):
                ack = result.message
                self._rumours.apply(ack.records, result.told_by)
                newer = (member.record,) if member.record.incarnation > request.known else ()
                answer: Ack | Nack = Ack(ack.incarnation, kernel.load(*newer))
            else:
                reason = result.reason if isinstance(result, SendFailed) else "a strange answer"
                answer = Nack(reason[:200], kernel.load())
                if isinstance(result, SendFailed) and proves_absence(result):
                    self._rumours.accuse(member, record.incarnation, reason)
            kernel.effects.append(Respond(token, answer))

        ping = Ping(kernel.me.incarnation, known, kernel.load(*self._rumours.evidence(member)))
        kernel.send(member, ping, kernel.config.probe_timeout_s * kernel.config.nack_fraction, relay)

    def introduce(self, member: Member) -> None:
        """Send our own record to a member that asked for it."""
        kernel = self._kernel
        gossip = GossipMessage(kernel.me.incarnation, kernel.load(kernel.me))
        kernel.send(member, gossip, kernel.config.probe_interval_s, lambda result: None)


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


EXPIRE_EVERY_S = 60.0
TOLD_AT_ONCE = 32
"""Calls under way while a setting is told to everybody."""
TELL_TRIES = 5
TELL_AGAIN_S = 1.0
"""A member whose mode is older is told ours at most this often."""


class Rounds:
    """The repeating work of one node.

    Args:
        kernel: what the core's parts share.
        rumours: takes the records that ride on answers.
        prober: probes the next member.
        syncer: compares views.
    """

    def __init__(self, kernel: Kernel, rumours: Rumours, prober: Prober, syncer: Syncer) -> None:
        self._kernel = kernel
        self._rumours = rumours
        self._prober = prober
        self._syncer = syncer
        self._gossiping = False
        self._told_at: dict[str, float] = {}

    def start(self) -> None:
        """Arm the first of each round, at random phases."""
        kernel, config = self._kernel, self._kernel.config
        kernel.arm(kernel.rng.uniform(0.0, config.probe_interval_s), self._probe_round)
        kernel.arm(kernel.rng.uniform(0.2, 1.0) * config.sync_interval_s, self._sync_round)
        kernel.arm(kernel.rng.uniform(0.2, 1.0) * config.reconnect_interval_s, self._reconnect_round)
        kernel.arm(EXPIRE_EVERY_S, self._expire_round)

    def _probe_round(self) -> None:
        kernel = self._kernel
        self._prober.probe_next()
        interval_s = kernel.awareness.scale(kernel.jitter(kernel.config.probe_interval_s))
        kernel.arm(interval_s, self._probe_round)

    def start_gossip(self) -> None:
        """There is news: gossip until everything was told often enough."""
        if not self._gossiping and not self._kernel.leaving:
            self._gossiping = True
            kernel = self._kernel
            kernel.arm(kernel.rng.uniform(0.1, 0.5) * kernel.config.gossip_interval_s, self._gossip_round)

    def _gossip_round(self) -> None:
        kernel, config = self._kernel, self._kernel.config
        fit = kernel.table.sample(config.gossip_fanout, kernel.rng, lambda member: member.state == "alive")
        for member in fit:
            records = kernel.load()
            if records:
                gossip = GossipMessage(kernel.me.incarnation, records)
                kernel.send(member, gossip, config.probe_interval_s, self._gossiped)
        self._gossiping = len(kernel.queue) > 0
        if self._gossiping:
            kernel.arm(kernel.jitter(config.gossip_interval_s), self._gossip_round)

    def _gossiped(self, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._rumours.apply(result.message.records, result.told_by)

    def tell_all(self, record: SwarmRecord) -> None:
        """Tell a new setting to every living member at once, besides the gossip.

        Gossip takes some rounds, and longer on a busy machine; nodes that still follow the old mode work with
        each other meanwhile. Whoever doesn't answer is tried again a few times.
        """
        kernel = self._kernel
        waiting = [(member.record.id, 1) for member in kernel.table.living]
        kernel.rng.shuffle(waiting)

        def tell_next() -> None:
            while waiting and kernel.swarm.get(record.key) == record and not kernel.leaving:
                if tell(*waiting.pop()):
                    return

        def tell(node_id: str, tries: int) -> bool:
            member = kernel.table.get(node_id)
            if member is None or not member.living:
                return False
            gossip, deadline_s = (
                GossipMessage(kernel.me.incarnation, (record,)),
                2 * kernel.config.probe_interval_s,
            )
            kernel.send(member, gossip, deadline_s, lambda result: told(result, node_id, tries))
            return True

        def told(result: Answered | SendFailed, node_id: str, tries: int) -> None:
            self._gossiped(result)
            if not isinstance(result, Answered) and tries < TELL_TRIES:
                kernel.arm(kernel.config.gossip_interval_s, lambda: again(node_id, tries + 1))
            tell_next()

        def again(node_id: str, tries: int) -> None:
            waiting.append((node_id, tries))
            tell_next()

        for _ in range(min(TOLD_AT_ONCE, len(waiting))):
            tell_next()

    def tell_settings(self, member: Member) -> None:
        """Tell a member that seems to follow older settings ours; its ack brings those that are newer."""
        kernel = self._kernel
        settings, node_id = kernel.swarm.all(), member.record.id
        if not settings or kernel.now < self._told_at.get(node_id, float("-inf")) + TELL_AGAIN_S:
            return
        self._told_at = {peer: at for peer, at in self._told_at.items() if at > kernel.now - TELL_AGAIN_S}
        self._told_at[node_id] = kernel.now
        gossip = GossipMessage(kernel.me.incarnation, settings)
        kernel.send(member, gossip, 2 * kernel.config.probe_interval_s, self._gossiped)

    def _sync_round(self) -> None:
        kernel = self._kernel
        for member in kernel.table.sample(1, kernel.rng, lambda member: member.state == "alive"):
            self._syncer.run(member)
        kernel.arm(kernel.jitter(kernel.config.sync_every_s(kernel.table.living_total)), self._sync_round)

    def _reconnect_round(self) -> None:
        kernel, config = self._kernel, self._kernel.config
        dead = [member for member in kernel.table if member.state == "dead"]
        if dead and kernel.rng.random() * max(1, len(kernel.table.living)) < len(dead):
            self._reconnect(kernel.rng.choice(dead))
        kernel.arm(kernel.jitter(config.reconnect_interval_s), self._reconnect_round)

    def _reconnect(self, member: Member) -> None:
        """Try a dead member; when it answers it refutes its death, and the views are merged."""
        kernel = self._kernel
        evidence = self._rumours.evidence(member)
        ping = Ping(kernel.me.incarnation, member.record.incarnation, kernel.load(*evidence))

        def answered(result: Answered | SendFailed) -> None:
            if isinstance(result, Answered) and isinstance(result.message, Ack):
                self._rumours.apply(result.message.records, result.told_by)
                if member.living:
                    self._syncer.run(member)

        kernel.send(member, ping, 2 * kernel.config.probe_timeout_s, answered)

    def _expire_round(self) -> None:
        kernel, config = self._kernel, self._kernel.config
        keep_s = {"dead": config.dead_tombstone_s, "left": config.left_tombstone_s}
        expired = [
            member.record.id
            for member in kernel.table
            if not member.living and kernel.now - member.since > keep_s[member.state]
        ]
        for node_id in expired:
            kernel.table.remove(node_id)
        kernel.arm(EXPIRE_EVERY_S, self._expire_round)


class Membership:
    """One node's view of the swarm and its part in keeping everybody's.

    Args:
        config: the protocol's constants.
        signer: signs in our name.
        verifier: checks what others signed.
        record: our own record (`own_record`), unsigned.
        rng: every random choice.
        wall: seconds since the Unix epoch.
        now: monotonic time, seconds.
        policy: judges addresses that others claim.
    """

    def __init__(
        self,
        *,
        config: MembershipConfig,
        signer: Signer,
        verifier: Verifier,
        record: MemberRecord,
        rng: random.Random,
        wall: Callable[[], float],
        now: float,
        policy: AddressPolicy | None = None,
    ) -> None:
        kernel = Kernel(
            config=config,
            signer=signer,
            verifier=verifier,
            policy=policy or AddressPolicy(),
            rng=rng,
            wall=wall,
            record=record,
            now=now,
        )
        self._kernel = kernel
        self._rumours = Rumours(kernel)
        self._prober = Prober(kernel, self._rumours)
        self._syncer = Syncer(kernel, self._rumours)
        self._last_looks = LastLooks(kernel, self._rumours)
        self._rounds = Rounds(kernel, self._rumours, self._prober, self._syncer)
        kernel.on_news = self._rounds.start_gossip
        kernel.on_joined = self._prober.enter
        kernel.on_suspect = self._prober.second_opinion
        kernel.on_expired = self._last_looks.start
        self._rounds.start()

    # What others read

    @property
    def me(self) -> MemberRecord:
        """Our own signed record."""
        return self._kernel.me

    @property
    def config(self) -> MembershipConfig:
        """The protocol's constants."""
        return self._kernel.config

    @property
    def health(self) -> int:
        """Our own local health: 0 is well, 7 is worst."""
        return self._kernel.awareness.score

    @property
    def refused_records(self) -> int:
        """Records refused so far: forged, out of bounds or from the future."""
        return self._kernel.refused_records

    @property
    def swarm(self) -> SwarmRecords:
        """Settings of the whole swarm."""
        return self._kernel.swarm

    def members(self, now: float) -> list[MemberView]:
        """Everybody known, ourselves first, tombstones included."""
        me = self._kernel.me
        own = MemberView(
            id=me.id,
            name=me.name,
            address=me.address,
            state="left" if self._kernel.leaving else "alive",
            state_reason="this node",
            incarnation=me.incarnation,
            rtt_s=0.0,
            last_seen_s=0.0,
            tags=dict(me.tags),
            suspected_by=(),
            protocol=me.protocol,
            public_key=me.public_key,
            is_self=True,
        )
        return [own, *(view_of(member, now) for member in self._kernel.table)]

    def member(self, node_id: str, now: float) -> MemberView | None:
        """One other member, or None."""
        held = self._kernel.table.get(node_id)
        return None if held is None else view_of(held, now)

    def alive_ids(self) -> list[str]:
        """Ids of the alive (not the suspect), ourselves included, sorted."""
        alive = [member.record.id for member in self._kernel.table.living if member.state == "alive"]
        return sorted([self._kernel.me.id, *alive])

    def lives(self, address: str, node_id: str | None) -> bool:
        """True when a living other member has that address or that id."""
        return any(
            member.record.id == node_id or member.record.address == address
            for member in self._kernel.table.living
        )

    def next_wakeup(self) -> float | None:
        """Monotonic time at which `handle` wants a `Tick`."""
        return self._kernel.next_due()

    # What drives it

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take in one input at monotonic time ``now`` and return what is to be done."""
        kernel = self._kernel
        self._advance(now)
        if isinstance(event, Answered | SendFailed):
            self._finished(event)
        elif isinstance(event, Request):
            self._request(event)
        elif isinstance(event, Welcomed):
            self._welcomed(event)
        kernel.run_due()
        return self._flush()

    def _advance(self, now: float) -> None:
        """Move to ``now``; when a timer is late, we were held up, and nobody else is to blame."""
        kernel = self._kernel
        kernel.now = max(now, kernel.now)
        due = kernel.next_due()
        late_s = 0.0 if due is None else kernel.now - due
        if late_s <= kernel.config.lag_s:
            return
        kernel.awareness.add(1)
        kernel.shift_timers(late_s)
        if late_s > kernel.config.probe_timeout_s:
            self._prober.forget()

    def _flush(self) -> list[Effect]:
        effects, self._kernel.effects = self._kernel.effects, []
        return effects

    def _finished(self, event: Answered | SendFailed) -> None:
        member = self._kernel.finish(event)
        if member is None or not isinstance(event, Answered) or not isinstance(event.message, Ack):
            return
        if event.message.want_record:
            self._prober.introduce(member)

    def _request(self, request: Request) -> None:
        kernel = self._kernel
        member = kernel.table.get(request.sender)
        if member is not None:
            member.last_seen = kernel.now
        token, message, told_by = request.token, request.message, request.told_by
        bad: BadRecordError | None = None
        if isinstance(message, Ping):
            self._prober.answer_ping(token, request.sender, message, told_by)
        elif isinstance(message, PingReq):
            self._prober.answer_ping_req(token, message, told_by)
        elif isinstance(message, GossipMessage):
            bad = self._rumours.apply(message.records, told_by)
            ack = self._prober.ack(request.sender, message.incarnation)
            kernel.effects.append(Respond(token, ack))
        elif isinstance(message, Sync):
            self._syncer.answer_sync(token, message, told_by)
        elif isinstance(message, Delta):
            bad = self._syncer.answer_delta(token, message, told_by)
        elif isinstance(message, JoinRequest):
            bad = self._join(token, message, told_by)
        else:
            kernel.effects.append(Reject(token, 400, "that isn't a request"))
        if bad is not None:
            self._refuse(token, bad)

    def _refuse(self, token: int, bad: BadRecordError) -> None:
        kernel = self._kernel
        kernel.effects = [
            effect for effect in kernel.effects if not (isinstance(effect, Respond) and effect.token == token)
        ]
        kernel.effects.append(Reject(token, bad.status, str(bad)))

    def _join(self, token: int, join: JoinRequest, told_by: str) -> BadRecordError | None:
        kernel = self._kernel
        bad = self._rumours.apply((join.record,), told_by)
        if bad is not None:
            return bad
        member = kernel.table.get(join.record.id)
        accusations = () if member is None else self._rumours.evidence(member)
        welcome = Welcome((*accusations, *self._syncer.view()), observed_host=told_by)
        kernel.effects.append(Respond(token, welcome))
        return None

    def _welcomed(self, welcomed: Welcomed) -> None:
        kernel = self._kernel
        self._rumours.apply(welcomed.message.records, welcomed.told_by, trusted=True)
        member = kernel.table.get(welcomed.sender)
        if member is not None:
            member.last_seen = kernel.now
            self._syncer.run(member)

    # What the daemon asks for

    def update_self(
        self, now: float, address: str | None = None, tags: dict[str, str] | None = None
    ) -> list[Effect]:
        """Change what we say about ourselves, and spread it."""
        self._advance(now)
        changes: dict[str, Any] = {}
        if address is not None and address != self._kernel.me.address:
            changes["address"] = address
        if tags is not None and tags != self._kernel.me.tags:
            changes["tags"] = dict(tags)
        if changes:
            self._kernel.renew(**changes)
        return self._flush()

    def propose(self, key: str, value: Any, now: float) -> tuple[SwarmRecord, list[Effect]]:
        """Write a setting of the whole swarm.

        Raises:
            ValueError: the value is longer than 8 KiB, or there is no such setting.
        """
        self._advance(now)
        kernel = self._kernel
        record = kernel.swarm.compose(key, value, kernel.signer)
        kernel.swarm.merge(record)
        kernel.table.touch()
        kernel.broadcast(record)
        self._rounds.tell_all(record)
        kernel.effects.append(SwarmChanged(record))
        return record, self._flush()

    def follow(self, lineage: str, now: float) -> list[Effect]:
        """Hold the settings of ``lineage`` from now on, and ask a member for them."""
        self._advance(now)
        kernel = self._kernel
        if kernel.swarm.follow(lineage) and not kernel.leaving:
            kernel.table.touch()
            for member in kernel.table.sample(2, kernel.rng, lambda member: member.state == "alive"):
                self._syncer.run(member)
        return self._flush()

    def refuses_address(self, address: str, told_by: str) -> bool:
        """True for an address that must not be dialled on the word of ``told_by``."""
        return self._kernel.policy.refuse(address, told_by) is not None

    def recall(self, record: SwarmRecord, now: float) -> list[Effect]:
        """Take a setting that this node held in an earlier run, unless a greater one is known by now.

        Raises:
            BadRecordError: forged, or of another swarm.
        """
        self._advance(now)
        kernel = self._kernel
        if kernel.swarm.merge(record, trusted=True):
            kernel.table.touch()
            kernel.broadcast(record)
            kernel.effects.append(SwarmChanged(record))
        return self._flush()

    def catch_up(self, node_id: str, now: float) -> list[Effect]:
        """Compare views with a member that knows more than we do: gossip may have missed us."""
        self._advance(now)
        member = self._kernel.table.get(node_id)
        if member is not None and not self._kernel.leaving:
            self._syncer.run(member)
        return self._flush()

    def tell_settings(self, node_id: str, now: float) -> list[Effect]:
        """Tell a member that seems to follow older settings ours, at once."""
        self._advance(now)
        member = self._kernel.table.get(node_id)
        if member is not None and member.living and not self._kernel.leaving:
            self._rounds.tell_settings(member)
        return self._flush()

    def assume(self, records: Iterable[Record], now: float) -> None:
        """Take ``records`` as known without telling anybody: a view that everyone has already."""
        self._advance(now)
        self._rumours.apply(records)
        self._kernel.queue.clear()
        self._flush()

    def leave(self, now: float) -> list[Effect]:
        """Say goodbye to a few members, and do nothing of our own accord from now on."""
        self._advance(now)
        kernel = self._kernel
        if kernel.leaving:
            return []
        kernel.renew(state="left")
        kernel.leaving = True
        kernel.stop_timers()
        self._prober.forget()
        told = kernel.table.sample(
            kernel.config.leave_fanout, kernel.rng, lambda member: member.state == "alive"
        )
        for member in told:
            gossip = GossipMessage(kernel.me.incarnation, (kernel.me,))
            kernel.send(member, gossip, 2 * kernel.config.probe_interval_s, lambda result: None)
        return self._flush()

    def tick(self, now: float) -> list[Effect]:
        """Run what is due."""
        return self.handle(Tick(), now)


def own_record(signer: Signer, name: str, address: str, boot_ms: int, tags: dict[str, str]) -> MemberRecord:
    """A node's first record of this boot, unsigned."""
    return MemberRecord(
        signer.node_id,
        signer.public_key,
        name,
        address,
        Incarnation(boot_ms, 0),
        "alive",
        dict(tags),
        PROTOCOL_VERSION,
    )


def open_core(
    *,
    config: MembershipConfig,
    signer: Signer,
    swarm_id: str,
    name: str,
    address: str,
    clock: Clock,
    rng: random.Random,
    known: KnownMembers,
    tags: dict[str, str] | None = None,
    policy: AddressPolicy | None = None,
) -> Membership:
    """Make the core of a node that starts now, with a boot id greater than any before."""
    boot_ms = known.next_boot_ms(clock.wall(), config.future_s)
    return Membership(
        config=config,
        signer=signer,
        verifier=Verifier(swarm_id, verify, config.future_s),
        record=own_record(signer, name[:64], address, boot_ms, tags or {}),
        rng=rng,
        wall=clock.wall,
        now=clock.monotonic(),
        policy=policy,
    )
