"""Environments in the learner's own process: it acts, then learns, and so on."""

from __future__ import annotations

from p2pdrl.rl.rollout import Collector, Unroll
from p2pdrl.rl.sources.scaling import UnrollScaler
from p2pdrl.rl.sources.source import Source

__all__ = ["InlineSource"]


class InlineSource(Source[Unroll]):
    """Collects an unroll whenever one is asked for, with the parameters as they are then.

    Args:
        collector: steps the environments; closed with the source.
        scaler: scales and counts.
    """

    def __init__(self, collector: Collector, scaler: UnrollScaler) -> None:
        self._collector = collector
        self._scaler = scaler

    def next(self) -> Unroll:
        """Run T steps in every environment."""
        return self._scaler.scale(self._collector.collect())

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()
