"""The two ends of a connection."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from p2pdrl.transport.stream.socket import StreamSocket


@pytest.fixture
async def ends() -> AsyncIterator[tuple[StreamSocket, StreamSocket]]:
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.setblocking(False)
    made = StreamSocket(one), StreamSocket(other)
    yield made
    for stream in made:
        stream.close()
        stream.close()
