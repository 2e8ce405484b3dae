"""``p2pdrl doctor``: whether a node will run here and reach its peers, and what to do if not."""

from __future__ import annotations

import click

from p2pdrl.cli.options import json_option, split_addresses

__all__ = ["doctor"]

_STYLE = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option(
    "--peers", multiple=True, metavar="HOST:PORT[,…]", help="Peers that must be reachable. Repeatable."
)
@click.option(
    "--listen",
    default="127.0.0.1:7700",
    show_default=True,
    metavar="HOST:PORT",
    help="Where a node will listen.",
)
@click.option("--data-dir", metavar="FOLDER", help="Data folder that a node will use.")
@click.option(
    "--swarm-key-file",
    envvar="P2PDRL_SWARM_KEY_FILE",
    metavar="FILE",
    help="The swarm's key, to compare with the peers'.  [env: P2PDRL_SWARM_KEY_FILE]",
)
@json_option
def doctor(
    *, peers: tuple[str, ...], listen: str, data_dir: str | None, swarm_key_file: str | None, as_json: bool
) -> None:
    """Check this machine, and the way to the peers.

    Each line says ok, warn or fail, and what to do. The exit code is 4 if anything fails.
    """  # fmt: skip
    from p2pdrl.api.keyfile import read_swarm_key
    from p2pdrl.cli.checks import machine_checks, peer_checks
    from p2pdrl.errors import UnhealthyError

    key = read_swarm_key(swarm_key_file) if swarm_key_file else None
    checks = machine_checks(data_dir, listen)
    for address in split_addresses(peers):
        checks += peer_checks(address, key)
    failed = sum(check.result == "fail" for check in checks)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode({"ok": not failed, "checks": checks}), indent=2))
    else:
        width = min(max(len(check.name) for check in checks), 40)
        for check in checks:
            result = click.style(f"{check.result:<4}", fg=_STYLE[check.result])
            click.echo(f"{result}  {check.name:<{width}}  {check.found}")
            if check.advice:
                click.echo(f"{'':<4}  {'':<{width}}  → {check.advice}")
    if failed:
        raise UnhealthyError(f"{failed} of {len(checks)} checks failed")
