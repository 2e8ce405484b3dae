"""Tables of members and the line of progress, shared by ``top``, ``peers``, ``status`` and ``swarm up``.

A member is a dict as ``/v1/peers`` lists them; ``/v1/status`` has the same keys where it matters.
All text from elsewhere is shown as text: no markup, no control characters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pdrl.cli.formats import (
    NONE,
    age,
    as_number,
    clean,
    count,
    duration,
    fixed,
    grouped,
    millis,
    percent,
    scientific,
)

__all__ = [
    "ADDRESSES",
    "RESULTS",
    "TRAINING",
    "complaints",
    "console",
    "facts_table",
    "members_table",
    "outcome",
    "plain_table",
    "progress_line",
    "swarm_view",
]

Member = Mapping[str, Any]
Cell = Callable[[Member, float | None], Text]

WIDTH = 100
"""Columns of output that doesn't go to a terminal."""

_STATE_STYLE = {
    "training": "green",
    "alive": "green",
    "stopped": "green",
    "done": "green",
    "suspect": "yellow",
    "unwell": "yellow",
    "paused": "yellow",
    "dead": "red",
    "banned": "red",
    "failed": "red",
    "left": "dim",
}


def console(stream: IO[str] | None = None) -> Console:
    """A console: as wide as its terminal or ``COLUMNS`` say, or `WIDTH` columns where there is neither."""
    out = stream or sys.stdout
    width = None if out.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDTH
    return Console(file=out, width=width, highlight=False, markup=False, emoji=False)


def members_table(members: Sequence[Member], columns: Sequence[str]) -> Table:
    """Show one line per member, with columns such as `TRAINING`.

    Where one of the members is a stage of a pipeline, that is shown in place of the version lag: ranks below
    the first learn versions only now and then. Where one only acts or only learns, roles are shown; and how
    each is reached beside its address, where one can't be dialled.
    """
    if _roles_differ(members):
        columns = (*columns[:2], "roles", *columns[2:])
    if "address" in columns and any(member.get("reach") == "outbound-only" for member in members):
        columns = tuple(name for key in columns for name in ((key, "reach") if key == "address" else (key,)))
    if any(_stage_of(member) for member in members):
        columns = (*(key for key in columns if key != "lag"), *STAGES)
    newest = max((v for m in members if (v := as_number(m.get("policy_version"))) is not None), default=None)
    table = plain_table()
    for key in columns:
        header, left, _ = _COLUMNS[key]
        table.add_column(
            header,
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis",
            vertical="bottom",
            max_width=(34 if key == "reach" else 22) if left else None,
        )
    for member in members:
        table.add_row(*(_COLUMNS[key][2](member, newest) for key in columns))
    return table


def plain_table() -> Table:
    """An empty table without lines, its headers bold."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def facts_table(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Lines of ``word  what``."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for word, what in rows:
        table.add_row(word, Text(what) if isinstance(what, str) else what)
    return table


def progress_line(status: Member, elapsed_s: object = None, *, nodes: int | None = None) -> str:
    """Say in one line how far the swarm is: steps, speed, members, time, goal.

    Args:
        status: any node's ``/v1/status``.
        elapsed_s: time of the run; none takes the node's uptime.
        nodes: shown in place of the members that are alive, for a run that is over.
    """
    members = status.get("members") or {}
    parts = [
        f"{grouped(status.get('swarm_env_steps'))} steps",
        f"{count(status.get('swarm_steps_per_s'))} steps/s",
        f"{members.get('alive', NONE)} alive" if nodes is None else f"{nodes} nodes",
        duration(status.get("uptime_s") if elapsed_s is None else elapsed_s),
        _mode(status),
        *_goals(status),
    ]
    return "  ·  ".join(parts)


def swarm_view(status: Member, members: Sequence[Member], elapsed_s: object = None) -> RenderableType:
    """The progress line, the table, and what is wrong, if anything."""
    parts: list[RenderableType] = [Text(progress_line(status, elapsed_s), style="bold")]
    if why := outcome(status):
        parts.append(Text(why, style="green"))
    parts += [Text(), members_table(members, TRAINING)]
    if lines := complaints(members):
        parts += [Text(), *(Text(line, style="yellow") for line in lines)]
    return Group(*parts)


def outcome(status: Member) -> str:
    """Why the swarm stopped; empty while it hasn't."""
    stop = status.get("stop") or {}
    return clean(stop.get("reason") or "the stop condition is met", 300) if stop.get("reached") else ""


def complaints(members: Sequence[Member]) -> list[str]:
    """``node-3: the learner is down``, for each member that says or shows that it is unwell."""
    lines = []
    for member in members:
        reasons = list(member.get("reasons") or [])
        if member.get("state") == "banned":
            continue
        if member.get("state") in {"suspect", "dead"}:
            reasons.insert(0, f"{member['state']} {member.get('state_reason') or ''}".strip())
        elif member.get("healthy") is not False:
            continue
        lines.append(
            f"{clean(member.get('name', '?'), 64)}: {clean('; '.join(map(str, reasons)) or 'unwell')}"
        )
    return lines


