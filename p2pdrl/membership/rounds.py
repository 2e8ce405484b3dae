"""What a node does of its own accord: probe, gossip, push-pull, reconnect, forget tombstones.

Each round arms its next one. `Membership` starts them.
"""

from __future__ import annotations

from p2pdrl.membership.anti_entropy import Syncer
from p2pdrl.membership.events import Answered, Failed
from p2pdrl.membership.kernel import Kernel
from p2pdrl.membership.messages import Ack, Gossip, Ping
from p2pdrl.membership.prober import Prober
from p2pdrl.membership.records import SwarmRecord
from p2pdrl.membership.rumours import Rumours
from p2pdrl.membership.table import Member

__all__ = ["Rounds"]

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
                gossip = Gossip(kernel.me.incarnation, records)
                kernel.send(member, gossip, config.probe_interval_s, self._gossiped)
        self._gossiping = len(kernel.queue) > 0
        if self._gossiping:
            kernel.arm(kernel.jitter(config.gossip_interval_s), self._gossip_round)

    def _gossiped(self, result: Answered | Failed) -> None:
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
            gossip, deadline_s = Gossip(kernel.me.incarnation, (record,)), 2 * kernel.config.probe_interval_s
            kernel.send(member, gossip, deadline_s, lambda result: told(result, node_id, tries))
            return True

        def told(result: Answered | Failed, node_id: str, tries: int) -> None:
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
        gossip = Gossip(kernel.me.incarnation, settings)
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

        def answered(result: Answered | Failed) -> None:
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
