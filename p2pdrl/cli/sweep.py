"""``p2pdrl sweep``: search settings over many short trainings on this machine.

On a terminal the table of trials is live; elsewhere each trial's end is a line on standard error. The result
goes to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.completion import complete_presets
from p2pdrl.cli.formats import NONE, clean, duration, percent, scientific
from p2pdrl.cli.options import json_option
from p2pdrl.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from p2pdrl.cli.tables import Listing
    from p2pdrl.library.sweep import Objective, Sweep, SweepPlan, TrialRow

__all__ = ["sweep"]

_SHOWN = 15
"""Trials in the live table."""
_STYLES = {"running": "yellow", "done": "green", "pruned": "dim", "failed": "red"}


@click.command()
@click.argument("files", metavar="CONFIG…", nargs=-1, required=True, shell_complete=complete_presets)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE|RANGE",
    help="Search a key: uniform(a,b), loguniform(a,b), int(a,b), logint(a,b), choice(x,y,…); or set it. "
    "Repeatable.",
)
@click.option(
    "--trials",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Of all runs together.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N", help="At a time."
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="Trainings of a trial, whose values are averaged.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    metavar="N",
    help="Environment steps of each training. Default: task.stop.env_steps.",
)
@click.option(
    "--objective",
    type=click.Choice(["return", "evaluation", "area"]),
    default="return",
    show_default=True,
    help="Maximise the last training episodes' mean return, the last evaluation, or the mean of the curve.",
)
@click.option(
    "--prune/--no-prune", default=True, show_default=True, help="End trials below the median early."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Study, best settings, nodes' data; the same again goes on there. Default: sweep-CONFIG.",
)
@click.option(
    "--allow-import", is_flag=True, help="Import the module:name that the task names, which runs its code."
)
@json_option
def sweep(
    *,
    files: tuple[str, ...],
    settings: tuple[str, ...],
    trials: int,
    jobs: int,
    seeds: int,
    steps: int | None,
    objective: Objective,
    prune: bool,
    folder: Path | None,
    allow_import: bool,
    as_json: bool,
) -> None:
    """Search settings over many trainings on this machine.

    CONFIG is a preset or a TOML file; of several, later ones count over earlier ones. The best settings are
    written to best.toml in the folder. Ctrl-C ends the sweep; the same command goes on with it.
    """
    from p2pdrl.library.sweep import Sweep, make_plan, require_optuna, train_node

    require_optuna()
    plan = make_plan(files, settings, steps=steps, seeds=seeds, objective=objective, environ=os.environ)
    _require_task(plan.files, plan.fixed)
    place = Path(f"sweep-{Path(files[-1]).stem}") if folder is None else folder
    made = Sweep(plan, place, train_node(plan, place / "trials", allow_import=allow_import), prune=prune)
    try:
        _run(made, trials, jobs)
    finally:
        made.close()
    if as_json:
        click.echo(json.dumps(made.document(), indent=2))
    else:
        _print(made)
    if made.best is None:
        failed = [row for row in made.rows.values() if row.state == "failed"]
        raise WorkerError(
            "no trial was trained to its end"
            + (f"; the last said: {clean(failed[-1].why, 500)}" if failed else "")
        )


def _require_task(files: tuple[str, ...], fixed: tuple[str, ...]) -> None:
    """Check that the environment can run here, before anything starts."""
    from p2pdrl.config.environments import require_environment
    from p2pdrl.config.loader import resolve

    require_environment(resolve(files=files, sets=fixed, environ=os.environ).config.task)


def _run(made: Sweep, trials: int, jobs: int) -> None:
    from p2pdrl.cli.tables import console

    if sys.stdout.isatty():
        from rich.live import Live

        with Live(console=console(), auto_refresh=False, transient=True) as live:
            made.run(
                trials,
                jobs,
                lambda: live.update(trials_table(made.plan, made.rows.values(), _SHOWN), refresh=True),
            )
        return
    told = {number for number, row in made.rows.items() if row.state != "running"}

    def tell() -> None:
        for number, row in sorted(made.rows.items()):
            if row.state != "running" and number not in told:
                told.add(number)
                print(_line(row), file=sys.stderr, flush=True)

    made.run(trials, jobs, tell)
    tell()


def _line(row: TrialRow) -> str:
    params = ", ".join(f"{_short(key)}={_value(value)}" for key, value in row.params.items())
    what = clean(row.why, 300) if row.state == "failed" else scientific(row.value)
    return f"trial {row.number}: {row.state} {what} in {duration(row.seconds)} ({params})"


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _value(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return clean(text, 24)


def trials_table(plan: SweepPlan, trials: Iterable[TrialRow], most: int | None = None) -> Listing:
    """Running trials first, then by value."""
    from rich.text import Text

    from p2pdrl.cli.tables import Column, Listing

    keys = list(plan.ranges)
    columns = [Column("trial", left=False), Column("state"), Column(plan.objective, left=False)]
    columns += [Column("done", left=False, rank=2), Column("time", left=False, rank=3)]
    columns += [Column(_short(key), left=False, rank=1) for key in keys]

    def order(row: TrialRow) -> tuple[bool, bool, float]:
        return row.state != "running", row.value is None, -(row.value or 0.0)

    rows = []
    for row in sorted(trials, key=order)[:most]:
        cells: list[Any] = [str(row.number), Text(row.state, style=_STYLES[row.state]), scientific(row.value)]
        cells += [percent(row.part), duration(row.seconds) if row.seconds else NONE]
        rows.append([*cells, *(_value(row.params.get(key, NONE)) for key in keys)])
    return Listing(columns, rows)


def _print(made: Sweep) -> None:
    from p2pdrl.cli.tables import show

    show(trials_table(made.plan, made.rows.values()))
    best = made.best
    if best is not None:
        click.echo(f"\nbest: trial {best.number}, {made.plan.objective} {scientific(best.value)}")
        click.echo(f"its settings: p2pdrl node --config {made.folder / 'best.toml'}")
