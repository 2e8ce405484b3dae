"""``p2pdrl status``, ``peers`` and ``top``: one node's view of itself and of the swarm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.options import Target, api_options, json_option

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["peers", "show_again", "status", "top", "watchable"]

watch_options = [
    click.option("--watch", is_flag=True, help="Show it again and again until Ctrl-C."),
    click.option(
        "--interval", "interval_s", type=click.FloatRange(min=0.1), default=2.0, show_default=True,
        metavar="SECONDS", help="With --watch.",
    ),
]  # fmt: skip


def watchable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--watch`` and ``--interval`` to a command."""
    for option in reversed(watch_options):
        command = option(command)
    return command


@click.command()
@api_options
@json_option
@watchable
def status(target: Target, as_json: bool, watch: bool, interval_s: float) -> None:
    """Show one node and its view of the swarm."""
    from p2pdrl.cli.facts import status_view

    client = target.client()
    show_again(client.status, lambda: status_view(client.status()), as_json, watch, interval_s)


@click.command()
@api_options
@json_option
@watchable
def peers(target: Target, as_json: bool, watch: bool, interval_s: float) -> None:
    """List every member that the node knows."""
    from p2pdrl.cli.tables import ADDRESSES, members_table

    client = target.client()
    show_again(client.peers, lambda: members_table(client.peers(), ADDRESSES), as_json, watch, interval_s)


@click.command()
@api_options
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True,
    metavar="SECONDS", help="Pause between pictures.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what it shows as JSON, once, and end.")
def top(target: Target, interval_s: float, as_json: bool) -> None:
    """Watch the members live."""
    from p2pdrl.cli.tables import swarm_view

    client = target.client()

    def ask() -> dict[str, object]:
        return {"status": client.status(), "peers": client.peers()}

    def view() -> RenderableType:
        return swarm_view(client.status(), client.peers())

    show_again(ask, view, as_json, not as_json, interval_s)


def show_again(
    ask: Callable[[], object],
    view: Callable[[], RenderableType],
    as_json: bool,
    again: bool,
    interval_s: float,
) -> None:
    """Print once or again and again, as JSON (with --watch one document per line) or as a table."""
    if as_json:
        while again:
            click.echo(json.dumps(ask()))
            time.sleep(interval_s)
        click.echo(json.dumps(ask(), indent=2))
        return
    from p2pdrl.cli.tables import console

    if again:
        from p2pdrl.cli.watch import watch

        watch(view, console(), interval_s)
    console().print(view())
