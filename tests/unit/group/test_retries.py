"""Short calls that are made again until one is answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError
from p2pdrl.group.calls import MOST_TIMES, repeated

pytestmark = pytest.mark.looptime

BROKEN = PeerUnreachableError("it broke", sent=True)
REFUSED = PeerUnreachableError("nothing listens", sent=False)


def now() -> float:
    return asyncio.get_running_loop().time()


class Peer:
    """Answers each call by what stands for it: after so many seconds, never (None), or with an error."""

    def __init__(self, *fates) -> None:
        self.fates = list(fates)
        self.made_s: list[float] = []
        self.under_way = 0

    async def call(self, left_s: float) -> int:
        number = len(self.made_s)
        self.made_s.append(now())
        fate = self.fates[number]
        self.under_way += 1
        try:
            if isinstance(fate, Exception):
                raise fate
            if fate is None or fate > left_s:
                await asyncio.sleep(left_s)
                raise PeerTimeoutError("no answer")
            await asyncio.sleep(fate)
            return number
        finally:
            self.under_way -= 1


async def run(peer: Peer, again_s: float = 0.2, deadline_s: float = 1.0) -> int:
    try:
        return await repeated(peer.call, again_s=again_s, deadline_s=deadline_s, clock=LoopClock())
    finally:
        assert not peer.under_way


async def test_a_call_that_is_answered_is_made_once():
    peer = Peer(0.1)
    assert await run(peer) == 0
    assert now() == pytest.approx(0.1)


async def test_a_lost_one_is_made_again():
    peer = Peer(None, 0.1)
    assert await run(peer) == 1
    assert now() == pytest.approx(0.3)


async def test_the_first_answer_counts_whichever_call_it_is_of():
    peer = Peer(0.3, 0.5)
    assert await run(peer) == 0
    assert now() == pytest.approx(0.3)
    assert len(peer.made_s) == 2


async def test_it_is_made_so_often_and_no_longer_than_the_deadline():
    peer = Peer(*[None] * MOST_TIMES)
    with pytest.raises(PeerTimeoutError):
        await run(peer)
    assert now() == pytest.approx(1.0)
    assert peer.made_s == pytest.approx([0.0, 0.2, 0.4, 0.6])


async def test_a_short_deadline_cuts_the_repeats():
    peer = Peer(None, None)
    with pytest.raises(PeerTimeoutError):
        await run(peer, again_s=0.2, deadline_s=0.3)
    assert now() == pytest.approx(0.3)


async def test_a_connection_that_broke_is_no_news():
    peer = Peer(BROKEN, BROKEN, 0.0)
    assert await run(peer) == 2
    assert peer.made_s == pytest.approx([0.0, 0.2, 0.4])


async def test_all_broken_is_unreachable():
    with pytest.raises(PeerUnreachableError):
        await run(Peer(*[BROKEN] * MOST_TIMES))


@pytest.mark.parametrize("error", [REFUSED, PeerRefusedError(409, "another mode")])
async def test_that_nothing_listens_and_a_refusal_are_known_at_once(error):
    peer = Peer(error)
    with pytest.raises(type(error)):
        await run(peer)
    assert now() == 0.0
    assert len(peer.made_s) == 1


async def test_cancelling_ends_all_calls():
    peer = Peer(None, None, None)
    task = asyncio.create_task(run(peer))
    await asyncio.sleep(0.5)
    assert peer.under_way == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not peer.under_way


def heard_complaints() -> list[str]:
    """What the event loop says of errors that nobody handles, such as those of tasks that nobody reads."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
    return said


class Together:
    """Two calls that end in the same turn of the loop, the first made first."""

    def __init__(self, *ends: object) -> None:
        self.ends = list(ends)
        self.both = asyncio.Event()
        self.made = 0

    async def call(self, left_s: float) -> str:
        end = self.ends[self.made]
        self.made += 1
        if self.made == len(self.ends):
            asyncio.get_running_loop().call_later(0.05, self.both.set)
        await self.both.wait()
        if isinstance(end, Exception):
            raise end
        return str(end)


@pytest.mark.parametrize("ends", [("answer", BROKEN), (BROKEN, "answer"), (REFUSED, "answer")])
async def test_an_answer_counts_and_the_failures_beside_it_are_read(ends):
    complaints = heard_complaints()
    peer = Together(*ends)
    found = await repeated(peer.call, again_s=0.2, deadline_s=1.0, clock=LoopClock())
    assert found == "answer"
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_of_failures_that_come_together_all_are_read():
    complaints = heard_complaints()
    peer = Together(*(PeerRefusedError(409, "another mode") for _ in range(3)))
    with contextlib.suppress(
        PeerRefusedError
    ):  # `pytest.raises` would keep the frames, and the tasks in them
        await repeated(peer.call, again_s=0.2, deadline_s=1.0, clock=LoopClock())
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []
