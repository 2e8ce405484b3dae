"""Short calls over links that lose messages: made again, while the earlier go on, until one is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError

__all__ = ["MOST_TIMES", "repeated"]

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
        deadline_s: for all of them together.
        clock: monotonic time.

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
