"""One core, driven by hand, for the tests of memberlist and serf, in idea: all effects are kept."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

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
)
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.messages import Ack, Digest, GossipMessage, Message, Nack, Ping, PingReq, Sync
from p2pdrl.membership.operators import Operator
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import (
    Incarnation,
    MemberRecord,
    Record,
    Suspicion,
    Verifier,
    sign_member,
    sign_suspicion,
)
from p2pdrl.membership.state import Membership, own_record

WALL_S = 1_000_000.0
BOOT_MS = int(WALL_S * 1000)
KEYS = [Identity(bytes([number]) * 32) for number in range(1, 201)]


def record(number: int, counter: int = 0, **changes: object) -> MemberRecord:
    key = KEYS[number]
    plain = own_record(key, f"n{number}", f"10.0.0.{number}:7600", BOOT_MS, {})
    changes.setdefault("incarnation", Incarnation(BOOT_MS, counter))
    return sign_member(key, "swarm", msgspec.structs.replace(plain, **changes))


def suspicion(subject: int, accuser: int, counter: int = 0, verdict: str = "suspect") -> Suspicion:
    plain = Suspicion(
        KEYS[subject].node_id, Incarnation(BOOT_MS, counter), KEYS[accuser].node_id, verdict, "no answer"
    )
    return sign_suspicion(KEYS[accuser], "swarm", plain)


class Bench:
    """Node 0 under test among ``others`` peers; calls to peers succeed unless named in ``down``."""

    def __init__(self, others: int = 4, roots: tuple[Operator, ...] = (), **options: object) -> None:
        self.now = 0.0
        self.core = Membership(
            config=MembershipConfig(**options),
            signer=KEYS[0],
            verifier=Verifier("swarm", verify),
            record=own_record(KEYS[0], "n0", "10.0.0.0:7600", BOOT_MS, {}),
            rng=random.Random(0),
            wall=lambda: WALL_S + self.now,
            now=0.0,
            roots=roots,
        )
        self.core.assume([record(number) for number in range(1, others + 1)], 0.0)
        self.down: dict[int, str] = {}
        self.sent: list[Send] = []
        self.events: list[MemberEvent] = []
        self.other_effects: list[Effect] = []
        self._tokens: Iterator[int] = iter(range(1, 10**6))

    def feed(self, event: Input) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Notified):
                self.events.append(effect.event)
            elif isinstance(effect, Send):
                self.sent.append(effect)
            else:
                self.other_effects.append(effect)
        return effects

    def run(self, seconds: float) -> None:
        """Let timers run; every call is answered at once, or fails as ``down`` says."""
        end = self.now + seconds
        while True:
            self.answer_all()
            due = self.core.next_wakeup()
            if due is None or due > end:
                break
            self.now = max(due, self.now)
            self.feed(Tick())
        self.now = end

    def answer_all(self) -> None:
        while self.sent:
            send = self.sent.pop(0)
            number = next(i for i, key in enumerate(KEYS) if key.node_id == send.target_id)
            if number in self.down:
                kind = self.down[number]
                self.feed(SendFailed(send.call_id, kind, f"it was {kind}"))  # type: ignore[arg-type]
            elif isinstance(send.message, PingReq):
                self.feed(Answered(send.call_id, Nack("no answer")))
            elif isinstance(send.message, Sync):
                self.feed(Answered(send.call_id, Digest(True)))
            else:
                self.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0))))

    def ask(self, sender: int, message: Message, told_by: str = "") -> Message | Reject:
        """Give it a request and return its answer."""
        token = next(self._tokens)
        for effect in self.feed(Request(token, KEYS[sender].node_id, message, told_by)):
            if isinstance(effect, Respond) and effect.token == token:
                return effect.message
            if isinstance(effect, Reject) and effect.token == token:
                return effect
        raise AssertionError("no answer")

    def gossip(self, *records: Record, sender: int = 1) -> Message | Reject:
        return self.ask(sender, GossipMessage(Incarnation(BOOT_MS, 0), records))

    def state(self, number: int) -> str:
        view = self.core.member(KEYS[number].node_id, self.now)
        return "unknown" if view is None else view.state

    def kinds(self, number: int) -> list[str]:
        return [event.kind for event in self.events if event.member.id == KEYS[number].node_id]


def kill(bench: Bench, number: int = 1) -> None:
    """Nothing listens at a member any more: wait until it is taken for dead."""
    bench.down[number] = "unreachable"
    bench.run(30.0)
    assert bench.state(number) == "dead"


def first_ping(bench: Bench) -> Send:
    """Run timers until the core pings somebody."""
    while not any(isinstance(send.message, Ping) for send in bench.sent):
        due = bench.core.next_wakeup()
        assert due is not None
        bench.now = due
        bench.feed(Tick())
    return next(send for send in bench.sent if isinstance(send.message, Ping))
