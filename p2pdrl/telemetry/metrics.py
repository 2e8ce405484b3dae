"""Every metric of a node, by name, in one table; rendered for Prometheus.

The daemon owns one `Registry` and hands parts of it to whoever counts; the API serves
``Registry.render`` at ``/metrics``. Names carry the prefix ``p2pdrl_`` and base units (seconds,
bytes). Label values are bounded, for some of them are chosen by peers.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from p2pdrl.versions import SPOKEN

__all__ = ["CONTENT_TYPE", "LabelledTotal", "Registry", "Total"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Content type of what `Registry.render` returns."""

PREFIX = "p2pdrl_"
OTHER = "other"
_MAX_LABEL_VALUES = 32
_MAX_LEARNER_METRICS = 64

_PIPELINE = {
    "generation": ("pipeline_generation", "Number of the pipeline that this node is part of; NaN for none."),
    "rank": ("pipeline_rank", "This node's rank in it, 0 for the first; NaN for none."),
    "stages": ("pipeline_stages", "Stages of this node's pipeline; NaN for none."),
    "microbatches": ("pipeline_microbatches", "Parts that its minibatches are cut into; NaN for none."),
    "bubble": ("pipeline_bubble_ratio", "Part of its time that this stage waited for others; NaN for none."),
    "activation_bytes": ("pipeline_activation_bytes", "Most memory of its activations; NaN for none."),
    "step_s": ("pipeline_step_seconds", "Latest duration of a pipelined minibatch; NaN for none."),
}
"""By figure: name and meaning of its gauge."""

_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_EXCHANGE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ACT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_STEP_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_BATCH_BUCKETS = tuple(float(2**power) for power in range(13))
_STALENESS_BUCKETS = (0.0, *(float(2**power) for power in range(11)))


class Total:
    """A count that only grows."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._followed = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add ``amount``, which isn't negative."""
        self._counter.inc(amount)

    def advance_to(self, total: float) -> None:
        """Follow a running total that is kept elsewhere; one that went back is left alone.

        Use either this or `inc` on one metric.
        """
        if total > self._followed:
            self._counter.inc(total - self._followed)
            self._followed = total


class LabelledTotal:
    """Counts that only grow, one per value of a label; beyond 32 values they count as ``other``."""

    def __init__(self, counter: Counter, known: Iterable[str] = ()) -> None:
        self._counter = counter
        self._totals: dict[str, Total] = {}
        for value in known:
            self.of(value)

    def of(self, value: str) -> Total:
        """The count of one value of the label."""
        if value not in self._totals:
            if len(self._totals) >= _MAX_LABEL_VALUES and value != OTHER:
                return self.of(OTHER)
            self._totals[value] = Total(self._counter.labels(value))
        return self._totals[value]

    def inc(self, value: str, amount: float = 1.0) -> None:
        """Add to the count of one value of the label."""
        self.of(value).inc(amount)


