"""Calls whose answers are held, over an in-memory network that loses what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random

import msgspec
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError
from p2pdrl.group.calls import FIRST_S, MOST_S, SILENCE_S, AtWork, HeldCalls
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

pytestmark = pytest.mark.looptime

WAY_S = 0.01
VECTOR = bytes(range(16))


def now() -> float:
    return asyncio.get_running_loop().time()


class Pair:
    """A caller, and a peer that holds calls until `release`."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(random.Random(0), delay_s=(WAY_S, WAY_S), unseen=True)
        self.caller, self.peer = (
            self.network.join(name, Address(f"10.0.0.{i}", 7000)) for i, name in enumerate(("a", "b"))
        )
        self.at_work = AtWork()
        self.calls = HeldCalls(self.caller, LoopClock(), self._ask)
        self.handled: list[int] = []
        self.asked = 0
        self.release = asyncio.Event()
        self.release.set()
        self.why: Refusal | None = None

    async def __aenter__(self) -> Pair:
        for transport in (self.caller, self.peer):
            await transport.start()
        self.peer.serve("work", self._work)
        self.peer.serve("ask", self._answer)
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in (self.caller, self.peer):
            await transport.close()

    async def call(self, *, once: bool = False, deadline_s: float = 20.0) -> bytes:
        room = bytearray(len(VECTOR))
        await self.calls.call(
            self.peer.address,
            "b",
            "work",
            msgspec.msgpack.encode,
            into=lambda _, nbytes: memoryview(room)[:nbytes],
            deadline_s=deadline_s,
            once=once,
        )
        return bytes(room)

    async def _work(self, incoming: Incoming) -> Reply:
        number = msgspec.msgpack.decode(incoming.meta)
        self.handled.append(number)
        return await self.at_work.serve(incoming.sender, number, self._reply())

    async def _reply(self) -> Reply:
        await self.release.wait()
        if self.why is not None:
            raise self.why
        return Reply(b"", vector=memoryview(VECTOR))

    async def _ask(self, to: Address, peer: str, number: int) -> bool:
        self.asked += 1
        answer = await self.caller.call(to, peer, "ask", msgspec.msgpack.encode(number), deadline_s=0.5)
        return answer.meta == b"yes"

    async def _answer(self, incoming: Incoming) -> Reply:
        held = (incoming.sender, msgspec.msgpack.decode(incoming.meta)) in self.at_work
        return Reply(b"yes" if held else b"no")

    async def settled(self) -> None:
        """Make some calls, so that it is known how long they take."""
        for _ in range(8):
            assert await self.call() == VECTOR
        self.handled.clear()
        self.asked = 0

    def lose(self, source: str, target: str, seconds: float) -> None:
        """Lose all one way for a while."""
        self.network.cut(source, target, one_way=True)
        asyncio.get_running_loop().call_later(seconds, self.network.heal)


async def test_a_call_that_goes_well_is_made_once_and_asked_after_never():
    async with Pair() as pair:
        await pair.settled()
        assert await pair.call() == VECTOR
        assert (len(pair.handled), pair.asked, pair.calls.lost) == (1, 0, 0)


async def test_one_that_is_held_for_long_is_asked_after_and_made_once():
    async with Pair() as pair:
        await pair.settled()
        pair.release.clear()
        asyncio.get_running_loop().call_later(8.0, pair.release.set)
        assert await pair.call() == VECTOR
        assert len(pair.handled) == 1
        assert 7 <= pair.asked <= 16  # at growing pauses, up to a second


@pytest.mark.parametrize(("source", "target", "handled"), [("a", "b", 1), ("b", "a", 2)])
async def test_what_is_lost_is_made_again_soon(source, target, handled):
    async with Pair() as pair:
        await pair.settled()
        began_s = now()
        pair.lose(source, target, 0.05)
        assert await pair.call() == VECTOR
        assert now() - began_s < 0.25
        assert len(pair.handled) == handled
        assert len(set(pair.handled)) == 1  # it is the same call
        assert pair.calls.lost == 1


async def test_before_it_is_known_how_long_calls_take_a_lost_one_costs_little_more():
    async with Pair() as pair:
        pair.lose("a", "b", 0.05)
        assert await pair.call() == VECTOR
        assert now() < 2 * FIRST_S


async def test_one_that_would_do_harm_twice_is_given_up():
    async with Pair() as pair:
        await pair.settled()
        began_s = now()
        pair.lose("b", "a", 0.05)
        with pytest.raises(PeerTimeoutError, match="lost"):
            await pair.call(once=True)
        assert now() - began_s < 0.25
        assert len(pair.handled) == 1


async def test_a_silent_peer_is_given_up():
    async with Pair() as pair:
        await pair.settled()
        began_s = now()
        pair.network.freeze("b")
        with pytest.raises(PeerTimeoutError):
            await pair.call()
        assert SILENCE_S < now() - began_s < SILENCE_S + 2 * MOST_S
        pair.network.thaw("b")


async def test_a_pause_of_the_peer_costs_just_that():
    async with Pair() as pair:
        await pair.settled()
        began_s = now()
        pair.network.freeze("b")
        asyncio.get_running_loop().call_later(2.0, pair.network.thaw, "b")
        assert await pair.call() == VECTOR
        assert now() - began_s < 2.1


async def test_nobody_who_listens_is_known_at_once():
    async with Pair() as pair:
        await pair.settled()
        await pair.peer.close()
        with pytest.raises(PeerUnreachableError):
            await pair.call()


async def test_a_peer_that_dies_while_it_holds_a_call_is_known_when_it_is_asked():
    async with Pair() as pair:
        await pair.settled()
        began_s = now()
        pair.release.clear()
        asyncio.get_running_loop().call_later(0.02, pair.network.detach, pair.peer)
        with pytest.raises(PeerUnreachableError):
            await pair.call()
        assert now() - began_s < 0.2
        pair.release.set()


async def test_the_deadline_holds_however_often_it_is_made():
    async with Pair() as pair:
        await pair.settled()
        began_s = now()
        pair.lose("b", "a", 60.0)
        with pytest.raises(PeerTimeoutError):
            await pair.call(deadline_s=2.0)
        assert now() - began_s == pytest.approx(2.0)


async def test_a_refusal_is_an_answer():
    async with Pair() as pair:
        pair.why = Refusal(409, "another view")
        with pytest.raises(PeerRefusedError):
            await pair.call()
        assert ("a", 1) not in pair.at_work


async def test_a_call_is_held_until_its_answer_was_written():
    at_work, ends = AtWork(), []

    async def work() -> Reply:
        return Reply(b"", on_end=ends.append)

    reply = await at_work.serve("a", 7, work())
    again = await at_work.serve("a", 7, work())
    assert ("a", 7) in at_work
    reply.on_end(False)
    assert ("a", 7) in at_work
    again.on_end(True)
    assert ("a", 7) not in at_work
    assert ends == [False, True]


class Unhelpful:
    """A transport whose calls never end, and break when they are given up."""

    async def call(self, *_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise PeerUnreachableError("it broke", sent=True) from error


async def test_how_a_call_that_is_given_up_ends_is_read():
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))

    async def gone(*_: object) -> bool:
        raise PeerUnreachableError("nothing listens", sent=False)

    calls = HeldCalls(Unhelpful(), LoopClock(), gone)
    with contextlib.suppress(PeerUnreachableError):
        await calls.call(Address("10.0.0.1", 7000), "b", "work", msgspec.msgpack.encode, deadline_s=20.0)
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []
