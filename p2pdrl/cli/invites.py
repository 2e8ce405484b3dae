"""``p2pdrl invite``: a line by which one more machine joins, without ever holding the swarm's key."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlencode

import click

from p2pdrl.cli.formats import as_number, clean
from p2pdrl.cli.options import Span, Target, api_options, json_option, refuse_before_subcommand
from p2pdrl.errors import UsageError
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.protocol import Address

__all__ = ["invite"]


@click.group(invoke_without_command=True)
@click.option(
    "--roles",
    metavar="LIST",
    help="All that the newcomer may do, such as actor; its peers refuse the rest. Default: no limit.",
)
@click.option(
    "--expires",
    "expires_s",
    type=Span(),
    default="24h",
    show_default=True,
    metavar="TIME",
    help="How long the line can be used, as 30m, 24h or 7d.",
)
@click.option(
    "--member-for",
    "membership_s",
    type=Span(),
    metavar="TIME",
    help="How long the newcomer stays a member. Default: for ever.",
)
@api_options
@json_option
@click.pass_context
def invite(
    context: click.Context,
    *,
    target: Target,
    roles: str | None,
    expires_s: float,
    membership_s: float | None,
    as_json: bool,
) -> None:
    """Print a line by which one more machine can join.

    There, p2pdrl node --join LINE needs nothing else, neither key nor addresses, and never gets the key. Any
    node that holds the key can invite. The line holds a secret that is good once; give it to
    nobody but the newcomer. The node that made it has to be up when it is used.
    """
    if refuse_before_subcommand(context):
        return
    asked = [("role", word) for word in _words(roles)] + [("expires_s", f"{expires_s:g}")]
    if membership_s is not None:
        asked.append(("membership_s", f"{membership_s:g}"))
    made = target.client().post("/v1/invites?" + urlencode(asked))
    if as_json:
        click.echo(json.dumps(made, indent=2))
    else:
        click.echo(clean(made.get("line"), 2048))
    may = f" as {_listed(made.get('roles'))}" if made.get("roles") else ""
    click.echo(
        f"on the new machine: p2pdrl node --join LINE (good once, until {_moment(made.get('expires'))}{may}; "
        f"take it back with: p2pdrl invite revoke {clean(made.get('id'), 8)})",
        err=True,
    )
    seeds = made.get("seeds")
    if isinstance(seeds, list) and seeds and is_loopback(Address.parse(str(seeds[0])).host):
        click.echo(
            f"careful: the node listens at {clean(seeds[0], 60)}, where this machine alone reaches it; for "
            "others start it with --listen 0.0.0.0:7700, or tell them where with --advertise HOST:PORT",
            err=True,
        )


@invite.command("list")
@api_options
@json_option
def list_invites(target: Target, as_json: bool) -> None:
    """Show what has become of the invites that the node has made."""
    rows: Any = target.client().get("/v1/invites")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from p2pdrl.cli.tables import Column, Listing, show

    columns = [Column("id"), Column("state"), Column("what became of it", least=24, wraps="short")]
    cells = [_cells(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    show(Listing(columns, cells, headers=False) if cells else "this node has made no invites")


@invite.command()
@click.argument("name", metavar="ID")
@api_options
@json_option
def revoke(target: Target, name: str, as_json: bool) -> None:
    """Take an invite back: nobody can use it any more.

    A node that has used it stays a member until the swarm's key is replaced (`p2pdrl key rotate`): its
    certificate isn't renewed then.
    """
    done = target.client().post("/v1/invites/revoke?" + urlencode([("id", name)]))
    if as_json:
        click.echo(json.dumps(done, indent=2))
        return
    if done.get("before") == "used":
        click.echo(f"{clean(name, 8)} is revoked; its node stays a member until the swarm's key is replaced")
    else:
        click.echo(f"{clean(name, 8)} is revoked")


def _words(roles: str | None) -> list[str]:
    """Read a list of roles.

    Raises:
        UsageError: it names none.
    """
    if roles is None:
        return []
    words = [word.strip() for word in roles.split(",") if word.strip()]
    if not words:
        raise UsageError("--roles: name at least one of actor, learner, replay and server")
    return words


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Its id, its state, and the rest in words."""
    state = clean(row.get("state"), 8)
    if state == "open":
        words = f"until {_moment(row.get('expires'))}"
    elif row.get("node"):
        words = f"{clean(row.get('name'), 64)} ({clean(row.get('node'), 8)}) since {_moment(row.get('used'))}"
    else:
        words = f"made {_moment(row.get('created'))}"
    if row.get("roles"):
        words += f", as {_listed(row.get('roles'))} alone"
    if row.get("until"):
        words += f", member until {_moment(row.get('until'))}"
    return clean(row.get("id"), 8), state, words


def _listed(words: object) -> str:
    return " and ".join(clean(word, 20) for word in words) if isinstance(words, list) else ""


def _moment(wall_s: object) -> str:
    seconds = as_number(wall_s)
    return "?" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