class Registry:
    """All metrics of one node; ``version`` is the package's."""

    def __init__(self, version: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        total, gauge = self._total, self._gauge

        self.env_steps_total = total("env_steps_total", "Environment steps that this node has made.")
        self.episodes_total = total("episodes_total", "Episodes that this node has finished.")
        self.updates_total = total("updates_total", "Updates of this node's learner.")
        self.steps_per_second = gauge("steps_per_second", "Environment steps a second of this node.")
        self.mean_return = gauge("mean_return", "Mean return of this node's latest episodes; NaN before any.")
        self.evaluation_mean_return = gauge(
            "evaluation_mean_return", "Mean return of the swarm's newest evaluation; NaN before any."
        )
        self.swarm_env_steps = gauge("swarm_env_steps", "Environment steps of the whole swarm.")
        self.healthy = gauge("healthy", "1 while this node is well; status says why not.")
        self._learner = gauge(
            "learner_metric", "The learner's own figures of its latest updates (loss, entropy …).", "figure"
        )
        self.policy_version = gauge("policy_version", "Policy version (Lamport count of updates).")
        self.consensus_distance = gauge(
            "consensus_distance", "Root mean square distance from the swarm's mean, estimated from exchanges."
        )
        self.members = gauge("members", "Members of the swarm as this node sees them.", "state")
        self.exchanges_total = LabelledTotal(
            self._counter("exchanges_total", "Exchanges with peers by outcome.", "outcome"),
            ("ok", "busy", "refused", "timeout", "failed"),
        )
        self.exchange_seconds = self._histogram(
            "exchange_seconds", "Duration of an exchange that this node began.", _EXCHANGE_BUCKETS_S
        )
        self.rounds_total = LabelledTotal(
            self._counter("rounds_total", "Rounds of the strategy by outcome.", "outcome"), ("ok",)
        )
        self.round_seconds = self._histogram(
            "round_seconds", "Duration of a round of the strategy.", _EXCHANGE_BUCKETS_S
        )
        self.round_trips_total = total("round_trips_total", "Calls to peers that rounds made.")
        self.round_bytes_total = LabelledTotal(
            self._counter("round_bytes_total", "Payload of rounds, by direction.", "direction"), ("in", "out")
        )
        self.learner_wait_seconds_total = total(
            "learner_wait_seconds_total", "Time that the learner stood still for rounds."
        )
        self.staleness = self._histogram(
            "staleness_versions", "Staleness of merged contributions in policy versions.", _STALENESS_BUCKETS
        )
        self._add_traffic()
        self.strikes_total = total(
            "strikes_total", "Vectors from peers that were poisoned, or far off again and again."
        )
        self.quarantined_peers = gauge(
            "quarantined_peers", "Peers that are neither met nor answered for strikes."
        )
        self.distrusted_peers = gauge(
            "distrusted_peers", "Peers that count less since the return fell after exchanges with them."
        )
        self.membership_messages_total = total(
            "membership_messages_total",
            "Requests and answers of the membership protocol that this node sent.",
        )
        self.records_refused_total = total(
            "records_refused_total",
            "Membership and swarm records from peers that were forged or out of bounds.",
        )
        self.facts_refused_total = total(
            "facts_refused_total",
            "Counts, moments and reports from peers that weren't signed by the node that they are about.",
        )
        self.facts_held_total = total(
            "facts_held_total", "Counts from peers that were too great for the time that their node is there."
        )
        self.learner_restarts_total = total("learner_restarts_total", "Times the learner was started again.")
        self._add_actors()
        self._add_inference()
        self.checkpoint_failures_total = total(
            "checkpoint_failures_total", "Checkpoints that couldn't be written."
        )
        self.loop_lag_seconds = gauge("loop_lag_seconds", "Latest lag of the daemon's event loop.")
        self.loop_lag_distribution_seconds = self._histogram(
            "loop_lag_distribution_seconds", "Lags of the daemon's event loop.", _LAG_BUCKETS_S
        )
        self.rss_bytes = gauge("rss_bytes", "Resident memory of the daemon and its children.")
        self.tasks = gauge("tasks", "Tasks of the daemon's event loop.")

        self._learner_names: dict[str, None] = {}
        self._pipeline = {figure: gauge(name, meaning) for figure, (name, meaning) in _PIPELINE.items()}

        build = Gauge(
            f"{PREFIX}build_info",
            "Always 1; the labels tell what is running.",
            ("version", "protocol", "python"),
            registry=self._registry,
        )
        build.labels(version, SPOKEN.wire, platform.python_version()).set(1)
        self.show_members(dict.fromkeys(("alive", "suspect", "dead", "left", "banned"), 0))
        self.mean_return.set(float("nan"))
        self.evaluation_mean_return.set(float("nan"))
        self.set_pipeline({})

    def show_members(self, counts: Mapping[str, int]) -> None:
        """Show how many members are in each state."""
        for state, count in counts.items():
            self.members.labels(state).set(count)

    def set_learner(self, figures: Mapping[str, float]) -> None:
        """Show a learner's figures by name, the first 64 of them; one that it tells no more is NaN."""
        for name in figures:
            if len(self._learner_names) < _MAX_LEARNER_METRICS:
                self._learner_names.setdefault(name)
        for name in self._learner_names:
            self._learner.labels(name).set(figures.get(name, float("nan")))

    def set_actors(self, actors: Sequence[Mapping[str, object]]) -> None:
        """Show what a node's actors do, as status has it."""
        self.actors.set(sum(bool(actor["running"]) for actor in actors))
        for actor in actors:
            self.actor_env_steps_total.of(str(actor["number"])).advance_to(_whole(actor["env_steps"]))
        self.actor_restarts_total.advance_to(sum(_whole(actor["restarts"]) for actor in actors))
        self.actor_unrolls_dropped_total.advance_to(sum(_whole(actor["dropped"]) for actor in actors))

    def observe_steps(self, environments: Iterable[int], seconds: Iterable[float]) -> None:
        """Record batches of actors: how many environments each had, and how long it took."""
        for count in environments:
            self.actor_batch_environments.observe(count)
        for duration_s in seconds:
            self.actor_batch_seconds.observe(duration_s)

    def set_pipeline(self, figures: Mapping[str, object]) -> None:
        """Follow the figures of this node's pipeline; what isn't among them, or no number, is NaN."""
        for figure, gauge in self._pipeline.items():
            value = figures.get(figure)
            gauge.set(value if isinstance(value, int | float) else float("nan"))

    def observe_loop_lag(self, lag_s: float) -> None:
        """Record one measurement of the event loop's lag, in seconds."""
        self.loop_lag_seconds.set(lag_s)
        self.loop_lag_distribution_seconds.observe(lag_s)

    def observe_exchange(self, outcome: str, seconds: float) -> None:
        """Record one exchange that this node began."""
        self.exchanges_total.inc(outcome)
        self.exchange_seconds.observe(seconds)

    def observe_round(
        self,
        outcome: str,
        *,
        seconds: float = 0.0,
        waited_s: float = 0.0,
        bytes_in: int = 0,
        bytes_out: int = 0,
        round_trips: int = 0,
        staleness: Iterable[int] = (),
    ) -> None:
        """Record one round of the strategy: ``ok``, or in a word why not.

        The learner stood still for ``waited_s``; ``staleness`` is that of each merged contribution, in policy
        versions.
        """
        self.rounds_total.inc(outcome)
        self.round_seconds.observe(seconds)
        self.learner_wait_seconds_total.inc(max(0.0, waited_s))
        self.round_bytes_total.inc("in", bytes_in)
        self.round_bytes_total.inc("out", bytes_out)
        self.round_trips_total.inc(round_trips)
        for versions in staleness:
            self.staleness.observe(versions)

    def value(self, name: str, **labels: str) -> float | None:
        """The present value of one series, by its name without prefix; None when there is none."""
        return self._registry.get_sample_value(PREFIX + name, labels)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(_WithoutCreated(self._registry))

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, meaning, labels, registry=self._registry)

    def _add_actors(self) -> None:
        """What this node's actor processes do, and what travels from actors to learners."""
        total, gauge = self._total, self._gauge
        self.actors = gauge("actors", "Actor processes of this node that run.")
        self.actor_env_steps_total = LabelledTotal(
            self._counter("actor_env_steps_total", "Environment steps by actor process.", "actor")
        )
        self.actor_restarts_total = total("actor_restarts_total", "Times an actor was started again.")
        self.actor_unrolls_dropped_total = total(
            "actor_unrolls_dropped_total", "Half unrolls of actors that died."
        )
        self.unrolls_total = LabelledTotal(
            self._counter(
                "unrolls_total", "Unrolls that travelled between nodes, by direction.", "direction"
            ),
            ("in", "out"),
        )
        self.unroll_staleness = self._histogram(
            "unroll_staleness_versions",
            "How many versions the policy of unrolls from other nodes was behind.",
            _STALENESS_BUCKETS,
        )

    def _add_inference(self) -> None:
        """What the inference process does, for who asks the node to act and for its own actors."""
        total = self._total
        self.act_requests_total = LabelledTotal(
            self._counter("act_requests_total", "Requests for actions by outcome.", "outcome"),
            ("ok", "busy", "late", "failed"),
        )
        self.act_observations_total = total("act_observations_total", "Observations that were acted on.")
        self.act_seconds = self._histogram(
            "act_seconds", "From a request for actions to its answer, good ones only.", _ACT_BUCKETS_S
        )
        self.act_batch_observations = self._histogram(
            "act_batch_observations", "Observations of a batch of requests for actions.", _BATCH_BUCKETS
        )
        self.actor_batch_seconds = self._histogram(
            "actor_batch_seconds",
            "From the first question of a batch of actors to its answers, by the inference process.",
            _STEP_BUCKETS_S,
        )
        self.actor_batch_environments = self._histogram(
            "actor_batch_environments",
            "Environments that the inference process acts for at once.",
            _BATCH_BUCKETS,
        )
        self.inference_starts_total = total(
            "inference_starts_total", "Times the inference process was started."
        )
        self.inference_failures_total = total(
            "inference_failures_total", "Times the inference process died, hung or couldn't be started."
        )

    def _add_traffic(self) -> None:
        """What the transport moves and refuses."""
        self.bytes_in_total = self._total("bytes_in_total", "Bytes received from peers, bodies only.")
        self.bytes_out_total = self._total("bytes_out_total", "Bytes sent to peers, bodies only.")
        self.refused_total = LabelledTotal(
            self._counter("refused_total", "Requests that this node refused, by reason.", "reason")
        )
        self.connections_ended_total = LabelledTotal(
            self._counter(
                "connections_ended_total",
                "Connections that were ended or couldn't be taken, by why: refused (too many, no token), "
                "slow, displaced (strangers'), handshake (not this swarm's TLS), starved (no files left).",
                "why",
            ),
            ("refused", "slow", "displaced", "handshake", "starved"),
        )

    def _total(self, name: str, meaning: str) -> Total:
        return Total(self._counter(name, meaning))

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, meaning, buckets=buckets, registry=self._registry)


class _WithoutCreated(Collector):
    """Leaves out the ``_created`` series, which double the page and serve nobody here."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def collect(self) -> Iterable[Metric]:
        for metric in self._inner.collect():
            metric.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
            yield metric


def _whole(number: object) -> int:
    return number if isinstance(number, int) else 0
