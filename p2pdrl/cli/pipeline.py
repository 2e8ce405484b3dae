"""``p2pdrl pipeline``: what a schedule would do, before anything runs; what a live pipeline did lately."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.formats import age, clean, grouped
from p2pdrl.cli.options import FiniteRange, Target, api_options, config_options, done, json_option
from p2pdrl.config.schedules import MAX_CHUNKS, MAX_STAGES
from p2pdrl.errors import ConfigError, P2PDRLError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from p2pdrl.pipeline.timeline import Timeline

__all__ = ["pipeline", "timeline_document", "timeline_parts"]

_WIDTH = 100
"""Columns of output that doesn't go to a terminal."""


@click.group()
def pipeline() -> None:
    """Plan how one model is trained over several devices."""


@pipeline.command()
@click.option(
    "--stages",
    type=click.IntRange(1, MAX_STAGES * MAX_CHUNKS),
    metavar="S",
    help=f"Parts of the model; at most {MAX_STAGES} unless interleaved.",
)
@click.option("--microbatches", type=click.IntRange(1, 1024), metavar="M", help="Parts of the batch.")
@click.option(
    "--schedule",
    type=click.Choice(["gpipe", "1f1b", "interleaved"]),
    default="1f1b",
    show_default=True,
    help="Who does what in which order.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_STAGES),
    metavar="R",
    help="Devices; S by default. Interleaved puts S/R stages on each.",
)
@click.option(
    "--forward-s",
    default="1",
    show_default=True,
    metavar="SECONDS[,…]",
    help="Of one microbatch through a stage: one number, or one per stage.",
)
@click.option(
    "--backward-s", metavar="SECONDS[,…]", help="The same back; by default twice that of the forward."
)
@click.option(
    "--latency-s",
    type=float,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="One way between two devices.",
)
@click.option(
    "--bandwidth", type=float, default=math.inf, metavar="BYTES/S", help="Each way; without limit by default."
)
@click.option(
    "--activation-bytes",
    default="0",
    show_default=True,
    metavar="BYTES[,…]",
    help="What a stage sends on per microbatch: one number, or S-1.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Also write a trace for chrome://tracing or ui.perfetto.dev.",
)
@config_options
@json_option
def plan(
    *,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    stages: int | None,
    microbatches: int | None,
    schedule: Any,
    ranks: int | None,
    forward_s: str,
    backward_s: str | None,
    latency_s: float,
    bandwidth: float,
    activation_bytes: str,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Draw a schedule, and predict how long one batch takes.

    With --stages and --microbatches any schedule, of stages that take what the options say. With --config or
    --set that of a task: its blocks are measured on this machine and listed by their numbers, as
    task.strategy.cuts wants them, and cut for as many such machines as task.strategy.stages.

    F2 is the forward of the second microbatch, B2 its backward, F2b that of the device's second stage;
    dots are bubbles, in which a device waits.
    """
    link = latency_s, bandwidth
    if files or sets:
        _refuse_given()
        _plan_task(files, sets, link, trace, as_json=as_json)
        return
    if stages is None or microbatches is None:
        raise click.UsageError("give --config, or both --stages and --microbatches")
    from p2pdrl.pipeline.layers import PeerLink
    from p2pdrl.pipeline.schedule import make_schedule
    from p2pdrl.pipeline.timeline import MicrobatchCosts, predict

    _check_ranks(schedule, stages, ranks)
    actions = make_schedule(schedule, stages, microbatches, ranks=ranks)
    forwards = _numbers("--forward-s", forward_s, stages)
    backwards = (
        tuple(2.0 * each for each in forwards)
        if backward_s is None
        else _numbers("--backward-s", backward_s, stages)
    )
    sizes = _numbers("--activation-bytes", activation_bytes, stages - 1)
    timeline = predict(actions, MicrobatchCosts(forwards, backwards, sizes, PeerLink(*link)))
    if trace is not None:
        _write_trace(trace, schedule, timeline)
    if as_json:
        click.echo(json.dumps({"schedule": schedule, **timeline_document(timeline)}, indent=2))
    else:
        _show(timeline_parts(schedule, timeline))


def _show(parts: list[RenderableType]) -> None:
    from rich.console import Group

    from p2pdrl.cli.tables import show

    show(Group(*parts))


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """Return everything, as JSON has it."""
    ranks = range(len(timeline.rows))
    return {
        "stages": timeline.stages,
        "ranks": len(ranks),
        "microbatches": timeline.microbatches,
        "step_s": timeline.total_s,
        "one_device_s": timeline.one_device_s,
        "speedup": timeline.speedup,
        "ideal_speedup": timeline.ideal_speedup,
        "per_rank": [
            {
                "rank": rank,
                "stages": list(range(rank, timeline.stages, len(ranks))),
                "busy_s": timeline.busy_s[rank],
                "bubble": timeline.bubbles[rank],
                "stored_activations": timeline.stored[rank],
                "actions": [
                    {**t.action._asdict(), "start_s": t.start_s, "end_s": t.end_s}
                    for t in timeline.rows[rank]
                ],
            }
            for rank in ranks
        ],
    }


def timeline_parts(schedule: str, timeline: Timeline) -> list[RenderableType]:
    """Return a picture, and what it comes to."""
    from p2pdrl.cli.tables import Column, Listing
    from p2pdrl.pipeline.timeline import draw, legend

    ranks = len(timeline.rows)
    several = f" on {ranks} ranks" if timeline.stages > ranks else ""
    ideal = f"with equal stages and free messages {timeline.ideal_speedup:.2f}"
    lines: list[RenderableType] = [
        f"{schedule}: {timeline.microbatches} microbatches through {timeline.stages} stages{several}",
        "",
        *draw(timeline, shutil.get_terminal_size((_WIDTH, 24)).columns),
        legend(timeline),
        "",
        f"step      {timeline.total_s:.4g} s; one device takes {timeline.one_device_s:.4g} s",
        f"speed-up  {timeline.speedup:.2f} of {ranks}; {ideal}",
        "",
    ]
    computes = [
        (str(rank), f"{busy_s:.4g} s", f"{bubble:.1%}", str(stored))
        for rank, (busy_s, bubble, stored) in enumerate(
            zip(timeline.busy_s, timeline.bubbles, timeline.stored, strict=True)
        )
    ]
    heads = ("rank", "computes", "bubble", "stored activations")
    return [*lines, Listing([Column(head, left=False) for head in heads], computes, gap=3)]


@pipeline.command()
@api_options
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    default=Path("trace.json"),
    show_default=True,
    metavar="FILE",
    help="Where to write; - is standard output.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=0, max=60, min_open=True),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How far back, as far as each rank remembers.",
)
@json_option
def trace(target: Target, *, path: Path, seconds: float, as_json: bool) -> None:
    """Write what a node's pipeline did lately, a row for each of its ranks.

    For chrome://tracing or ui.perfetto.dev. Each rank remembers its last few thousand boxes; how far back
    those go is told. The node asks the others of its pipeline; their clocks are
    aligned by round trips.
    """
    document = target.client().get(f"/v1/pipeline/trace?seconds={seconds:g}")
    document = document if isinstance(document, dict) else {}
    boxes = sum(one.get("ph") == "X" for one in document.get("traceEvents") or [])
    others = document.get("otherData") or {}
    without = [
        f"without {clean(name, 80)}: {clean(why)}" for name, why in (others.get("missing") or {}).items()
    ]
    if not boxes:
        why = "; ".join(without) or "is training paused, or stopped? See `p2pdrl status`"
        raise P2PDRLError(f"no rank of the pipeline did anything in the last {seconds:g} s: {why}")
    piped = str(path) == "-"
    if piped:
        click.echo(json.dumps(document))
    else:
        _write("--output", path, document)
    if as_json and not piped:
        missing, told = others.get("missing") or {}, others.get("told") or {}
        done("", as_json, file=str(path), boxes=boxes, told=told, missing=missing)
        return
    click.echo(f"{grouped(boxes)} boxes are in {'standard output' if piped else path}", err=piped)
    for name, told in (others.get("told") or {}).items():
        click.echo(f"  {clean(name, 80)}: {_covered(told)}", err=piped)
    for line in without:
        click.echo(line, err=True)


def _covered(told: dict[str, Any]) -> str:
    """``4,096 boxes, from 2.4 s to 0.0 s ago; it remembers no more``."""
    if not told.get("boxes"):
        return "no boxes"
    began, ended = age(told.get("began_s_ago")), age(told.get("ended_s_ago"))
    more = "; it remembers no more" if told.get("remembers_no_more") else ""
    return f"{grouped(told['boxes'])} boxes, from {began} to {ended} ago{more}"


_OF_ONE_S_OWN = ("stages", "microbatches", "schedule", "ranks", "forward_s", "backward_s", "activation_bytes")
"""Options of `plan` that a task's own values take the place of."""


def _refuse_given() -> None:
    """Raise a usage error for options that say nothing beside ``--config``."""
    from click.core import ParameterSource

    context = click.get_current_context()
    for name in _OF_ONE_S_OWN:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            key = f", as in --set task.strategy.{name}=…" if name in _OF_ONE_S_OWN[:3] else ""
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} goes without --config and --set, which bring their own{key}")


