"""``p2pdrl events``: what happened on a node, as far as it remembers, and as it happens."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.formats import as_number, clean
from p2pdrl.cli.options import Target, api_options, json_option
from p2pdrl.errors import DaemonUnreachableError

if TYPE_CHECKING:
    from p2pdrl.cli.client import NodeClient

__all__ = ["events"]

_SILENCE_S = 40.0
"""The node sends a comment every 15 s; two in a row may be lost to a slow link."""


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
    past = _events(client.get(f"/v1/events?follow=0&since={since or 0}"))
    if as_json and not follow:
        click.echo(json.dumps(past, indent=2))
        return
    shown = past if since is not None or not follow else past[-10:]
    last = past[-1]["seq"] if past else since or 0
    for event in itertools.chain(shown, _follow(client, last) if follow else ()):
        click.echo(json.dumps(event) if as_json else _line(event))


def _follow(client: NodeClient, since: int) -> Iterator[dict[str, Any]]:
    for line in client.lines(f"/v1/events?since={since}", silence_s=_SILENCE_S):
        if line.startswith(b"data: "):
            yield from _events([json.loads(line[6:])])
    raise DaemonUnreachableError(f"the node at {client.address} ended the stream of events")


def _events(content: object) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return []
    return [event for event in content if isinstance(event, dict) and isinstance(event.get("seq"), int)]


def _line(event: dict[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(as_number(event.get("time")) or 0))
    return f"{when}  {clean(event.get('kind', ''), 20):<16}  {clean(event.get('text', ''), 1000)}"
