"""The pictures of ``p2pdrl mode show`` and ``p2pdrl rounds``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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

__all__ = ["mode_view", "rounds_view"]

_SHOWN = 8
"""Names in one cell; of more the rest is counted."""
_GOOD = ("ok", "pushed", "answered")


def mode_view(document: Mapping[str, Any]) -> RenderableType:
    """Show a ``/v1/mode``."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for word, text in _facts(document):
        facts.add_row(word, Text(text))
    members = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header in ("node", "state", "epoch", "strategy", "role", "follows"):
        members.add_column(header, no_wrap=True, overflow="ellipsis", max_width=24)
    for member in document.get("members") or []:
        if isinstance(member, Mapping):
            follows = bool(member.get("follows"))
            cells = [
                clean(member.get(key) or NONE, 64) for key in ("name", "state", "epoch", "protocol", "role")
            ]
            members.add_row(
                *map(Text, cells), Text("yes" if follows else "not yet", "green" if follows else "yellow")
            )
    return Group(facts, Text(), members)


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    record = document.get("record")
    record = record if isinstance(record, Mapping) else {}
    rows = [
        ("mode", mode_words(document.get("mode"), document.get("protocol"), document.get("options"))),
        ("epoch", clean(document.get("epoch", NONE), 20)),
    ]
    if record:
        rows.append(("proposed by", clean(record.get("proposer_name") or NONE, 64)))
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
    told = [
        (word, beside(facts.pop(f"measured_{key}", None), facts.pop(f"predicted_{key}", None), form))
        for word, key, form in (("step", "step_s", millis), ("bubble", "bubble", percent))
    ]
    long = [(key, clean(facts.pop(key), 600)) for key in ("limited", "why") if facts.get(key)]
    rows += [(clean(key, 20).replace("_", " "), _fact(value)) for key, value in facts.items()]
    rows += [row for row in told if row[1]]
    return [*rows, *long]


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(key, 40)} {_fact(inner)}" for key, inner in value.items())[:500]
    if isinstance(value, list):
        more = f" and {len(value) - _SHOWN} more" if len(value) > _SHOWN else ""
        return ", ".join(_fact(item) for item in value[:_SHOWN]) + more
    number = as_number(value)
    return scientific(number) if isinstance(value, float) else clean(NONE if value is None else value)


def rounds_view(rounds: Sequence[Any]) -> RenderableType:
    """Show a ``/v1/rounds``: one line per round, the newest last."""
    found = [one for one in rounds if isinstance(one, Mapping)]
    if not found:
        return Text("no rounds yet")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header in ("when", "strategy", "outcome"):
        table.add_column(header, no_wrap=True)
    table.add_column("merged", overflow="fold")
    table.add_column("missing", overflow="fold")
    for header in ("bytes", "time", "waited", "changed"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for one in found:
        good = one.get("outcome") in _GOOD
        moved = (as_number(one.get("bytes_in")) or 0.0) + (as_number(one.get("bytes_out")) or 0.0)
        table.add_row(
            Text(time.strftime("%H:%M:%S", time.localtime(as_number(one.get("time")) or 0))),
            Text(clean(one.get("protocol", NONE), 20)),
            Text(clean(one.get("outcome", NONE), 20), "green" if good else "yellow"),
            Text(_several([_merged(peer) for peer in one.get("merged") or [] if isinstance(peer, Mapping)])),
            Text(_several([clean(peer, 64) for peer in one.get("missing") or []])),
            Text(byte_size(moved)),
            Text(millis(one.get("seconds"))),
            Text(millis(one.get("waited_s"))),
            Text(scientific(one.get("changed"))),
            Text(clean(one.get("error") or "", 200)),
        )
    return table


def _merged(peer: Mapping[str, Any]) -> str:
    """``node-2×0.50``."""
    return f"{clean(peer.get('name', '?'), 64)}×{fixed(peer.get('weight'), 2)}"


def _several(words: Sequence[str]) -> str:
    more = f" +{len(words) - _SHOWN}" if len(words) > _SHOWN else ""
    return " ".join(words[:_SHOWN]) + more
