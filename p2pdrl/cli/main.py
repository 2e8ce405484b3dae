"""The ``p2pdrl`` command: names its subcommands, imports only the one that is called, ends with its code.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | it failed; one line on standard error says why |
| 2 | the command line or the configuration is wrong |
| 3 | no node answers at the API address, or none did while we waited |
| 4 | the node or swarm answers, and is unwell; or waiting took too long |
| 130 | interrupted by Ctrl-C |
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO, cast

import click

from p2pdrl.errors import P2PDRLError

__all__ = ["COMMANDS", "LazyGroup", "cli", "main", "run_command"]

COMMANDS: dict[str, tuple[str, str]] = {
    "node": ("p2pdrl.cli.node:node", "Run a node in the foreground: join the swarm and train."),
    "swarm": ("p2pdrl.cli.swarm:swarm", "Run a whole swarm, on this machine or on several by ssh."),
    "sweep": (
        "p2pdrl.cli.sweep:sweep",
        "Search settings over many trainings on this machine.",
    ),
    "status": ("p2pdrl.cli.status:status", "Show one node and its view of the swarm."),
    "peers": ("p2pdrl.cli.peers:peers", "List every member that the node knows, or ban one."),
    "top": ("p2pdrl.cli.status:top", "Watch the members live."),
    "page": ("p2pdrl.cli.status:page", "Print the address of the node's page, or open it."),
    "mode": ("p2pdrl.cli.mode:mode", "Show how the swarm agrees, or change it while it trains."),
    "roles": ("p2pdrl.cli.roles:roles", "Show what each node does for the swarm, or change that."),
    "stop": ("p2pdrl.cli.actions:stop", "Show when the swarm is done, or change that while it trains."),
    "rounds": ("p2pdrl.cli.mode:rounds", "Show the last rounds of the node's strategy."),
    "events": ("p2pdrl.cli.events:events", "Show what happened on the node."),
    "wait": ("p2pdrl.cli.wait:wait", "Wait until enough members are healthy, or train."),
    "pause": ("p2pdrl.cli.actions:pause", "Stop training; membership goes on."),
    "resume": ("p2pdrl.cli.actions:resume", "Train again after a pause."),
    "halt": ("p2pdrl.cli.actions:halt", "End the training on every node of the swarm, as if it were done."),
    "checkpoint": ("p2pdrl.cli.actions:checkpoint", "Write a checkpoint now."),
    "leave": ("p2pdrl.cli.actions:leave", "Make the node leave the swarm and end."),
    "eval": ("p2pdrl.cli.evaluate:evaluate", "Measure a checkpoint, or a running node's policy."),
    "export": ("p2pdrl.cli.export:export", "Write a policy as a file that runs without p2pdrl."),
    "doctor": ("p2pdrl.cli.doctor:doctor", "Check this machine, and the way to the peers."),
    "pipeline": ("p2pdrl.cli.pipeline:pipeline", "Plan how one model is trained over several devices."),
    "invite": ("p2pdrl.cli.invites:invite", "Print a line by which one more machine can join."),
    "keygen": ("p2pdrl.cli.keys:keygen", "Make a swarm key, and the key of its operator."),
    "key": ("p2pdrl.cli.keys:key", "Replace a swarm's key while it trains, or look at it."),
    "operators": ("p2pdrl.cli.operators:operators", "Show who may command the swarm, or change that."),
    "presets": ("p2pdrl.cli.presets:presets", "List the presets, which --config takes by name."),
    "config": ("p2pdrl.cli.config:config", "Show, check or write a configuration."),
    "completion": (
        "p2pdrl.cli.completion:completion",
        "Print the script that completes commands in a shell.",
    ),
}
"""Name of each command: where it is, and its line in ``--help``."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name][0]} isn't a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a guess for a name that doesn't exist."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from p2pdrl.cli.usage import no_such_command

            ctx.fail(no_such_command(args[0], list(COMMANDS), "`p2pdrl --help`"))
        return super().resolve_command(ctx, args)


def _show_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from p2pdrl import __version__

        click.echo(f"p2pdrl {__version__}")
        ctx.exit()


_HELP = """Peer-to-peer daemon for decentralized deep reinforcement learning.

One line per machine makes them one swarm that trains one policy:

\b
  p2pdrl node                          on the first machine
  p2pdrl node --peers HOST:7700        on every other

Try it on this machine: p2pdrl swarm up 4 --config cartpole
"""


@click.group(
    cls=LazyGroup,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    callback=_show_version,
    expose_value=False,
    is_eager=True,
    help="Show the version.",
)
def cli() -> None:
    """Choose a command; see `COMMANDS`."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the code of the table above."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't show a sign gets a question mark
    sys.exit(run_command(cli, "p2pdrl", args))


def run_command(command: click.Command, name: str, args: Sequence[str] | None = None) -> int:
    """Run a click command (scripts pass theirs) and return the exit code of the table above.

    An error is printed as one line that begins with ``name``.
    """
    with _standard_streams():
        return _run(command, name, args)


def _run(command: click.Command, name: str, args: Sequence[str] | None) -> int:
    try:
        code = command.main(args=args, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        from p2pdrl.cli.usage import explain, pointer

        print(f"{name}: {explain(error)}", file=sys.stderr)
        if more := pointer(error):
            print(more, file=sys.stderr)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except _OutputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        _drop_output()
        return error.exit_code
    except P2PDRLError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        _drop_output()  # its reader (head, less) went away
        return 1
    return code if isinstance(code, int) else 0


class _OutputError(P2PDRLError):
    """Standard output can't be written to."""


class _Output:
    """Standard output whose errors can be told from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to it.

        Raises:
            BrokenPipeError: nobody reads it any more.
            _OutputError: it can't be written to.
        """
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush it; raises what `write` does."""
        with _told():
            self._stream.flush()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise _OutputError(f"can't write to standard output: {why}") from error


@contextmanager
def _standard_streams() -> Iterator[None]:
    """Both there, also where they are closed; and standard output as an `_Output`."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    stream = sys.stdout
    ours = cast("TextIO", _Output(stream))
    sys.stdout = ours
    try:
        yield
    finally:
        if sys.stdout is ours:  # the parser puts another one in its place where nobody reads it any more
            sys.stdout = stream


def _drop_output() -> None:
    """Keep the interpreter's own flush from failing once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
