"""``p2pdrl presets``: what there is to start from, and all that one of them says."""

from __future__ import annotations

import json
from typing import Any

import click

from p2pdrl.cli.options import json_option

__all__ = ["presets"]


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def presets(context: click.Context, as_json: bool) -> None:
    """List the presets, which --config takes by name.

    `p2pdrl presets show NAME` shows one of them.
    """
    if context.invoked_subcommand is not None:
        return
    from p2pdrl.config.loader import preset_names, preset_summary

    summaries = {name: preset_summary(name) for name in preset_names()}
    if as_json:
        click.echo(json.dumps(summaries, indent=2))
        return
    width = max(map(len, summaries), default=0)
    for name, summary in summaries.items():
        click.echo(f"{name:<{width}}  {summary}")


@presets.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
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
    from p2pdrl.config.describe import toml_value
    from p2pdrl.config.schema import dotted, leaves

    click.echo(f"{name}\n\n{about}\n\nfile: {path}\nuse:  p2pdrl node --config {name}\n")
    for keys, value in leaves(resolved.config):
        key = dotted(keys)
        if key.startswith("task.") or key in given:
            click.echo(f"{'*' if key in given else ' '} {key} = {toml_value(value)}")
