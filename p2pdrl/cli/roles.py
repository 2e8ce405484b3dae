"""``p2pdrl roles``: what each node does for the swarm, and to change that while it trains."""

from __future__ import annotations

import json
from typing import get_args
from urllib.parse import urlencode

import click

from p2pdrl.cli.formats import clean
from p2pdrl.cli.options import FiniteRange, Target, api_options, command_options, done, json_option
from p2pdrl.config.node import Role
from p2pdrl.errors import UsageError, did_you_mean

__all__ = ["roles"]

ROLES: tuple[str, ...] = get_args(Role)


@click.group()
def roles() -> None:
    """Show what each node does for the swarm, or change that."""


@roles.command("show")
@api_options
@json_option
def show_roles(target: Target, as_json: bool) -> None:
    """Show the roles of all living members, the node that is asked first."""
    rows = [row for row in target.client().peers() if row.get("state") == "alive"]
    found = [{"name": row.get("name"), "id": row.get("id"), "roles": row.get("roles")} for row in rows]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from p2pdrl.cli.tables import Column, Listing, show

    cells = [
        (clean(row["name"], 64), ", ".join(clean(role, 20) for role in row["roles"] or [])) for row in found
    ]
    ids = [clean(row["id"], 8) for row in found]
    show(Listing([Column("node", least=20), Column("roles")], cells, ids=ids, headers=False))


@roles.command("set")
@click.argument("names", metavar="ROLE[,ROLE…]")
@command_options
@click.option(
    "--wait", "wait_s", type=FiniteRange(min=0), default=60.0, show_default=True, metavar="SECONDS",
    help="Wait at most this long until it works in them; then exit with 1. 0 doesn't wait.",
)  # fmt: skip
@json_option
def set_roles(target: Target, names: str, wait_s: float, as_json: bool) -> None:
    """Give a node other roles: actor, learner, replay, server. It keeps what it has trained.

    The rest of the swarm goes on meanwhile.
    """
    wanted = [word.strip() for word in names.split(",") if word.strip()]
    if not wanted:
        raise UsageError(f"name at least one role: {', '.join(ROLES)}")
    for word in wanted:
        if word not in ROLES:
            near = did_you_mean(word, ROLES, f"there are {', '.join(ROLES)}")
            raise UsageError(f"no role is called {clean(word, 40)!r}; {near}")
    client = target.client()
    client.post("/v1/roles?" + urlencode([("role", name) for name in wanted]))
    if wait_s:
        client.wait_for_roles(wanted, wait_s)
    words = f"the node {'is' if wait_s else 'becomes'} {', '.join(wanted)}"
    done(words, as_json, roles=wanted, at_work=bool(wait_s))
