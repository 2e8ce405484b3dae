"""A fake node's API on a free port, and the command line as a function."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from p2pdrl.cli import main as cli_main
from p2pdrl.testing.fake_node import FakeNode, ServedNode


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (
        "P2PDRL_API", "P2PDRL_TOKEN", "P2PDRL_SWARM_KEY_FILE", "P2PDRL_OPERATOR", "P2PDRL_JOIN", "COLUMNS",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def p2pdrl():
    """Run ``p2pdrl ARGS``; returns click's result with the exit code of the real command."""

    def run(*args):
        import click

        # The same error mapping as `main`, inside the runner's captured streams.
        wrapper = click.Command(
            "p2pdrl",
            callback=lambda: (_ for _ in ()).throw(
                SystemExit(cli_main.run_command(cli_main.cli, "p2pdrl", args))
            ),
        )
        return CliRunner().invoke(wrapper, [])

    return run


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
