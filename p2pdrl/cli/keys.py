"""``p2pdrl keygen`` makes the secret of a swarm; ``p2pdrl key`` replaces it while the swarm trains."""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdrl.cli.options import FiniteRange, done, json_option
from p2pdrl.errors import P2PDRLError

if TYPE_CHECKING:
    from p2pdrl.api.keyfile import SwarmKeys

__all__ = ["key", "keygen"]


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path("swarm.key"))
@click.option("--name", metavar="NAME", help="What to call the operator; your login name by default.")
@click.option(
    "--no-operator",
    is_flag=True,
    help="Whoever holds the key may command the swarm: pause, change and end it.",
)
@click.option(
    "--operator-only",
    is_flag=True,
    help="Write an operator's key to FILE, for one more person, and no swarm key.",
)
@json_option
def keygen(file: Path, name: str | None, no_operator: bool, operator_only: bool, as_json: bool) -> None:
    """Make a swarm key, and the key of its operator.

    Writes the swarm's to FILE (swarm.key by default) and the operator's to FILE.operator, readable by you
    only, and never over other files. Copy FILE to every machine of the swarm and start each node with
    --swarm-key-file FILE. Who has FILE.operator may command the swarm; it stays with you.
    """
    from p2pdrl.api.keyfile import write_operator_key, write_swarm_key

    if no_operator and operator_only:
        raise click.UsageError("--no-operator and --operator-only leave nothing to be made")
    name = name or _login_name()
    if operator_only:
        public = write_operator_key(file, name).public
        line = f"{public.public_key.hex()}:{public.name}"
        done(line, as_json, operator_file=str(file), operator=line)
        click.echo(
            f"{file} is the key of {public.words}; a root operator lets it command with "
            "`p2pdrl operators add` and the line above",
            err=True,
        )
        return
    private = None
    if no_operator:
        write_swarm_key(file)
    else:
        private = Path(f"{file}.operator")
        operator = write_operator_key(private, name).public
        try:
            write_swarm_key(file, [operator])
        except P2PDRLError:
            private.unlink()
            raise
        click.echo(f"{private} is the key of {operator.words}, who commands the swarm: keep it", err=True)
    made = None if private is None else str(private)
    done(str(file), as_json, swarm_key_file=str(file), operator_file=made)
    click.echo(
        f"copy {file} to every machine, and start on the first: p2pdrl node --swarm-key-file {file} --listen "
        "0.0.0.0:7700; on each other the same with --peers FIRST:7700",
        err=True,
    )


def _login_name() -> str:
    import getpass

    from p2pdrl.membership.operators import operator_name

    try:
        return operator_name(getpass.getuser()) or "operator"
    except (OSError, KeyError, ImportError):
        return "operator"


@click.group()
def key() -> None:
    """Replace a swarm's key while it trains, or look at it."""


@key.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--overlap",
    type=FiniteRange(min=0.02, max=720),
    default=1.0,
    show_default=True,
    metavar="HOURS",
    help="Time to copy FILE to all machines; the old key is taken for as long again.",
)
@click.option(
    "--add-operator", "add", multiple=True, metavar="KEY:NAME", help="One more root operator. Repeatable."
)
@click.option(
    "--remove-operator", "remove", multiple=True, metavar="NAME|ID", help="A root operator less. Repeatable."
)
@json_option
def rotate(file: Path, overlap: float, add: tuple[str, ...], remove: tuple[str, ...], as_json: bool) -> None:
    """Put a new key into FILE, beside the old one. Its root operators stay, but for those that you name.

    Copy FILE to every machine of the swarm before the overlap is over; running nodes read it by
    themselves. From then on they show the new key, and after as long again they refuse the old one.
    """
    from p2pdrl.api.keyfile import rotate_swarm_key
    from p2pdrl.cli.operators import read_public

    new = [read_public(public) for public in add]
    _tell_keys(rotate_swarm_key(file, overlap * 3600.0, time.time(), add=new, remove=remove), as_json)
    click.echo(f"copy {file} to every machine of the swarm; running nodes read it by themselves", err=True)


@key.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option
def show(file: Path, as_json: bool) -> None:
    """Show which swarm FILE is the key of, and whether it is being replaced. The key stays hidden."""
    from p2pdrl.api.keyfile import read_swarm_keys

    _tell_keys(read_swarm_keys(file), as_json)


def _tell_keys(keys: SwarmKeys, as_json: bool) -> None:
    """Print when each key is shown and taken, newest first."""
    good = keys.good(time.time())
    rows: list[dict[str, object]] = []
    cells: list[tuple[str, str, str]] = []
    for entry in keys.keys:
        fingerprint = hashlib.sha256(entry.key).hexdigest()[:8]
        begins_s, ends_s = entry.from_s or None, entry.until_s if math.isfinite(entry.until_s) else None
        shown, taken = entry.key == good[0], entry.key in good
        rows.append(
            {"fingerprint": fingerprint, "shown": shown, "taken": taken, "from": begins_s, "until": ends_s}
        )
        words = "shown" if shown else "taken" if taken else "refused"
        begins = f", shown from {_moment(begins_s)}" if begins_s and not shown else ""
        ends = f", taken until {_moment(ends_s)}" if ends_s else ""
        cells.append(("key", fingerprint, f"{words}{begins}{ends}"))
    roots = [
        {"name": root.name, "id": root.id, "public_key": root.public_key.hex()} for root in keys.operators
    ]
    if as_json:
        click.echo(json.dumps({"swarm": keys.swarm_id, "keys": rows, "operators": roots}, indent=2))
        return
    from p2pdrl.cli.tables import Column, Listing, show

    cells += [("operator", root.id[:8], f"{root.name} {root.public_key.hex()}") for root in keys.operators]
    show(f"swarm {keys.swarm_id}")
    columns = [Column("what"), Column("id"), Column("is", least=40, wraps="fold")]
    show(Listing(columns, cells, headers=False), lines=True)


def _moment(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall_s))
