"""Where the node's figures go: the metrics page, run writers (TensorBoard, W&B …), at last ``summary.json``.

Each run replaces the last one's summary; the boot and the process id in it tell whose it is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

import p2pdrl
from p2pdrl.atomic import storage_error, write_atomic
from p2pdrl.config.mode import protocol_of
from p2pdrl.node import settings
from p2pdrl.node.accounting.evaluations import Entry
from p2pdrl.node.accounting.exchanges import GOOD
from p2pdrl.node.children.run_writers import RunWriters
from p2pdrl.node.context import NodeContext
from p2pdrl.node.status.pipeline import pipeline_document
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.telemetry.metrics import Registry
from p2pdrl.telemetry.tracing import RoundTracer, Value

__all__ = ["NAME", "Meters", "summary", "write_summary"]

NAME = "summary.json"
SCALARS_EVERY_S = 5.0
FROM_STATUS = (
    *("env_steps", "swarm_env_steps", "updates", "episodes", "mean_return"),
    *("accounting", "exchanges"),
)
"""What of a node's status its summary shows at the top, too."""


def summary(context: NodeContext, reporter: StatusReporter, reason: str) -> dict[str, object]:
    """``summary.json`` as JSON types; ``reason`` is why the node ended."""
    status = reporter.status()
    ended = context.clock.wall()
    training = context.training
    return {
        "name": context.name,
        "id": context.node_id,
        "boot": context.boot,
        "began": ended - (context.clock.monotonic() - context.began_s),
        "ended": ended,
        "reason": reason,
        "modes": [] if training is None else training.accounting.walk(),
        "evaluations": reporter.evaluations(),
        **{name: status[name] for name in FROM_STATUS},
        "status": status,
    }


async def write_summary(context: NodeContext, reporter: StatusReporter, reason: str) -> None:
    """Write it; a disk that doesn't take it is told and does no other harm."""
    path = Path(context.data_dir) / NAME
    content = msgspec.json.format(msgspec.json.encode(summary(context, reporter, reason)), indent=2) + b"\n"
    try:
        await asyncio.to_thread(write_atomic, path, content)
    except OSError as error:
        told = storage_error("write the summary", path, error)
        context.events.emit("summary-failed", str(told), level="warning")


