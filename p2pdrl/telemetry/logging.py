"""Structured log lines: text for people at a terminal, JSON lines for everything else.

`configure` is called once per process by its main function; every module takes its logger from
`get_logger`. Lines of foreign libraries (aiohttp, asyncio) pass through the same processors. Peers
choose some of what is logged (their names, their reasons), so control characters are escaped;
values under keys that sound like secrets are replaced, at any depth. As JSON, a traceback is one
record, too: that of an error that somebody logged, and that of a bug that ends the process or a thread.

structlog is imported on first use: it costs 0.15 s, which a command that logs nothing needn't pay.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import types
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from structlog.typing import Processor

__all__ = ["REDACTED", "Format", "Level", "configure", "get_logger", "redact"]

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "text", "json"]

REDACTED = "[redacted]"
"""What is logged in place of a secret."""

_SECRET = re.compile(r"key|token|secret|passw|authorization|cookie", re.IGNORECASE)
_ROOT = "p2pdrl"
_MAX_DEPTH = 6


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `configure` installs, and replaces when it is called again."""


def configure(level: Level = "info", format: Format = "auto", stream: TextIO | None = None) -> None:  # noqa: A002
    """Send this process's log lines to ``stream``; calling it again replaces the first call.

    Args:
        level: least severe line that is shown. Foreign libraries are shown from one level up.
        format: ``auto`` writes text when ``stream`` is a terminal, JSON lines otherwise.
        stream: where to; none is standard error.
    """
    import structlog

    stream = sys.stderr if stream is None else stream
    as_text = format == "text" or (format == "auto" and stream.isatty())
    handler = _Handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_text_renderer(stream.isatty()) if as_text else _json_renderer()),
            ],
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *_shared()],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    if sys.excepthook in (sys.__excepthook__, _log_uncaught):  # another's hook stays
        sys.excepthook = sys.__excepthook__ if as_text else _log_uncaught
    if threading.excepthook in (threading.__excepthook__, _log_uncaught_in_thread):
        threading.excepthook = threading.__excepthook__ if as_text else _log_uncaught_in_thread
    own = getattr(logging, level.upper())
    logging.getLogger(_ROOT).setLevel(own)
    root.setLevel({"debug": logging.INFO, "info": logging.WARNING}.get(level, own))


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        get_logger(_ROOT).error(
            "an error that nobody caught ends this process", exc_info=(kind, error, trace)
        )


def _log_uncaught_in_thread(caught: threading.ExceptHookArgs) -> None:
    if caught.exc_value is not None and not issubclass(caught.exc_type, SystemExit):
        name = "" if caught.thread is None else caught.thread.name
        found = (caught.exc_type, caught.exc_value, caught.exc_traceback)
        get_logger(_ROOT).error("an error that nobody caught ends a thread", thread=name, exc_info=found)


def get_logger(name: str) -> BoundLogger:
    """A logger whose methods take an event and keyword fields: ``log.info("joined", peer=id)``.

    Names under ``p2pdrl`` obey the configured level.
    """
    import structlog

    logger: BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    return logger


def _shared() -> list[Processor]:
    """What every line passes through, whoever wrote it and however it is shown."""
    import structlog

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        redact,
    ]


def _text_renderer(colors: bool) -> list[Processor]:
    import structlog

    return [
        _printable,
        # structlog's default formatter shows local variables, which may hold secrets.
        structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback, timestamp_key="time"
        ),
    ]


def _json_renderer() -> list[Processor]:
    import structlog

    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=_plain)]


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace values under keys that sound like secrets, and all bytes. A structlog processor."""
    for key, value in event.items():
        # Not ours to rewrite: exception info holds live objects, "_record" the foreign line itself.
        if key != "exc_info" and not key.startswith("_"):
            event[key] = REDACTED if _SECRET.search(key) else _clean(value, _MAX_DEPTH)
    return event


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if depth == 0:
        return "…"
    if isinstance(value, Mapping):
        return {
            key: REDACTED if _SECRET.search(str(key)) else _clean(inner, depth - 1)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_clean(inner, depth - 1) for inner in value]
    return value


def _printable(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, so that no peer's name can move the operator's cursor."""
    for key, value in event.items():
        if key not in ("exc_info", "exception", "stack"):
            if isinstance(value, str):
                event[key] = _escaped(value)
            elif value is not None and not isinstance(value, (bool, int, float)):
                event[key] = _escaped(repr(value))
    return event


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: Any) -> str:
    """What JSON has no word for."""
    return repr(value)
