"""Fills the metrics registry from the node's figures whenever somebody reads it."""

from __future__ import annotations

import p2pdrl
from p2pdrl.node.figures import Figures
from p2pdrl.node.parts import Parts
from p2pdrl.telemetry.metrics import Registry

__all__ = ["Meters"]


class Meters:
    """Prometheus metrics of this node.

    Args:
        parts: the node.
        figures: its figures.
    """

    def __init__(self, parts: Parts, figures: Figures) -> None:
        self._parts = parts
        self._figures = figures
        self.registry = Registry(p2pdrl.__version__)

    def render(self) -> bytes:
        """Return the page of ``/metrics``."""
        parts, registry = self._parts, self.registry
        report = self._figures.report()
        training, saving = parts.training, parts.saving
        registry.env_steps_total.advance_to(report.env_steps)
        registry.episodes_total.advance_to(report.episodes)
        registry.updates_total.advance_to(report.updates)
        registry.steps_per_second.set(report.steps_per_s)
        registry.mean_return.set(float("nan") if report.mean_return is None else report.mean_return)
        registry.policy_version.set(report.policy_version)
        distance = report.consensus_distance
        registry.consensus_distance.set(float("nan") if distance is None else distance)
        registry.rss_bytes.set(report.rss_bytes)
        counters = parts.transport.counters
        registry.bytes_in_total.advance_to(counters.bytes_in)
        registry.bytes_out_total.advance_to(counters.bytes_out)
        for status, count in counters.refused.items():
            registry.refused_total.of(str(status)).advance_to(count)
        for state, count in parts.member_counts().items():
            registry.members.set(state, count)
        if training is not None:
            registry.learner_restarts_total.advance_to(training.supervisor.restarts)
            registry.strikes_total.advance_to(training.strikes)
        if saving is not None:
            registry.checkpoint_failures_total.advance_to(saving.failures)
        return registry.render()
