"""Nodes on one network, in memory and on the loop's clock."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.node.events import EventLog
from p2pdrl.testing.memory_transport import MemoryNetwork


class Striking:
    """Notes strikes; so many of them are quarantine."""

    def __init__(self, most):
        self.strikes = []
        self.most = most

    def strike(self, peer, why):
        self.strikes.append((peer, why))

    def quarantined(self, peer):
        return len(self.strikes) >= self.most


class World:
    """Nodes on one network; what they run ends with the test."""

    def __init__(self):
        self.network = MemoryNetwork(random.Random(1))
        self.clock = LoopClock()
        self.events = EventLog(500, self.clock)
        self.striking = Striking
        self.tasks = []
        self.nodes = []
        self.stale = []

    async def add(self, kind, number, **options):
        node = kind(self, number, **options)
        await node.transport.start()
        self.nodes.append(node)
        return node

    def start(self, coroutine):
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()
        for node in self.nodes:
            await node.transport.close()
            node.close()


@pytest.fixture
async def world():
    made = World()
    yield made
    await made.end()
