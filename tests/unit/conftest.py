"""A fake node's API on a free port."""

from __future__ import annotations

import pytest

from p2pdrl.testing.fake_node import FakeNode, ServedNode


@pytest.fixture
def node(tmp_path):
    """A node whose token can be found in its data folder."""
    fake = FakeNode(data_dir=str(tmp_path))
    (tmp_path / "token").write_text(fake.token + "\n")
    return fake


@pytest.fixture
def served(node):
    """The node's API, served."""
    with ServedNode(node) as running:
        yield running


@pytest.fixture
def free_address():
    """An address where nobody listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
