"""No averaging: the reference that other strategies are measured against."""

from __future__ import annotations

import asyncio

__all__ = ["LocalStrategy"]


class LocalStrategy:
    """Trains alone."""

    mode = "local"
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

    def updated(self, updates: int) -> None:
        """Nothing to do."""
