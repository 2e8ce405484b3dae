"""What changes a node, or the swarm: ``p2pdrl pause``, ``resume``, ``halt``, ``stop``, ``leave`` and more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from p2pdrl.cli.formats import clean
from p2pdrl.cli.options import FiniteRange, Target, api_options, command_options, done, json_option
from p2pdrl.errors import P2PDRLError
from p2pdrl.library.commands import command_swarm

if TYPE_CHECKING:
    from p2pdrl.membership.swarm_records import SwarmRecords

__all__ = ["checkpoint", "halt", "leave", "pause", "resume", "stop"]

_SLOW_S = 60.0

swarm_option = click.option(
    "--swarm", "whole_swarm", is_flag=True, help="Every node of the swarm, not just this one."
)


@click.command()
@command_options
@swarm_option
@json_option
def pause(target: Target, whole_swarm: bool, as_json: bool) -> None:
    """Stop training; membership goes on."""
    facts = _hold(target, paused=True, whole_swarm=whole_swarm)
    done("the swarm is pausing" if whole_swarm else "the node is pausing", as_json, **facts)


@click.command()
@command_options
@swarm_option
@json_option
def resume(target: Target, whole_swarm: bool, as_json: bool) -> None:
    """Train again after a pause."""
    facts = _hold(target, paused=False, whole_swarm=whole_swarm)
    done("the swarm trains again" if whole_swarm else "the node trains again", as_json, **facts)


def _hold(target: Target, *, paused: bool, whole_swarm: bool) -> dict[str, Any]:
    """Return what was done, for programs."""
    client, path = target.client(), f"/v1/{'pause' if paused else 'resume'}"
    if not whole_swarm:
        client.post(f"{path}?scope=node")
        return {"paused": paused, "scope": "node"}

    def setting(_records: SwarmRecords, _by: str) -> tuple[str, Any]:
        from p2pdrl.node.settings import PAUSE, PauseSetting

        return PAUSE, PauseSetting(paused)

    record = command_swarm(target, client, f"{path}?scope=swarm", setting)
    return {"paused": paused, "scope": "swarm", **_signed(record)}


def _signed(record: dict[str, Any]) -> dict[str, Any]:
    """Where a setting of the whole swarm is to be found."""
    return {"epoch": record.get("epoch"), "proposer": record.get("proposer")}


@click.command()
@command_options
@click.option("--reason", default="", metavar="TEXT", help="Told on every node.")
@json_option
def halt(target: Target, reason: str, as_json: bool) -> None:
    """End the training on every node of the swarm, as if it were done.

    Nodes that are started again go on from their checkpoints; `p2pdrl leave` ends one node alone.
    """

    def setting(records: SwarmRecords, _by: str) -> tuple[str, Any]:
        from p2pdrl.node.settings import HALT, HaltSetting

        ends = records.get("stop")
        if ends is None:
            raise P2PDRLError("the node doesn't know the swarm's stop condition yet; wait until it trains")
        return HALT, HaltSetting("command", reason[:200], ends.epoch, ends.proposer)

    query = urlencode({"reason": reason[:200]})
    record = command_swarm(target, target.client(), f"/v1/halt?{query}", setting)
    done("the swarm is ending", as_json, halted=True, reason=reason[:200], **_signed(record))


@click.group()
def stop() -> None:
    """Show when the swarm is done, or change that while it trains."""


@stop.command("show")
@api_options
@json_option
def show_stop(target: Target, as_json: bool) -> None:
    """Show the stop condition, and whether it is met."""
    found = target.client().status().get("stop")
    found = found if isinstance(found, dict) else {}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from p2pdrl.cli.tables import facts_table, show

    given = [(clean(key, 20), clean(value, 300)) for key, value in found.items() if value]
    show(facts_table(given) if given else "nothing ends this swarm but `p2pdrl halt`")


@stop.command("set")
@click.argument("conditions", metavar="KEY=VALUE…", nargs=-1, required=True)
@command_options
@json_option
def set_stop(target: Target, conditions: tuple[str, ...], as_json: bool) -> None:
    """Give the swarm another stop condition: env_steps=1000000, time_s=3600, mean_return=475, window=100.

    The one that is met first ends it; what isn't named is off.
    """
    from p2pdrl.config.mode import stop_from

    condition = stop_from(conditions)

    def setting(records: SwarmRecords, _by: str) -> tuple[str, Any]:
        from p2pdrl.node.settings import STOP, StopSetting, decode

        held = records.get(STOP)
        before = None if held is None else decode(held.value, StopSetting)
        if before is None:
            raise P2PDRLError("the node doesn't know the swarm's stop condition yet; wait until it trains")
        return STOP, StopSetting(condition, before.founded_at)

    query = urlencode([("set", one) for one in conditions])
    record = command_swarm(target, target.client(), f"/v1/stop?{query}", setting)
    said = {name: getattr(condition, name) for name in condition.__struct_fields__}
    ends = condition.env_steps or condition.time_s or condition.mean_return is not None
    words = f"the swarm stops at {', '.join(conditions)}" if ends else "nothing ends it now but `p2pdrl halt`"
    done(words, as_json, stop=said, **_signed(record))


@click.command()
@command_options
@json_option
def checkpoint(target: Target, as_json: bool) -> None:
    """Write a checkpoint now.

    On the node's own disk; prints its path there.
    """
    path = target.client(_SLOW_S).post("/v1/checkpoint").get("path")
    done(clean(path, 4096), as_json, path=path)


@click.command()
@command_options
@click.option(
    "--timeout", "timeout_s", type=FiniteRange(min=0), default=30.0, show_default=True,
    metavar="SECONDS", help="Wait at most this long for the node to be gone; 0 doesn't wait.",
)  # fmt: skip
@json_option
def leave(target: Target, timeout_s: float, as_json: bool) -> None:
    """Make the node leave the swarm and end."""
    client = target.client()
    before = client.status().get("pid")
    client.post("/v1/leave")
    if timeout_s:
        client.wait_for_end(before, timeout_s)
    done("the node has left" if timeout_s else "the node is leaving", as_json, left=bool(timeout_s))
