"""``p2pdrl roles``: what each node does for the swarm, and to change that while it trains."""

from __future__ import annotations

import json
from urllib.parse import urlencode

import click

from p2pdrl.cli.formats import clean
from p2pdrl.cli.options import Target, api_options, command_options, json_option
from p2pdrl.errors import UsageError

__all__ = ["roles"]


@click.group()
def roles() -> None:
    """Show what each node does for the swarm, or change that."""


@roles.command()
@api_options
@json_option
def show(target: Target, as_json: bool) -> None:
    """Show the roles of all living members, the node that is asked first."""
    rows = [row for row in target.client().peers() if row.get("state") == "alive"]
    found = [{"name": row.get("name"), "id": row.get("id"), "roles": row.get("roles")} for row in rows]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    names = [clean(row["name"], 60) for row in found]
    width = max(map(len, names), default=0)
    for name, row in zip(names, found, strict=True):
        click.echo(f"{name:<{width}}  {', '.join(map(str, row['roles'] or []))}")


@roles.command("set")
@click.argument("names", metavar="ROLE[,ROLE…]")
@command_options
@click.option(
    "--wait", "wait_s", type=click.FloatRange(min=0), default=60.0, show_default=True, metavar="SECONDS",
    help="Wait at most this long until it works in them; then exit with 1. 0 doesn't wait.",
)  # fmt: skip
def set_roles(target: Target, names: str, wait_s: float) -> None:
    """Give a node other roles: actor, learner, replay, server. It keeps what it has trained.

    The rest of the swarm goes on meanwhile.
    """
    wanted = [word.strip() for word in names.split(",") if word.strip()]
    if not wanted:
        raise UsageError("name at least one role: actor, learner, replay or server")
    client = target.client()
    client.post("/v1/roles?" + urlencode([("role", name) for name in wanted]))
    if wait_s:
        client.wait_for_roles(wanted, wait_s)
    click.echo(f"the node is {', '.join(wanted)}" if wait_s else f"the node becomes {', '.join(wanted)}")
