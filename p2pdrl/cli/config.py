"""``p2pdrl config``: what the configuration is, where each value came from, whether a file is good."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.options import config_options, json_option
from p2pdrl.cli.presets import presets
from p2pdrl.errors import UsageError

if TYPE_CHECKING:
    from p2pdrl.config.loader import Resolved

__all__ = ["config"]


@click.group()
def config() -> None:
    """Show, check or write a configuration.

    Strongest first: flags, --set KEY=VALUE, P2PDRL_A__B variables, files (later ones over earlier ones),
    defaults.
    """


@config.command("show")
@config_options
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@json_option
def show_config(files: tuple[str, ...], sets: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Show the resolved configuration, as TOML unless asked otherwise."""
    from p2pdrl.config.loader import resolve

    resolved = resolve(files=files, sets=sets, environ=os.environ)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(_document(resolved, origin)), indent=2))
    elif origin:
        _print_origins(resolved)
    else:
        from p2pdrl.config.describe import render_toml

        click.echo(render_toml(resolved.config, docs=False, active=True), nl=False)


@config.command()
@click.argument("file", metavar="FILE|PRESET")
@json_option
def validate(file: str, as_json: bool) -> None:
    """Check a file by itself, without flags and variables."""
    from p2pdrl.config.loader import resolve

    try:
        resolve(files=[file])
    except UsageError as error:
        if as_json:
            click.echo(json.dumps({"file": file, "valid": False, "error": str(error)}, indent=2))
        raise
    click.echo(json.dumps({"file": file, "valid": True}, indent=2) if as_json else f"{file} is valid")


@config.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
def init(file: Path | None) -> None:
    """Write a file of all keys with their meanings and defaults, to FILE or to standard output."""
    from p2pdrl.atomic import write_new
    from p2pdrl.config.describe import render_toml

    text = render_toml()
    if file is None:
        click.echo(text, nl=False)
        return
    try:
        write_new(file, text.encode(), 0o666, "write")
    except FileExistsError:
        raise UsageError(f"{file} exists already: name another file, or remove it first") from None
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror}; name a file in a folder of yours") from None
    click.echo(f"wrote {file}: take away the # of what you want to change", err=True)


config.add_command(presets)


def _document(resolved: Resolved, origin: bool) -> dict[str, Any]:
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(resolved.config)
    if not origin:
        return values
    return {"config": values, "origins": {key: str(where) for key, where in resolved.origins.items()}}


def _print_origins(resolved: Resolved) -> None:
    """One ``key = value`` per line, with its origin in a column of its own."""
    from p2pdrl.cli.tables import Column, Listing, show
    from p2pdrl.config.describe import toml_value
    from p2pdrl.config.schema import dotted, leaves

    values = [(dotted(path), value) for path, value in leaves(resolved.config)]
    rows = [(f"{key} = {toml_value(value)}", str(resolved.origins[key])) for key, value in values]
    columns = [Column("key and value", least=40, wraps="fold"), Column("where from", least=12, wraps="fold")]
    show(Listing(columns, rows, headers=False), lines=True)
