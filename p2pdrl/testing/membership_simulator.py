"""A swarm of membership cores on a manual clock and an in-memory queue of messages.

Tests and calibration run hundreds of nodes for virtual minutes in seconds. The cores are those of the daemon;
only the network, the signatures and time are made up. Calls and answers are the core's own effects and
inputs; nothing is encoded unless bytes are to be counted.

    swarm = SimulatedSwarm(32, seed=1)
    swarm.run(5.0)
    swarm.kill(3)
    print(swarm.seconds_until(lambda: swarm.all_see(3, "dead"), 30.0))

`SimulatedNetwork` has time, delays, losses and stopped processes; `SimulatedSwarm` adds nodes and faults.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from p2pdrl.clock import ManualClock
from p2pdrl.ids import node_id_from_public_key
from p2pdrl.membership.events import (
    Answered,
    Effect,
    Input,
    MemberEvent,
    Notified,
    Reject,
    Request,
    Respond,
    Send,
    SendFailed,
    Tick,
    Welcomed,
)
from p2pdrl.membership.messages import JoinRequest, Message, Welcome, encode
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import SwarmRecord, Verifier
from p2pdrl.membership.state import Membership, own_record

__all__ = ["FreeSigner", "SimulatedNetwork", "SimulatedNode", "SimulatedSwarm", "trust"]


class FreeSigner:
    """Signs with nothing: for simulations, where nobody forges."""

    def __init__(self, number: int) -> None:
        self.public_key = number.to_bytes(32, "big")
        self.node_id = node_id_from_public_key(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """Return no bytes at all."""
        return b""


def trust(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Accept any signature."""
    return True


@dataclass(slots=True)
class SimulatedNode:
    """One process.

    Attributes:
        life: raised at each restart; what was under way for an earlier life is lost.
        wake_at: when its core wants a tick.
        pending: calls under way.
        inbox: what arrived while it was stopped.
        events: what its core told, with the time.
    """

    number: int
    signer: FreeSigner
    address: str
    core: Membership
    running: bool = True
    unplugged: bool = False
    paused: bool = False
    life: int = 0
    wake_at: float = float("inf")
    pending: set[int] = field(default_factory=set)
    inbox: list[Input] = field(default_factory=list)
    events: list[tuple[float, MemberEvent]] = field(default_factory=list)


