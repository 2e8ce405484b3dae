"""``p2pdrl presets``: what there is to start from, and all that one of them says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from p2pdrl.cli.options import json_option, refuse_before_subcommand

__all__ = ["presets"]


@click.group(invoke_without_command=True)
@click.option(
    "--matrix",
    is_flag=True,
    help="Show which algorithm goes with which strategy in which placement instead, and why others don't.",
)
@json_option
@click.pass_context
def presets(context: click.Context, matrix: bool, as_json: bool) -> None:
    """List the presets, which --config takes by name.

    `p2pdrl presets show NAME` shows one of them.
    """
    if refuse_before_subcommand(context):
        return
    if matrix:
        _show_matrix(as_json=as_json)
        return
    from p2pdrl.config.loader import preset_names, preset_summary

    summaries = {name: preset_summary(name) for name in preset_names()}
    if as_json:
        click.echo(json.dumps(summaries, indent=2))
        return
    from p2pdrl.cli.tables import Column, Listing, show

    columns = [Column("preset"), Column("what it is", least=30, wraps="fold")]
    show(Listing(columns, list(summaries.items()), headers=False), lines=True)


@presets.command("show")
@click.argument("name")
@json_option
def show_preset(name: str, as_json: bool) -> None:
    """Show what a preset is, where its values come from, and the whole configuration that it gives.

    Values that the preset itself gives are marked with a *.
    """
    from p2pdrl.config.loader import preset_about, preset_path, resolve

    path, about = preset_path(name), preset_about(name)
    resolved = resolve(files=[name])
    given = resolved.given()
    if as_json:
        import msgspec

        document: dict[str, Any] = {
            "name": name,
            "about": about,
            "file": str(path),
            "given": sorted(given),
            "config": msgspec.to_builtins(resolved.config),
        }
        click.echo(json.dumps(document, indent=2))
        return
    from p2pdrl.cli.tables import Column, Listing, show
    from p2pdrl.config.describe import toml_value
    from p2pdrl.config.schema import dotted, leaves

    show(f"{name}\n\n{about}\n\nfile: {path}\nuse:  p2pdrl node --config {name}\n", lines=True)
    told = [(dotted(keys), toml_value(value)) for keys, value in leaves(resolved.config)]
    rows = [
        ("*" if key in given else "", f"{key} = {value}")
        for key, value in told
        if key.startswith("task.") or key in given
    ]
    columns = [Column("given"), Column("key and value", least=40, wraps="fold")]
    show(Listing(columns, rows, headers=False, gap=1), lines=True)


def _show_matrix(*, as_json: bool) -> None:
    from p2pdrl.config.matrix import PLACEMENTS, combinations

    cells = list(combinations())
    if as_json:
        rows: list[dict[str, Any]] = []
        for cell in cells:
            algorithm, strategy, placement = cell.names
            rows.append(
                {
                    "algorithm": algorithm,
                    "strategy": strategy,
                    "placement": placement,
                    "possible": cell.problem is None,
                    "reason": "" if cell.problem is None else cell.problem.message,
                }
            )
        click.echo(json.dumps(rows, indent=2))
        return
    reasons: dict[str, int] = {}
    marks: dict[tuple[str, str, str], str] = {}
    for cell in cells:
        why = "" if cell.problem is None else cell.problem.message
        marks[cell.names] = str(reasons.setdefault(why, len(reasons) + 1)) if why else "✓"
    algorithms = list(dict.fromkeys(cell.names[0] for cell in cells))
    strategies = list(dict.fromkeys(cell.names[1] for cell in cells))
    from p2pdrl.cli.tables import Column, Listing, console

    out = console()
    first = max(map(len, algorithms))
    for placement, what in PLACEMENTS.items():
        out.print(f"{placement}: {what}")
        for some in _blocks(strategies, out.width - first):
            columns = [Column(""), *(Column("\n".join(_in_two(name))) for name in some)]
            lines = [[one, *(marks[one, strategy, placement] for strategy in some)] for one in algorithms]
            out.print(Listing(columns, lines, gap=1))
            out.print()
    columns = [Column("number"), Column("why", least=30, wraps="fold")]
    out.print(Listing(columns, [(str(number), why) for why, number in reasons.items()], headers=False))


def _blocks(strategies: Sequence[str], room: int) -> Iterator[list[str]]:
    """Groups of strategies whose columns stand beside each other in so much room."""
    block: list[str] = []
    taken = 0
    for name in strategies:
        width = 1 + max(map(len, _in_two(name)))
        if block and taken + width > room:
            yield block
            block, taken = [], 0
        block.append(name)
        taken += width
    yield block


LONGEST_HEAD = 7
"""Letters of a column's head in one line."""


def _in_two(name: str) -> tuple[str, str]:
    """A strategy's name in two lines, where it is long."""
    if "_" in name:
        head, rest = name.split("_", 1)
        return f"{head}_", rest
    half = len(name) // 2
    return (name, "") if len(name) <= LONGEST_HEAD else (f"{name[:half]}-", name[half:])