def _mode(status: Member) -> str:
    """``adpsgd``: the strategy says more than its family, and the line is long."""
    strategy = status.get("strategy")
    name = strategy.get("name") if isinstance(strategy, Mapping) else None
    return clean(name or status.get("mode") or NONE, 40)


def _goals(status: Member) -> list[str]:
    stop = status.get("stop") or {}
    if stop.get("reached"):
        return ["done"]
    goals = []
    if stop.get("env_steps"):
        part = (as_number(status.get("swarm_env_steps")) or 0.0) / stop["env_steps"]
        goals.append(f"{min(part, 1):.0%} of {count(stop['env_steps'])} steps")
    if stop.get("time_s"):
        goals.append(f"until {duration(stop['time_s'])}")
    if stop.get("mean_return") is not None:
        goals.append(f"goal: return {stop['mean_return']:g}")
    evaluation = status.get("evaluation") or {}
    if as_number(evaluation.get("mean")) is not None:
        goals.append(f"evaluated: {fixed(evaluation['mean'])} at {count(evaluation.get('env_steps'))} steps")
    return goals


def _name(member: Member, _newest: float | None) -> Text:
    return Text(clean(member.get("name", "?"), 64), style="bold" if member.get("self") else "")


def _reach(member: Member, _newest: float | None) -> Text:
    """``direct``, or the members through which calls to it go."""
    if member.get("reach") != "outbound-only":
        return Text("direct" if member.get("reach") else NONE)
    names = [clean(name, 20) for name in member.get("relays") or []][:3]
    return Text(f"outbound-only, by {', '.join(names)}" if names else "outbound-only", style="yellow")


def _state(member: Member, _newest: float | None) -> Text:
    state = clean(member.get("state", "?"), 20)
    if member.get("quarantined") is True:
        state = "quarantined"
    elif (weight := as_number(member.get("pull_weight"))) is not None and weight < 1:
        state += f", pulls ×{weight:.2g}"
    if member.get("healthy") is False and state in {"alive", "training"}:
        state = "unwell"
    return Text(state, style=_STATE_STYLE.get(state.split()[0] if state else "", ""))


def _lag(member: Member, newest: float | None) -> Text:
    version = as_number(member.get("policy_version"))
    return Text(NONE if version is None or newest is None else grouped(newest - version))


def _of_trainer(key: str) -> Cell:
    """A count that means nothing where the learner computes for another and has made none of its own."""

    def cell(member: Member, _newest: float | None) -> Text:
        served = member.get("collects") is False and member.get("mean_return") is None
        return Text(NONE if served and not member.get(key) else count(member.get(key)))

    return cell


def _roles_differ(members: Sequence[Member]) -> bool:
    """Whether somebody only acts, or only learns."""
    roles = (member.get("roles") for member in members)
    return any(isinstance(one, list) and not {"actor", "learner"} <= set(one) for one in roles)


def _stage_of(member: Member) -> str:
    """``2/3``, or ``standby`` for who has a pipeline's mode but no stage; empty for everybody else."""
    stage = member.get("stage") or ("standby" if member.get("role") == "standby" else "")
    return clean(stage, 12)


def _listed(words: object) -> str:
    return clean(", ".join(map(str, words)), 40) if isinstance(words, list) else NONE


def _shown(key: str, form: Callable[[object], str]) -> Cell:
    return lambda member, _newest: Text(form(member.get(key)))


_COLUMNS: dict[str, tuple[str, bool, Cell]] = {
    "name": ("node", True, _name),
    "state": ("state", True, _state),
    "address": ("address", True, _shown("address", lambda x: clean(x or NONE, 60))),
    "reach": ("reached", True, _reach),
    "return": ("mean\nreturn", False, _shown("mean_return", fixed)),
    "rate": ("steps/s", False, _of_trainer("steps_per_s")),
    "steps": ("steps", False, _of_trainer("env_steps")),
    "lag": ("version\nlag", False, _lag),
    "distance": ("consensus\ndistance", False, _shown("consensus_distance", scientific)),
    "loop": ("loop\nlag", False, _shown("loop_lag_s", millis)),
    "episodes": ("episodes\nin window", False, _shown("episodes_in_window", grouped)),
    "rtt": ("round\ntrip", False, _shown("rtt_s", millis)),
    "seen": ("last\nseen", False, _shown("last_seen_s", age)),
    "roles": ("roles", True, _shown("roles", _listed)),
    "stage": ("stage", True, lambda member, _newest: Text(_stage_of(member) or NONE)),
    "bubble": ("bubble", False, _shown("bubble", percent)),
    "exit": ("exit\ncode", False, _shown("exit_code", grouped)),
}
"""Key: header, whether it is text (to the left), and the cell of a member."""

TRAINING = ("name", "state", "return", "rate", "steps", "lag", "distance", "loop")
"""How training goes."""
STAGES = ("stage", "bubble")
"""Who holds what of a pipeline, and how long it waits."""
ADDRESSES = ("name", "address", "state", "return", "rate", "lag", "rtt", "seen")
"""Who the members are and where."""
RESULTS = ("name", "state", "exit", "return", "episodes", "rate", "steps", "lag", "distance")
"""How a run ended."""
