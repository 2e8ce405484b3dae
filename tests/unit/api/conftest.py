"""Applications served on real ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

Serve = Callable[[web.Application], Awaitable[TestClient]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves applications; returns a test client of each."""
    clients: list[TestClient] = []

    async def served(app: web.Application) -> TestClient:
        client = TestClient(TestServer(app))
        await client.start_server()
        clients.append(client)
        return client

    yield served
    for client in clients:
        await client.close()
