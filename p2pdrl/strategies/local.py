"""No averaging: the reference that other strategies are measured against."""

from __future__ import annotations

import asyncio

from p2pdrl.config.strategy import Mode
from p2pdrl.strategies.protocol import Strategy
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["LocalStrategy"]


class LocalStrategy(Strategy):
    """Trains alone."""

    mode: Mode = "local"
    consensus_distance: float | None = None

    def __init__(self) -> None:
        self._stopped = asyncio.Event()

    @property
    def outcomes(self) -> dict[str, int]:
        """Nothing ever happens."""
        return {}

    async def start(self) -> None:
        """Nothing to begin."""

    async def stop(self, timeout_s: float) -> None:
        """Nothing to end but the watch."""
        self._stopped.set()

    async def watch(self) -> None:
        """Wait until it is stopped."""
        await self._stopped.wait()

    async def answer(self, incoming: Incoming) -> Reply:
        """Refuse: whoever calls is in another mode.

        Raises:
            Refusal: always.
        """
        raise Refusal(409, "this node's mode is local")
