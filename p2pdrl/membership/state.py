"""The membership core: SWIM (Das, Gupta, Motivala 2002) with Lifeguard (arXiv 1707.00788), without any I/O.

Calls and answers leave as effects, and time comes in with each input; `service` carries effects out on a
network, `testing.membership_simulator` on a manual clock.

- `MemberTable`: the view. `Membership`: our record, timers, calls, gossip, what a received record changes.
- `Introductions`: which newcomers are taken in on a member's word, and which have to answer first.
- `_FailureDetector`: probes, direct and through relays. `_AntiEntropy`: push-pull.

What `Membership` does with records (SWIM, section 4.2):

| held | arrives | result |
|---|---|---|
| anything | a member's record of a higher incarnation | taken; alive, or left |
| alive at i | a suspicion at i | suspect; the timer starts |
| suspect at i | a suspicion at i by somebody new | the timer comes down |
| suspect at i | the timer runs out, and a final probe fails | dead; told as evidence |
| ourselves at i | a suspicion at i | we raise our incarnation: a refutation |
| anything | a record ``bans`` that names it | banned: nothing about it is taken until it is named no more |
"""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from p2pdrl.clock import Clock
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
    TwinFound,
    Welcomed,
    proves_absence,
    shows_life,
)
from p2pdrl.membership.identity import Signer, verify
from p2pdrl.membership.introductions import Introductions, itself_from
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
from p2pdrl.membership.operators import Operator
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import (
    RECORD_KEYS,
    BadRecordError,
    Incarnation,
    MemberRecord,
    Record,
    Suspicion,
    SwarmRecord,
    Verifier,
    refuse_address,
    relays_in,
    release_in,
    sign_member,
    sign_suspicion,
    spoken_in,
    with_release,
)
from p2pdrl.membership.suspicion import Awareness, SuspicionTimer
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.versions import SPOKEN, ProtocolRange

__all__ = ["Membership", "open_core", "own_record"]

# The view

RTT_WEIGHT = 0.2
"""Weight of the newest round trip in the running mean."""


@dataclass(slots=True)
class Member:
    """One other member.

    Attributes:
        since: monotonic time at which it came into its state.
        reason: plain words for that state, without the age.
        evidence: the accusations held against it while suspect or dead; told to it, so that it
            can refute them.
        generation: counts suspicions; a timer of an earlier one is stale.
        final_probe: the last probe before it is declared dead is under way.
        rtt_s: smoothed round trip of direct probes.
        last_seen: monotonic time at which it last spoke to us directly.
    """

    record: MemberRecord
    state: State
    since: float
    reason: str
    timer: SuspicionTimer | None = None
    evidence: list[Suspicion] = field(default_factory=list)
    generation: int = 0
    final_probe: bool = False
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

    def view(self, now: float) -> MemberView:
        """Return what is told of it outside the core."""
        record, reason = self.record, self.reason
        if self.state in ("suspect", "dead"):
            reason = f"{reason} ({max(0.0, now - self.since):.0f} s ago)"
        return MemberView(
            id=record.id,
            name=record.name,
            address=record.address,
            state=self.state,
            state_reason=reason,
            incarnation=record.incarnation,
            rtt_s=self.rtt_s,
            last_seen_s=None if self.last_seen is None else max(0.0, now - self.last_seen),
            tags=dict(record.tags),
            suspected_by=self.timer.accusers if self.timer is not None and self.state == "suspect" else (),
            spoken=spoken_in(record.tags, record.protocol),
            public_key=record.public_key,
        )


def _is_alive(member: Member) -> bool:
    return member.state == "alive"


