"""A membership ends on connections that are open, too: their handshakes were before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError, TransportError
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.certificates import Authority, Credentials
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Lane, Reply

KEY = b"the swarm's key"
HOLDER, GUEST = Identity(b"a" * 32), Identity(b"b" * 32)
LEFT_S = 3600.0


class AheadClock(SystemClock):
    """Of a machine whose wall clock goes on faster than OpenSSL's."""

    ahead_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead_s


def credentials(left_s: float) -> Credentials:
    authority = Authority(KEY)
    certificate = authority.certify(GUEST.public_key, until_s=time.time() + left_s)
    return Credentials(certificate, (authority.certificate,))


class Member:
    """One node on a real port."""

    def __init__(self, identity: Identity, shown: Credentials | list[bytes]) -> None:
        self.id, self.clock, limits = identity.node_id, AheadClock(), TransportLimits(shutdown_grace_s=0.05)
        tls = identity.tls(shown)
        self.transport = HttpTransport(self.id, "default", tls, clock=self.clock, limits=limits)
        self.listener = Listener(limits, self.clock, self.transport.counters)
        self.at = Address("127.0.0.1", 0)

    async def start(self) -> None:
        async def hello(_: Incoming) -> Reply:
            return Reply(b"hello")

        self.transport.serve("hello", hello)
        app = web.Application()
        self.transport.mount(app)
        self.at = await self.listener.listen(app, "127.0.0.1", 0, has_key=True)
        await self.transport.start()

    async def call(self, other: Member, lane: Lane) -> bytes:
        answer = await self.transport.call(other.at, other.id, "hello", b"", deadline_s=5, lane=lane)
        return answer.meta

    async def close(self) -> None:
        await self.transport.close()
        await self.listener.close()


@pytest.fixture
async def members() -> AsyncIterator[tuple[Member, Member]]:
    made = Member(HOLDER, [KEY]), Member(GUEST, credentials(LEFT_S))
    for member in made:
        await member.start()
    yield made
    for member in made:
        await member.close()


@pytest.mark.parametrize("lane", ["probe", "bulk"])
async def test_a_caller_whose_membership_has_ended_is_refused(
    members: tuple[Member, Member], lane: Lane
) -> None:
    holder, guest = members
    for _ in range(3):
        assert await guest.call(holder, lane) == b"hello"
    holder.clock.ahead_s = LEFT_S + 1.0
    for _ in range(2):
        with pytest.raises(PeerRefusedError, match="membership of your node has ended") as told:
            await guest.call(holder, lane)
        assert told.value.status == 403


@pytest.mark.parametrize("lane", ["probe", "bulk"])
async def test_one_that_was_invited_anew_shows_its_new_certificate(
    members: tuple[Member, Member], lane: Lane
) -> None:
    holder, guest = members
    assert await guest.call(holder, lane) == b"hello"
    guest.transport.use_keys(credentials(3 * LEFT_S), anew=False)
    holder.clock.ahead_s = LEFT_S + 1.0
    with contextlib.suppress(TransportError):  # a stream that is open ends by it
        await guest.call(holder, lane)
    assert await guest.call(holder, lane) == b"hello"


async def test_nor_is_its_answer_taken(members: tuple[Member, Member]) -> None:
    holder, guest = members
    assert await holder.call(guest, "probe") == b"hello"
    holder.clock.ahead_s = LEFT_S + 1.0
    with pytest.raises(PeerRefusedError, match="membership of the node that answers has ended"):
        await holder.call(guest, "probe")
