"""Whether others can dial this node, and who relays calls to it where they can't.

A node asks members to dial it back, soon after it joined, then now and again, and when it was accused or
has moved. Each makes a new connection to the port that the node tells, at the address of its signed record
and at the one from which it was asked, so nobody can be made to dial a third. Where half of them fail, the
node is outbound-only: it says so in its record, with the relays that it keeps (`transport.relay`), and all
members call it through those.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.membership.events import MemberView
from p2pdrl.membership.records import refuse_address, relays_in
from p2pdrl.membership.service import MembershipService
from p2pdrl.node.background import set_within
from p2pdrl.node.events import EventLog
from p2pdrl.transport import codec
from p2pdrl.transport.calls import TokenBuckets
from p2pdrl.transport.dial import dial_back, ip_of, is_loopback
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["CHECK_ROUTE", "PROVE_ROUTE", "DialBack", "Reachability", "outbound_only"]

CHECK_ROUTE, PROVE_ROUTE = "reach/check", "reach/prove"
NONCE_BYTES = 16

ASKED = 3
"""Members that are asked at a time; half of those that answer have to fail."""
RELAYS = 2
MOST_RELAYS = 3
"""With those that are suspect, until it is known what became of them."""
DIAL_S = 3.0
CHECK_S = 2 * DIAL_S + 3.0
LOOK_S = 0.25
AGAIN_S: dict[str, float] = {"unknown": 3.0, "direct": 300.0, "outbound-only": 60.0}
"""Seconds from one check to the next."""
CONFIRM_S = 1.0
LEAST_S = 5.0
"""Between a check and one for a reason."""
RELAY_AGAIN_S = 10.0
"""A member that didn't relay isn't asked for so long."""
DIALS_AT_ONCE = 8
DIALS_PER_S, DIALS_BURST = 0.2, 6.0

Reach = Literal["unknown", "direct", "outbound-only"]


def outbound_only(member: MemberView) -> bool:
    """Whether a member says that nobody can dial it."""
    return relays_in(member.tags) is not None


class DialBack(msgspec.Struct, frozen=True, array_like=True):
    """Asks a member to dial us."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class DialedBack(msgspec.Struct, frozen=True, array_like=True):
    """What came of it.

    Attributes:
        reached: whether the address that we tell everybody led to us.
        host: the IP from which we were heard.
        why: why not, in a few words.
        elsewhere: whether our port at ``host`` did, which isn't the address that we tell.
    """

    reached: bool
    host: Annotated[str, Meta(max_length=64)]
    why: Annotated[str, Meta(max_length=200)] = ""
    elsewhere: bool = False


