"""Virtual time: an event loop whose clock jumps to the next timer as soon as nobody has anything to do.

Coroutines that wait for timers and for each other alone run as fast as their work, and always in the same
order. A loop made with ``waits`` also serves those who wait for a thread, a process or a socket.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["VirtualTimeLoop", "run_in_virtual_time"]

T = TypeVar("T")

_DIGITS = 9
"""Times are whole nanoseconds, asyncio's own resolution: sums of delays are what they are on paper."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps while a timer is set; its time begins at 0.

    Args:
        waits: where no timer is set, sleep until a thread or a socket wakes somebody; and while work is in an
            executor, sleep as long as the timer says, but let no time pass where the work ends sooner.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._now_s = 0.0
        self._waits = waits
        self._executing = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def real_wait_s(self, timeout: float | None) -> float | None:
        """How long to sleep, in true seconds, None without end, as nobody has anything to do for ``timeout``.

        Raises:
            RuntimeError: no timer will ever wake anybody, and nobody else is waited for.
        """
        if timeout is None and not self._waits:
            raise RuntimeError("in virtual time all wait for each other, and no timer is set")
        return timeout if timeout is None or self._executing else 0.0

    def jump(self, seconds: float) -> None:
        """Nobody has anything to do for so long: a nanosecond at least, or who looks again would for ever."""
        self._now_s = round(max(self._now_s + seconds, self._now_s + 10.0**-_DIGITS), _DIGITS)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """As ever; see ``waits``."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        if self._waits:
            self._executing += 1
            future.add_done_callback(self._executed)
        return future

    def _executed(self, _future: asyncio.Future[Any]) -> None:
        self._executing -= 1

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """As ever; a time-out that Python may have for it is in true seconds."""
        self._executing += 1
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self._executing -= 1


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return super().select(0)
        ready = super().select(self._loop.real_wait_s(timeout))
        if not ready and timeout is not None:
            self._loop.jump(timeout)
        return ready


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
