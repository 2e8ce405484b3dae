"""``p2pdrl mode`` and ``rounds``: how the swarm agrees, changing that as it trains, and its last rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.formats import (
    NONE,
    as_number,
    beside,
    byte_size,
    clean,
    fixed,
    millis,
    mode_words,
    percent,
    scientific,
)
from p2pdrl.cli.options import (
    FiniteRange,
    Target,
    api_options,
    command_options,
    done,
    json_option,
    wide_option,
)
from p2pdrl.cli.status import show_again, watchable
from p2pdrl.config.schedules import MAX_STAGES
from p2pdrl.library.commands import command_swarm

if TYPE_CHECKING:
    from rich.console import RenderableType

    from p2pdrl.cli.tables import Cell
    from p2pdrl.membership.swarm_records import SwarmRecords

__all__ = ["mode", "rounds"]

_SHOWN = 8
"""Names in one cell; of more the rest is counted."""
_GOOD = ("ok", "pushed", "answered")


@click.group()
def mode() -> None:
    """Show how the swarm agrees, or change it while it trains."""


@mode.command()
@api_options
@json_option
@wide_option
def show(target: Target, as_json: bool, wide: bool) -> None:
    """Show the mode in force, its options, and who follows it."""
    client = target.client()
    show_again(lambda: client.get("/v1/mode"), _mode_view, as_json, wide=wide)


class _SetCommand(click.Command):
    """Ends its help with the strategies that there are, read when somebody asks."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them by mode."""
        from p2pdrl.config.mode import PROTOCOLS

        del ctx
        with formatter.section("Protocols of each mode (the first is taken when none is named)"):
            formatter.write_dl([(mode, ", ".join(protocols)) for mode, protocols in PROTOCOLS.items()])