class MemberTable:
    """Every other member that this node knows of, by id, tombstones included.

    Args:
        max_members: bound on their number; a full table gives up its oldest tombstone.

    Attributes:
        version: raised with every change.
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

    def sample(
        self, count: int, rng: random.Random, keep: Callable[[Member], bool] = _is_alive
    ) -> list[Member]:
        """Up to ``count`` of the living that ``keep`` accepts (the alive), drawn without replacement."""
        fit = [member for member in self.living if keep(member)]
        return fit if len(fit) <= count else rng.sample(fit, count)


# State, dissemination and suspicion

_Outcome = Callable[[Answered | SendFailed], None]
_EXPIRE_EVERY_S = 60.0
_TOLD_AT_ONCE = 32
"""Calls under way while a setting is told to everybody."""
_TELL_TRIES = 5
_TELL_AGAIN_S = 1.0
"""A member whose settings are older is told ours at most this often."""
_SPOKE_INTERVALS = 2.0
"""Probe intervals for which a call of an outbound-only member shows that it lives."""
_ASKED_PER_INTERVAL = 8
"""Newcomers that are pinged in a probe interval before they are taken in."""
_MAX_CORRECTIONS = 4
"""Most records that correct the sender in one answer."""


class Membership:
    """One node's view of the swarm and its part in keeping everybody's.

    Args:
        record: our own record (`own_record`), unsigned.
        wall: seconds since the Unix epoch, to refuse incarnations from the future.
        now: monotonic time, seconds.
        roots: the operators that the swarm's key names.

    Attributes:
        me: our own signed record.
        swarm: settings of the whole swarm.
        refused_records: records refused so far: forged, out of bounds or from the future.
        refutations: how often we were accused and said that we live.
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
        roots: Iterable[Operator] = (),
    ) -> None:
        self.config = config
        self.signer = signer
        self.verifier = verifier
        self.rng = rng
        self.wall = wall
        self.now = now
        self.me = sign_member(signer, verifier.swarm_id, record)
        self.table = MemberTable(config.max_members)
        self.introductions = Introductions(config)
        self.queue = BroadcastQueue()
        self.awareness = Awareness(config.awareness_max)
        self.swarm = SwarmRecords(verifier, roots)
        self.effects: list[Effect] = []
        self.leaving = False
        self.refused_records = 0
        self.refutations = 0
        self._calls: dict[int, tuple[str, _Outcome]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._gossiping = False
        self._asking = False
        self._teller = ""
        """Id of the member whose message is taken in; empty for those that we believe as a whole."""
        self._told_at: dict[str, float] = {}
        self._corrections: dict[str, MemberRecord | SwarmRecord] = {}
        self.detector = _FailureDetector(self)
        self.anti_entropy = _AntiEntropy(self)
        self.detector.start()
        self.anti_entropy.start()
        self.arm(_EXPIRE_EVERY_S, self._expire_round)

    @property
    def spoken(self) -> ProtocolRange:
        """The protocols that we speak."""
        return spoken_in(self.me.tags, self.me.protocol)

    # Timers

    def arm(self, delay_s: float, run: Callable[[], None]) -> None:
        """Call ``run`` after ``delay_s``. There is no cancelling: ``run`` checks what it finds."""
        self._count += 1
        heapq.heappush(self._timers, (self.now + delay_s, self._count, run))

    def jitter(self, seconds: float) -> float:
        """``seconds`` ± the probe jitter."""
        spread = self.config.probe_jitter
        return seconds * self.rng.uniform(1 - spread, 1 + spread)

    def next_wakeup(self) -> float | None:
        """Monotonic time at which `handle` wants a `Tick`."""
        return self._timers[0][0] if self._timers else None

    def _run_due(self) -> None:
        """Run every timer that is due."""
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()

    def _advance(self, now: float) -> None:
        """Move to ``now``; when a timer is late, we were held up, and nobody else is to blame."""
        self.now = max(now, self.now)
        due = self.next_wakeup()
        late_s = 0.0 if due is None else self.now - due
        if late_s <= self.config.lag_s:
            return
        self.awareness.add(1)
        self._timers = [(due + late_s, number, run) for due, number, run in self._timers]
        for member in self.table:
            if member.timer is not None:
                member.timer.started += late_s
        if late_s > self.config.probe_timeout_s:
            self.detector.forget()

    def _expire_round(self) -> None:
        """Forget old tombstones."""
        keep_s = {"left": self.config.left_tombstone_s}
        expired = [
            member.record.id
            for member in self.table
            if not member.living
            and self.now - member.since > keep_s.get(member.state, self.config.dead_tombstone_s)
        ]
        for node_id in expired:
            self.table.remove(node_id)
        self.arm(_EXPIRE_EVERY_S, self._expire_round)

    # Calls

    def send(self, member: Member, message: Message, deadline_s: float, outcome: _Outcome) -> None:
        """Call ``member``; ``outcome`` gets the answer or the failure."""
        self._count += 1
        record = member.record
        self._calls[self._count] = (record.id, outcome)
        self.effects.append(Send(self._count, record.address, record.id, message, deadline_s))

    def gossip_to(
        self,
        member: Member,
        records: tuple[Record, ...],
        deadline_s: float,
        outcome: _Outcome = lambda result: None,
    ) -> None:
        """Send ``records`` to ``member``."""
        self.send(member, GossipMessage(self.me.incarnation, records), deadline_s, outcome)

    def respond(self, token: int, message: Message) -> None:
        """Answer a request."""
        self.effects.append(Respond(token, message))

    def notify(self, kind: EventKind, member: Member, reason: str) -> None:
        """Tell the subscribers."""
        self.effects.append(Notified(MemberEvent(kind, member.view(self.now), reason)))

    # Dissemination: records ride on messages, and on gossip while there are any (SWIM, section 4.1)

    def broadcast(self, record: Record) -> None:
        """Spread ``record``: gossip runs until everything was sent often enough."""
        self.queue.put(record)
        if not self._gossiping and not self.leaving:
            self._gossiping = True
            self.arm(self.rng.uniform(0.1, 0.5) * self.config.gossip_interval_s, self._gossip_round)

    def piggyback(self, *first: Record) -> tuple[Record, ...]:
        """The records for one message: ``first``, then what is due in the queue."""
        config = self.config
        rest = self.queue.take(
            config.piggyback_records - len(first),
            config.piggyback_bytes,
            config.transmissions(self.table.living_total),
        )
        return (*first, *(record for record in rest if record not in first)) if first else rest

    def _gossip_round(self) -> None:
        for member in self.table.sample(self.config.gossip_fanout, self.rng):
            records = self.piggyback()
            if records:
                self.gossip_to(member, records, self.config.probe_interval_s, self.learn)
        self._gossiping = len(self.queue) > 0
        if self._gossiping:
            self.arm(self.jitter(self.config.gossip_interval_s), self._gossip_round)

    def learn(self, result: Answered | SendFailed) -> None:
        """Take in the records that ride on an answer."""
        if isinstance(result, Answered) and isinstance(result.message, Ack | Nack):
            self.apply(result.message.records, result.told_by)

    def tell_all(self, record: SwarmRecord) -> None:
        """Send a new setting to every living member at once, besides the gossip.

        Gossip takes some rounds, and longer on a busy machine; nodes that still follow the old mode work with
        each other meanwhile. Whoever doesn't answer is tried again a few times.
        """
        bans = self.swarm.bans
        waiting = [(member.record.id, 1) for member in self.table.living if member.record.id not in bans]
        self.rng.shuffle(waiting)
        records = self._with_warrant(record)

        def tell_next() -> None:
            while waiting and self.swarm.get(record.key) == record and not self.leaving:
                if tell(*waiting.pop()):
                    return

        def tell(node_id: str, tries: int) -> bool:
            member = self.table.get(node_id)
            if member is None or not member.living:
                return False
            deadline_s = 2 * self.config.probe_interval_s
            self.gossip_to(member, records, deadline_s, lambda result: told(result, node_id, tries))
            return True

        def told(result: Answered | SendFailed, node_id: str, tries: int) -> None:
            self.learn(result)
            if not isinstance(result, Answered) and tries < _TELL_TRIES:
                self.arm(self.config.gossip_interval_s, lambda: again(node_id, tries + 1))
            tell_next()

        def again(node_id: str, tries: int) -> None:
            waiting.append((node_id, tries))
            tell_next()

        for _ in range(min(_TOLD_AT_ONCE, len(waiting))):
            tell_next()

    def _with_warrant(self, record: SwarmRecord) -> tuple[SwarmRecord, ...]:
        """The record, and before it the list of operators if only that says that its signer is one."""
        listed, operator = self.swarm.get("operators"), self.swarm.operator(record.proposer)
        if listed is None or listed == record or operator is None or operator in self.swarm.roots:
            return (record,)
        return (listed, record)

    def _tell_settings(self, member: Member) -> None:
        """Send our settings to a member that seems to follow older ones; its ack brings what is newer."""
        settings, node_id = self.swarm.all(), member.record.id
        if not settings or self.now < self._told_at.get(node_id, float("-inf")) + _TELL_AGAIN_S:
            return
        self._told_at = {peer: at for peer, at in self._told_at.items() if at > self.now - _TELL_AGAIN_S}
        self._told_at[node_id] = self.now
        self.gossip_to(member, settings, 2 * self.config.probe_interval_s, self.learn)

    # Ourselves

    def renew(self, at_least: Incarnation | None = None, **changes: object) -> None:
        """Raise our incarnation above ``at_least``, sign and spread our record."""
        held = self.me.incarnation
        base = held if at_least is None else max(held, at_least)
        raised = Incarnation(base.boot_ms, base.counter + 1)
        changed = msgspec.structs.replace(self.me, incarnation=raised, **changes)
        self.me = sign_member(self.signer, self.verifier.swarm_id, changed)
        self.table.touch()
        self.broadcast(self.me)

    # What records change

    def apply(
        self, records: Iterable[Record], told_by: str = "", trusted: bool = False
    ) -> BadRecordError | None:
        """Take in ``records``; bad ones are skipped and counted.

        Args:
            records: in any order; who may command is taken first, then members, so that accusers are known.
            told_by: IP address of the sender.
            trusted: they are our welcome into the swarm.

        Returns:
            The first bad record's error, if any.
        """
        bad: BadRecordError | None = None
        self._corrections.clear()
        for record in sorted(records, key=_order):
            try:
                if isinstance(record, MemberRecord):
                    self._apply_member(record, told_by)
                elif isinstance(record, Suspicion):
                    self._apply_suspicion(record)
                else:
                    self._apply_setting(record, trusted)
            except BadRecordError as error:
                self.refused_records += 1
                bad = bad or error
        return bad

    def corrections(self) -> tuple[MemberRecord | SwarmRecord, ...]:
        """What the sender of the last batch didn't know yet; rides back on the answer."""
        return tuple(self._corrections.values())[:_MAX_CORRECTIONS]

    def evidence(self, member: Member) -> tuple[Suspicion, ...]:
        """What to tell ``member`` so that it can refute; empty while it is alive."""
        return tuple(member.evidence[:2]) if member.state in ("suspect", "dead") else ()

    def _apply_member(self, record: MemberRecord, told_by: str) -> None:
        if record.id == self.me.id:
            self._apply_own(record)
            return
        if record.id in self.swarm.bans:
            return  # told by somebody who hasn't heard of it yet
        held = self.table.get(record.id)
        if held is not None and record.incarnation <= held.record.incarnation:
            if record.incarnation < held.record.incarnation:
                self._corrections[record.id] = held.record
            says_left = record.state == "left" and held.state != "left"
            if not (says_left and record.incarnation == held.record.incarnation):
                return
        introducer = self._introducer(held, record, told_by)
        if introducer and not self.introductions.has_room(introducer, self.now):
            return  # before anything is checked, which would keep us busy
        self.verifier.check_member(record, self.wall())
        # an answer of its own may bring the news that it left, and is answered; everybody tells of that
        refusal = refuse_address(record.address, "" if record.state == "left" else told_by)
        if refusal is not None:
            raise BadRecordError(400, refusal)
        if introducer and not self.introductions.vouch(introducer, record.id, self.now):
            self.introductions.wait(introducer, record, self.now)
            self._ask_newcomers()
            return
        self._take_in(held, record)

    def _take_in(self, held: Member | None, record: MemberRecord) -> None:
        if held is None:
            self._add(record)
        else:
            self._replace(held, record)
        self.broadcast(record)

    def _introducer(self, held: Member | None, record: MemberRecord, told_by: str) -> str:
        """On whose word a newcomer would be taken in; empty for members, and for those who leave."""
        heard = held is not None and (held.living or held.last_seen is not None)
        if heard or record.state == "left" or not self._teller:
            return ""
        if self._teller != record.id:
            return self._teller
        return itself_from(told_by) if told_by else ""

    def _ask_newcomers(self) -> None:
        if not self._asking and not self.leaving:
            self._asking = True
            self.arm(self.config.probe_interval_s / _ASKED_PER_INTERVAL, self._ask_newcomer)

    def _ask_newcomer(self) -> None:
        """Ping the next of those who wait; who answers is in."""
        self._asking = False
        found = self.introductions.next()
        if found is None:
            return
        _, record = found

        def answered(result: Answered | SendFailed) -> None:
            held = self.table.get(record.id)
            news = held is None or held.record.incarnation < record.incarnation
            if shows_life(result) and news and record.id not in self.swarm.bans:
                self._take_in(held, record)
            if isinstance(result, Answered):
                self.learn(result)

        newcomer = Member(record, "alive", self.now, "")
        self.detector.ping(newcomer, 2 * self.config.probe_timeout_s, answered)
        self._ask_newcomers()

    def _apply_own(self, record: MemberRecord) -> None:
        """Outbid a record of ours that we don't know: of an earlier run, or of a node with our key."""
        me = self.me
        if self.leaving or record.incarnation <= me.incarnation:
            return
        self.verifier.check_member(record, self.wall())
        is_twin = record.incarnation.boot_ms > me.incarnation.boot_ms and record.address != me.address
        if is_twin and record.state == "alive":
            self.effects.append(TwinFound(record.address))
            return
        self.renew(record.incarnation)

    def _add(self, record: MemberRecord) -> None:
        if record.state == "left":
            self.table.add(Member(record, "left", self.now, "left"))
            return
        member = Member(record, "alive", self.now, "joined")
        if not self.table.add(member):
            self.introductions.proven(record.id)
            raise BadRecordError(429, f"the view is full: {len(self.table)} members")
        self.notify("joined", member, "joined")
        self.detector.enter(member)

    def _replace(self, held: Member, record: MemberRecord) -> None:
        before, state = held.record, held.state
        held.record, held.evidence, held.timer, held.final_probe = record, [], None, False
        self.table.touch()
        if record.state == "left":
            self.introductions.proven(record.id)
            if state != "left":
                self._enter(held, "left", "left")
            return
        rebooted = record.incarnation.boot_ms > before.incarnation.boot_ms
        if state == "left" or rebooted:
            where = f" at {record.address}" if record.address != before.address else ""
            self._enter(held, "alive", "came back" if state == "left" else f"restarted{where}", kind="joined")
            self.detector.enter(held)
        elif state != "alive":
            self._enter(held, "alive", f"refuted that it was {state}")
            self.detector.enter(held)
        elif (record.name, record.address, record.tags) != (before.name, before.address, before.tags):
            moved = record.address != before.address
            self.notify("updated", held, f"moved to {record.address}" if moved else "changed its tags")

    def _enter(self, member: Member, state: State, reason: str, kind: EventKind | None = None) -> None:
        member.state = state
        member.since = self.now
        member.reason = reason
        self.table.touch()
        self.notify(kind or state, member, reason)

    def _apply_setting(self, record: SwarmRecord, trusted: bool) -> None:
        if self.take_setting(record, trusted):
            return
        held = self.swarm.get(record.key)
        newer = held is not None and (held.epoch, held.proposer) > (record.epoch, record.proposer)
        if held is not None and newer and record.lineage == held.lineage:
            self._corrections[record.key] = held

    def take_setting(self, record: SwarmRecord, trusted: bool = False) -> bool:
        """Take a setting when it wins, and spread it; raises `BadRecordError`."""
        if not self.swarm.merge(record, trusted):
            return False
        self._took(record)
        return True

    def _took(self, record: SwarmRecord) -> None:
        """Spread a setting that is new here, and follow it as far as it concerns members."""
        self.table.touch()
        for one in self._with_warrant(record):
            self.broadcast(one)
        self.effects.append(SwarmChanged(record))
        self._follow_bans()

    def _follow_bans(self) -> None:
        """Hold nobody for a member who is banned; whoever is banned no more is probed like any other."""
        for member in list(self.table):
            ban = self.swarm.bans.get(member.record.id)
            if ban is not None and member.state != "banned":
                member.evidence, member.timer, member.final_probe = [], None, False
                member.generation += 1
                self.queue.forget_suspicions(member.record.id)
                self._enter(member, "banned", ban.words)
            elif ban is None and member.state == "banned":
                left = member.record.state == "left"
                self._enter(member, "left" if left else "alive", "is banned no more")
                if not left:
                    self.detector.enter(member)

    # Suspicion (SWIM, section 4.2; Lifeguard, section IV-B)

    def _apply_suspicion(self, suspicion: Suspicion) -> None:
        if suspicion.subject == self.me.id:
            self._refute(suspicion)
            return
        member = self.table.get(suspicion.subject)
        if member is None or suspicion.incarnation != member.record.incarnation:
            if member is not None and suspicion.incarnation < member.record.incarnation:
                self._corrections[suspicion.subject] = member.record
            return
        if suspicion.accuser in (self.me.id, suspicion.subject, *self.swarm.bans):
            return
        if member.state in ("left", "banned"):
            return
        if member.state == "dead":
            self._pass_on(member, suspicion)
            return
        timer = member.timer
        dead = suspicion.verdict == "dead"
        counted = timer is not None and (timer.settled or suspicion.accuser in timer.accusers)
        accuser = self.table.get(suspicion.accuser)
        if accuser is None or (counted and not dead):
            return
        self.verifier.check_suspicion(suspicion, accuser.record.public_key)
        self._count_accuser(member, suspicion)
        if dead and member.timer is not None:
            needed = self._dead_verdicts_needed()
            if member.timer.confirm_dead(suspicion.accuser, needed, self.now):
                self.broadcast(suspicion)
                self._arm_suspicion(member)
        if timer is None:
            self.detector.second_opinion(member)

    def _refute(self, suspicion: Suspicion) -> None:
        """We are accused: raise our incarnation."""
        if self.leaving or suspicion.incarnation != self.me.incarnation:
            self._corrections[self.me.id] = self.me
            return
        accuser = self.table.get(suspicion.accuser)
        if accuser is not None:
            self.verifier.check_suspicion(suspicion, accuser.record.public_key)
        self.awareness.add(1)
        self.refutations += 1
        self.renew()

    def _dead_verdicts_needed(self) -> int:
        """How many must have given a member up before we probe it for the last time at once."""
        return max(2, min(self.config.suspicion_confirmations + 1, self.table.living_total - 2))

    def _pass_on(self, member: Member, suspicion: Suspicion) -> None:
        """We hold it dead already: help the verdicts of others reach those who don't."""
        accuser = self.table.get(suspicion.accuser)
        known = {verdict.accuser for verdict in member.evidence}
        if accuser is None or suspicion.verdict != "dead" or suspicion.accuser in known:
            return
        if len(known) > self._dead_verdicts_needed():
            return
        self.verifier.check_suspicion(suspicion, accuser.record.public_key)
        member.evidence.append(suspicion)
        self.broadcast(suspicion)

    def accuse(self, member: Member, incarnation: Incarnation, reason: str) -> None:
        """Our own probe of ``member`` in ``incarnation`` failed."""
        timer = member.timer
        if not member.living or member.record.incarnation != incarnation:
            return
        if self._spoke_lately(member):
            return
        if timer is not None and (timer.settled or self.me.id in timer.accusers):
            return
        self._count_accuser(member, self._signed(member, "suspect", reason))

    def _spoke_lately(self, member: Member) -> bool:
        """Whether a member that nobody can dial has called us: then a relay failed, and not it."""
        if relays_in(member.record.tags) is None or member.last_seen is None:
            return False
        return self.now - member.last_seen < _SPOKE_INTERVALS * self.config.probe_interval_s

    def _signed(self, member: Member, verdict: Literal["suspect", "dead"], reason: str) -> Suspicion:
        record = member.record
        plain = Suspicion(record.id, record.incarnation, self.me.id, verdict, reason[:200])
        return sign_suspicion(self.signer, self.verifier.swarm_id, plain)

    def _count_accuser(self, member: Member, suspicion: Suspicion) -> None:
        if member.timer is None:
            self._suspect(member, suspicion)
        elif not member.timer.confirm(suspicion.accuser):
            return
        member.evidence.append(suspicion)
        self.broadcast(suspicion)
        self._arm_suspicion(member)

    def _suspect(self, member: Member, suspicion: Suspicion) -> None:
        config, total = self.config, self.table.living_total
        member.generation += 1
        member.evidence = []
        member.timer = SuspicionTimer(
            suspicion.accuser,
            max(0, min(config.suspicion_confirmations, total - 2)),
            config.suspicion_min_s(total),
            config.suspicion_max_s(total),
            self.now,
        )
        told = suspicion.reason
        if suspicion.accuser != self.me.id:
            accuser = self.table.get(suspicion.accuser)
            name = "" if accuser is None else accuser.record.name
            told = f"{name or suspicion.accuser[:8]} says: {told}"
        self._enter(member, "suspect", told)

    def _arm_suspicion(self, member: Member) -> None:
        timer = member.timer
        if timer is not None:
            node_id, generation = member.record.id, member.generation
            self.arm(max(0.0, timer.deadline - self.now), lambda: self._expired(node_id, generation))

    def _suspected(self, node_id: str, generation: int) -> tuple[Member, SuspicionTimer] | None:
        """The member and its timer, if it is still under the suspicion of that generation."""
        member = self.table.get(node_id)
        if member is None or member.state != "suspect" or member.generation != generation:
            return None
        return None if member.timer is None else (member, member.timer)

    def _expired(self, node_id: str, generation: int) -> None:
        """The timer ran out: probe once more ourselves, as whoever answers isn't dead."""
        suspected = self._suspected(node_id, generation)
        if suspected is None or suspected[0].final_probe:
            return
        member, timer = suspected
        if self.now < timer.deadline - 1e-9:
            return  # its deadline moved on; another timer stands there
        member.final_probe = True
        self.detector.final_probe(member)

    def final_probe_ended(self, node_id: str, generation: int, answered: bool) -> None:
        """Declare a suspect dead after its final probe, or give it more time."""
        suspected = self._suspected(node_id, generation)
        if suspected is None:
            return
        member, timer = suspected
        member.final_probe = False
        if answered or self._spoke_lately(member):
            timer.restart(self.now)
            self._arm_suspicion(member)
            return
        verdict = self._signed(member, "dead", member.reason)
        member.evidence = [verdict]
        member.timer = None
        self._enter(member, "dead", member.reason)
        self.introductions.failed(member.record.id, self.now)
        self.queue.forget_suspicions(member.record.id)
        self.broadcast(verdict)

    # What others read

    @property
    def health(self) -> int:
        """Our own local health: 0 is well, 7 is worst."""
        return self.awareness.score

    def members(self, now: float) -> list[MemberView]:
        """Everybody known, ourselves first, tombstones included."""
        me = self.me
        own = MemberView(
            id=me.id,
            name=me.name,
            address=me.address,
            state="left" if self.leaving else "alive",
            state_reason="this node",
            incarnation=me.incarnation,
            rtt_s=0.0,
            last_seen_s=0.0,
            tags=dict(me.tags),
            suspected_by=(),
            spoken=self.spoken,
            public_key=me.public_key,
            is_self=True,
        )
        return [own, *(member.view(now) for member in self.table)]

    def member(self, node_id: str, now: float) -> MemberView | None:
        """One other member, or None."""
        held = self.table.get(node_id)
        return None if held is None else held.view(now)

    def alive_ids(self) -> list[str]:
        """Ids of the alive (not the suspect), ourselves included, sorted."""
        alive = [member.record.id for member in self.table.living if member.state == "alive"]
        return sorted([self.me.id, *alive])

    def lives(self, address: str, node_id: str | None) -> bool:
        """True when a living other member has that address or that id."""
        return any(
            member.record.id == node_id or member.record.address == address for member in self.table.living
        )

    # What drives it

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take in one input at monotonic time ``now`` and return what is to be done."""
        self._advance(now)
        if isinstance(event, Answered | SendFailed):
            self._finished(event)
        elif isinstance(event, Request):
            self._teller = event.sender
            self._request(event)
            self._teller = ""
        elif isinstance(event, Welcomed):
            self._welcomed(event)
        self._run_due()
        return self._flush()

    def _flush(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def _finished(self, result: Answered | SendFailed) -> None:
        """Give ``result`` to whoever made the call."""
        target, outcome = self._calls.pop(result.call_id, (None, None))
        if target is None or outcome is None:
            return
        self._teller = target
        outcome(result)
        self._teller = ""
        member = self.table.get(target)
        if member is None or isinstance(result, SendFailed):
            return
        member.last_seen = self.now
        self.introductions.proven(target)
        if isinstance(result.message, Ack) and result.message.want_record:
            self.gossip_to(member, self.piggyback(self.me), self.config.probe_interval_s)

    def _request(self, request: Request) -> None:
        member = self.table.get(request.sender)
        if member is not None:
            member.last_seen = self.now
        token, message, told_by = request.token, request.message, request.told_by
        bad: BadRecordError | None = None
        if isinstance(message, Ping):
            self.detector.answer_ping(token, request.sender, message, told_by)
        elif isinstance(message, PingReq):
            self.detector.answer_ping_req(token, message, told_by)
        elif isinstance(message, GossipMessage):
            bad = self.apply(message.records, told_by)
            self.respond(token, self.detector.ack(request.sender, message.incarnation))
        elif isinstance(message, Sync):
            self.anti_entropy.answer_sync(token, message, told_by)
        elif isinstance(message, Delta):
            bad = self.anti_entropy.answer_delta(token, message, told_by)
        elif isinstance(message, JoinRequest):
            bad = self._join(token, message, told_by)
        else:
            self.effects.append(Reject(token, 400, "that isn't a request"))
        if bad is not None:
            self.effects = [
                effect
                for effect in self.effects
                if not (isinstance(effect, Respond) and effect.token == token)
            ]
            self.effects.append(Reject(token, bad.status, str(bad)))

    def _join(self, token: int, join: JoinRequest, told_by: str) -> BadRecordError | None:
        bad = self.apply((join.record,), told_by)
        if bad is not None:
            return bad
        member = self.table.get(join.record.id)
        accusations = () if member is None else self.evidence(member)
        self.respond(token, Welcome((*accusations, *self.anti_entropy.view()), observed_host=told_by))
        return None

    def _welcomed(self, welcomed: Welcomed) -> None:
        self.apply(welcomed.message.records, welcomed.told_by, trusted=True)
        member = self.table.get(welcomed.sender)
        if member is not None:
            member.last_seen = self.now
            self.anti_entropy.run(member)

    # What the daemon asks for

    def update_self(
        self, now: float, address: str | None = None, tags: dict[str, str] | None = None
    ) -> list[Effect]:
        """Change what we say about ourselves, and spread it."""
        self._advance(now)
        changes: dict[str, Any] = {}
        if address is not None and address != self.me.address:
            changes["address"] = address
        if tags is not None:
            told = with_release(tags, release_in(self.me.tags), self.spoken)
            if told != self.me.tags:
                changes["tags"] = told
        if changes:
            self.renew(**changes)
        return self._flush()

    def propose(self, key: str, value: Any, now: float) -> tuple[SwarmRecord, list[Effect]]:
        """Write a setting of the whole swarm.

        Raises:
            ValueError: the value is longer than 8 KiB, or there is no such setting.
            BadRecordError: the swarm has operators, and this isn't for nodes to write.
        """
        self._advance(now)
        record = self.swarm.compose(key, value, self.signer, self.wall())
        return record, self.submit(record, now)

    def submit(self, record: SwarmRecord, now: float) -> list[Effect]:
        """Take a setting that somebody has signed who may, and tell everybody at once.

        Raises:
            BadRecordError: it is forged, by somebody who may not, or under a key that we don't know.
        """
        if record.key not in RECORD_KEYS:
            raise BadRecordError(400, f"no swarm has a setting {record.key!r}, as far as this release knows")
        self._advance(now)
        if self.swarm.merge(record):
            self.tell_all(record)
            for member in self.table.living:
                if member.record.id in self.swarm.bans:  # so that it knows why
                    self.gossip_to(member, self._with_warrant(record), 2 * self.config.probe_interval_s)
            self._took(record)
        return self._flush()

    def use_roots(self, roots: Iterable[Operator], now: float) -> list[Effect]:
        """Take other root operators: the file of the swarm's key has changed."""
        self._advance(now)
        if self.swarm.use_roots(roots):
            self.table.touch()
            self._follow_bans()
        return self._flush()

    def follow(self, lineage: str, now: float) -> list[Effect]:
        """Hold the settings of ``lineage`` from now on, and ask a member for them."""
        self._advance(now)
        if self.swarm.follow(lineage) and not self.leaving:
            self.table.touch()
            for member in self.table.sample(2, self.rng):
                self.anti_entropy.run(member)
        return self._flush()

    def recall(self, record: SwarmRecord, now: float) -> list[Effect]:
        """Take a setting that this node held in an earlier run, unless a greater one is known by now.

        Raises:
            BadRecordError: forged, or of another swarm.
        """
        self._advance(now)
        self.take_setting(record, trusted=True)
        return self._flush()

    def catch_up(self, node_id: str, now: float) -> list[Effect]:
        """Compare views with a member that knows more than we do: gossip may have missed us."""
        self._advance(now)
        member = self.table.get(node_id)
        if member is not None and not self.leaving:
            self.anti_entropy.run(member)
        return self._flush()

    def tell_settings(self, node_id: str, now: float) -> list[Effect]:
        """Send our settings at once to a member that seems to follow older ones."""
        self._advance(now)
        member = self.table.get(node_id)
        if member is not None and member.living and not self.leaving:
            self._tell_settings(member)
        return self._flush()

    def assume(self, records: Iterable[Record], now: float) -> None:
        """Take ``records`` as known without telling anybody: a view that everyone has already."""
        self._advance(now)
        self.apply(records)
        self.queue.clear()
        self._flush()

    def leave(self, now: float) -> list[Effect]:
        """Say goodbye to a few members, and do nothing of our own accord from now on."""
        self._advance(now)
        if self.leaving:
            return []
        self.renew(state="left")
        self.leaving = True
        self._timers.clear()
        self.detector.forget()
        for member in self.table.sample(self.config.leave_fanout, self.rng):
            self.gossip_to(member, (self.me,), 2 * self.config.probe_interval_s)
        return self._flush()


# Failure detection

_PROBED_AHEAD = 128
"""Members of the round among which the most silent is probed first."""


@dataclass(slots=True)
class _Probe:
    """One probe under way.

    Attributes:
        started: monotonic time.
        nacks: relays that said that they couldn't reach it.
        silent: relays that failed themselves.
        indirect: the relays were asked.
        failed: the direct ping failed.
    """

    target: str
    incarnation: Incarnation
    started: float
    relays_asked: int = 0
    nacks: int = 0
    silent: int = 0
    indirect: bool = False
    failed: bool = False


@dataclass(slots=True)
class _FinalProbe:
    """One final probe under way: ``open`` answers are still to come."""

    node_id: str
    generation: int
    open: int = 0
    over: bool = False


class _FailureDetector:
    """Probes one member an interval, and through k relays when that times out (SWIM, section 3.1).

    A refused connection is fast evidence and accuses at once. A timeout is ambiguous: relays are asked, each
    of which answers with an ack on the target's behalf or with a nack; a relay that says nothing counts
    against ourselves (Lifeguard).

    A suspicion may outlive its refutation when the news got lost on the way to one node. So before that node
    gives the suspect up it pings it once more; a refused connection settles it at once. If the ping times out
    it asks twice the usual number of relays, who answer at once when they have heard of a newer incarnation,
    and pings again.
    """

    def __init__(self, core: Membership) -> None:
        self._core = core
        self._ring: list[str] = []
        self._probes: dict[int, _Probe] = {}
        self._count = 0

    # Rounds

    def start(self) -> None:
        """Arm the first probe at a random phase."""
        core = self._core
        core.arm(core.rng.uniform(0.0, core.config.probe_interval_s), self._probe_round)

    def enter(self, member: Member) -> None:
        """Give a newcomer a random place in the present round."""
        self._ring.insert(self._core.rng.randint(0, len(self._ring)), member.record.id)

    def _probe_round(self) -> None:
        core = self._core
        member = self._next()
        if member is not None:
            self.probe(member)
        core.arm(core.awareness.scale(core.jitter(core.config.probe_interval_s)), self._probe_round)

    def _next(self) -> Member | None:
        """Of the next few of the round, the one that we haven't heard from for longest.

        Everybody is probed once a round all the same; but who fell silent comes first, which cuts the
        tail of the time to the first probe that fails.
        """
        table = self._core.table
        for fresh in (False, True):
            if fresh:
                self._ring = [member.record.id for member in table.living]
                self._core.rng.shuffle(self._ring)
            while self._ring:
                node_id = min(self._ring[-_PROBED_AHEAD:], key=self._last_seen)
                self._ring.remove(node_id)
                member = table.get(node_id)
                if member is not None and member.living:
                    return member
        return None

    def _last_seen(self, node_id: str) -> float:
        member = self._core.table.get(node_id)
        return 0.0 if member is None or member.last_seen is None else member.last_seen

    def second_opinion(self, member: Member) -> None:
        """Somebody accuses ``member``: maybe probe it ourselves, soon.

        About ``second_opinions`` of all members do, so that a death is confirmed, or refuted, fast.
        """
        core, config = self._core, self._core.config
        others = max(1, core.table.living_total - 2)
        if core.rng.random() * others >= config.second_opinions:
            return
        node_id, generation = member.record.id, member.generation

        def look() -> None:
            held = core.table.get(node_id)
            if held is None or held.timer is None or held.generation != generation:
                return
            if core.me.id not in held.timer.accusers:
                self.probe(held)

        core.arm(core.rng.uniform(0.0, 0.25) * config.probe_interval_s, look)

    def forget(self) -> None:
        """Drop every probe under way without a verdict: we were held up ourselves."""
        self._probes.clear()

    # One probe

    def ping(self, member: Member, deadline_s: float, outcome: _Outcome) -> None:
        """Ping ``member``, with the accusations against it."""
        core = self._core
        records = core.piggyback(*core.evidence(member))
        core.send(member, Ping(core.me.incarnation, member.record.incarnation, records), deadline_s, outcome)

    def probe(self, member: Member) -> None:
        """Start one probe of ``member``."""
        core, config = self._core, self._core.config
        self._count += 1
        number, record = self._count, member.record
        self._probes[number] = _Probe(record.id, record.incarnation, core.now)
        window_s = core.awareness.scale(config.probe_interval_s)
        self.ping(member, window_s, lambda result: self._direct(number, result))
        core.arm(config.probe_timeout_s, lambda: self._ask_relays(number))
        core.arm(window_s, lambda: self._judge(number))

    def _direct(self, number: int, result: Answered | SendFailed) -> None:
        core = self._core
        probe = self._probes.get(number)
        member = None if probe is None else core.table.get(probe.target)
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            if probe is not None and member is not None:
                member.measured(core.now - probe.started)
            self._succeeded(number, result)
        elif probe is None:
            return
        elif isinstance(result, SendFailed) and proves_absence(result):
            del self._probes[number]
            if member is not None:
                core.accuse(member, probe.incarnation, result.reason)
        elif shows_life(result):
            del self._probes[number]
        else:
            if isinstance(result, SendFailed) and result.kind == "local":
                core.awareness.add(1)
            probe.failed = True
            self._ask_relays(number)
            self._judge_early(number)

    def _ask_relays(self, number: int) -> None:
        core = self._core
        probe = self._probes.get(number)
        if probe is None or probe.indirect:
            return
        probe.indirect = True
        relays = core.table.sample(
            core.config.indirect_probes,
            core.rng,
            lambda member: member.state == "alive" and member.record.id != probe.target,
        )
        probe.relays_asked = len(relays)
        deadline_s = core.awareness.scale(core.config.probe_timeout_s)
        for relay in relays:
            request = PingReq(probe.target, probe.incarnation, core.piggyback())
            core.send(relay, request, deadline_s, lambda result: self._relayed(number, result))

    def _relayed(self, number: int, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._succeeded(number, result)
            return
        probe = self._probes.get(number)
        if isinstance(result, Answered) and isinstance(result.message, Nack):
            self._core.learn(result)
            if probe is not None:
                probe.nacks += 1
        elif probe is not None:
            probe.silent += 1
        self._judge_early(number)

    def _succeeded(self, number: int, result: Answered) -> None:
        probe = self._probes.pop(number, None)
        self._core.learn(result)
        if probe is not None:
            self._core.awareness.add(-1)

    def _judge_early(self, number: int) -> None:
        """Judge when nothing more can come."""
        probe = self._probes.get(number)
        if probe is not None and probe.failed and probe.nacks + probe.silent == probe.relays_asked > 0:
            self._judge(number)

    def _judge(self, number: int) -> None:
        """Accuse the target of a probe that nobody answered; relays that were silent point at ourselves."""
        core = self._core
        probe = self._probes.pop(number, None)
        if probe is None:
            return
        missing = probe.relays_asked - probe.nacks
        core.awareness.add(missing if probe.relays_asked else 1)
        member = core.table.get(probe.target)
        if member is None:
            return
        reason = "no answer to probe"
        if probe.relays_asked:
            reason += f"; {probe.nacks} of {probe.relays_asked} relays could not reach it either"
        core.accuse(member, probe.incarnation, reason)

    # The final probe of a suspect, before it is declared dead

    def final_probe(self, member: Member) -> None:
        """Probe ``member``, whose suspicion has run out: directly, then again and through twice k relays."""
        final = _FinalProbe(member.record.id, member.generation)
        deadline_s = self._core.awareness.scale(self._core.config.probe_timeout_s)
        self.ping(member, deadline_s, lambda result: self._final_direct(final, member, result))

    def _final_direct(self, final: _FinalProbe, member: Member, result: Answered | SendFailed) -> None:
        core = self._core
        core.learn(result)
        if shows_life(result) or (isinstance(result, SendFailed) and result.kind == "local"):
            self._end_final(final, answered=True)
            return
        if isinstance(result, SendFailed) and proves_absence(result):
            self._end_final(final, answered=False)
            return
        relays = core.table.sample(2 * core.config.indirect_probes, core.rng)
        final.open = len(relays) + 1
        deadline_s = core.awareness.scale(core.config.probe_timeout_s)
        self.ping(member, deadline_s, lambda result: self._final_second(final, result))
        for relay in relays:
            request = PingReq(final.node_id, member.record.incarnation, core.piggyback())
            core.send(relay, request, deadline_s, lambda result: self._final_second(final, result))

    def _final_second(self, final: _FinalProbe, result: Answered | SendFailed) -> None:
        self._core.learn(result)
        final.open -= 1
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._end_final(final, answered=True)
        elif final.open == 0:
            self._end_final(final, answered=False)

    def _end_final(self, final: _FinalProbe, answered: bool) -> None:
        if not final.over:
            final.over = True
            self._core.final_probe_ended(final.node_id, final.generation, answered)

    # Answering

    def answer_ping(self, token: int, sender: str, ping: Ping, told_by: str) -> None:
        """Answer a probe of ourselves: with our record when it is news, and with accusations."""
        core = self._core
        core.apply(ping.records, told_by)
        first = (core.me,) if ping.known < core.me.incarnation else ()
        core.respond(token, self.ack(sender, ping.incarnation, *first))

    def ack(self, sender: str, incarnation: Incarnation, *first: Record) -> Ack:
        """An ack to ``sender``, who said that it is in ``incarnation``."""
        core = self._core
        member = core.table.get(sender)
        accusations: tuple[Suspicion, ...] = ()
        if member is not None and member.record.incarnation == incarnation:
            accusations = core.evidence(member)
        want = member is None or member.record.incarnation < incarnation
        return Ack(core.me.incarnation, core.piggyback(*first, *core.corrections(), *accusations), want)

    def answer_ping_req(self, token: int, request: PingReq, told_by: str) -> None:
        """Probe ``request.target`` for somebody else; only at the address that we hold."""
        core = self._core
        core.apply(request.records, told_by)
        member = core.table.get(request.target)
        if member is None or member.state in ("left", "banned"):
            core.respond(token, Nack("not in my view", core.piggyback()))
            return
        record = member.record
        if record.incarnation > request.known and member.state == "alive":
            core.respond(token, Ack(record.incarnation, core.piggyback(record)))
            return
        if record.incarnation == request.known and member.state == "dead":
            core.respond(token, Nack("given up here too", core.piggyback()))
            return
        known = min(request.known, record.incarnation)

        def relay(result: Answered | SendFailed) -> None:
            if isinstance(result, Answered) and isinstance(result.message, Ack):
                core.learn(result)
                newer = (member.record,) if member.record.incarnation > request.known else ()
                core.respond(token, Ack(result.message.incarnation, core.piggyback(*newer)))
                return
            reason = result.reason if isinstance(result, SendFailed) else "a strange answer"
            nack = Nack(reason[:200], core.piggyback())
            if isinstance(result, SendFailed) and proves_absence(result):
                core.accuse(member, record.incarnation, reason)
            core.respond(token, nack)

        ping = Ping(core.me.incarnation, known, core.piggyback(*core.evidence(member)))
        core.send(member, ping, core.config.probe_timeout_s * core.config.nack_fraction, relay)


# Anti-entropy

_CODE: dict[State, int] = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}
_DEAD = 2
_LIVING = (0, 1)


class _AntiEntropy:
    """Push-pull: two members compare views by a digest, and each sends what the other lacks.

    Gossip sends each record a limited number of times; what it missed, a push-pull mends. It runs every
    30 s with a random member, after each join, and with each dead member that answers again. Equal
    views cost two small messages.
    """

    def __init__(self, core: Membership) -> None:
        self._core = core
        self._hash = b""
        self._hash_version = -1

    def start(self) -> None:
        """Arm the first rounds at random phases."""
        core, config = self._core, self._core.config
        core.arm(core.rng.uniform(0.2, 1.0) * config.sync_interval_s, self._sync_round)
        core.arm(core.rng.uniform(0.2, 1.0) * config.reconnect_interval_s, self._reconnect_round)

    def _sync_round(self) -> None:
        core = self._core
        for member in core.table.sample(1, core.rng):
            self.run(member)
        core.arm(core.jitter(core.config.sync_every_s(core.table.living_total)), self._sync_round)

    def _reconnect_round(self) -> None:
        core = self._core
        dead = [member for member in core.table if member.state == "dead"]
        if dead and core.rng.random() * max(1, len(core.table.living)) < len(dead):
            self._reconnect(core.rng.choice(dead))
        core.arm(core.jitter(core.config.reconnect_interval_s), self._reconnect_round)

    def _reconnect(self, member: Member) -> None:
        """Try a dead member; when it answers it refutes its death, and the views are merged."""
        core = self._core

        def answered(result: Answered | SendFailed) -> None:
            if isinstance(result, Answered) and isinstance(result.message, Ack):
                core.learn(result)
                if member.living:
                    self.run(member)

        core.detector.ping(member, 2 * core.config.probe_timeout_s, answered)

    def view_hash(self) -> bytes:
        """16 bytes that agree between two nodes exactly when their living members and settings do."""
        core = self._core
        if self._hash_version != core.table.version or not self._hash:
            digest = hashlib.blake2b(digest_size=16)
            living = [core.me, *(member.record for member in core.table.living)]
            for record in sorted(living, key=lambda record: record.id):
                digest.update(record.id.encode() + struct.pack(">QQ", *record.incarnation))
            for entry in core.swarm.digest():
                digest.update(f"{entry.key} {entry.epoch} {entry.proposer} {entry.lineage};".encode())
            self._hash, self._hash_version = digest.digest(), core.table.version
        return self._hash

    # The side that asks

    def run(self, member: Member) -> None:
        """Start a push-pull with ``member``."""
        core, node_id = self._core, member.record.id
        sync = Sync(self.view_hash(), core.piggyback())
        deadline_s = 4 * core.config.probe_interval_s
        core.send(member, sync, deadline_s, lambda result: self._compared(node_id, result))

    def _compared(self, node_id: str, result: Answered | SendFailed) -> None:
        core = self._core
        member = core.table.get(node_id)
        if member is None or not isinstance(result, Answered) or not isinstance(result.message, Digest):
            return
        digest = result.message
        if digest.same:
            return
        give, want = self.compare(digest.members)
        give_swarm, want_swarm = core.swarm.compare(digest.swarm)
        if give or want or give_swarm or want_swarm:
            delta = Delta((*give_swarm, *give), want, want_swarm)
            core.send(member, delta, 8 * core.config.probe_interval_s, self._mended)

    def _mended(self, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, GossipMessage):
            self._core.apply(result.message.records, result.told_by)

    def compare(self, theirs: tuple[DigestEntry, ...]) -> tuple[tuple[Record, ...], tuple[str, ...]]:
        """Return what the other side lacks, and the ids of what we lack.

        A dead or left member that the other side doesn't know stays unknown to it: tombstones
        would otherwise be handed round for ever.
        """
        core = self._core
        other = {entry.id.hex(): (entry.incarnation, entry.state) for entry in theirs}
        give: list[Record] = []
        want: list[str] = []
        mine = other.pop(core.me.id, None)
        if mine is None or mine[0] < core.me.incarnation:
            give.append(core.me)
        elif mine[1] in (1, _DEAD) or mine[0] > core.me.incarnation:
            want.append(core.me.id)
        for node_id in core.swarm.bans:
            other.pop(node_id, None)
        for member in core.table:
            if member.state == "banned":
                continue
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
                give.extend((member.record,) if member.state == "left" else core.evidence(member))
            elif held[1] < their[1]:
                want.append(member.record.id)
        want.extend(node_id for node_id, (_, state) in other.items() if state in _LIVING)
        return tuple(give[: core.config.max_records_per_answer]), tuple(want[:8192])

    # The side that is asked

    def answer_sync(self, token: int, sync: Sync, told_by: str) -> None:
        """Answer with our digest, or with ``same``."""
        core = self._core
        core.apply(sync.records, told_by)
        if sync.view_hash == self.view_hash():
            core.respond(token, Digest(True))
            return
        entries = [DigestEntry(bytes.fromhex(core.me.id), core.me.incarnation, 0)]
        entries += [
            DigestEntry(bytes.fromhex(member.record.id), member.record.incarnation, _CODE[member.state])
            for member in core.table
            if member.state != "banned"
        ]
        core.respond(token, Digest(False, tuple(entries), core.swarm.digest()))

    def answer_delta(self, token: int, delta: Delta, told_by: str) -> BadRecordError | None:
        """Take what we lacked, and answer with what was wanted."""
        core = self._core
        bad = core.apply(delta.records, told_by)
        records: list[Record] = []
        for key in delta.want_swarm:
            setting = core.swarm.get(key)
            if setting is not None:
                records.append(setting)
        for node_id in delta.want_members[: core.config.max_records_per_answer]:
            member = core.table.get(node_id)
            if node_id == core.me.id:
                records.append(core.me)
            elif member is not None and member.state != "banned":
                records += (member.record, *core.evidence(member))
        core.respond(token, GossipMessage(core.me.incarnation, tuple(records)))
        return bad

    def view(self) -> tuple[Record, ...]:
        """Every living member's record and every setting: what a newcomer is given."""
        core = self._core
        living = [member.record for member in core.table.living]
        everything: tuple[Record, ...] = (*core.swarm.all(), core.me, *living)
        return everything[: core.config.max_records_per_answer]


def _order(record: Record) -> int:
    """Who may command first, accusations last."""
    if isinstance(record, SwarmRecord):
        return 0 if record.key == "operators" else 1
    return 3 if isinstance(record, Suspicion) else 2


def own_record(
    signer: Signer,
    name: str,
    address: str,
    boot_ms: int,
    tags: dict[str, str],
    *,
    release: str = "",
    spoken: ProtocolRange = SPOKEN,
) -> MemberRecord:
    """A node's first record of this boot, unsigned."""
    return MemberRecord(
        signer.node_id,
        signer.public_key,
        name,
        address,
        Incarnation(boot_ms, 0),
        "alive",
        with_release(tags, release, spoken),
        spoken.oldest,
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
    allowed: Callable[[str], Collection[str] | None] = lambda node_id: None,
    roots: Iterable[Operator] = (),
    release: str = "",
    spoken: ProtocolRange = SPOKEN,
) -> Membership:
    """Make the core of a node that starts now, with a boot id greater than any before.

    Args:
        allowed: the roles that a node's certificate allows it; None for no limit.
        release: of p2pdrl, as others are told.
        spoken: the protocols that the node speaks.
    """
    boot_ms = known.next_boot_ms(clock.wall(), config.future_s)
    return Membership(
        config=config,
        signer=signer,
        verifier=Verifier(swarm_id, verify, config.future_s, allowed),
        record=own_record(signer, name[:64], address, boot_ms, tags or {}, release=release, spoken=spoken),
        rng=rng,
        wall=clock.wall,
        now=clock.monotonic(),
        roots=roots,
    )
