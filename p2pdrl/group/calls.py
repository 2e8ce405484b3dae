"""Calls over links that lose messages: some whose answers are held, and short ones made several times.

How long a held call stays unanswered is up to the slowest member, so time alone can't tell that it, or its
answer, was lost. The caller asks: does the peer work at it? If it doesn't, the call is made again, with
the same number; handlers of such calls do no harm when they run twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.group.adaptive_timeout import ENOUGH, AdaptiveTimeout
from p2pdrl.transport.protocol import Address, Answer, Reply, Transport, VectorBuffer

__all__ = ["HOLD", "MOST_TIMES", "AtWork", "HeldCalls", "repeated"]

SILENCE_S = 3.5
"""A peer that doesn't even say whether it works at a call is given up after so long."""
FIRST_S = 0.3
LEAST_S = 0.1
MOST_S = 1.0
"""A peer is asked after so long: at first, at least, at most."""
MARGIN = 2.0
"""Within them it is so many times what calls to it take: asking is cheap."""
QUANTILE = 0.25
"""What calls take is this quantile of what the last took: most may have been held up by what got lost."""
LATER = 1.5
"""Each time, it is asked so much later."""
SOON_S = 0.02
SOON = 0.25
"""An answer that left before the peer said that it is no longer at work comes within `SOON_S`, or within this
part of what calls take."""
MOST_PEERS = 1024
HOLD = 0.8
"""Part of the time a caller waits for which its call is held; the rest is for the way back."""


