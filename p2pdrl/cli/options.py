"""Options that many commands share: how to reach a node, and where the configuration comes from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from p2pdrl.api.client import NodeClient

__all__ = ["Target", "api_options", "as_arguments", "config_options", "json_option", "split_addresses"]

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Target:
    """The node that a command talks to, as named on the command line; see `api_options`."""

    api: str
    key_file: str | None
    data_dir: str | None

    def client(self, timeout_s: float = 5.0) -> NodeClient:
        """Make the client.

        Raises:
            UsageError: a bad address, key file or token.
        """
        from p2pdrl.api.client import NodeClient

        return NodeClient.at(
            self.api, swarm_key_file=self.key_file, data_dir=self.data_dir, timeout_s=timeout_s
        )


def api_options(command: Command) -> Command:
    """Add ``--api``, ``--swarm-key-file`` and ``--data-dir``; the command gets them as ``target``."""

    @functools.wraps(command)
    def wrapped(*args: Any, api: str, swarm_key_file: str | None, data_dir: str | None, **kwargs: Any) -> Any:
        return command(*args, target=Target(api, swarm_key_file, data_dir), **kwargs)

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


def config_options(command: Command) -> Command:
    """Add ``--config`` and ``--set``, both repeatable."""
    command = click.option(
        "--set", "sets", multiple=True, metavar="KEY=VALUE",
        help="Set one key, such as task.env.num_envs=16. Repeatable.",
    )(command)  # fmt: skip
    return click.option(
        "--config", "files", multiple=True, metavar="FILE|PRESET",
        help="A TOML file, or the name of a preset (see `p2pdrl config presets`). Repeatable.",
    )(command)  # fmt: skip


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
