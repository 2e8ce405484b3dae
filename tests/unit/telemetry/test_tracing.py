"""Rounds as OpenTelemetry spans."""

from __future__ import annotations

import builtins
import json
from typing import Any

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import UsageError
from p2pdrl.telemetry.tracing import open_tracer


@pytest.fixture
def memory() -> Any:
    reason = "wants the OpenTelemetry SDK: pip install 'p2pdrl[otel]'"
    return pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=reason
    ).InMemorySpanExporter()


def test_a_round_is_a_span(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=rl")
    tracer = open_tracer(ManualClock(wall_s=1000.0), {"service.instance.id": "n1"}, memory)
    tracer.round("round adpsgd", 0.25, {"p2pdrl.peers": ["n2"], "p2pdrl.bytes_in": 5})
    tracer.round("round adpsgd", 0.5, {"p2pdrl.outcome": "timeout"}, "n3 didn't answer")
    good, bad = memory.get_finished_spans()
    assert (good.name, good.start_time, good.end_time) == ("round adpsgd", 999_750_000_000, 1_000_000_000_000)
    assert dict(good.attributes) == {"p2pdrl.peers": ("n2",), "p2pdrl.bytes_in": 5}
    assert good.status.is_ok
    assert not bad.status.is_ok
    assert bad.status.description == "n3 didn't answer"
    resource = good.resource.attributes
    assert (resource["service.name"], resource["service.instance.id"], resource["team"]) == (
        "p2pdrl",
        "n1",
        "rl",
    )
    assert good.parent is None
    tracer.close()
    tracer.round("round adpsgd", 0.5, {})  # as the node ends


def test_what_the_environment_says(memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my swarm")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    tracer = open_tracer(ManualClock(), {})
    tracer.round("round sgp", 0.1, {"p2pdrl.peers": ["n2"]})
    tracer.close()
    [line] = capsys.readouterr().err.splitlines()
    span = json.loads(line)
    assert span["name"] == "round sgp"
    assert span["resource"]["attributes"]["service.name"] == "my swarm"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    tracer = open_tracer(ManualClock(), {})
    tracer.round("round sgp", 0.1, {})
    tracer.close()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(UsageError, match="zipkin: it may be otlp, console or none"):
        open_tracer(ManualClock(), {})


def test_a_collector_that_is_away_costs_nothing(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracer = open_tracer(ManualClock(), {})
    tracer.round("round sgp", 0.1, {})
    tracer.close()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[otel\]'"):
        open_tracer(ManualClock(), {})
