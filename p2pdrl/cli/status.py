"""``p2pdrl status`` and ``top``: one node's view of itself and of the swarm."""

from __future__ import annotations

import json
import time
import webbrowser
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from p2pdrl.cli import formats
from p2pdrl.cli.options import FiniteRange, Target, api_options, done, json_option, wide_option
from p2pdrl.errors import DaemonUnreachableError, P2PDRLError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["page", "show_again", "status", "status_view", "top", "top_view", "watch", "watchable"]

T = TypeVar("T")


def watchable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--watch`` and ``--interval`` to a command."""
    command = click.option(
        "--interval", "interval_s", type=FiniteRange(min=0.1), default=2.0, show_default=True,
        metavar="SECONDS", help="With --watch.",
    )(command)  # fmt: skip
    return click.option("--watch", is_flag=True, help="Show it again and again until Ctrl-C.")(command)


@click.command()
@api_options
@json_option
@watchable
def status(target: Target, as_json: bool, watch: bool, interval_s: float) -> None:
    """Show one node and its view of the swarm."""
    client = target.client()
    show_again(client.status, status_view, as_json, watch, interval_s)


@click.command()
@api_options
@click.option("--open", "opens", is_flag=True, help="Open it in this machine's browser, too.")
@json_option
def page(target: Target, opens: bool, as_json: bool) -> None:
    """Print the address of the node's page, or open it.

    With the node's token behind a #, which browsers send nowhere: who has the line may do with the node what
    its owner may.
    """
    url = target.client().page()
    done(url, as_json, url=url)
    if opens and not webbrowser.open(url):
        raise P2PDRLError("there is no browser to be opened here; open the address yourself")


@click.command()
@api_options
@click.option(
    "--interval", "interval_s", type=FiniteRange(min=0.1), default=1.0, show_default=True,
    metavar="SECONDS", help="Pause between pictures.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what it shows as JSON, once, and end.")
@wide_option
def top(target: Target, interval_s: float, as_json: bool, wide: bool) -> None:
    """Watch the members live.

    With the curves of the mean return and of the steps per second since the start, as far as the node knows.
    """
    client = target.client()

    def ask() -> dict[str, Any]:
        return {"status": client.status(), "peers": client.peers(), "history": client.get("/v1/history")}

    show_again(ask, top_view, as_json, not as_json, interval_s, wide=wide)


def top_view(found: Mapping[str, Any]) -> RenderableType:
    """Render what ``top`` asks for: ``status``, ``peers`` and ``history``."""
    from p2pdrl.cli.tables import swarm_view

    return swarm_view(found["status"], found["peers"], history=found.get("history"))


def show_again(
    ask: Callable[[], T],
    view: Callable[[T], RenderableType],
    as_json: bool,
    again: bool = False,
    interval_s: float = 0.0,
    *,
    wide: bool = False,
) -> None:
    """Print once or again and again, as JSON (with --watch one document per line) or as a table.

    A table that is wider than its terminal is shown one below the other, where it could be scrolled to.
    """
    if as_json:
        while again:
            click.echo(json.dumps(ask()))
            time.sleep(interval_s)
        click.echo(json.dumps(ask(), indent=2))
        return
    from p2pdrl.cli.tables import console

    if again:
        watch(lambda: view(ask()), console(wide=wide), interval_s, live=not wide)
    console(wide=wide).print(view(ask()))


def watch(show: Callable[[], RenderableType], out: Console, interval_s: float, *, live: bool = True) -> None:
    """Ask and show every ``interval_s`` for ever: live on a terminal, one below the other elsewhere.

    Raises:
        DaemonUnreachableError: nobody answered the first time; later failures stand below the last view.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    last = show()

    def again() -> RenderableType:
        nonlocal last
        try:
            last = show()
        except DaemonUnreachableError as error:
            return Group(last, Text(f"\n{error}", style="red"))
        return last

    if not live or not out.is_terminal or out.is_dumb_terminal:
        out.print(last)
        while True:
            out.print()
            time.sleep(interval_s)
            out.print(again())
    with Live(last, console=out, auto_refresh=False, transient=False) as picture:
        while True:
            time.sleep(interval_s)
            picture.update(again(), refresh=True)


