"""All tables of the command line, and the line of progress that ``top`` and ``swarm up`` share.

A table is a `Listing`, which fits itself into as many columns as there are: names and addresses that are
long lose their middle, then what matters least isn't shown, and a line below says what that was. What tells
rows apart stays whole: where a name is cut, an id stands beside it. With ``--wide`` nothing is left out.

A member is a dict as ``/v1/peers`` lists them; ``/v1/status`` has the same keys where it matters.
All text from elsewhere is shown as text: no markup, no control characters.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import IO, Any, Literal

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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
    "Cell",
    "Column",
    "Listing",
    "complaints",
    "console",
    "curve_rows",
    "facts_table",
    "members_table",
    "outcome",
    "progress_line",
    "shorten",
    "show",
    "sparkline",
    "swarm_view",
]

Member = Mapping[str, Any]
Cell = str | Text
CellOf = Callable[[Member, float | None], Text]

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


UNLIMITED = 100_000
"""Columns with ``--wide``."""
GAP = 2
"""Blanks between columns."""


def console(stream: IO[str] | None = None, *, wide: bool = False) -> Console:
    """A console: as wide as its terminal or ``COLUMNS`` say, or `WIDTH` columns where there is neither."""
    out = stream or sys.stdout
    known = out.isatty() or os.environ.get("COLUMNS", "").isdigit()
    size = shutil.get_terminal_size((WIDTH, 24))
    width = UNLIMITED if wide else size.columns if known else WIDTH
    # Both are given: of a terminal that says it is dumb the console would believe 80 columns.
    return Console(file=out, width=width, height=size.lines, highlight=False, markup=False, emoji=False)


def show(what: RenderableType, *, wide: bool = False, lines: bool = False) -> None:
    """Print a table to standard output.

    Args:
        wide: as wide as it wants to be.
        lines: the same where the output goes to a file or program, which may look for lines in it.
    """
    elsewhere = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    console(wide=wide or (lines and elsewhere)).print(what)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a `Listing`.

    Attributes:
        header: one line, or several.
        left: text, which stands to the left; numbers stand to the right.
        rank: 0 is always shown; of all others the highest is left out first where there is no room.
        least: it may be made so narrow; 0 for a column whose cells are never cut.
        wraps: a cell that is too long goes on in the next line, between words; of words that are too long
            themselves ``short`` takes the middle out, ``fold`` breaks them. Otherwise it loses its middle.
    """

    header: str
    left: bool = True
    rank: int = 0
    least: int = 0
    wraps: Literal["", "short", "fold"] = ""


