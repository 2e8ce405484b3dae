"""Keeps pytest-asyncio from making an event loop that nobody closes."""

from __future__ import annotations

import asyncio


def pytest_configure() -> None:
    # Before 3.14 asyncio.get_event_loop() invents a loop in the main thread unless one, or none, was set.
    asyncio.set_event_loop(None)