def _plan_task(
    files: tuple[str, ...],
    sets: tuple[str, ...],
    link: tuple[float, float],
    trace: Path | None,
    *,
    as_json: bool,
) -> None:
    """Measure a task's blocks and plan its pipeline.

    Raises:
        ConfigError: it can't be planned; blocks that could be measured are listed before.
    """
    from p2pdrl.cli.pipeline_plan import plan_document, plan_parts, plan_task
    from p2pdrl.pipeline.layers import PeerLink

    found = plan_task(files, sets, PeerLink(*link))
    if trace is not None and found.timeline is not None:
        _write_trace(trace, found.schedule, found.timeline)
    if as_json:
        click.echo(json.dumps(plan_document(found), indent=2))
    else:
        _show(plan_parts(found))
    if found.refused:
        raise ConfigError(found.refused)


def _write_trace(path: Path, schedule: str, timeline: Timeline) -> None:
    """Write what is predicted."""
    from p2pdrl.pipeline.trace import predicted_trace

    _write("--trace", path, predicted_trace(timeline, f"{schedule}, predicted"))


def _write(option: str, path: Path, document: dict[str, Any]) -> None:
    """Write a trace.

    Raises:
        UsageError: it can't be written there.
    """
    try:
        path.write_text(json.dumps(document), "utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from error


def _check_ranks(schedule: str, stages: int, ranks: int | None) -> None:
    """Refuse what no pipeline of peers may be.

    Raises:
        UsageError: there are too many ranks, or stages on one, or interleaved isn't told how many.
    """
    if schedule == "interleaved" and ranks is None:
        fits = [str(r) for r in range(2, min(stages // 2, MAX_STAGES) + 1) if stages % r == 0]
        hint = f"{', '.join(fits) or 'no number of them'} can share {stages} stages"
        raise UsageError(f"interleaved needs --ranks, each of which holds several stages; {hint}")
    if ranks is None and stages > MAX_STAGES:
        raise UsageError(
            f"--stages {stages}: {schedule} has a rank for each, and there are at most {MAX_STAGES}"
        )
    if ranks is not None and stages > ranks * MAX_CHUNKS:
        raise UsageError(f"--stages {stages}: on {ranks} ranks there are at most {ranks * MAX_CHUNKS}")


def _numbers(option: str, text: str, count: int) -> tuple[float, ...]:
    """One number for all, or one for each.

    Raises:
        UsageError: it is neither.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) == 1:
        return numbers * count
    if len(numbers) != count:
        raise UsageError(
            f"{option} {text}: give one number{f', or {count} with commas' if count > 1 else ''}"
        )
    return numbers
