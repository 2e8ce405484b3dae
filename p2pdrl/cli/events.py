"""``p2pdrl events``: what happened on a node, as far as it remembers, and as it happens."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import click

from p2pdrl.cli.formats import as_number, clean
from p2pdrl.cli.options import Target, api_options, json_option
from p2pdrl.cli.tables import Column, Listing, show

__all__ = ["events"]


@click.command()
@api_options
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until Ctrl-C.")
@click.option(
    "--since", type=click.IntRange(min=0), default=None, metavar="N", help="Only events after number N."
)
@json_option
def events(target: Target, follow: bool, since: int | None, as_json: bool) -> None:
    """Show what happened on the node.

    With --follow the last ten come first, unless --since is given. With --json each event is a line
    of its own with --follow, and all are one list without.
    """
    client = target.client()
    past = client.past_events(since or 0)
    if as_json and not follow:
        click.echo(json.dumps(past, indent=2))
        return
    shown = past if since is not None or not follow else past[-10:]
    last = past[-1]["seq"] if past else since or 0
    for event in itertools.chain(shown, client.coming_events(last) if follow else ()):
        if as_json:
            click.echo(json.dumps(event))
        else:
            show(_line(event), lines=True)


def _line(event: dict[str, Any]) -> Listing:
    when = time.strftime("%H:%M:%S", time.localtime(as_number(event.get("time")) or 0))
    cells = [when, f"{clean(event.get('kind', ''), 20):<16}", clean(event.get("text", ""), 1000)]
    columns = [Column("when"), Column("kind"), Column("what", least=30, wraps="fold")]
    return Listing(columns, [cells], headers=False)
