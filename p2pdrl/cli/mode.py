"""``p2pdrl mode show`` and ``mode set``: how the swarm agrees, and changing that while it trains."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.options import Target, api_options, json_option
from p2pdrl.config.schedules import MAX_STAGES

if TYPE_CHECKING:
    from p2pdrl.cli.client import NodeClient

__all__ = ["mode"]

_PAUSE_S = 0.25


@click.group()
def mode() -> None:
    """Show how the swarm agrees, or change it while it trains."""


@mode.command()
@api_options
@json_option
def show(target: Target, as_json: bool) -> None:
    """Show the mode in force, its options, and who follows it."""
    document = target.client().get("/v1/mode")
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    from p2pdrl.cli.mode_view import mode_view
    from p2pdrl.cli.tables import console

    console().print(mode_view(document))


@mode.command("set")
@click.argument("name", metavar="MODE")
@api_options
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
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait at most this long until every living member follows; then exit with 1.",
)
@click.option("--no-wait", is_flag=True, help="Don't wait.")
def set_mode(
    target: Target,
    *,
    name: str,
    sets: tuple[str, ...],
    servers: int | None,
    stages: int | None,
    wait_s: float,
    no_wait: bool,
) -> None:
    """Change the mode of the whole swarm, through any node of it.

    MODE is gossip, server-sync, server-async, allreduce, pipeline or local. Options that aren't given take
    their defaults. Protocols of gossip: adpsgd, dsgd, sgp, gala, strom, hogwild; of allreduce: grad_average,
    param_average, federated; of local: local, hogwild. Of each the first is taken when none is named.
    """  # fmt: skip
    from urllib.parse import urlencode

    from p2pdrl.config.mode import mode_words, strategy_from
    from p2pdrl.config.strategy import mode_of

    counts = {"servers": servers, "stages": stages}
    given = [*sets, *(f"{key}={count}" for key, count in counts.items() if count is not None)]
    strategy = strategy_from(name, given)
    words = mode_words(strategy)
    client = target.client()
    query = urlencode([("mode", mode_of(strategy)), *(("set", one) for one in given)])
    record = client.post(f"/v1/mode?{query}")
    epoch, proposer = record.get("epoch"), record.get("proposer")
    if no_wait:
        click.echo(f"proposed mode {words}, epoch {epoch}")
        return
    _Waiting(client, words, (epoch, proposer)).until(wait_s)
    click.echo(f"mode is {words}, epoch {epoch}")


class _Waiting:
    """Waits for everybody to follow one record."""

    def __init__(self, client: NodeClient, words: str, record: tuple[Any, Any]) -> None:
        self._client = client
        self._words = words
        self._record = record
        self._told = ""

    def until(self, wait_s: float) -> None:
        """Ask until all follow.

        Raises:
            P2PDRLError: another record won, or somebody doesn't follow in time.
        """
        from p2pdrl.errors import P2PDRLError

        deadline = time.monotonic() + wait_s
        while late := self._late():
            if time.monotonic() + _PAUSE_S > deadline:
                raise P2PDRLError(
                    f"after {wait_s:g} s not everybody is in mode {self._words}: {'; '.join(late[:20])}"
                )
            time.sleep(_PAUSE_S)

    def _late(self) -> list[str]:
        """Who doesn't follow yet, in words; progress goes to standard error."""
        document = self._client.get("/v1/mode")
        self._check(document.get("record") or {})
        members = [member for member in document.get("members") or [] if isinstance(member, dict)]
        late = [_why_not(member, self._record[0]) for member in members if not member.get("follows")]
        told = f"{len(members) - len(late)} of {len(members)} members are in mode {self._words}"
        if told != self._told:
            click.echo(told, err=True)
            self._told = told
        return late or ([] if members else ["nobody is heard of"])

    def _check(self, record: dict[str, Any]) -> None:
        from p2pdrl.cli.formats import clean, mode_words
        from p2pdrl.errors import P2PDRLError

        if (record.get("epoch"), record.get("proposer")) == self._record:
            return
        who = clean(record.get("proposer_name", "?"), 64)
        what = mode_words(record.get("mode") or "?", record.get("protocol"), record.get("options"))
        raise P2PDRLError(
            f"another mode was proposed at the same time and counts: {what} by {who} "
            f"(epoch {clean(record.get('epoch'), 20)}); look with `p2pdrl mode show`, then set yours again"
        )


def _why_not(member: dict[str, Any], epoch: object) -> str:
    from p2pdrl.cli.formats import clean

    name = clean(member.get("name", "?"), 64)
    if member.get("state") == "unheard":
        return f"{name} hasn't been heard of"
    if member.get("epoch") == epoch:
        return f"{name} can't run it (see its `p2pdrl status`)"
    return f"{name} is at epoch {clean(member.get('epoch'), 20)}"