def status_view(status: Mapping[str, Any]) -> RenderableType:
    """Render a ``/v1/status`` as lines of ``word  what``."""
    from rich.text import Text

    from p2pdrl.cli.tables import facts_table, outcome

    shown = _Shown(status)
    rows: list[tuple[str, str | Text]] = [
        (word, fact(shown)) for word, fact in _FACTS.items() if status.get(word) not in _NOTHING.get(word, ())
    ]
    if limit := shown.get("pipeline.limit"):
        rows.append(("limited", Text(formats.clean(limit, 600), style="yellow")))
    if why := outcome(status):
        rows.append(("stopped", why))
    reasons = status.get("reasons") or []
    return facts_table([*rows, *(("unwell", Text(formats.clean(one), style="yellow")) for one in reasons)])


_NOTHING: dict[str, tuple[object, ...]] = {
    "pipeline": (None,),
    "actors": (None, []),
    "experience": (None, {}),
    "speedup": (None, {}),
    "reach": (None, {}),
    "commands": (None, []),
}
"""What of a status isn't worth a line."""


class _Shown:
    """Values of a status by dotted key, written for people."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self.status = status

    def get(self, key: str) -> Any:
        """The value, or None where it or a part of its path is missing."""
        value: Any = self.status
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        return formats.NONE if value is None or value == "" else formats.clean(value)

    def number(self, key: str) -> str:
        return formats.grouped(self.get(key))

    def counts(self, key: str) -> str:
        """``3 alive, 1 dead`` of a mapping, without what is zero."""
        found = self.get(key)
        parts = found.items() if isinstance(found, Mapping) else []
        return ", ".join(f"{formats.grouped(n)} {formats.clean(word, 20)}" for word, n in parts if n)


def _node(s: _Shown) -> str:
    return f"{s.text('name')}  {s.text('id')[:8]}  at {s.text('address')}, p2pdrl {s.text('version')}"


def _state(s: _Shown) -> str:
    return f"{s.text('state')}, up {formats.duration(s.get('uptime_s'))}, pid {s.text('pid')}"


def _mode(s: _Shown) -> str:
    words = formats.mode_words(s.get("mode"), s.get("strategy.name"), s.get("strategy.options"))
    return f"{words}, epoch {s.number('mode_epoch')}"


def _commands(s: _Shown) -> str:
    """``mode, stop by operator alice (1a2b3c4d) on 2026-11-02 14:03; …``, the newest first."""
    found = [one for one in s.get("commands") or [] if isinstance(one, Mapping)]
    found.sort(key=lambda one: -(formats.as_number(one.get("at")) or 0.0))
    parts: dict[str, list[str]] = {}
    for one in found:
        at_s = formats.as_number(one.get("at"))
        when = "" if at_s is None else time.strftime(" on %Y-%m-%d %H:%M", time.localtime(at_s))
        parts.setdefault(f"{formats.clean(one.get('by'), 80)}{when}", []).append(
            formats.clean(one.get("key"), 20)
        )
    return "; ".join(f"{', '.join(keys)} by {who}" for who, keys in parts.items())


def _swarm(s: _Shown) -> str:
    from p2pdrl.cli.tables import progress_line

    return progress_line(s.status)


def _reach(s: _Shown) -> str:
    """``outbound-only, called through n0 and n2 (a connection to … is refused); relays for n5``."""
    state = s.text("reach.state")
    words = {"direct": "others can dial it", "unknown": "nobody has tried yet whether it can be dialled"}
    parts = [words.get(state, state)]
    if state == "outbound-only":
        relays = " and ".join(formats.clean(name, 64) for name in s.get("reach.relays") or [])
        parts = [f"outbound-only, called through {relays or 'nobody'} ({s.text('reach.why')})"]
    if served := s.get("reach.relays_for"):
        parts.append(f"relays for {', '.join(formats.clean(name, 64) for name in served[:8])}")
    return "; ".join(parts)


def _serves(s: _Shown) -> str:
    """What a learner does that learns from no experience by itself; empty for all others."""
    sends = bool(s.get("experience.sent"))
    if (s.get("collects") is not False and not sends) or s.get("mean_return") is not None:
        return ""
    if sends and s.get("stage"):
        return "computes and acts for the first rank of its pipeline"
    if sends:
        return f"acts for {s.text('experience.sent.learner_name')}"
    if s.get("role") == "standby":
        return "stands by"
    return "computes for the first rank of its pipeline" if s.get("stage") else ""


def _speedup(s: _Shown) -> str:
    """``3.4 × the fastest of 4 nodes; gradients have 256 rows, beyond 1,300 more bring little``."""
    words = f"{formats.fixed(s.get('speedup.times'))} × the fastest of {s.number('speedup.nodes')} nodes"
    critical = s.get("speedup.critical_rows")
    if critical is None:
        return words
    bound = f"beyond {formats.grouped(critical)} (the critical batch) more bring little"
    return f"{words}; gradients have {s.number('speedup.rows')} rows, {bound}"


def _return(s: _Shown) -> str:
    if why := _serves(s):
        return f"{formats.NONE}, it {why}"
    mean = formats.fixed(s.get("mean_return"))
    return f"{mean} over the last {s.number('episodes_in_window')} of {s.number('episodes')} episodes"


def _evaluation(s: _Shown) -> str:
    """``476.2 ± 31.0 over 30 episodes at 120,331 steps, by node-2; best 482.1 at 100,204``."""
    if s.get("evaluation.mean") is None:
        return "none yet"
    mean = f"{formats.fixed(s.get('evaluation.mean'))} ± {formats.fixed(s.get('evaluation.std'))}"
    steps, who = s.number("evaluation.env_steps"), formats.clean(s.get("evaluation.name"), 64)
    best = f"{formats.fixed(s.get('evaluation.best.mean'))} at {s.number('evaluation.best.env_steps')}"
    return f"{mean} over {s.number('evaluation.episodes')} episodes at {steps} steps, by {who}; best {best}"


def _training(s: _Shown) -> str:
    if _serves(s) and s.get("collects") is False:
        before = f"; {s.number('env_steps')} steps, {s.number('updates')} updates before"
        return f"none of its own{before if s.get('env_steps') else ''}"
    rate = formats.count(s.get("steps_per_s"))
    return f"{rate} steps/s, {s.number('env_steps')} steps, {s.number('updates')} updates"


def _learner(s: _Shown) -> str:
    restarts = s.get("learner.restarts")
    after = f", {s.number('learner.restarts')} restarts" if restarts else ""
    if s.get("learner.last_death.how"):
        after += f"; the last one {formats.clean(s.get('learner.last_death.how'), 300)}"
    if s.get("learner.stopped_s"):
        return f"stopped for {formats.duration(s.get('learner.stopped_s'))}{after}"
    if s.get("learner.starting_s") is not None:
        return f"starting for {formats.duration(s.get('learner.starting_s'))}{after}"
    return f"{s.text('learner.state')} on {s.text('learner.device')}{after}"


def _actors(s: _Shown) -> str:
    """``2 of 2, 812 + 790 steps/s, 1 restart, 1 half unroll dropped``."""
    rows = [row for row in s.get("actors") or [] if isinstance(row, Mapping)]
    running = sum(bool(row.get("running")) for row in rows)
    rates = " + ".join(formats.count(row.get("steps_per_s")) for row in rows[:16])
    parts = [f"{running} of {len(rows)}", f"{rates}{' + …' if len(rows) > 16 else ''} steps/s"]
    for key, word in (("restarts", "restart"), ("dropped", "half unroll")):
        total = sum(row.get(key) or 0 for row in rows)
        if total:
            parts.append(f"{total} {word}{'' if total == 1 else 's'}{' dropped' if key == 'dropped' else ''}")
    return ", ".join(parts)


def _experience(s: _Shown) -> str:
    """``sent 812 unrolls with 97,440 steps; works for n0``, or ``actors: 2 of a1; 1,204 unrolls came``."""
    parts = []
    if s.get("experience.sent"):
        unrolls, steps = s.number("experience.sent.sent"), s.number("experience.sent.env_steps")
        learner = s.text("experience.sent.learner_name")
        parts.append(f"sent {unrolls} unrolls with {steps} steps; works for {learner}")
    if s.get("experience.received"):
        rows = [row for row in s.get("experience.received.actors") or [] if isinstance(row, Mapping)]
        nodes = Counter(formats.clean(row.get("name"), 64) for row in rows)
        who = ", ".join(f"{count} of {name}" for name, count in nodes.items()) or "nobody yet"
        lost = sum(row.get("lost") or 0 for row in rows)
        unrolls = formats.grouped(sum(row.get("unrolls") or 0 for row in rows))
        parts.append(f"actors: {who}; {unrolls} unrolls came" + (f", {lost} were lost" if lost else ""))
    return "; ".join(parts) or formats.NONE


def _pipeline(s: _Shown) -> str:
    """``stage 2 of 2, 1f1b over stream, 4 microbatches, bubble 12%, with n0, n1; generation 3``."""
    if s.get("pipeline.rank") is None:
        return s.text("pipeline.role") if s.get("pipeline.role") else "none"
    if s.get("pipeline.alone"):
        why = s.get("pipeline.why")
        return f"computes by itself{f': {formats.clean(why, 300)}' if why else ''}"
    if s.get("pipeline.ranks") == 1:
        return f"pipeline of one: computes alone; generation {s.number('pipeline.generation')}"
    held = s.get("pipeline.stage")
    numbers = " and ".join(map(formats.grouped, held)) if isinstance(held, list) else formats.NONE
    parts = [
        f"stage {numbers} of {s.number('pipeline.stages')}",
        f"{s.text('pipeline.schedule')} over {s.text('pipeline.backend')}",
        f"{s.number('pipeline.microbatches')} microbatches",
    ]
    for name, form in (("step_s", formats.millis), ("bubble", formats.percent)):
        cost = formats.beside(s.get(f"pipeline.{name}"), s.get(f"pipeline.predicted_{name}"), form)
        if cost:
            parts.append(f"{name.removesuffix('_s')} {cost}")
    if s.get("pipeline.activation_bytes") is not None:
        parts.append(f"{formats.byte_size(s.get('pipeline.activation_bytes'))} of activations")
    peers = s.get("pipeline.peers")
    if isinstance(peers, list) and peers:
        parts.append("with " + ", ".join(formats.clean(peer, 64) for peer in peers[:8]))
    if s.get("pipeline.experience"):
        parts.append(formats.clean(s.get("pipeline.experience"), 120))
    return f"{', '.join(parts)}; generation {s.number('pipeline.generation')}"


def _consensus(s: _Shown) -> str:
    distance = formats.scientific(s.get("consensus_distance"))
    return f"distance {distance}, policy version {s.number('policy_version')}"


def _traffic(s: _Shown) -> str:
    received, sent = formats.byte_size(s.get("bytes_in")), formats.byte_size(s.get("bytes_out"))
    return f"{received} in, {sent} out"


def _process(s: _Shown) -> str:
    return f"{formats.byte_size(s.get('rss_bytes'))}, loop lag {formats.millis(s.get('loop_lag_s'))}"


def _checkpoint(s: _Shown) -> str:
    if s.get("last_checkpoint.error"):
        return f"failed: {s.text('last_checkpoint.error')}"
    if not s.get("last_checkpoint.path"):
        return "none yet"
    return f"{s.text('last_checkpoint.path')}, {formats.age(s.get('last_checkpoint.age_s'))} old"


_FACTS: dict[str, Callable[[_Shown], str]] = {
    "node": _node,
    "state": _state,
    "mode": _mode,
    "pipeline": _pipeline,
    "reach": _reach,
    "commands": _commands,
    "swarm": _swarm,
    "speedup": _speedup,
    "members": lambda s: s.counts("members") or formats.NONE,
    "return": _return,
    "evaluation": _evaluation,
    "training": _training,
    "learner": _learner,
    "actors": _actors,
    "experience": _experience,
    "exchanges": lambda s: s.counts("exchanges") or "none yet",
    "consensus": _consensus,
    "traffic": _traffic,
    "process": _process,
    "data": lambda s: s.text("data_dir"),
    "checkpoint": _checkpoint,
}
