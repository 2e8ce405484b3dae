"""``p2pdrl keygen``: the secret that makes machines one swarm."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["keygen"]


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
