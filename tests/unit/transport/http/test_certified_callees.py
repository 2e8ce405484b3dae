"""What a node does with an answer of a peer whose certificate doesn't allow it to give that one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError, PeerUnreachableError
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.certificates import Authority, Credentials
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe.ticket import PipeReply
from p2pdrl.transport.protocol import Address, Incoming, Lane, Reply, RouteRoles

KEY = b"the swarm's key"
HOLDER, ACTOR = Identity(b"a" * 32), Identity(b"b" * 32)
TRAINERS = frozenset({"learner", "server"})


class Ends:
    """A holder of the key calls a node that was invited as an actor."""

    def __init__(self) -> None:
        clock, limits = SystemClock(), TransportLimits(shutdown_grace_s=0.05)
        authority = Authority(KEY)
        certificate = authority.certify(ACTOR.public_key, {"actor"})
        tls = ACTOR.tls(Credentials(certificate, (authority.certificate,)))
        self.holder = HttpTransport(HOLDER.node_id, "default", HOLDER.tls([KEY]), clock=clock, limits=limits)
        self.actor = HttpTransport(ACTOR.node_id, "default", tls, clock=clock, limits=limits)
        self.listener = Listener(limits, clock, self.actor.counters)
        self.asked = 0
        for transport in (self.holder, self.actor):
            transport.serve("state", self._answer, roles=RouteRoles(callees=TRAINERS))
            transport.serve("hello", self._answer)
            transport.serve_pipes("stage", self._pipe, roles=RouteRoles(callees=TRAINERS))

    async def _answer(self, _: Incoming) -> Reply:
        self.asked += 1
        return Reply(b"mine")

    async def _pipe(self, _: Incoming) -> PipeReply:
        raise AssertionError("nobody asked for it")

    async def start(self) -> None:
        app = web.Application()
        self.actor.mount(app)
        self.at: Address = await self.listener.listen(app, "localhost", 0, has_key=True)
        await self.holder.start()
        await self.actor.start()

    async def close(self) -> None:
        await self.holder.close()
        await self.actor.close()
        await self.listener.close()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    await made.start()
    yield made
    await made.close()


@pytest.mark.parametrize("lane", ["probe", "bulk"])
async def test_the_first_answer_isnt_believed_and_there_is_no_second_question(ends: Ends, lane: Lane) -> None:
    for target in (None, ACTOR.node_id, ACTOR.node_id):
        with pytest.raises(PeerRefusedError, match="for actor alone makes no learner or server"):
            await ends.holder.call(ends.at, target, "state", b"", deadline_s=5, lane=lane)
    assert ends.asked == 1, "who it is was known from then on"
    answer = await ends.holder.call(ends.at, ACTOR.node_id, "hello", b"", deadline_s=5, lane=lane)
    assert answer.meta == b"mine"


async def test_no_pipe_is_opened_to_it(ends: Ends) -> None:
    await ends.holder.call(ends.at, None, "hello", b"", deadline_s=5)
    with pytest.raises(PeerRefusedError, match="who alone are asked for stage"):
        await ends.holder.open_pipe(ends.at, ACTOR.node_id, "stage", b"", deadline_s=5)


async def test_a_certificate_with_more_roles_counts_once_it_is_shown(ends: Ends) -> None:
    await ends.holder.call(ends.at, None, "hello", b"", deadline_s=5)
    assert ends.holder.roles_of(ACTOR.node_id) == {"actor"}
    authority = Authority(KEY)
    certificate = authority.certify(ACTOR.public_key, {"actor", "learner"})
    ends.actor.use_keys(Credentials(certificate, (authority.certificate,)), anew=True)
    ends.listener.cut()
    with contextlib.suppress(PeerUnreachableError):  # the connection that is kept may be found dead
        await ends.holder.call(ends.at, None, "hello", b"", deadline_s=5)
    await ends.holder.call(ends.at, None, "hello", b"", deadline_s=5)
    answer = await ends.holder.call(ends.at, ACTOR.node_id, "state", b"", deadline_s=5)
    assert answer.meta == b"mine"
