"""``p2pdrl keygen`` makes the secret of a swarm; ``p2pdrl key`` replaces it while the swarm trains."""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdrl.cli.options import json_option

if TYPE_CHECKING:
    from p2pdrl.api.keyfile import SwarmKeys

__all__ = ["key", "keygen"]


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path("swarm.key"))
def keygen(file: Path) -> None:
    """Make a swarm key.

    Writes it to FILE (swarm.key by default), readable by you only, and never over another file.
    Copy it to every machine of the swarm and start each node with --swarm-key-file FILE.
    """
    from p2pdrl.api.keyfile import write_swarm_key

    write_swarm_key(file)
    click.echo(file)
    click.echo(
        f"copy it to every machine, and start: p2pdrl node --swarm-key-file {file} --listen HOST:PORT",
        err=True,
    )


@click.group()
def key() -> None:
    """Replace a swarm's key while it trains, or look at it."""


@key.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--overlap",
    type=click.FloatRange(min=0.02, max=720),
    default=1.0,
    show_default=True,
    metavar="HOURS",
    help="Time to copy FILE to all machines; the old key is taken for as long again.",
)
@json_option
def rotate(file: Path, overlap: float, as_json: bool) -> None:
    """Put a new key into FILE, beside the old one.

    Copy FILE to every machine of the swarm before the overlap is over; running nodes read it by
    themselves. From then on they show the new key, and after as long again they refuse the old one.
    """
    from p2pdrl.api.keyfile import rotate_swarm_key

    _tell_keys(rotate_swarm_key(file, overlap * 3600.0, time.time()), as_json)
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
    lines = [f"swarm {keys.swarm_id}"]
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
        lines.append(f"key {fingerprint}  {words}{begins}{ends}")
    click.echo(json.dumps({"swarm": keys.swarm_id, "keys": rows}, indent=2) if as_json else "\n".join(lines))


def _moment(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall_s))
