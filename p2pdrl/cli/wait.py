"""``p2pdrl wait``: for scripts that start nodes and need the swarm to be there before they go on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.formats import clean
from p2pdrl.cli.options import FiniteRange, Target, api_options, json_option
from p2pdrl.errors import DaemonUnreachableError, UnhealthyError

if TYPE_CHECKING:
    from p2pdrl.api.client import NodeClient

__all__ = ["wait"]

_PAUSE_S = 0.5


@click.command()
@api_options
@click.option(
    "--healthy",
    type=click.IntRange(min=1),
    metavar="N",
    help="Members that are alive and well, this node included; those that only start count too.",
)
@click.option(
    "--training",
    type=click.IntRange(min=1),
    metavar="N",
    help="Members whose learners make updates, or compute a stage of a pipeline.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up after this long: exit code 3 if no node ever answered, else 4.",
)
@json_option
def wait(target: Target, healthy: int | None, training: int | None, timeout_s: float, as_json: bool) -> None:
    """Wait until enough members are healthy, or train.

    As one node sees them; it needn't be up yet. With both --healthy and --training both are waited for.
    """
    wanted = {word: n for word, n in (("healthy", healthy), ("training", training)) if n is not None}
    if not wanted:
        raise click.UsageError("Give --healthy N, --training N, or both.")
    client = target.client()
    began_s = time.monotonic()
    answered = False
    while True:
        found, error = _look(client)
        answered = answered or error is None
        missing = str(error) if error is not None else _shortfall(found, wanted)
        waited_s = time.monotonic() - began_s
        if not missing or waited_s + _PAUSE_S > timeout_s:
            break
        time.sleep(_PAUSE_S)
    if as_json:
        counts = {word: _count(found, word) for word in _TESTS} | {"members": len(found)}
        document = {"ok": not missing, **counts, "wanted": wanted, "waited_s": waited_s, "missing": missing}
        click.echo(json.dumps(document, indent=2))
    if missing:
        kind = UnhealthyError if answered else DaemonUnreachableError
        raise kind(f"after {timeout_s:g} s: {missing}")
    if not as_json:
        click.echo(" and ".join(_WORDS[word].format(n) for word, n in wanted.items()))


def _look(client: NodeClient) -> tuple[list[dict[str, Any]], Exception | None]:
    """The members as the node sees them; none, and why, when it doesn't answer."""
    try:
        return client.peers(), None
    except DaemonUnreachableError as error:
        return [], error


def _shortfall(members: Sequence[Mapping[str, Any]], wanted: Mapping[str, int]) -> str:
    """What is missing; empty when nothing is."""
    counts = {word: _count(members, word) for word in wanted}
    few = [f"{counts[word]} of {_WORDS[word].format(n)}" for word, n in wanted.items() if counts[word] < n]
    if not few:
        return ""
    from p2pdrl.cli.tables import complaints

    why = complaints(members)
    if counts.get("training", 0) < wanted.get("training", 0):
        why += _idle(members)
    why = why[:5]
    return " and ".join(few) + (f" ({'; '.join(why)})" if why else "")


def _idle(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """``node-3 is starting``, for each member that is alive and doesn't train."""
    lines = []
    for member in members:
        if member.get("state") == "alive" and member.get("trains") is not True:
            state = member.get("training_state")
            words = (
                "has made no update" if state == "training" else f"is {clean(state or 'not heard of', 20)}"
            )
            lines.append(f"{clean(member.get('name', '?'), 64)} {words}")
    return lines


def _count(members: Sequence[Mapping[str, Any]], word: str) -> int:
    return sum(member.get("state") == "alive" and member.get(_TESTS[word]) is True for member in members)


_TESTS = {"healthy": "healthy", "training": "trains"}
"""Keys of a member that say so."""
_WORDS = {"healthy": "{} members are healthy", "training": "{} members train"}
