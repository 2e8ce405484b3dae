"""Options that many commands share: how to reach a node, and where the configuration comes from."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import click

from p2pdrl.cli.completion import complete_presets
from p2pdrl.library.commands import Target

__all__ = [
    "Span",
    "Target",
    "api_options",
    "as_arguments",
    "command_options",
    "config_options",
    "json_option",
    "policy_peer_options",
    "split_addresses",
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


def policy_peer_options(command: Command) -> Command:
    """Add ``--swarm-key-file`` and ``--data-dir``, for commands that may take a policy of a running node."""
    command = click.option(
        "--data-dir", metavar="FOLDER", help="With --peer: that node's data folder, where its token is."
    )(command)
    return click.option(
        "--swarm-key-file", envvar="P2PDRL_SWARM_KEY_FILE", metavar="FILE",
        help="With --peer, for a node on another machine.  [env: P2PDRL_SWARM_KEY_FILE]",
    )(command)  # fmt: skip


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


def as_arguments(options: Mapping[str, object]) -> list[str]:
    """``--allow-import --seed 7`` of ``allow_import=True, seed=7``; what is None or False is left out."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return arguments


def split_addresses(values: tuple[str, ...]) -> list[str]:
    """Flatten a repeatable option whose values may be comma separated."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]
