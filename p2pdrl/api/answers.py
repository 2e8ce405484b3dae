"""Answers of the API: JSON that is always valid, and errors as ``{"error": one line}``."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from p2pdrl.errors import ConfigError, P2PDRLError

__all__ = ["ApiRefusal", "Handler", "answers_errors", "error_answer", "json_answer"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class ApiRefusal(Exception):  # noqa: N818 - an answer, not a failure
    """Ends a request with an error answer, whose ``reason`` is one line for the caller."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason
        self.headers = headers or {}


def json_answer(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return ``content`` as JSON; NaN and infinity become null, as JSON knows neither."""
    return web.Response(
        body=msgspec.json.encode(content) + b"\n",
        status=status,
        content_type="application/json",
        headers={**_NO_STORE, **(headers or {})},
    )


def error_answer(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return ``{"error": reason}``, cut to one line."""
    line = " ".join(reason.split())[:500]
    return json_answer({"error": line}, status=status, headers=headers)


def answers_errors(handler: Handler) -> Handler:
    """Turn refusals and the package's own errors into answers; bugs go on to aiohttp's log and 500."""

    @functools.wraps(handler)
    async def wrapped(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiRefusal as refusal:
            return error_answer(refusal.status, refusal.reason, refusal.headers)
        except P2PDRLError as error:
            return error_answer(400 if isinstance(error, ConfigError) else 503, str(error))
        except ConnectionError:
            return error_answer(408, "the caller went away")  # nobody is there to read it

    return wrapped
