"""Rounds as OpenTelemetry spans, when the ``otel`` extra is installed and ``node.log.opentelemetry`` is set.

The SDK's own environment variables say the rest: ``OTEL_EXPORTER_OTLP_ENDPOINT`` and its headers,
``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_…``,
``OTEL_SDK_DISABLED``. ``OTEL_TRACES_EXPORTER`` may be ``otlp`` (over HTTP, the default), ``console``
(standard error) or ``none``. Spans go out from a thread of the SDK: a collector that is away costs no more.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from p2pdrl.clock import Clock
from p2pdrl.errors import UsageError

__all__ = ["RoundTracer", "open_tracer"]

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

_CLOSE_S = 3.0


class RoundTracer:
    """Writes a span for each round.

    Args:
        exporter: where spans go, at once; None takes what the environment says, in batches.
        resource: attributes of this node, such as its name.

    Raises:
        ImportError: the OpenTelemetry SDK is missing.
        UsageError: the environment names an exporter that there isn't.
    """

    def __init__(self, clock: Clock, resource: Mapping[str, str], exporter: Any = None) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        named = {"service.name": "p2pdrl"} if "OTEL_SERVICE_NAME" not in os.environ else {}
        self._clock = clock
        self._provider = TracerProvider(
            resource=Resource.create({**named, **resource}), shutdown_on_exit=False
        )
        if exporter is not None:
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        elif (chosen := _exporter()) is not None:
            self._provider.add_span_processor(BatchSpanProcessor(chosen))
        self._tracer = self._provider.get_tracer("p2pdrl")

    def round(self, name: str, seconds: float, attributes: Mapping[str, Value], error: str = "") -> None:
        """Write a round that has just ended.

        Args:
            seconds: how long it took.
            error: why it didn't go well, in words; empty when it did.
        """
        from opentelemetry.trace import StatusCode

        end_ns = round(self._clock.wall() * 1e9)
        span = self._tracer.start_span(
            name, attributes=dict(attributes), start_time=end_ns - round(seconds * 1e9)
        )
        if error:
            span.set_status(StatusCode.ERROR, error)
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, for a few seconds at most; blocks that long."""
        thread = threading.Thread(target=self._shut_down, name="otel shutdown", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _shut_down(self) -> None:
        with contextlib.suppress(Exception):  # of the collector's; the SDK has logged it
            self._provider.shutdown()


def _exporter() -> Any:
    """What ``OTEL_TRACES_EXPORTER`` names; None for none.

    Raises:
        UsageError: there is no such exporter here.
    """
    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip()
    if name == "none":
        return None
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n")
    if name == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    raise UsageError(f"OTEL_TRACES_EXPORTER={name[:40]}: it may be otlp, console or none")


def open_tracer(clock: Clock, resource: Mapping[str, str], exporter: Any = None) -> RoundTracer:
    """Open a tracer.

    Raises:
        UsageError: the ``otel`` extra isn't installed, or the environment asks for what there isn't.
    """
    try:
        return RoundTracer(clock, resource, exporter)
    except ImportError as error:
        raise UsageError("node.log.opentelemetry wants the otel extra: pip install 'p2pdrl[otel]'") from error