class Meters:
    """Prometheus metrics of this node, filled whenever somebody reads them; and points for writers."""

    def __init__(
        self,
        context: NodeContext,
        reporter: StatusReporter,
        writer: RunWriters | None,
        tracer: RoundTracer | None = None,
    ) -> None:
        self._context = context
        self._reporter = reporter
        self._writer = writer
        self._tracer = tracer
        self._written_s = float("-inf")
        self.registry = Registry(p2pdrl.__version__)

    def round(self, report: RoundReport) -> None:
        """Count a round of the strategy."""
        self.registry.observe_round(
            report.outcome,
            seconds=report.seconds,
            waited_s=report.waited_s,
            bytes_in=report.bytes_in,
            bytes_out=report.bytes_out,
            round_trips=report.round_trips,
            staleness=report.staleness(self._context.node_id),
        )

        if self._tracer is not None:
            self._trace(self._tracer, report)

    def _trace(self, tracer: RoundTracer, report: RoundReport) -> None:
        """Write a round as a span."""
        me, training = self._context.node_id, self._context.training
        others = [one for one in report.merged if one.peer != me]
        name_of = self._context.name_of
        attributes: dict[str, Value] = {
            "p2pdrl.outcome": report.outcome,
            "p2pdrl.peers": [name_of(one.peer) for one in others],
            "p2pdrl.peer_ids": [one.peer for one in others],
            "p2pdrl.weights": [one.weight for one in others],
            "p2pdrl.staleness": report.staleness(me),
            "p2pdrl.missing": [name_of(node) for node in report.missing],
            "p2pdrl.bytes_out": report.bytes_out,
            "p2pdrl.bytes_in": report.bytes_in,
            "p2pdrl.round_trips": report.round_trips,
            "p2pdrl.waited_s": report.waited_s,
            "p2pdrl.changed": report.changed,
        }
        strategy = "local"
        if training is not None:
            strategy = protocol_of(training.mode.config)
            attributes |= {"p2pdrl.mode": training.mode.config.mode, "p2pdrl.strategy": strategy}
            attributes |= {"p2pdrl.mode_epoch": settings.epoch_of(training.mode.epoch)}
        if report.distance is not None:
            attributes["p2pdrl.distance"] = report.distance
        error = "" if report.outcome in GOOD else report.error or report.outcome
        tracer.round(f"round {strategy}", report.seconds, attributes, error)

    def evaluated(self, entry: Entry) -> None:
        """Write an evaluation of the swarm's policy over the steps at which it began."""
        one = entry.evaluation
        if self._writer is not None:
            values = {"mean_return": one.mean, "std": one.std, "episode_length": one.length}
            self._writer.scalars(
                one.env_steps, {f"evaluation/{name}": value for name, value in values.items()}
            )

    def write_scalars(self) -> None:
        """Write the newest figures over the swarm's environment steps, at most every five seconds."""
        now_s = self._context.clock.monotonic()
        training = self._context.training
        if self._writer is None or training is None or now_s < self._written_s + SCALARS_EVERY_S:
            return
        self._written_s = now_s
        report = self._reporter.report()
        values = {
            "swarm/mean_return": report.mean_return,
            "swarm/consensus_distance": report.consensus_distance,
            "node/policy_version": float(report.policy_version),
            "node/steps_per_s": report.steps_per_s,
            "node/loop_lag_s": report.loop_lag_s,
        }
        values |= {f"train/{name}": value for name, value in training.supervisor.metrics.items()}
        known = {name: value for name, value in values.items() if value is not None}
        self._writer.scalars(self._context.progress_tracker.total().env_steps, known)

    def render(self) -> bytes:
        """Return the page of ``/metrics``."""
        context, registry = self._context, self.registry
        report = self._reporter.report()
        training, checkpointer = context.training, context.checkpointer
        registry.env_steps_total.advance_to(report.env_steps)
        registry.episodes_total.advance_to(report.episodes)
        registry.updates_total.advance_to(report.updates)
        registry.steps_per_second.set(report.steps_per_s)
        registry.mean_return.set(float("nan") if report.mean_return is None else report.mean_return)
        newest = context.evaluations.newest
        if newest is not None:
            registry.evaluation_mean_return.set(newest.evaluation.mean)
        registry.swarm_env_steps.set(context.progress_tracker.total().env_steps)
        registry.healthy.set(report.healthy)
        registry.policy_version.set(report.policy_version)
        distance = report.consensus_distance
        registry.consensus_distance.set(float("nan") if distance is None else distance)
        registry.rss_bytes.set(report.rss_bytes)
        registry.tasks.set(len(asyncio.all_tasks()))
        counters = context.transport.counters
        registry.bytes_in_total.advance_to(counters.bytes_in)
        registry.bytes_out_total.advance_to(counters.bytes_out)
        for status, count in counters.refused.items():
            registry.refused_total.of(str(status)).advance_to(count)
        for why, ended in counters.ended().items():
            registry.connections_ended_total.of(why).advance_to(ended)
        registry.membership_messages_total.advance_to(context.membership.messages)
        registry.records_refused_total.advance_to(context.membership.core.refused_records)
        tracker = context.progress_tracker
        registry.facts_refused_total.advance_to(tracker.signer.forged)
        if tracker.bounds is not None:
            registry.facts_held_total.advance_to(tracker.bounds.held)
        registry.show_members(context.member_counts())
        if training is not None:
            registry.set_learner(training.supervisor.metrics)
            registry.learner_restarts_total.advance_to(training.supervisor.restarts)
            swarm = training.swarm
            registry.strikes_total.advance_to(swarm.quarantine.total)
            registry.quarantined_peers.set(len(swarm.quarantine.held(context.clock.monotonic())))
            registry.distrusted_peers.set(len(swarm.drift.weights))
            if training.actors is not None:
                registry.set_actors(training.actors.figures())
            if training.receiver is not None:
                registry.unrolls_total.of("in").advance_to(training.receiver.unrolls)
            if (sender := training.sender_at_work) is not None:
                registry.unrolls_total.of("out").advance_to(sender.sent)
            registry.set_pipeline(pipeline_document(training) or {})
        if checkpointer is not None:
            registry.checkpoint_failures_total.advance_to(checkpointer.failures)
        return registry.render()