class Listing:
    """A table without lines that fits itself to the terminal.

    Args:
        columns: from left to right.
        rows: a cell for each column.
        ids: of the rows, shown behind the first column where that had to be cut.
        headers: whether the columns' headers are shown.
        gap: blanks between columns.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Cell]],
        *,
        ids: Sequence[str] = (),
        headers: bool = True,
        gap: int = GAP,
    ) -> None:
        self._columns = list(columns)
        self._rows = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        self._ids = [Text(one, style="dim") for one in ids]
        self._headers = headers
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Fit into ``options.max_width`` columns."""
        columns, rows = self._columns, self._rows
        natural = [self._natural(number, columns, rows) for number in range(len(columns))]
        widths = _fit(columns, natural, options.max_width, self._gap)
        if self._ids and widths and widths.get(0, natural[0]) < natural[0]:
            columns = [columns[0], Column("id"), *columns[1:]]
            rows = [[row[0], one, *row[1:]] for row, one in zip(rows, self._ids, strict=True)]
            natural = [self._natural(number, columns, rows) for number in range(len(columns))]
            widths = _fit(columns, natural, options.max_width, self._gap)
        lines = [self._heads(columns, widths)] if self._headers else []
        lines += [
            {number: _lines(console, row[number], columns[number], width) for number, width in widths.items()}
            for row in rows
        ]
        for cells in lines:
            for line in range(max(map(len, cells.values()), default=0)):
                told = [(columns[number], cells[number], widths[number]) for number in widths]
                yield _joined(told, line, self._gap)
        missing = [
            one.header.replace("\n", " ") for number, one in enumerate(columns) if number not in widths
        ]
        if missing:
            yield Text(f"no room for: {', '.join(missing)} (--json has all)", style="dim")

    @staticmethod
    def _heads(columns: Sequence[Column], widths: Mapping[int, int]) -> dict[int, list[Text]]:
        """All headers, which stand on the same last line."""
        heads = {number: columns[number].header.split("\n") for number in widths}
        height = max(map(len, heads.values()), default=0)
        return {
            number: [Text()] * (height - len(head))
            + [Text(shorten(line, widths[number]), "bold") for line in head]
            for number, head in heads.items()
        }

    def _natural(self, number: int, columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> int:
        heads = columns[number].header.split("\n") if self._headers else []
        cells = [row[number].plain for row in rows]
        return max(1, *map(cell_len, heads), *map(cell_len, cells))


def _fit(columns: Sequence[Column], natural: Sequence[int], room: int, gap: int) -> dict[int, int]:
    """Return the widths of the columns that are shown, by number."""
    shown = list(range(len(columns)))

    def least(number: int) -> int:
        return min(natural[number], columns[number].least or natural[number])

    def missing(widths: Iterable[int]) -> int:
        return sum(widths) + gap * (len(shown) - 1) - room

    while missing(map(least, shown)) > 0:
        last = max(shown, key=lambda number: columns[number].rank)
        if columns[last].rank == 0:
            break
        shown.remove(last)
    widths = {number: least(number) for number in shown}
    flexible = [number for number in shown if columns[number].least]
    free = -missing(widths.values())
    while free > 0 and (narrow := [number for number in flexible if widths[number] < natural[number]]):
        number = min(narrow, key=lambda one: widths[one])
        widths[number] += 1
        free -= 1
    while free < 0 and (wide := [number for number in flexible if widths[number] > NARROWEST]):
        number = max(wide, key=lambda one: widths[one])
        widths[number] -= 1
        free += 1
    return widths


NARROWEST = 8
"""Columns of a cell that is cut, on a terminal with hardly any room."""


def _lines(console: Console, cell: Text, column: Column, width: int) -> list[Text]:
    """A cell in lines of that width."""
    if cell_len(cell.plain) <= width:
        return [cell]
    if not column.wraps:
        return [Text(shorten(cell.plain, width), style=cell.style)]
    if column.wraps == "short":
        cell = Text(" ".join(shorten(word, width) for word in cell.plain.split()), style=cell.style)
    return list(cell.wrap(console, width, overflow="fold"))


def _joined(cells: Sequence[tuple[Column, Sequence[Text], int]], number: int, gap: int) -> Text:
    """One line of all cells of a row, without blanks at its end."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for column, lines, width in cells:
        cell = lines[number].copy() if number < len(lines) else Text()
        cell.rstrip()
        blanks = " " * max(0, width - cell_len(cell.plain))
        line.append(blanks if not column.left else "")
        line.append_text(cell)
        line.append((blanks if column.left else "") + " " * gap)
    line.rstrip()
    return line


def shorten(text: str, width: int) -> str:
    """Take the middle out of a text that is wider than so many columns: both ends tell more than one.

    Example:
        >>> shorten("worker-of-the-long-row-17", 13)
        'worker…row-17'
    """
    if cell_len(text) <= width:
        return text
    head = chop_cells(text, (width - 1) // 2 or 1)[0]
    tail, room = "", width - 1 - cell_len(head)
    for letter in reversed(text):
        if cell_len(letter + tail) > room:
            break
        tail = letter + tail
    return f"{head}…{tail}"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[object], width: int) -> str:
    """A curve in one line: the means of so many equal parts of the samples; a blank where there is none.

    Example:
        >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
        '▁▂▃▄▅▆▇█'
    """
    numbers = [as_number(value) for value in values]
    count = min(width, len(numbers))
    means: list[float | None] = []
    for part in range(count):
        inside = numbers[part * len(numbers) // count : (part + 1) * len(numbers) // count]
        known = [number for number in inside if number is not None]
        means.append(sum(known) / len(known) if known else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else BARS[round((mean - low) * scale)] for mean in means)


def members_table(members: Sequence[Member], columns: Sequence[str]) -> Listing:
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
    rows = [[_COLUMNS[key][1](member, newest) for key in columns] for member in members]
    ids = [clean(member.get("id") or NONE, 8) for member in members]
    return Listing([_COLUMNS[key][0] for key in columns], rows, ids=ids)


def facts_table(rows: Iterable[tuple[str, Cell]]) -> Listing:
    """Lines of ``word  what``."""
    cells = [(Text(word, "dim"), what) for word, what in rows]
    return Listing([Column("word"), Column("what", least=30, wraps="fold")], cells, headers=False)


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
    return SEPARATOR.join(parts)


SEPARATOR = "  ·  "


class _Broken:
    """A progress line that is broken at its separators alone."""

    def __init__(self, line: str) -> None:
        self._parts = line.split(SEPARATOR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._parts[0]
        for part in self._parts[1:]:
            if cell_len(f"{line}{SEPARATOR}{part}") <= options.max_width:
                line += SEPARATOR + part
            else:
                yield Text(line, style="bold")
                line = part
        yield Text(line, style="bold")


def swarm_view(
    status: Member, members: Sequence[Member], elapsed_s: object = None, *, history: object = None
) -> RenderableType:
    """The progress line, curves if there is a ``/v1/history``, the table, and what is wrong, if anything."""
    parts: list[RenderableType] = [_Broken(progress_line(status, elapsed_s))]
    if isinstance(history, Mapping) and (curves := curve_rows(history)):
        parts += [Text(), facts_table(curves)]
    if why := outcome(status):
        parts.append(Text(why, style="green"))
    parts += [Text(), members_table(members, TRAINING)]
    if lines := complaints(members):
        parts += [Text(), *(Text(line, style="yellow") for line in lines)]
    return Group(*parts)


def curve_rows(history: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line for the mean return (of all members that tell one), and one for the steps per second.

    Each says its lowest, highest and last value behind the curve; the first sample is at the left.
    """
    nodes = history.get("nodes")
    columns = [
        one["mean_return"]
        for one in (nodes.values() if isinstance(nodes, Mapping) else ())
        if isinstance(one, Mapping) and isinstance(one.get("mean_return"), list)
    ]
    returns: list[float | None] = []
    for told in zip_longest(*columns):
        known = [number for value in told if (number := as_number(value)) is not None]
        returns.append(sum(known) / len(known) if known else None)
    speeds = history.get("steps_per_s")
    curves: list[tuple[str, Sequence[object], Callable[[object], str]]] = [
        ("return", returns, fixed),
        ("steps/s", speeds if isinstance(speeds, list) else [], count),
    ]
    rows = []
    for word, values, form in curves:
        known = [number for value in values if (number := as_number(value)) is not None]
        if len(known) > 1:
            span = f"{form(known[-1])} now, {form(min(known))} to {form(max(known))}"
            rows.append((word, f"{sparkline(values, CURVE)} {span}"))
    return rows


CURVE = 32
"""Columns of a curve."""


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
        taken = as_number(status.get("swarm_env_steps")) or 0.0
        goals.append(f"{min(taken / stop['env_steps'], 1):.0%} of {count(stop['env_steps'])} steps")
        speed = as_number(status.get("swarm_steps_per_s")) or 0.0
        if speed > 0:
            most = "at most " if stop.get("mean_return") is not None else ""
            goals.append(f"{most}{duration(max(0.0, stop['env_steps'] - taken) / speed)} left")
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


def _of_trainer(key: str) -> CellOf:
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


def _shown(key: str, form: Callable[[object], str]) -> CellOf:
    return lambda member, _newest: Text(form(member.get(key)))


_COLUMNS: dict[str, tuple[Column, CellOf]] = {
    "name": (Column("node", least=20), _name),
    "state": (Column("state"), _state),
    "address": (Column("address", least=21), _shown("address", lambda x: clean(x or NONE, 60))),
    "reach": (Column("reached", rank=1, least=13, wraps="short"), _reach),
    "return": (Column("mean\nreturn", left=False, rank=1), _shown("mean_return", fixed)),
    "rate": (Column("steps/s", left=False, rank=2), _of_trainer("steps_per_s")),
    "steps": (Column("steps", left=False, rank=3), _of_trainer("env_steps")),
    "lag": (Column("version\nlag", left=False, rank=6), _lag),
    "distance": (Column("consensus\ndistance", left=False, rank=7), _shown("consensus_distance", scientific)),
    "loop": (Column("loop\nlag", left=False, rank=9), _shown("loop_lag_s", millis)),
    "episodes": (Column("episodes\nin window", left=False, rank=8), _shown("episodes_in_window", grouped)),
    "rtt": (Column("round\ntrip", left=False, rank=8), _shown("rtt_s", millis)),
    "seen": (Column("last\nseen", left=False, rank=5), _shown("last_seen_s", age)),
    "roles": (Column("roles", rank=4, least=8, wraps="short"), _shown("roles", _listed)),
    "stage": (Column("stage", rank=2), lambda member, _newest: Text(_stage_of(member) or NONE)),
    "bubble": (Column("bubble", left=False, rank=4), _shown("bubble", percent)),
    "exit": (Column("exit\ncode", left=False), _shown("exit_code", grouped)),
}
"""By key: the column, and the cell of a member."""

TRAINING = ("name", "state", "return", "rate", "steps", "lag", "distance", "loop")
"""How training goes."""
STAGES = ("stage", "bubble")
"""Who holds what of a pipeline, and how long it waits."""
ADDRESSES = ("name", "address", "state", "return", "rate", "lag", "rtt", "seen")
"""Who the members are and where."""
RESULTS = ("name", "state", "exit", "return", "episodes", "rate", "steps", "lag", "distance")
"""How a run ended."""
