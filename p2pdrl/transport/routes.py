"""The table of served routes, and the one place where a handler's failure becomes a refusal.

`http.server` and `testing.memory_transport` share it, so that both answer alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2pdrl.errors import PeerTimeoutError, TensorError, WireError
from p2pdrl.transport.http.body import OverlongError
from p2pdrl.transport.protocol import Incoming, Refusal, Reply, check_route

__all__ = ["MAX_REASON_CHARS", "R", "Routes", "ServedRoute", "report", "report_end", "run_handler"]

R = TypeVar("R")
"""What a handler answers: `Reply`, or `pipe.ticket.PipeReply`."""

V = TypeVar("V")

MAX_REASON_CHARS = 500
"""A refusal's reason is cut to this length."""


@dataclass(frozen=True, slots=True)
class ServedRoute(Generic[R]):
    """One served route and its bounds, in bytes."""

    name: str
    handler: Callable[[Incoming], Awaitable[R]]
    max_meta_bytes: int
    max_vector_bytes: int

    def admit(self, meta_nbytes: int, vector_nbytes: int) -> None:
        """Check the announced lengths.

        Raises:
            Refusal: 413, one is over its bound.
        """
        if meta_nbytes > self.max_meta_bytes:
            raise Refusal(413, f"{self.name} takes metadata of {self.max_meta_bytes} bytes at most")
        if vector_nbytes > self.max_vector_bytes:
            raise Refusal(413, f"{self.name} takes a vector of {self.max_vector_bytes} bytes at most")


class Routes(Generic[R]):
    """Routes by name."""

    def __init__(self) -> None:
        self._routes: dict[str, ServedRoute[R]] = {}

    def add(
        self,
        name: str,
        handler: Callable[[Incoming], Awaitable[R]],
        max_meta_bytes: int,
        max_vector_bytes: int,
    ) -> None:
        """Register a handler.

        Raises:
            ValueError: the name is malformed or taken.
        """
        if check_route(name) in self._routes:
            raise ValueError(f"route {name!r} is served already")
        self._routes[name] = ServedRoute(name, handler, max_meta_bytes, max_vector_bytes)

    def find(self, name: str) -> ServedRoute[R]:
        """Return the route called ``name``.

        Raises:
            Refusal: 404, there is none.
        """
        route = self._routes.get(name)
        if route is None:
            raise Refusal(404, f"nothing is served as {name[:80]!r} here")
        return route


async def run_handler(route: ServedRoute[R], incoming: Incoming) -> R:
    """Run the handler of ``route``.

    A bug in it is handed to the event loop's exception handler, and the caller learns no more
    than that there was one.

    Raises:
        Refusal: whatever went wrong, in the shape in which it is told.
    """
    try:
        return await route.handler(incoming)
    except Refusal:
        raise
    except OverlongError as error:
        raise Refusal(413, str(error)) from error
    except WireError as error:
        raise Refusal(400, str(error)) from error
    except TensorError as error:
        raise Refusal(422, str(error)) from error
    except PeerTimeoutError as error:
        raise Refusal(408, str(error)) from error
    except Exception as error:
        context = {"message": f"the handler of {route.name} failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
        raise Refusal(500, "the handler failed: see this node's log") from error


def report_end(route: str, reply: Reply, written: bool) -> None:
    """Call ``reply.on_end``."""
    if reply.on_end is not None:
        report(f"on_end of {route}", reply.on_end, written)


def report(what: str, callback: Callable[[V], None], value: V) -> bool:
    """Call back with ``value``; a bug in that is handed to the event loop's exception handler.

    Returns:
        Whether it went well.
    """
    try:
        callback(value)
    except Exception as error:  # noqa: BLE001 - reported, not swallowed
        context = {"message": f"{what} failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
        return False
    return True
