"""Options that many commands share: how to reach a node, and where the configuration comes from."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import click

from p2pdrl.cli.completion import complete_presets
from p2pdrl.errors import UsageError
from p2pdrl.library.commands import Target

__all__ = [
    "FiniteRange",
    "Span",
    "Target",
    "api_options",
    "as_arguments",
    "command_options",
    "config_options",
    "done",
    "json_option",
    "policy_options",
    "refuse_before_subcommand",
    "require_writable",
    "split_addresses",
    "wide_option",
]

Command = Callable[..., Any]


def api_options(command: Command) -> Command:
    """Add ``--api``, ``--swarm-key-file`` and ``--data-dir``; the command gets them as ``target``."""

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        api: str,
        swarm_key_file: str | None,
        data_dir: str | None,
        operator_file: str | None = None,
        **kwargs: Any,
    ) -> Any:
        target = Target(api, swarm_key_file, data_dir, operator_file)
        return command(*args, target=target, **kwargs)

    for option in reversed(
        [
            click.option(
                "--api", envvar="P2PDRL_API", default="127.0.0.1:7700", show_default=True,
                metavar="HOST:PORT", help="The node to talk to.  [env: P2PDRL_API]",
            ),
            click.option(
                "--swarm-key-file", envvar="P2PDRL_SWARM_KEY_FILE", metavar="FILE", default=None,
                help="Key of its swarm, for a node on another machine.  [env: P2PDRL_SWARM_KEY_FILE]",
            ),
            click.option(
                "--data-dir", metavar="FOLDER", default=None,
                help="Its data folder, where its token is; a node on this machine tells by itself.",
            ),
        ]
    ):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped


def command_options(command: Command) -> Command:
    """Add what `api_options` does and ``--operator``, for commands that an operator may have to sign."""
    return click.option(
        "--operator", "operator_file", envvar="P2PDRL_OPERATOR", metavar="FILE", default=None,
        help="Operator's key, to sign this with; by default SWARM_KEY_FILE.operator, where there is one.  "
        "[env: P2PDRL_OPERATOR]",
    )(api_options(command))  # fmt: skip


def config_options(command: Command) -> Command:
    """Add ``--config`` and ``--set``, both repeatable."""
    command = click.option(
        "--set", "sets", multiple=True, metavar="KEY=VALUE",
        help="Set one key, such as task.env.num_envs=16. Repeatable.",
    )(command)  # fmt: skip
    return click.option(
        "--config", "files", multiple=True, metavar="FILE|PRESET", shell_complete=complete_presets,
        help="A TOML file, or the name of a preset (see `p2pdrl presets`). Repeatable.",
    )(command)  # fmt: skip


def policy_options(command: Command) -> Command:
    """Add what names a policy: CHECKPOINT, or a running node by ``--api`` and how to reach it.

    The command gets ``checkpoint`` and ``peer``, one of which is None. P2PDRL_API names a node where no
    CHECKPOINT is given.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, checkpoint: Path | None, peer: str | None, **kwargs: Any) -> Any:
        source = click.get_current_context().get_parameter_source("peer")
        if checkpoint is not None and source is click.core.ParameterSource.ENVIRONMENT:
            peer = None
        if (checkpoint is None) == (peer is None):
            raise click.UsageError(
                "name either a CHECKPOINT, as in DATA_DIR/checkpoints, or --api HOST:PORT for what a running "
                "node holds now"
            )
        return command(*args, checkpoint=checkpoint, peer=peer, **kwargs)

    for option in reversed(
        [
            click.argument("checkpoint", type=click.Path(path_type=Path), required=False),
            click.option(
                "--api", "--peer", "peer", envvar="P2PDRL_API", metavar="HOST:PORT",
                help="Take the current policy of this running node instead.  [env: P2PDRL_API]",
            ),
            click.option(
                "--swarm-key-file", envvar="P2PDRL_SWARM_KEY_FILE", metavar="FILE",
                help="Key of its swarm, for a node on another machine.  [env: P2PDRL_SWARM_KEY_FILE]",
            ),
            click.option(
                "--data-dir", metavar="FOLDER", help="That node's data folder, where its token is."
            ),
        ]
    ):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped


def refuse_before_subcommand(context: click.Context) -> bool:
    """Tell whether a subcommand of this group was called, which doesn't see the group's own options.

    Raises:
        UsageError: one was, and some of these are written before it.
    """
    if context.invoked_subcommand is None:
        return False
    given = click.core.ParameterSource.COMMANDLINE
    if any(context.get_parameter_source(name) == given for name in context.params):
        raise UsageError(f"write the options behind `{context.invoked_subcommand}`")
    return True


class FiniteRange(click.FloatRange):
    """A number in a range, such as of seconds; ``nan`` and ``inf``, which no bound keeps out, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Span(click.ParamType[float]):
    """A time as people write it: ``90s``, ``30m``, ``24h``, ``7d``; seconds as a float."""

    name = "time"
    _UNITS: ClassVar[dict[str, float]] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        text = str(value).strip().lower()
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])", text)
        seconds = float(found[1]) * self._UNITS[found[2]] if found is not None else 0.0
        if seconds <= 0:
            self.fail(f"{text[:40]!r} is no time: write a number with s, m, h or d, such as 24h", param, ctx)
        return seconds


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
wide_option = click.option(
    "--wide", is_flag=True, help="Leave nothing out of the table, however wide the terminal is."
)


def done(words: str, as_json: bool, **facts: object) -> None:
    """Say that a command has done what it was asked for: in words, or as JSON of what they say."""
    click.echo(json.dumps(facts, indent=2) if as_json else words)


def as_arguments(options: Mapping[str, object]) -> list[str]:
    """``--allow-import --seed 7`` of ``allow_import=True, seed=7``; what is None or False is left out."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return arguments


def require_writable(option: str, file: Path) -> None:
    """See that a file can be written, before the work is done whose result it is to hold.

    Raises:
        UsageError: there is no such folder, or we may not write there.
    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {file}: there is no folder {folder}; make it, or name another")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"{option} {file}: you may not write there; name a file in another folder")


def split_addresses(values: tuple[str, ...]) -> list[str]:
    """Flatten ``--peers``, which is repeatable, and whose values may be comma separated.

    Raises:
        UsageError: it is given and names nobody, as ``--peers "$SEEDS"`` does where that isn't set.
    """
    found = [part.strip() for value in values for part in value.split(",") if part.strip()]
    if values and not found:
        raise UsageError("--peers names nobody: write HOST:PORT behind it, or leave it away")
    return found
