"""The membership core: SWIM with Lifeguard, without input or output."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from p2pdrl.clock import Clock
from p2pdrl.ids import PROTOCOL_VERSION
from p2pdrl.membership.addresses import AddressPolicy
from p2pdrl.membership.anti_entropy import Syncer
from p2pdrl.membership.events import (
    Answered,
    Effect,
    Input,
    MemberView,
    Reject,
    Request,
    Respond,
    SendFailed,
    SwarmChanged,
    Tick,
    Welcomed,
)
from p2pdrl.membership.identity import Signer, verify
from p2pdrl.membership.kernel import Kernel
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.messages import Ack, Delta, GossipMessage, JoinRequest, Ping, PingReq, Sync, Welcome
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.prober import LastLooks, Prober
from p2pdrl.membership.records import BadRecordError, Incarnation, MemberRecord, Record, SwarmRecord, Verifier
from p2pdrl.membership.rumours import Rumours
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.membership.table import Member, view_of

__all__ = ["Membership", "Rounds", "open_core", "own_record"]

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
