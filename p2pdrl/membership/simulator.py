"""A swarm of membership cores on a manual clock and an in-memory queue of messages.

Tests and calibration run hundreds of nodes for virtual minutes in seconds. The cores are those
of the daemon; only the network, the signatures and time are made up.

    swarm = Swarm(32, seed=1)
    swarm.run(5.0)
    swarm.kill(3)
    print(swarm.seconds_until(lambda: swarm.all_see(3, "dead"), 30.0))
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import Any

from p2pdrl.membership.events import MemberEvent, Send, Tick
from p2pdrl.membership.messages import Join
from p2pdrl.membership.opening import own_record
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import SwarmRecord, Verifier
from p2pdrl.membership.simulated_network import FreeSigner, SimulatedNetwork, SimulatedNode, trust
from p2pdrl.membership.state import Membership

__all__ = ["Swarm"]


class Swarm(SimulatedNetwork):
    """Nodes 0 … n−1, all of whom know each other at the start.

    Args:
        n: how many.
        seed: of every random choice.
        config: constants of the protocol.
        loss: probability that a request, and again that an answer, is lost.
        delay_s: least and greatest time of one way.
        acquainted: False starts them as strangers; use `join`.
        count_bytes: encode each message to count its bytes (slow).
    """

    def __init__(
        self,
        n: int,
        *,
        seed: int = 0,
        config: MembershipConfig | None = None,
        loss: float = 0.0,
        delay_s: tuple[float, float] = (0.0005, 0.005),
        acquainted: bool = True,
        count_bytes: bool = False,
    ) -> None:
        super().__init__(random.Random(seed), loss, delay_s, count_bytes)
        self.config = config or MembershipConfig.lan()
        for number in range(n):
            self._add(number)
        if acquainted:
            records = [node.core.me for node in self.nodes]
            for node in self.nodes:
                node.core.assume(records, self.now)
                node.events.clear()

    def _core(self, number: int, signer: FreeSigner, address: str) -> Membership:
        return Membership(
            config=self.config,
            signer=signer,
            verifier=Verifier("sim", trust),
            record=own_record(signer, f"n{number}", address, int(self.clock.wall() * 1000), {}),
            rng=random.Random(self._rng.getrandbits(64)),
            wall=self.clock.wall,
            now=self.now,
        )

    def _add(self, number: int) -> SimulatedNode:
        signer = FreeSigner(number)
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:7600"
        node = SimulatedNode(number, signer, address, self._core(number, signer, address))
        self.nodes.append(node)
        self._by_address[address] = node
        self._plan(node)
        return node

    # Faults

    def kill(self, number: int) -> None:
        """As kill -9: its address refuses connections from now on."""
        node = self.nodes[number]
        node.running, node.paused = False, False
        node.life += 1
        node.pending.clear()
        node.inbox.clear()

    def unplug(self, number: int) -> None:
        """The machine is gone: its address says nothing at all."""
        self.kill(number)
        self.nodes[number].unplugged = True

    def restart(self, number: int, through: int, address: str | None = None) -> None:
        """Start it again with the same key and a new boot, and join."""
        node = self.nodes[number]
        node.running, node.unplugged = True, False
        if address is not None:
            del self._by_address[node.address]
            node.address = address
            self._by_address[address] = node
        node.core = self._core(number, node.signer, node.address)
        node.wake_at = float("inf")
        node.events.clear()
        self._plan(node)
        self.join(number, through)

    def pause(self, number: int) -> None:
        """As SIGSTOP."""
        self.nodes[number].paused = True

    def resume(self, number: int) -> None:
        """As SIGCONT: what arrived meanwhile is read first, then late timers run."""
        node = self.nodes[number]
        node.paused = False
        inbox, node.inbox = node.inbox, []
        for event in inbox:
            self._feed(node, event)
        node.wake_at = float("inf")
        self._feed(node, Tick())

    def partition(self, *sides: Iterable[int]) -> None:
        """Nodes of different sides can't reach each other; nodes not named are side 0."""
        self._sides = {number: index for index, side in enumerate(sides) for number in side}

    def cut_one_way(self, source: int, target: int) -> None:
        """Drop everything from ``source`` to ``target``, requests and answers."""
        self._one_way.add((source, target))

    def heal(self) -> None:
        """Mend the network."""
        self._sides.clear()
        self._one_way.clear()

    def join(self, number: int, through: int) -> None:
        """Ask ``through`` to take ``number`` in, again every second until it does."""
        node, seed = self.nodes[number], self.nodes[through]
        self._count += 1
        call_id, life = -self._count, node.life
        node.pending.add(call_id)
        self._joins[call_id] = seed
        self._call(node, Send(call_id, seed.address, seed.signer.node_id, Join(node.core.me), 1.0))

        def again() -> None:
            if node.life == life and node.running and len(node.core.members(self.now)) == 1:
                self.join(number, through)

        self._at(self.now + 1.5, again)

    def leave(self, number: int) -> None:
        """Say goodbye, then end a little later."""
        node = self.nodes[number]
        self._carry_out(node, node.core.leave(self.now))
        self._at(self.now + 1.0, lambda: self.kill(number))

    def propose(self, number: int, key: str, value: Any) -> SwarmRecord:
        """Let a node write a setting of the whole swarm."""
        node = self.nodes[number]
        record, effects = node.core.propose(key, value, self.now)
        self._carry_out(node, effects)
        return record

    def catch_up(self, number: int, other: int) -> None:
        """Let a node compare views with another."""
        node = self.nodes[number]
        self._carry_out(node, node.core.catch_up(self.nodes[other].signer.node_id, self.now))

    # What is seen

    def state(self, observer: int, subject: int) -> str:
        """What ``observer`` holds of ``subject``: a state, or "unknown"."""
        view = self.nodes[observer].core.member(self.nodes[subject].signer.node_id, self.now)
        return "unknown" if view is None else view.state

    def all_see(self, subject: int, state: str, observers: Collection[int] | None = None) -> bool:
        """True when every running other node holds ``subject`` in ``state``."""
        return all(
            self.state(node.number, subject) == state
            for node in self.nodes
            if node.running
            and not node.paused
            and node.number != subject
            and (observers is None or node.number in observers)
        )

    def converged(self) -> bool:
        """True when every running node holds exactly the running nodes for alive."""
        truth = sorted(node.signer.node_id for node in self.nodes if node.running)
        return all(node.core.alive_ids() == truth for node in self.nodes if node.running)

    def told(self, kind: str) -> list[tuple[float, int, MemberEvent]]:
        """Every event of that kind: time, observer, event."""
        return [
            (when, node.number, event)
            for node in self.nodes
            for when, event in node.events
            if event.kind == kind
        ]
