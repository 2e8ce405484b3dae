"""The made-up network under the membership simulator: time, delays, losses, stopped processes.

`Swarm` in `simulator` adds nodes and faults to it. Calls and answers are the core's own effects and
inputs; nothing is encoded unless bytes are to be counted.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdrl.clock import ManualClock
from p2pdrl.ids import node_id_from_public_key
from p2pdrl.membership.events import (
    Answered,
    Effect,
    Failed,
    Input,
    MemberEvent,
    Reject,
    Request,
    Respond,
    Send,
    Tick,
    Told,
    Welcomed,
)
from p2pdrl.membership.messages import Message, Welcome, encode
from p2pdrl.membership.state import Membership

__all__ = ["FreeSigner", "SimulatedNetwork", "SimulatedNode", "trust"]


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
            elif isinstance(effect, Told):
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
            lambda: self._finish(node, life, Failed(call_id, "timeout", "no answer in time")),
        )
        target = self._by_address.get(send.to)
        if target is None or target.unplugged or not self._passes(node, target):
            return
        self._at(self.now + self._way_s(), lambda: self._arrive(node, life, target, send))

    def _arrive(self, node: SimulatedNode, life: int, target: SimulatedNode, send: Send) -> None:
        if target.unplugged:
            return  # the cable went while the message was on its way
        call_id = send.call_id
        failure: Failed | None = None
        if not target.running:
            failure = Failed(call_id, "unreachable", "connection refused")
        elif target.signer.node_id != send.target_id:
            failure = Failed(call_id, "refused", "it answered 403: another node lives here", 403)
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
        result: Answered | Failed
        if isinstance(effect, Respond):
            result = Answered(call_id, effect.message)
        else:
            result = Failed(call_id, "refused", effect.reason, effect.status)
        self._at(self.now + self._way_s(), lambda: self._finish(node, life, result))

    def _finish(self, node: SimulatedNode, life: int, result: Answered | Failed) -> None:
        if node.life != life or result.call_id not in node.pending:
            return
        node.pending.discard(result.call_id)
        if result.call_id >= 0:
            self._feed(node, result)
            return
        seed = self._joins.pop(result.call_id)
        if isinstance(result, Answered) and isinstance(result.message, Welcome):
            self._feed(node, Welcomed(seed.signer.node_id, seed.address, result.message))
