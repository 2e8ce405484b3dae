"""``p2pdrl node`` that sends its vectors with the sign flipped: a member in good standing that lies."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from p2pdrl.cli.main import main
from p2pdrl.transport import http_transport
from p2pdrl.transport.framing import join_views
from p2pdrl.transport.protocol import Handler, Incoming, Reply

LYING_ROUTES = frozenset({"exchange"})


def flipped(vector: Any) -> memoryview:
    """Return float32 numbers in bytes, times -1."""
    return memoryview(-np.frombuffer(bytes(vector), np.float32)).cast("B")


class LyingTransport(http_transport.HttpTransport):
    """Lies as a caller and as an answerer."""

    async def call(self, to: Any, target_id: Any, route: str, meta: bytes, **given: Any) -> Any:
        """Send, the vector flipped."""
        if route in LYING_ROUTES and given.get("vector") is not None:
            given["vector"] = flipped(given["vector"])
        return await super().call(to, target_id, route, meta, **given)

    def serve(self, route: str, handler: Handler, **given: Any) -> None:
        """Answer, the vector flipped."""

        async def lie(incoming: Incoming) -> Reply:
            reply = await handler(incoming)
            body = join_views(reply.vector) if route in LYING_ROUTES else b""
            return Reply(reply.meta, flipped(body), reply.on_end) if body else reply

        super().serve(route, lie, **given)


if __name__ == "__main__":
    from p2pdrl.node.bootstrap import startup

    startup.HttpTransport = LyingTransport  # type: ignore[misc]
    sys.argv[0] = "p2pdrl"
    main()