@mode.command("set", cls=_SetCommand)
@click.argument("name", metavar="MODE")
@command_options
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="protocol=NAME picks the strategy; every other key is an option of it. Repeatable.",
)
@click.option("--servers", type=click.IntRange(min=1), metavar="N", help="The same as --set servers=N.")
@click.option(
    "--stages",
    type=click.IntRange(1, MAX_STAGES),
    metavar="S",
    help="Of a pipeline; the same as --set stages=S.",
)
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait at most this long until every living member follows; then exit with 1.",
)
@click.option("--no-wait", is_flag=True, help="Don't wait.")
@json_option
def set_mode(
    target: Target,
    *,
    name: str,
    sets: tuple[str, ...],
    servers: int | None,
    stages: int | None,
    wait_s: float,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Change the mode of the whole swarm, through any node of it.

    MODE is gossip, server-sync, server-async, allreduce, pipeline or local. Options that aren't given take
    their defaults.
    """
    from urllib.parse import urlencode

    from p2pdrl.config import mode as modes

    counts = {"servers": servers, "stages": stages}
    given = [*sets, *(f"{key}={count}" for key, count in counts.items() if count is not None)]
    strategy = modes.strategy_from(name, given)
    words = modes.mode_words(strategy)
    client = target.client()
    query = urlencode([("mode", strategy.mode), *(("set", one) for one in given)])

    def setting(_records: SwarmRecords, _by: str) -> tuple[str, Any]:
        from p2pdrl.node.settings import MODE, ModeSetting

        return MODE, ModeSetting.of(strategy)

    record = command_swarm(target, client, f"/v1/mode?{query}", setting)
    epoch, proposer = record.get("epoch"), record.get("proposer")
    said = {"mode": strategy.mode, "strategy": words, "epoch": epoch, "proposer": proposer}
    if no_wait:
        done(f"proposed mode {words}, epoch {epoch}", as_json, **said, followed=False)
        return

    def told(following: int, members: int) -> None:
        click.echo(f"{following} of {members} members are in mode {words}", err=True)

    client.wait_for_mode(words, (epoch, proposer), wait_s, told)
    done(f"mode is {words}, epoch {epoch}", as_json, **said, followed=True)


def _mode_view(document: Mapping[str, Any]) -> RenderableType:
    """Render a ``/v1/mode``."""
    from rich.console import Group
    from rich.text import Text

    from p2pdrl.cli.tables import Column, Listing, facts_table

    columns = [
        Column("node", least=20),
        Column("state"),
        Column("epoch", left=False, rank=3),
        Column("strategy", rank=1),
        Column("role", rank=2),
        Column("follows"),
    ]
    members = [member for member in document.get("members") or [] if isinstance(member, Mapping)]
    rows: list[list[Cell]] = []
    for member in members:
        follows = bool(member.get("follows"))
        cells = [clean(member.get(key) or NONE, 64) for key in ("name", "state", "epoch", "protocol", "role")]
        rows.append([*cells, Text("yes" if follows else "not yet", "green" if follows else "yellow")])
    ids = [clean(member.get("id") or NONE, 8) for member in members]
    return Group(facts_table(_facts(document)), Text(), Listing(columns, rows, ids=ids))


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    record = document.get("record")
    record = record if isinstance(record, Mapping) else {}
    rows = [
        ("mode", mode_words(document.get("mode"), document.get("protocol"), document.get("options"))),
        ("epoch", clean(document.get("epoch", NONE), 20)),
    ]
    if record:
        at_s = as_number(record.get("at"))
        when = "" if at_s is None else f", {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_s))}"
        rows.append(("proposed by", f"{clean(record.get('proposer_name') or NONE, 80)}{when}"))
        if record.get("epoch") != document.get("epoch"):
            coming = mode_words(record.get("mode"), record.get("protocol"), record.get("options"))
            rows.append(("next", f"{coming}, epoch {clean(record.get('epoch'), 20)}"))
    since_s = as_number(document.get("since"))
    if since_s is not None:
        rows.append(("here since", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since_s))))
    if document.get("error"):
        rows.append(("error", clean(document["error"], 500)))
    facts = document.get("facts")
    facts = dict(facts) if isinstance(facts, Mapping) else {}
    costs = [
        (word, beside(facts.pop(f"measured_{key}", None), facts.pop(f"predicted_{key}", None), form))
        for word, key, form in (("step", "step_s", millis), ("bubble", "bubble", percent))
    ]
    long = [(key, clean(facts.pop(key), 600)) for key in ("limited", "why") if facts.get(key)]
    rows += [(clean(key, 20).replace("_", " "), _fact(value)) for key, value in facts.items()]
    rows += [row for row in costs if row[1]]
    return [*rows, *long]


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(key, 40)} {_fact(inner)}" for key, inner in value.items())[:500]
    if isinstance(value, list):
        more = f" and {len(value) - _SHOWN} more" if len(value) > _SHOWN else ""
        return ", ".join(_fact(item) for item in value[:_SHOWN]) + more
    number = as_number(value)
    return scientific(number) if isinstance(value, float) else clean(NONE if value is None else value)


@click.command()
@api_options
@click.option(
    "-n", "--last", type=click.IntRange(min=1), metavar="N",
    help="Only the last N; by default all that the node remembers, 50 at most.",
)  # fmt: skip
@json_option
@wide_option
@watchable
def rounds(
    target: Target, *, last: int | None, as_json: bool, wide: bool, watch: bool, interval_s: float
) -> None:
    """Show the last rounds of the node's strategy.

    Who was merged with which weight, who was missing, and what it cost.
    """
    client = target.client()

    def ask() -> list[object]:
        found = client.get("/v1/rounds")
        found = found if isinstance(found, list) else []
        return found if last is None else found[-last:]

    show_again(ask, _rounds_view, as_json, watch, interval_s, wide=wide)


def _rounds_view(rounds: Sequence[Any]) -> RenderableType:
    """Render a ``/v1/rounds``: one line per round, the newest last."""
    from rich.text import Text

    from p2pdrl.cli.tables import Column, Listing

    found = [one for one in rounds if isinstance(one, Mapping)]
    if not found:
        return Text("no rounds yet")
    columns = [
        Column("when"),
        Column("strategy", rank=5),
        Column("outcome"),
        Column("merged", least=16, wraps="short"),
        Column("missing", rank=1, least=12, wraps="short"),
        Column("bytes", left=False, rank=4),
        Column("time", left=False, rank=2),
        Column("waited", left=False, rank=3),
        Column("changed", left=False, rank=6),
    ]
    if any(one.get("error") for one in found):
        columns.append(Column("error", least=14, wraps="fold"))
    return Listing(columns, [_round(one)[: len(columns)] for one in found])


def _round(one: Mapping[str, Any]) -> list[Cell]:
    """Its cells, the error last."""
    from rich.text import Text

    moved = (as_number(one.get("bytes_in")) or 0.0) + (as_number(one.get("bytes_out")) or 0.0)
    return [
        time.strftime("%H:%M:%S", time.localtime(as_number(one.get("time")) or 0)),
        clean(one.get("protocol", NONE), 20),
        Text(clean(one.get("outcome", NONE), 20), "green" if one.get("outcome") in _GOOD else "yellow"),
        _several([_merged(peer) for peer in one.get("merged") or [] if isinstance(peer, Mapping)]),
        _several([clean(peer, 64) for peer in one.get("missing") or []]),
        byte_size(moved),
        millis(one.get("seconds")),
        millis(one.get("waited_s")),
        scientific(one.get("changed")),
        clean(one.get("error") or "", 200),
    ]


def _merged(peer: Mapping[str, Any]) -> str:
    """``node-2×0.50``, one word."""
    return f"{clean(peer.get('name', '?'), 64).replace(' ', '_')}×{fixed(peer.get('weight'), 2)}"


def _several(words: Sequence[str]) -> str:
    more = f" +{len(words) - _SHOWN}" if len(words) > _SHOWN else ""
    return " ".join(words[:_SHOWN]) + more
