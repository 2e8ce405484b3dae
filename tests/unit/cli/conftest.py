"""The command line as a function, in an environment that says nothing."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from p2pdrl.cli import main as cli_main


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
