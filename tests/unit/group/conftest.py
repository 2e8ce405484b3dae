"""The in-memory network that groups talk over."""

from __future__ import annotations

import random

import pytest

from p2pdrl.testing.memory_transport import MemoryNetwork


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(random.Random(0), delay_s=(0.01, 0.01))
