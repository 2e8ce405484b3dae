"""No averaging: the reference that other strategies are measured against."""

from __future__ import annotations

__all__ = ["LocalStrategy"]


class LocalStrategy:
    """Trains alone."""

    mode = "local"
    consensus_distance: float | None = None

    @property
    def outcomes(self) -> dict[str, int]:
        """Nothing ever happens."""
        return {}

    async def start(self) -> None:
        """Nothing to begin."""

    async def stop(self, timeout_s: float) -> None:
        """Nothing to end."""

    def updated(self, updates: int) -> None:
        """Nothing to do."""