class Reachability:
    """One node's.

    Args:
        membership: tells others what is found.
        transport: carries checks, and relays.
        rng: whom to ask.

    Attributes:
        reach: what is known of our own address.
        why: words for it.
    """

    def __init__(
        self,
        membership: MembershipService,
        transport: HttpTransport,
        clock: Clock,
        events: EventLog,
        rng: random.Random,
    ) -> None:
        self.reach: Reach = "unknown"
        self.why = ""
        self._membership = membership
        self._transport = transport
        self._clock = clock
        self._events = events
        self._rng = rng
        self._nonces: set[bytes] = set()
        self._asked = TokenBuckets(clock, DIALS_PER_S, DIALS_BURST)
        self._dialing = 0
        self._checked_s = float("-inf")
        self._seen_from = ""
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._news = asyncio.Event()
        transport.serve(CHECK_ROUTE, self._answer_check, max_meta_bytes=64)
        transport.serve(PROVE_ROUTE, self._answer_prove, max_meta_bytes=NONCE_BYTES)
        transport.relays.relays = membership.relays_of
        transport.relay.admits = self._is_member

    def figures(self) -> dict[str, object]:
        """What ``/v1/status`` tells."""
        relay = self._transport.relay
        checked = self._checked_s > float("-inf")
        return {
            "state": self.reach,
            "why": self.why,
            "seen_from": self._seen_from,
            "checked_s": self._clock.monotonic() - self._checked_s if checked else None,
            "relays": [self._name(node_id) for node_id in self._relays],
            "relays_for": [self._name(node_id) for node_id in relay.members],
            "tunnels": relay.tunnels,
            "relayed_bytes": relay.nbytes,
        }

    def _name(self, node_id: str) -> str:
        member = self._member(node_id)
        return node_id if member is None else member.name

    def _member(self, node_id: str) -> MemberView | None:
        return self._membership.core.member(node_id, self._clock.monotonic())

    def _is_member(self, node_id: str) -> bool:
        member = self._member(node_id)
        return member is not None and member.state in ("alive", "suspect")

    async def run(self) -> None:
        """Check, and keep relays, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_often(), name="reachability")
            group.create_task(self._keep_relays(group), name="relays")

    # Asking others to dial us

    async def _check_often(self) -> None:
        core = self._membership.core
        while True:
            checked_address, refutations = core.me.address, core.refutations
            tried = bool(self._dialable())
            if tried:
                await self._check_and_tell()
            began_s = self._clock.monotonic()
            while True:
                await asyncio.sleep(LOOK_S)
                waited_s = self._clock.monotonic() - began_s
                if tried and waited_s >= AGAIN_S[self.reach]:
                    break
                news = core.me.address != checked_address or core.refutations != refutations
                if (news and waited_s >= LEAST_S) or (not tried and self._dialable()):
                    break

    def _dialable(self) -> list[MemberView]:
        """Living others that can be dialled, and so can dial back."""
        return [
            member
            for member in self._membership.members()
            if member.state == "alive" and not member.is_self and not outbound_only(member)
        ]

    async def _check_and_tell(self) -> None:
        """Check, twice before something that was known changes, and tell everybody."""
        found = await self._check()
        if found is None or found[0] == self.reach:
            return
        if self.reach != "unknown":
            await asyncio.sleep(CONFIRM_S)
            again = await self._check()
            if again is None or again[0] != found[0]:
                return
        before = self.reach
        self.reach, self.why = found
        address = self._membership.core.me.address
        if self.reach == "outbound-only":
            port = Address.parse(address).port
            text = (
                f"others can't dial {address} ({self.why}): this node is outbound-only, and is called "
                f"through relays. For a direct connection forward port {port} of the router to this machine "
                "(node.port_mapping asks it to), or open it in the firewall"
            )
            self._events.emit("outbound-only", text, level="warning", address=address)
        elif before == "outbound-only":
            self._events.emit("direct", f"others can dial {address} now", address=address)
        self._news.set()

    async def _check(self) -> tuple[Reach, str] | None:
        """Ask some members; None when no one can tell."""
        members = self._dialable()
        asked = self._rng.sample(members, min(ASKED, len(members)))
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces.add(nonce)
        try:
            answers = await asyncio.gather(*(self._ask(member, nonce) for member in asked))
        finally:
            self._nonces.discard(nonce)
        told = [answer for answer in answers if answer is not None]
        if not told:
            return None
        self._checked_s = self._clock.monotonic()
        failed = [answer for answer in told if not answer.reached]
        self._seen_from = (failed or told)[0].host
        if 2 * len(failed) < len(told):
            return "direct", ""
        one = next((answer for answer in failed if answer.elsewhere), failed[0])
        words = one.why
        if one.elsewhere:
            there = Address(one.host, Address.parse(self._membership.core.me.address).port)
            words = f"{one.why}; but {there} leads here: start this node with --advertise {there}"
        return "outbound-only", words

    async def _ask(self, member: MemberView, nonce: bytes) -> DialedBack | None:
        port = Address.parse(self._membership.core.me.address).port
        try:
            meta = msgspec.msgpack.encode(DialBack(port, nonce))
            answer = await self._transport.call(
                Address.parse(member.address), member.id, CHECK_ROUTE, meta, deadline_s=CHECK_S
            )
            found: DialedBack = codec.decode(answer.meta, DialedBack, "answer of who was to dial us back")
        except (TransportError, msgspec.ValidationError):
            return None  # it can't tell
        printable = found.why.isprintable() and found.host.isprintable()
        return found if printable else msgspec.structs.replace(found, why="", host="")

    async def _answer_prove(self, incoming: Incoming) -> Reply:
        if incoming.meta not in self._nonces:
            raise Refusal(403, "this node has asked nobody with that number to dial it")
        return Reply(incoming.meta)

    # Dialling others for them

    async def _answer_check(self, incoming: Incoming) -> Reply:
        """Dial a member that asks, at its own address and no other.

        Raises:
            Refusal: 409, we don't see its address; 429, it asks too often.
        """
        ask: DialBack = codec.decode(incoming.meta, DialBack, "request to be dialled")
        if self.reach == "outbound-only" or self._transport.relayed.tunnels:
            raise Refusal(409, "this node is called through relays, and doesn't see who calls: ask another")
        host = incoming.remote_host
        allowed = self._asked.take(incoming.sender) and (is_loopback(host) or self._asked.take(host))
        if not allowed or self._dialing >= DIALS_AT_ONCE:
            raise Refusal(429, "too many want to be dialled: ask again later")
        self._dialing += 1
        try:
            return Reply(msgspec.msgpack.encode(await self._dial_back(incoming.sender, host, ask)))
        finally:
            self._dialing -= 1

    async def _dial_back(self, sender: str, host: str, ask: DialBack) -> DialedBack:
        """Dial the address that a member's record tells, as all members do; then where it asked from."""
        ip = ip_of(host)
        seen = Address(host if ip is None else str(ip), ask.port)
        member = self._member(sender) if self._is_member(sender) else None
        told = seen if member is None else Address.parse(member.address)
        why = await self._dial(told, sender, ask.nonce)
        if not why:
            return DialedBack(True, seen.host)
        elsewhere = told != seen and not await self._dial(seen, sender, ask.nonce)
        return DialedBack(False, seen.host, why, elsewhere)

    async def _dial(self, address: Address, node_id: str, nonce: bytes) -> str:
        """Connect anew to a node; return why that isn't possible, in a few words, or nothing."""
        if refused := refuse_address(str(address), address.host):
            return refused[:200]
        try:
            answer = await self._transport.call_anew(address, node_id, PROVE_ROUTE, nonce, deadline_s=DIAL_S)
        except PeerTimeoutError:
            return f"a connection to {address} gets no answer: a router or a firewall drops it"
        except PeerUnreachableError as error:
            return f"a connection to {address} is refused" if not error.sent else "the connection breaks"
        except TransportError:
            return f"somebody else answers at {address}"
        return "" if answer.meta == nonce else f"somebody else answers at {address}"

    async def dial_for(self, host: str, port: int, nonce: str) -> dict[str, object]:
        """Dial a machine that asks by the API whether its port can be reached, and say ``nonce`` there.

        Returns:
            ``connected``, ``host`` and ``why`` not.

        Raises:
            Refusal: 429, too many want that.
        """
        ip = ip_of(host)
        address = Address(host if ip is None else str(ip), port)
        why = "this node is called through relays, and doesn't see who asks: ask another"
        if self.reach != "outbound-only" and not self._transport.relayed.tunnels:
            if not self._asked.take(f"api {host}") or self._dialing >= DIALS_AT_ONCE:
                raise Refusal(429, "too many want to be dialled: ask again later")
            self._dialing += 1
            try:
                why = refuse_address(str(address), address.host) or await dial_back(address, nonce, DIAL_S)
            finally:
                self._dialing -= 1
        return {"connected": not why, "host": address.host, "why": why}

    # Relays of ours

    async def _keep_relays(self, group: asyncio.TaskGroup) -> None:
        while True:
            if self.reach == "outbound-only":
                await self._mend_relays(group)
            elif self._relays:
                for relay in tuple(self._relays):
                    self._drop(relay)
            told = relays_in(self._membership.core.me.tags)
            wanted = tuple(self._relays) if self.reach == "outbound-only" else None
            if told != wanted:
                self._tell(wanted)
            self._news.clear()
            await set_within(self._news, LOOK_S)

    def _tell(self, relays: Sequence[str] | None) -> None:
        self._membership.tell_relays(relays)
        if relays is None:
            return
        names = " and ".join(self._name(relay) for relay in relays)
        if names:
            self._events.emit("relays", f"others call this node through {names}", relays=list(relays))
        else:
            text = "no member relays calls to this node: others can't call it, and may take it for dead"
            self._events.emit("relays", text, level="warning", relays=[])

    async def _mend_relays(self, group: asyncio.TaskGroup) -> None:
        """Let go of relays that are gone, and attach to others while fewer than two are well."""
        members = {member.id: member for member in self._dialable()}
        for relay in tuple(self._relays):
            if self._relays[relay].done() or not self._is_member(relay) or len(self._relays) > MOST_RELAYS:
                self._drop(relay)
        well = [relay for relay in self._relays if relay in members]
        if len(well) >= RELAYS:
            for relay in set(self._relays) - set(well):
                self._drop(relay)
            return
        now_s = self._clock.monotonic()
        others = [
            member
            for member in members.values()
            if member.id not in self._relays and self._not_before_s.get(member.id, 0.0) <= now_s
        ]
        others.sort(key=lambda member: (round((member.rtt_s or 0.0) * 100), self._rng.random()))
        wanted = others[: RELAYS - len(well)]
        attached = await asyncio.gather(*(self._attach(member) for member in wanted))
        for member, good in zip(wanted, attached, strict=True):
            if good and len(self._relays) < MOST_RELAYS:
                address = Address.parse(member.address)
                serving = self._serve(member.id, address)
                self._relays[member.id] = group.create_task(serving, name="relay")

    async def _attach(self, member: MemberView) -> bool:
        try:
            await self._transport.relayed.attach(member.id, Address.parse(member.address))
        except TransportError:
            self._not_before_s = {
                node: at_s for node, at_s in self._not_before_s.items() if at_s > self._clock.monotonic()
            }
            self._not_before_s[member.id] = self._clock.monotonic() + RELAY_AGAIN_S
            return False
        return True

    async def _serve(self, relay: str, address: Address) -> None:
        try:
            await self._transport.relayed.serve(relay, address)
        except TransportError:
            self._news.set()

    def _drop(self, relay: str) -> None:
        self._relays.pop(relay).cancel()
