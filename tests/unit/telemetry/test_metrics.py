"""The metrics page: names, bounds on labels, and totals that follow others."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from p2pdrl.telemetry.metrics import CONTENT_TYPE, Registry
from p2pdrl.versions import SPOKEN

NAMES = {
    "env_steps_total", "episodes_total", "updates_total", "steps_per_second", "mean_return", "policy_version",
    "consensus_distance", "loop_lag_seconds", "members", "exchanges_total", "exchange_seconds_count",
    "bytes_in_total", "bytes_out_total", "connections_ended_total",
    "learner_restarts_total", "checkpoint_failures_total",
    "rounds_total", "round_seconds_count", "round_trips_total", "round_bytes_total",
    "learner_wait_seconds_total", "staleness_versions_bucket",
    "strikes_total", "rss_bytes", "swarm_env_steps", "healthy", "build_info",
    "loop_lag_distribution_seconds_bucket",
    "membership_messages_total", "tasks", "quarantined_peers", "distrusted_peers",
}  # fmt: skip


@pytest.fixture
def registry() -> Registry:
    return Registry("1.2.3")


def series(registry: Registry) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(registry.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_the_page_parses_and_holds_every_name(registry: Registry) -> None:
    registry.refused_total.inc("replay")
    found = series(registry)
    assert {f"p2pdrl_{name}" for name in NAMES | {"refused_total"}} <= set(found)
    assert all(name.startswith("p2pdrl_") for name in found)
    assert not [name for name in found if name.endswith("_created")]
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_every_metric_has_a_meaning(registry: Registry) -> None:
    families = list(text_string_to_metric_families(registry.render().decode()))
    assert all(len(family.documentation) > 10 for family in families)


def test_build_info(registry: Registry) -> None:
    [labels] = series(registry)["p2pdrl_build_info"]
    assert labels["version"] == "1.2.3"
    assert labels["protocol"] == SPOKEN.wire


def test_two_nodes_in_one_process_count_apart(registry: Registry) -> None:
    other = Registry("1.2.3")
    registry.updates_total.inc()
    assert (registry.value("updates_total"), other.value("updates_total")) == (1.0, 0.0)
    assert REGISTRY.get_sample_value("p2pdrl_updates_total") is None


def test_totals_follow_and_never_go_back(registry: Registry) -> None:
    for total in (5, 3, 5, 12):
        registry.bytes_in_total.advance_to(total)
    assert registry.value("bytes_in_total") == 12


def test_outcomes_and_durations(registry: Registry) -> None:
    registry.observe_exchange("ok", 0.03)
    registry.observe_exchange("unsure", 0.2)
    assert registry.value("exchanges_total", outcome="ok") == 1
    assert registry.value("exchanges_total", outcome="unsure") == 1
    assert registry.value("exchanges_total", outcome="timeout") == 0
    assert registry.value("exchange_seconds_count") == 2
    assert registry.value("exchange_seconds_sum") == pytest.approx(0.23)
    assert registry.value("exchange_seconds_bucket", le="0.05") == 1


def test_rounds(registry: Registry) -> None:
    staleness = [-2, 0, 3, 5000]
    registry.observe_round(
        "ok", seconds=0.03, waited_s=0.01, bytes_in=10, bytes_out=20, round_trips=2, staleness=staleness
    )
    registry.observe_round("timeout", seconds=2.0)
    assert registry.value("rounds_total", outcome="ok") == 1
    assert registry.value("rounds_total", outcome="timeout") == 1
    assert registry.value("round_seconds_count") == 2
    assert registry.value("round_bytes_total", direction="in") == 10
    assert registry.value("round_bytes_total", direction="out") == 20
    assert registry.value("round_trips_total") == 2
    assert registry.value("learner_wait_seconds_total") == pytest.approx(0.01)
    assert registry.value("staleness_versions_bucket", le="0.0") == 2
    assert registry.value("staleness_versions_bucket", le="4.0") == 3
    assert registry.value("staleness_versions_bucket", le="1024.0") == 3
    assert registry.value("staleness_versions_count") == 4


def test_loop_lag(registry: Registry) -> None:
    registry.observe_loop_lag(0.2)
    registry.observe_loop_lag(0.01)
    assert registry.value("loop_lag_seconds") == 0.01
    assert registry.value("loop_lag_distribution_seconds_count") == 2


def test_labels_are_bounded(registry: Registry) -> None:
    for number in range(1000):
        registry.refused_total.inc(f'a peer\'s "reason"\n{number}')
    labels = series(registry)["p2pdrl_refused_total"]
    assert len(labels) == 33
    assert registry.value("refused_total", reason="other") == 968


def test_members_by_state(registry: Registry) -> None:
    registry.show_members({"suspect": 2})
    assert registry.value("members", state="suspect") == 2
    assert registry.value("members", state="alive") == 0


def test_the_learners_figures_are_shown_while_it_tells_them(registry: Registry) -> None:
    registry.set_learner({"loss": 0.5, "entropy": 0.7})
    registry.set_learner({"loss": 0.25})
    assert registry.value("learner_metric", figure="loss") == 0.25
    entropy = registry.value("learner_metric", figure="entropy")
    assert entropy is not None
    assert entropy != entropy
    registry.set_learner({f"made up {number}": 1.0 for number in range(1000)})
    assert len(series(registry)["p2pdrl_learner_metric"]) == 64