class SimulatedNetwork:
    """Carries messages between simulated nodes.

    Args:
        rng: every random choice.
        loss: probability that a request, and again that an answer, is lost.
        delay_s: least and greatest time of one way.
        count_bytes: encode each message to count its bytes (slow).

    Attributes:
        messages: requests and answers sent so far.
        nbytes: their bytes, when counted.
    """

    def __init__(
        self, rng: random.Random, loss: float, delay_s: tuple[float, float], count_bytes: bool
    ) -> None:
        self.clock = ManualClock()
        self.loss = loss
        self.messages = 0
        self.nbytes = 0
        self.nodes: list[SimulatedNode] = []
        self._rng = rng
        self._delay_s = delay_s
        self._count_bytes = count_bytes
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._sides: dict[int, int] = {}
        self._one_way: set[tuple[int, int]] = set()
        self._by_address: dict[str, SimulatedNode] = {}
        self._tokens: dict[int, tuple[SimulatedNode, SimulatedNode, int, int]] = {}
        self._joins: dict[int, SimulatedNode] = {}

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.clock.monotonic()

    # Time

    def run(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self._step()
        self.clock.advance(max(0.0, end - self.now))

    def seconds_until(
        self, condition: Callable[[], bool], limit_s: float, every_s: float = 0.1
    ) -> float | None:
        """Let time pass until ``condition``; return the seconds that it took, or None at the limit."""
        start = self.now
        while not condition():
            if self.now - start >= limit_s:
                return None
            self.run(every_s)
        return self.now - start

    def _step(self) -> None:
        due, _, run = heapq.heappop(self._queue)
        self.clock.advance(max(0.0, due - self.now))
        run()

    def _at(self, due: float, run: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (due, self._count, run))

    def _plan(self, node: SimulatedNode) -> None:
        due = node.core.next_wakeup()
        if due is None or due >= node.wake_at:
            return
        node.wake_at = due
        life = node.life

        def wake() -> None:
            if node.life != life or not node.running or node.paused or node.wake_at != due:
                return
            node.wake_at = float("inf")
            self._feed(node, Tick())

        self._at(due, wake)

    # The network

    def _feed(self, node: SimulatedNode, event: Input) -> None:
        if not node.running:
            return
        if node.paused:
            node.inbox.append(event)
            return
        self._carry_out(node, node.core.handle(event, self.now))

    def _carry_out(self, node: SimulatedNode, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                node.pending.add(effect.call_id)
                self._call(node, effect)
            elif isinstance(effect, Respond | Reject):
                self._answer(effect)
            elif isinstance(effect, Notified):
                node.events.append((self.now, effect.event))
        self._plan(node)

    def _count_message(self, message: Message | None) -> None:
        self.messages += 1
        if self._count_bytes and message is not None:
            self.nbytes += len(encode(message))

    def _way_s(self) -> float:
        return self._rng.uniform(*self._delay_s)

    def _passes(self, source: SimulatedNode, target: SimulatedNode) -> bool:
        if self._sides.get(source.number, 0) != self._sides.get(target.number, 0):
            return False
        if (source.number, target.number) in self._one_way:
            return False
        return self.loss == 0 or self._rng.random() >= self.loss

    def _call(self, node: SimulatedNode, send: Send) -> None:
        self._count_message(send.message)
        life, call_id = node.life, send.call_id
        self._at(
            self.now + send.deadline_s,
            lambda: self._finish(node, life, SendFailed(call_id, "timeout", "no answer in time")),
        )
        target = self._by_address.get(send.to)
        if target is None or target.unplugged or not self._passes(node, target):
            return
        self._at(self.now + self._way_s(), lambda: self._arrive(node, life, target, send))

    def _arrive(self, node: SimulatedNode, life: int, target: SimulatedNode, send: Send) -> None:
        if target.unplugged:
            return  # the cable went while the message was on its way
        call_id = send.call_id
        failure: SendFailed | None = None
        if not target.running:
            failure = SendFailed(call_id, "unreachable", "connection refused")
        elif target.signer.node_id != send.target_id:
            failure = SendFailed(call_id, "refused", "it answered 403: another node lives here", 403)
        if failure is not None:
            self._at(self.now + self._way_s(), lambda: self._finish(node, life, failure))
            return
        self._count += 1
        self._tokens[self._count] = (target, node, life, call_id)
        self._feed(target, Request(self._count, node.signer.node_id, send.message))

    def _answer(self, effect: Respond | Reject) -> None:
        target, node, life, call_id = self._tokens.pop(effect.token)
        self._count_message(effect.message if isinstance(effect, Respond) else None)
        if not self._passes(target, node):
            return
        result: Answered | SendFailed
        if isinstance(effect, Respond):
            result = Answered(call_id, effect.message)
        else:
            result = SendFailed(call_id, "refused", effect.reason, effect.status)
        self._at(self.now + self._way_s(), lambda: self._finish(node, life, result))

    def _finish(self, node: SimulatedNode, life: int, result: Answered | SendFailed) -> None:
        if node.life != life or result.call_id not in node.pending:
            return
        node.pending.discard(result.call_id)
        if result.call_id >= 0:
            self._feed(node, result)
            return
        seed = self._joins.pop(result.call_id)
        if isinstance(result, Answered) and isinstance(result.message, Welcome):
            self._feed(node, Welcomed(seed.signer.node_id, seed.address, result.message))


class SimulatedSwarm(SimulatedNetwork):
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
        self._call(node, Send(call_id, seed.address, seed.signer.node_id, JoinRequest(node.core.me), 1.0))

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
        """True when every running other node holds ``subject`` in ``membership.state``."""
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
