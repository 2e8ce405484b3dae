"""``p2pdrl operators``: who may command a swarm. And how a command is signed.

The node that is asked never sees an operator's key. A command takes the swarm's records from it, checks their
signatures as a node would, signs the next one here, and gives that to the node to be passed on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from p2pdrl.cli.formats import clean
from p2pdrl.cli.options import Target, api_options, command_options, done, json_option, wide_option
from p2pdrl.errors import P2PDRLError, UsageError
from p2pdrl.library.commands import sign_record, signing_operator, told_records

if TYPE_CHECKING:
    from p2pdrl.api.client import NodeClient
    from p2pdrl.api.keyfile import OperatorKey
    from p2pdrl.membership.operators import Operator
    from p2pdrl.membership.swarm_records import SwarmRecords

__all__ = ["operators"]


@click.group()
def operators() -> None:
    """Show who may command the swarm, or change that.

    Root operators stand in the swarm's key file. They may name others here, who name nobody.
    """


@operators.command("list")
@api_options
@json_option
@wide_option
def list_operators(target: Target, as_json: bool, wide: bool) -> None:
    """List all operators, and who wrote what is in force."""
    told = target.client().get("/v1/records")
    told = told if isinstance(told, dict) else {}
    rows = [row for row in told.get("operators") or [] if isinstance(row, dict)]
    if as_json:
        records = [
            {key: value for key, value in one.items() if key != "record"}
            for one in told.get("records") or []
            if isinstance(one, dict)
        ]
        click.echo(json.dumps({"operators": rows, "records": records}, indent=2))
        return
    if not rows:
        click.echo("nobody in particular: every member may command this swarm")
        return
    from p2pdrl.cli.tables import Column, Listing, show

    columns = [
        Column("operator", least=12),
        Column("id"),
        Column("named by"),
        Column("public key", rank=1, least=64),
    ]
    cells = [
        (
            clean(row.get("name"), 64),
            clean(row.get("id"), 8),
            "the swarm's key" if row.get("root") else "a root operator",
            clean(row.get("public_key"), 64),
        )
        for row in rows
    ]
    show(Listing(columns, cells), wide=wide)


@operators.command()
@click.argument("public", metavar="KEY:NAME")
@command_options
@json_option
def add(target: Target, public: str, as_json: bool) -> None:
    """Let one more person command the swarm: KEY:NAME as `p2pdrl keygen --operator-only` prints it."""
    new = read_public(public)
    client = target.client()
    records, operator = _by_root(target, client)
    if any(held.public_key == new.public_key for held in records.operators):
        raise P2PDRLError(f"{new.words} is an operator already")
    _list(client, records, operator, [*_named(records), new])
    done(f"{new.words} may command the swarm from now on", as_json, **_facts(new), may_command=True)


@operators.command()
@click.argument("who", metavar="NAME|ID")
@command_options
@json_option
def remove(target: Target, who: str, as_json: bool) -> None:
    """Let somebody command no more.

    What he wrote and is in force is signed anew by you, and stays. Root operators are in the key file:
    `p2pdrl key rotate FILE --remove-operator NAME` makes one without them, for all machines.
    """
    from p2pdrl.membership.operators import find_operators

    client = target.client()
    records, operator = _by_root(target, client)
    roots = find_operators(who, records.roots)
    found = find_operators(who, _named(records))
    if not found and roots:
        raise P2PDRLError(
            f"{roots[0].words} is a root operator: those stand in the swarm's key file. Rotate the key "
            f"(`p2pdrl key rotate FILE --remove-operator {roots[0].name}`) and copy the file to every machine"
        )
    if len(found) != 1:
        known = ", ".join(named.words for named in _named(records)) or "nobody"
        raise P2PDRLError(f"{clean(who, 64)!r} names {len(found)} of those that could be removed: {known}")
    for record in records.all():
        if record.proposer == found[0].id and record.key != "halt":
            sign_record(client, records, operator, record.key, records.value(record.key))
    _list(client, records, operator, [named for named in _named(records) if named != found[0]])
    done(f"{found[0].words} commands no more", as_json, **_facts(found[0]), may_command=False)


def _facts(operator: Operator) -> dict[str, str]:
    return {"name": operator.name, "id": operator.id, "public_key": operator.public_key.hex()}


def read_public(text: str) -> Operator:
    """Read ``KEY:NAME``.

    Raises:
        UsageError: it isn't that.
    """
    from p2pdrl.membership.operators import Operator, operator_name

    key, _, name = text.strip().removeprefix("operator=").partition(":")
    try:
        public_key = bytes.fromhex(key)
    except ValueError:
        public_key = b""
    if len(public_key) != 32 or operator_name(name) is None:
        raise UsageError(
            f"{clean(text, 80)!r} isn't KEY:NAME (64 hex digits, and a name), as `p2pdrl keygen "
            "--operator-only FILE` prints it"
        )
    return Operator(public_key, name)


def _by_root(target: Target, client: NodeClient) -> tuple[SwarmRecords, OperatorKey]:
    records = told_records(target, client)
    if not records.roots:
        raise P2PDRLError(
            "the swarm's key names no operators, so there is nobody who could name others; "
            "`p2pdrl key rotate FILE --add-operator KEY:NAME` names the first"
        )
    operator = signing_operator(target, client, records)
    if all(root.public_key != operator.signer.public_key for root in records.roots):
        names = ", ".join(root.words for root in records.roots)
        raise P2PDRLError(f"{operator.public.words} can't change this, root operators can: {names}")
    return records, operator


def _named(records: SwarmRecords) -> list[Operator]:
    return [operator for operator in records.operators if operator not in records.roots]


def _list(client: NodeClient, records: SwarmRecords, operator: OperatorKey, named: list[Operator]) -> None:
    from p2pdrl.membership.operators import MAX_OPERATORS, OperatorsSetting

    if len(named) > MAX_OPERATORS:
        raise P2PDRLError(f"{MAX_OPERATORS} operators can be named beside the roots: remove one first")
    sign_record(client, records, operator, "operators", OperatorsSetting(tuple(named)))
