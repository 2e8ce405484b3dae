"""Fault proxies before the nodes of a `LocalSwarm`, run by a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.protocol import Address

__all__ = ["Proxies"]


class Proxies:
    """One proxy before each target.

    Args:
        targets: where the nodes listen.
        ports: where the proxies listen; none are any that are free.
    """

    def __init__(self, targets: Sequence[Address], ports: Sequence[int] = ()) -> None:
        self._targets = targets
        self._ports = ports or [0] * len(targets)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies")
        self._stack = AsyncExitStack()
        self._cutter: asyncio.Task[None] | None = None
        self.proxies: list[FaultProxy] = []

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def addresses(self) -> list[Address]:
        """What the nodes are to advertise."""
        return [proxy.address for proxy in self.proxies]

    def do(self, act: Callable[[FaultProxy], None], number: int | None = None) -> None:
        """Let ``act`` change one proxy, or all, in the loop's thread."""

        async def run() -> None:
            for proxy in self.proxies if number is None else [self.proxies[number]]:
                act(proxy)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def cut_at_random(self, chance: float, seed: int = 0) -> None:
        """From now on reset all connections to each node with this chance in every second."""

        async def begin() -> None:
            self._cutter = asyncio.create_task(self._cut(chance, random.Random(seed)))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)

    async def _cut(self, chance: float, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(1.0)
            for proxy in self.proxies:
                if rng.random() < chance:
                    proxy.reset()

    async def _open(self) -> None:
        for target, port in zip(self._targets, self._ports, strict=True):
            self.proxies.append(await self._stack.enter_async_context(FaultProxy(target, port=port)))

    async def _close(self) -> None:
        if self._cutter is not None:
            self._cutter.cancel()
            await asyncio.gather(self._cutter, return_exceptions=True)
        await self._stack.aclose()
