"""``p2pdrl wait``: for scripts that start nodes and need the swarm to be there before they go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.options import Target, api_options

if TYPE_CHECKING:
    from p2pdrl.cli.client import NodeClient

__all__ = ["wait"]

_PAUSE_S = 0.5


@click.command()
@api_options
@click.option(
    "--healthy", type=click.IntRange(min=1), required=True, metavar="N", help="Members, this node included."
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=60.0, show_default=True,
    metavar="SECONDS", help="Give up after this long, with exit code 4.",
)  # fmt: skip
def wait(target: Target, healthy: int, timeout_s: float) -> None:
    """Wait until enough members are healthy.

    That is alive and well, as one node sees it. The node needn't be up yet.
    """
    from p2pdrl.errors import UnhealthyError

    client = target.client()
    deadline = time.monotonic() + timeout_s
    while (shortfall := _shortfall(client, healthy)) is not None:
        if time.monotonic() + _PAUSE_S > deadline:
            raise UnhealthyError(f"after {timeout_s:g} s: {shortfall}")
        time.sleep(_PAUSE_S)
    click.echo(f"{healthy} members are healthy")


def _shortfall(client: NodeClient, wanted: int) -> str | None:
    """What is missing, or None."""
    from p2pdrl.errors import DaemonUnreachableError

    try:
        members = client.peers()
    except DaemonUnreachableError as error:
        return str(error)
    well = sum(_is_well(member) for member in members)
    if well >= wanted:
        return None
    from p2pdrl.cli.tables import complaints

    why = f" ({'; '.join(complaints(members)[:5])})" if complaints(members) else ""
    return f"{well} of {wanted} members are healthy{why}"


def _is_well(member: dict[str, Any]) -> bool:
    return member.get("state") == "alive" and member.get("healthy") is True