class AtWork:
    """What this node works at for others: calls that came, until their answers have been written."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, int]] = Counter()

    def __contains__(self, call: tuple[str, int]) -> bool:
        """Whether we work at a call, by sender and number."""
        return call in self._calls

    async def serve(self, sender: str, number: int, work: Awaitable[Reply]) -> Reply:
        """Return what ``work`` does; the call counts as held until that answer has been written."""
        key = (sender, number)
        self._calls[key] += 1
        try:
            reply = await work
        except BaseException:
            self._end(key)
            raise

        def ended(sent: bool) -> None:
            self._end(key)
            if reply.on_end is not None:
                reply.on_end(sent)

        return replace(reply, on_end=ended)

    def _end(self, key: tuple[str, int]) -> None:
        self._calls[key] -= 1
        if not self._calls[key]:
            del self._calls[key]


class HeldCalls:
    """The caller's side.

    Args:
        ask: ``(address, peer, number)`` -> whether it works at that call; raises `TransportError`.
    """

    def __init__(
        self, transport: Transport, clock: Clock, ask: Callable[[Address, str, int], Awaitable[bool]]
    ) -> None:
        self._transport, self._clock, self._ask = transport, clock, ask
        self._timeout: dict[tuple[str, str], AdaptiveTimeout] = {}
        self._number = 0
        self.lost = 0
        """Calls that were made again because they, or their answers, were lost."""

    async def call(
        self,
        to: Address,
        peer: str,
        route: str,
        meta: Callable[[int], bytes],
        *,
        vector: memoryview | None = None,
        into: VectorBuffer | None = None,
        deadline_s: float,
        once: bool = False,
    ) -> Answer:
        """Make a call on the lane of vectors, as often as it is lost.

        Args:
            meta: gives its metadata, which say the number that it is given.
            once: it would do harm twice: give it up when it, or its answer, is lost.

        Raises:
            PeerTimeoutError: no answer in time, or the peer has been silent for `SILENCE_S`, or it is lost.
            TransportError: as `Transport.call`.
        """
        self._number += 1
        number, began_s = self._number, self._clock.monotonic()
        timeout = self._timeout_for(peer, route)
        pause_s, message = timeout.deadline_s, meta(number)
        arriving = asyncio.Event()

        def room(head: bytes, nbytes: int) -> memoryview | None:
            arriving.set()
            return None if into is None else into(head, nbytes)

        while True:
            left_s = max(0.0, began_s + deadline_s - self._clock.monotonic())
            arriving.clear()
            call = self._transport.call(
                to, peer, route, message, vector=vector, into=room, deadline_s=left_s, lane="bulk"
            )
            task = asyncio.ensure_future(call)
            try:
                if not await self._lost(task, (to, peer, number), pause_s, arriving):
                    answer = task.result()
                    timeout.observe(self._clock.monotonic() - began_s)
                    return answer
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                elif not task.cancelled():
                    task.exception()  # read, also when we are cancelled just as it failed
            self.lost += 1
            if once:
                raise PeerTimeoutError(f"the call of {route} to {peer}, or its answer, was lost")
            pause_s = min(LATER * pause_s, MOST_S)

    async def _lost(
        self,
        task: asyncio.Future[Answer],
        which: tuple[Address, str, int],
        pause_s: float,
        arriving: asyncio.Event,
    ) -> bool:
        """Wait for a call's end; True when it won't come."""
        heard_s, soon_s = self._clock.monotonic(), max(SOON_S, SOON * pause_s / MARGIN)
        while True:
            await asyncio.wait({task}, timeout=pause_s)
            if arriving.is_set():
                await asyncio.wait({task})  # from here on the transport sees to it that it goes on
            if task.done():
                return False
            pause_s = min(LATER * pause_s, MOST_S)
            try:
                held = await self._ask(*which)
            except (PeerTimeoutError, PeerUnreachableError) as error:
                gone = isinstance(error, PeerUnreachableError) and not error.sent
                if not task.done() and (gone or self._clock.monotonic() > heard_s + SILENCE_S):
                    raise
                continue
            except TransportError:
                held = False  # it refuses to say, and will refuse the call as well
            heard_s = self._clock.monotonic()
            if not held:
                await asyncio.wait({task}, timeout=soon_s)
                if not task.done() and not arriving.is_set():
                    return True

    def _timeout_for(self, peer: str, route: str) -> AdaptiveTimeout:
        key = (peer, route)
        timeout = self._timeout.get(key)
        if timeout is None:
            if len(self._timeout) >= MOST_PEERS:
                self._timeout.clear()
            timeout = AdaptiveTimeout(MOST_S, least_s=LEAST_S, quantile=QUANTILE, margin=MARGIN)
            for _ in range(ENOUGH):
                timeout.observe(FIRST_S / MARGIN)
            self._timeout[key] = timeout
        return timeout


MOST_TIMES = 4
"""A call is made so often at most."""

T = TypeVar("T")


async def repeated(
    call: Callable[[float], Coroutine[Any, Any, T]], *, again_s: float, deadline_s: float, clock: Clock
) -> T:
    """Make a call that does no harm when it arrives twice; the first answer counts.

    A refusal is an answer. That nothing listens there is known at once; a connection that broke, or an
    answer that doesn't come, says little about the peer before it happened to all of the calls.

    Args:
        call: makes it, in at most the seconds that it is given.
        again_s: it is made again after so long without an answer.

    Raises:
        PeerTimeoutError: none was answered.
        PeerUnreachableError: nothing listens there, or all connections broke.
        TransportError: what the call raises.
    """
    until_s = clock.monotonic() + deadline_s
    failure: TransportError = PeerTimeoutError(f"no answer within {deadline_s:g} s")
    made: list[asyncio.Task[T]] = []
    waiting: set[asyncio.Task[T]] = set()
    try:
        for time in range(1, MOST_TIMES + 1):
            left_s = until_s - clock.monotonic()
            if left_s <= 0:
                break
            made.append(asyncio.create_task(call(left_s), name="repeated"))
            waiting.add(made[-1])
            next_s = until_s if time == MOST_TIMES else min(until_s, clock.monotonic() + again_s)
            while waiting and (left_s := next_s - clock.monotonic()) > 0:
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in sorted(done, key=_failed):
                    try:
                        return task.result()
                    except PeerUnreachableError as error:
                        if not error.sent:
                            raise
                        failure = error
                    except PeerTimeoutError as error:
                        failure = error
                if not done:
                    break
            if not waiting and time < MOST_TIMES:
                await asyncio.sleep(max(0.0, next_s - clock.monotonic()))
    finally:
        # All of them, also those that ended in the same turn as the one that counted: each failure is read.
        for task in made:
            task.cancel()
        await asyncio.gather(*made, return_exceptions=True)
    raise failure


def _failed(task: asyncio.Task[T]) -> bool:
    """Whether a call that has ended brought no answer: answers are looked at first."""
    return task.cancelled() or task.exception() is not None
