"""``p2pdrl peers``: the members as one node sees them; ``ban`` and ``unban`` refuse one, or take it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from p2pdrl.cli.formats import clean
from p2pdrl.cli.options import (
    Target,
    api_options,
    command_options,
    done,
    json_option,
    refuse_before_subcommand,
    wide_option,
)
from p2pdrl.cli.status import show_again, watchable
from p2pdrl.errors import P2PDRLError
from p2pdrl.ids import find_called
from p2pdrl.library.commands import command_swarm

if TYPE_CHECKING:
    from p2pdrl.membership.operators import BansSetting
    from p2pdrl.membership.swarm_records import SwarmRecords

__all__ = ["peers"]


@click.group(invoke_without_command=True)
@api_options
@json_option
@wide_option
@watchable
@click.pass_context
def peers(
    context: click.Context, *, target: Target, as_json: bool, wide: bool, watch: bool, interval_s: float
) -> None:
    """List every member that the node knows, or ban one."""
    if refuse_before_subcommand(context):
        return
    from p2pdrl.cli.tables import ADDRESSES, members_table

    client = target.client()
    show_again(
        client.peers, lambda peers: members_table(peers, ADDRESSES), as_json, watch, interval_s, wide=wide
    )


@peers.command()
@click.argument("node", metavar="ID|NAME")
@command_options
@click.option("--reason", default="", metavar="TEXT", help="Told to the node and to everybody.")
@json_option
def ban(target: Target, node: str, reason: str, as_json: bool) -> None:
    """Have every member refuse a node from now on.

    It is known by its id, which is that of its key: with a new data folder it is another node. Who holds
    the swarm's key can always make one; `p2pdrl key rotate` replaces that.
    """
    client = target.client()
    found = _one(client.peers(), node)
    node_id, name = str(found.get("id")), str(found.get("name") or "")

    def setting(records: SwarmRecords, by: str) -> tuple[str, Any]:
        from p2pdrl.membership.operators import Ban
        from p2pdrl.node.settings import BANS, with_ban

        return BANS, with_ban(_bans(records), Ban(node_id, name[:64], reason[:100], by[:100]))

    query = urlencode({"node": node_id, "reason": reason[:100]})
    record = command_swarm(target, client, f"/v1/ban?{query}", setting)
    done(
        f"{clean(name, 64)} ({node_id[:8]}) is banned", as_json, id=node_id, name=name, banned=True,
        reason=reason[:100], epoch=record.get("epoch"), proposer=record.get("proposer"),
    )  # fmt: skip


@peers.command()
@click.argument("node", metavar="ID|NAME")
@command_options
@json_option
def unban(target: Target, node: str, as_json: bool) -> None:
    """Have every member take a banned node again."""
    client = target.client()
    found = _one([row for row in client.peers() if row.get("state") == "banned"], node)
    node_id = str(found.get("id"))

    def setting(records: SwarmRecords, _by: str) -> tuple[str, Any]:
        from p2pdrl.node.settings import BANS, without_ban

        return BANS, without_ban(_bans(records), node_id)

    record = command_swarm(target, client, f"/v1/unban?{urlencode({'node': node_id})}", setting)
    name = found.get("name") or "?"
    done(
        f"{clean(name, 64)} ({node_id[:8]}) may join again", as_json, id=node_id, name=name, banned=False,
        epoch=record.get("epoch"), proposer=record.get("proposer"),
    )  # fmt: skip


def _bans(records: SwarmRecords) -> BansSetting:
    from p2pdrl.membership.operators import BansSetting

    return BansSetting(tuple(records.bans.values()))


def _one(rows: Sequence[dict[str, Any]], text: str) -> dict[str, Any]:
    """The member with that name, or whose id begins so.

    Raises:
        P2PDRLError: there is none, or several.
    """
    found = find_called(text, rows, lambda row: (row.get("name"), row.get("id", "")))
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(clean(row.get("id"), 32) for row in found)
        raise P2PDRLError(f"{len(found)} nodes are called {clean(text, 64)}; name one by its id: {ids}")
    names = ", ".join(clean(row.get("name") or "?", 64) for row in rows[:20]) or "nobody"
    raise P2PDRLError(f"nobody here is called {clean(text, 64)}, by name or id; there are: {names}")
