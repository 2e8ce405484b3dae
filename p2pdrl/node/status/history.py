"""What the members have told over time, for curves that survive a page's reload. Pure.

Samples are taken at first every five seconds; whenever there are too many, every second one goes and they are
taken half as often. So a run of any length has between half and all of `MOST_SAMPLES`, at even distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2pdrl.node.accounting.report_table import PeerReport

__all__ = ["MOST_NODES", "MOST_SAMPLES", "MetricHistory"]

EVERY_S = 5.0
MOST_SAMPLES = 480
MOST_NODES = 64
"""Nodes whose curves are kept; the swarm's own is kept however many there are."""

_FIGURES = ("mean_return", "steps_per_s")


@dataclass(slots=True)
class _Curve:
    name: str
    values: dict[str, list[float | None]] = field(default_factory=dict)


class MetricHistory:
    """Samples of a swarm's figures."""

    def __init__(self) -> None:
        self._every_s = EVERY_S
        self._times: list[float] = []
        self._steps: list[int] = []
        self._speeds: list[float] = []
        self._curves: dict[str, _Curve] = {}

    def due(self, wall_s: float) -> bool:
        """Whether it is time for a sample."""
        return not self._times or wall_s >= self._times[-1] + self._every_s

    def sample(
        self, wall_s: float, env_steps: int, reports: Iterable[PeerReport], names: dict[str, str]
    ) -> None:
        """Take a sample, if it is time for one.

        Args:
            wall_s: wall time; one that goes back takes none until it has caught up.
            env_steps: the swarm's.
            reports: the newest of each living member, ours included.
            names: by node id.
        """
        if not self.due(wall_s):
            return
        reports = list(reports)
        for report in reports:
            if report.id in self._curves or len(self._curves) < MOST_NODES:
                curve = self._curves.setdefault(report.id, _Curve(report.id[:8]))
                curve.name = names.get(report.id, curve.name)
        heard = {report.id: report for report in reports}
        for node, curve in self._curves.items():
            for figure in _FIGURES:
                value = getattr(heard[node], figure) if node in heard else None
                known = value is not None and math.isfinite(value)
                column = curve.values.setdefault(figure, [None] * len(self._times))
                column.append(value if known else None)
        self._times.append(wall_s)
        self._steps.append(env_steps)
        self._speeds.append(math.fsum(report.steps_per_s for report in reports))
        if len(self._times) >= MOST_SAMPLES:
            self._halve()

    def document(self) -> dict[str, object]:
        """All samples, as columns of equal lengths, the nodes' by id."""
        nodes = {node: {"name": curve.name, **curve.values} for node, curve in self._curves.items()}
        return {
            "times": self._times,
            "env_steps": self._steps,
            "steps_per_s": self._speeds,
            "nodes": nodes,
        }

    def _halve(self) -> None:
        self._every_s = 2.0 * (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        self._times, self._steps, self._speeds = self._times[1::2], self._steps[1::2], self._speeds[1::2]
        for node, curve in list(self._curves.items()):
            curve.values = {figure: column[1::2] for figure, column in curve.values.items()}
            if not any(value is not None for column in curve.values.values() for value in column):
                del self._curves[node]
