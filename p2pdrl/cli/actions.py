"""``p2pdrl pause``, ``resume``, ``checkpoint`` and ``leave``: the commands that change a node."""

from __future__ import annotations

import click

from p2pdrl.cli.formats import clean
from p2pdrl.cli.options import Target, api_options

__all__ = ["checkpoint", "leave", "pause", "resume"]

_SLOW_S = 60.0

swarm_option = click.option(
    "--swarm", "whole_swarm", is_flag=True, help="Every node of the swarm, not just this one."
)


@click.command()
@api_options
@swarm_option
def pause(target: Target, whole_swarm: bool) -> None:
    """Stop training; membership goes on."""
    target.client().post(f"/v1/pause?scope={_scope(whole_swarm)}")
    click.echo("the swarm is pausing" if whole_swarm else "the node is pausing")


@click.command()
@api_options
@swarm_option
def resume(target: Target, whole_swarm: bool) -> None:
    """Train again after a pause."""
    target.client().post(f"/v1/resume?scope={_scope(whole_swarm)}")
    click.echo("the swarm trains again" if whole_swarm else "the node trains again")


@click.command()
@api_options
def checkpoint(target: Target) -> None:
    """Write a checkpoint now.

    On the node's own disk; prints its path there.
    """
    click.echo(clean(target.client(_SLOW_S).post("/v1/checkpoint").get("path"), 4096))


@click.command()
@api_options
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=30.0, show_default=True,
    metavar="SECONDS", help="Wait at most this long for the node to be gone; 0 doesn't wait.",
)  # fmt: skip
def leave(target: Target, timeout_s: float) -> None:
    """Make the node leave the swarm and end."""
    client = target.client()
    before = client.status().get("pid")
    client.post("/v1/leave")
    if timeout_s:
        client.wait_for_end(before, timeout_s)
    click.echo("the node has left" if timeout_s else "the node is leaving")


def _scope(whole_swarm: bool) -> str:
    return "swarm" if whole_swarm else "node"
