"""``p2pdrl swarm up``: a whole swarm, here or on several hosts, in one command that ends when it is done.

On a terminal the table of nodes is live; elsewhere it is printed to standard error every few seconds.
The result goes to standard output.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.formats import as_number, clean
from p2pdrl.cli.options import Span, as_arguments, config_options, json_option
from p2pdrl.errors import DataDirUnusableError, UsageError, WorkerError

if TYPE_CHECKING:
    from p2pdrl.cli.fleet import Fleet
    from p2pdrl.cli.remote import RemoteFleet, Ssh
    from p2pdrl.config.task import TaskConfig

__all__ = ["swarm"]

_LIVE_S = 1.0
_BLOCK_S = 5.0
_GRACE_S = 20.0
_TUNNELS = 17700
"""From here on, ports on this machine lead to nodes on hosts."""


@click.group()
def swarm() -> None:
    """Run a whole swarm, on this machine or on several by ssh."""


def _host_options(command: Any) -> Any:
    """Add what says how hosts are reached; the command gets it as ``ssh``."""

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        remote_command: str | None,
        python: str | None,
        remote_dir: str | None,
        ssh_options: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        from p2pdrl.cli.remote import Ssh

        if remote_command is not None and python is not None:
            raise click.UsageError("--remote-command and --python both say how p2pdrl is called: give one")
        program = ("p2pdrl",) if remote_command is None else tuple(shlex.split(remote_command))
        if python is not None:
            program = (python, "-m", "p2pdrl")
        if not program:
            raise click.UsageError("--remote-command is empty: write how p2pdrl is called there")
        ssh = Ssh(ssh_options, program)
        return command(*args, ssh=ssh if remote_dir is None else replace(ssh, folder=remote_dir), **kwargs)

    for option in reversed([
        click.option(
            "--remote-command", metavar="TEXT",
            help="With --hosts: how p2pdrl is called there, such as /opt/venv/bin/p2pdrl.",
        ),
        click.option("--python", metavar="PATH", help="With --hosts: Python there that has p2pdrl."),
        click.option(
            "--remote-dir", metavar="FOLDER", help="With --hosts: where nodes write there, and it stays."
        ),
        click.option(
            "--ssh-option", "ssh_options", multiple=True, metavar="KEY=VALUE",
            help="With --hosts: passed to ssh as -o. Repeatable.",
        ),
    ]):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped


@swarm.command()
@click.argument("count", metavar="[N]", type=click.IntRange(1, 64), required=False)
@click.option(
    "--hosts",
    multiple=True,
    metavar="[USER@]HOST[:SSH_PORT][,…]",
    help="In place of N: a node on each of these machines, by ssh. Repeatable.",
)
@config_options
@click.option(
    "--exit-when-done/--keep",
    "ends",
    default=True,
    show_default=True,
    help="End when the stop condition is met, or stay up until Ctrl-C.",
)
@_host_options
@click.option(
    "--within",
    type=Span(),
    default="2m",
    show_default=True,
    metavar="TIME",
    help="With --hosts: how long they may take to become one swarm.",
)
@click.option("--detach", is_flag=True, help="With --hosts: end once they train; `swarm down` ends them.")
@click.option("--any-release", is_flag=True, help="With --hosts: of whichever release of p2pdrl they have.")
@click.option(
    "--data-root",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Keep data and logs here (of hosts: logs and the swarm's key); without it they are temporary.",
)
@click.option("--device", metavar="NAME", help="auto, cpu, cuda …")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Of the nodes' logs."
)
@click.option(
    "--swarm-key-file", metavar="FILE", help="Key of the swarm; hosts get one made for them if there is none."
)
@click.option(
    "--from",
    "start_from",
    metavar="CHECKPOINT",
    help="Begin with the parameters of a checkpoint: a file, a node's data folder, or HOST:PORT.",
)
@click.option(
    "--base-port",
    type=click.IntRange(1, 65535),
    default=7700,
    show_default=True,
    metavar="PORT",
    help="Nodes take the first free ports from here.",
)
@click.option(
    "--allow-import", is_flag=True, help="Import the module:name that the task names, which runs its code."
)
@click.option(
    "--learners",
    type=click.IntRange(min=1),
    metavar="N",
    help="The first N nodes only learn, all others only act for them. Default: each does both.",
)
@click.option(
    "--replays",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --learners: so many further nodes hold a shard each of the replay memory; else learners have "
    "their own.",
)
@json_option
def up(
    *,
    count: int | None,
    hosts: tuple[str, ...],
    ssh: Ssh,
    within: float,
    detach: bool,
    any_release: bool,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    ends: bool,
    data_root: Path | None,
    base_port: int,
    learners: int | None,
    replays: int | None,
    start_from: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Start N nodes, or one on each host; show how they train, and end when all of them have ended.

    Hosts need p2pdrl, and ports from --base-port on by which they reach each other.

    Ctrl-C makes them leave properly, and the exit code is 130 then; a second one ends them at once. The exit
    code is 0 only if every node's was.
    """  # fmt: skip
    from p2pdrl.api.checkpoints import checkpoint_to_start_from
    from p2pdrl.api.keyfile import read_swarm_keys
    from p2pdrl.cli.fleet import Fleet
    from p2pdrl.config.environments import require_environment
    from p2pdrl.config.loader import resolve
    from p2pdrl.library.node_process import reserved_ports

    if (count is None) == (not hosts):
        raise click.UsageError("say how many nodes to start here (swarm up 4), or where: --hosts a,b")
    # a bad one fails before anything starts
    task = resolve(files=files, sets=sets, environ=os.environ).config.task
    if count is None:
        on_hosts = _OnHosts(ssh, hosts, within_s=within, detach=detach, any_release=any_release)
        roles = _roles(len(on_hosts.hosts), learners, replays, task)
        arguments = [part for one in sets for part in ("--set", one)] + ([] if ends else ["--keep-running"])
        key_file = options.pop("swarm_key_file")
        on_hosts.up(
            files,
            arguments + as_arguments(options),
            roles,
            data_root=data_root,
            base_port=base_port,
            key_file=key_file,
            as_json=as_json,
        )
        return
    require_environment(task)
    if options["swarm_key_file"] is not None:
        read_swarm_keys(options["swarm_key_file"])
    if start_from is not None:
        checkpoint_to_start_from(start_from, options["swarm_key_file"])
        options["from"] = start_from
    roles = _roles(count, learners, replays, task)
    arguments = _node_arguments(files, sets, ends, options)
    # In this order: ports are let go after the nodes ended, and the folder last.
    with _folder(data_root) as folder, reserved_ports(count, base_port) as ports:
        with Fleet(folder, ports, arguments, roles) as fleet:
            run = _Run(fleet)
            run.until_all_ended()
        run.print_result(as_json)
        run.raise_for_failures()


@swarm.command()
@click.option(
    "--hosts",
    multiple=True,
    required=True,
    metavar="[USER@]HOST[:SSH_PORT][,…]",
    help="The machines, as `swarm up` was told. Repeatable.",
)
@_host_options
@json_option
def down(*, hosts: tuple[str, ...], ssh: Ssh, as_json: bool) -> None:
    """End the nodes that `swarm up --hosts` has left on these machines.

    They leave the swarm properly; one that doesn't within half a minute is killed.
    """
    from p2pdrl.cli.remote import end_nodes, parse_hosts

    rows = end_nodes(parse_hosts(hosts), ssh)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            ended = [*row["nodes"], *(f"{name} (killed)" for name in row["killed"])]
            click.echo(f"{row['host']}: {row['error'] or ', '.join(ended) or 'no node runs there'}")
    if failed := [row["host"] for row in rows if row["error"]]:
        raise WorkerError(f"not ended on {', '.join(failed)}")


class _OnHosts:
    """One run of `up` on hosts."""

    def __init__(
        self, ssh: Ssh, hosts: Sequence[str], *, within_s: float, detach: bool, any_release: bool
    ) -> None:
        from p2pdrl.cli.remote import parse_hosts

        self.hosts = parse_hosts(hosts)
        self._ssh = ssh
        self._within_s, self._detach, self._any_release = within_s, detach, any_release

    def up(
        self,
        files: Sequence[str],
        arguments: Sequence[str],
        roles: Sequence[str],
        *,
        data_root: Path | None,
        base_port: int,
        key_file: str | None,
        as_json: bool,
    ) -> None:
        """Start the nodes, show them, and end as they do; or leave them there."""
        from p2pdrl.api.keyfile import read_swarm_keys, write_swarm_key
        from p2pdrl.cli.remote import RemoteFleet, check_hosts, files_to_send
        from p2pdrl.library.node_process import reserved_ports

        if self._detach and key_file is None and data_root is None:
            raise click.UsageError("--detach wants --swarm-key-file or --data-root: where the key stays")
        with _folder(data_root) as folder:
            key = folder / "swarm.key" if key_file is None else Path(key_file)
            if key_file is None and not key.exists():
                write_swarm_key(key)
            swarm_key = read_swarm_keys(key).good(time.time())[0]
            sent, configured = files_to_send(key, files)
            hosts = check_hosts(self.hosts, self._ssh, base_port, any_release=self._any_release)
            with reserved_ports(len(hosts), _TUNNELS) as ports:
                fleet = RemoteFleet(
                    folder,
                    ports,
                    [*configured, *arguments],
                    roles,
                    hosts=hosts,
                    ssh=self._ssh,
                    files=sent,
                    swarm_key=swarm_key,
                    detach=self._detach,
                    within_s=self._within_s,
                )
                with fleet:
                    run = _Run(fleet, f"--api {fleet.members[0].address} --swarm-key-file {key}")
                    run.until_all_ended()
                    if run.detached:
                        fleet.detach()
                if run.detached:
                    _tell_detached(fleet, key, as_json)
                    return
            run.print_result(as_json)
            run.raise_for_failures()


def _tell_detached(fleet: RemoteFleet, key: Path, as_json: bool) -> None:
    rows = [{"name": host.name, "host": host.target, "address": str(host.address)} for host in fleet.hosts]
    if as_json:
        click.echo(json.dumps({"nodes": rows, "swarm_key_file": str(key)}, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']}  {row['address']}")
    named = ",".join(f"{h.target}:{h.ssh_port}" if h.ssh_port else h.target for h in fleet.hosts)
    click.echo(f"look: p2pdrl status --api {rows[0]['address']} --swarm-key-file {key}", err=True)
    click.echo(f"end:  p2pdrl swarm down --hosts {named}", err=True)


def _roles(count: int, learners: int | None, replays: int | None, task: TaskConfig) -> list[str]:
    """Return the roles of each node; none for all that the task needs.

    Raises:
        click.UsageError: nobody would act, for all or for one of them, or the task has no replay memory.
    """
    from p2pdrl.config.task import ReplayOptions

    if learners is None:
        if replays is not None:
            raise click.UsageError("--replays goes with --learners: say how many draw from the shards")
        return []
    has_replay = isinstance(task.algorithm, ReplayOptions)
    if replays is not None and not has_replay:
        name = task.algorithm.__struct_config__.tag
        raise click.UsageError(f"--replays: {name} has no replay memory; leave it out")
    others = learners + (replays or 0)
    if others >= count:
        said = f"--learners {learners}" + (f" and --replays {replays}" if replays else "")
        raise click.UsageError(f"{said} of {count} nodes leave none that acts for them")
    if replays is None and learners > count - learners:
        raise click.UsageError(
            f"each node that acts does so for one learner: --learners {learners} of {count} nodes leave "
            f"{count - learners}; start {2 * learners} nodes, or take --learners {count // 2}"
        )
    first = "learner,replay" if has_replay and replays is None else "learner"
    return [first] * learners + ["replay"] * (replays or 0) + ["actor"] * (count - others)


def _node_arguments(
    files: tuple[str, ...], sets: tuple[str, ...], ends: bool, options: dict[str, Any]
) -> list[str]:
    arguments = [part for file in files for part in ("--config", file)]
    arguments += [part for one in sets for part in ("--set", one)]
    if not ends:
        arguments.append("--keep-running")
    if options["swarm_key_file"] is None:
        # A name of its own: no other swarm on this machine is joined by accident.
        arguments += ["--swarm", f"up-{secrets.token_hex(4)}"]
    return arguments + as_arguments(options)


@contextmanager
def _folder(data_root: Path | None) -> Iterator[Path]:
    if data_root is None:
        with tempfile.TemporaryDirectory(prefix="p2pdrl-swarm-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        data_root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DataDirUnusableError(f"can't make the data root {data_root}: {error.strerror}") from None
    if not os.access(data_root, os.W_OK | os.X_OK):
        raise DataDirUnusableError(
            f"can't write to the data root {data_root}: name a folder of yours with --data-root"
        )
    yield data_root.absolute()


class _Run:
    """One run of a fleet, from its start to its table of results."""

    def __init__(self, fleet: Fleet, reach: str = "") -> None:
        self._fleet = fleet
        self._reach = reach or f"--api {fleet.members[0].address}"
        """How commands reach the first node."""
        self._trouble = ""
        self.detached = False
        """Whether all are one swarm by now, and shall stay."""
        self._started_s = time.monotonic()
        self._ended_s = self._started_s
        self._signals = 0
        self._interrupted = False

    def until_all_ended(self) -> None:
        """Show the fleet until no node runs; see to signals, and to nodes that can't even start."""
        with self._catching_signals():
            if sys.stdout.isatty():
                self._live()
            else:
                self._blocks()
        if not self.detached:
            self._fleet.ask()
        self._ended_s = time.monotonic()

    def _live(self) -> None:
        from rich.live import Live

        from p2pdrl.cli.tables import console

        with Live(console=console(), auto_refresh=False, transient=True) as live:
            for _ in self._rounds(_LIVE_S):
                live.update(self._picture(), refresh=True)

    def _blocks(self) -> None:
        from p2pdrl.cli.tables import console

        out, shown_s = console(sys.stderr), -_BLOCK_S
        for now_s in self._rounds(_LIVE_S):
            if now_s - shown_s >= _BLOCK_S:
                out.print(self._picture())
                out.print()
                shown_s = now_s

    def _rounds(self, interval_s: float) -> Iterator[float]:
        """Ask all nodes again and again; yields the seconds since the start."""
        leaving_s: float | None = None
        while self._fleet.running():
            self._fleet.ask()
            now_s = time.monotonic() - self._started_s
            self._trouble = self._trouble or self._fleet.trouble(now_s)
            yield now_s
            if leaving_s is None and not self._signals and self._fleet.may_detach:
                self.detached = True
                return
            if leaving_s is None and (self._signals or self._trouble or self._start_failed()):
                self._fleet.leave()
                leaving_s = now_s
            elif leaving_s is not None and (self._signals > 1 or now_s - leaving_s > _GRACE_S):
                self._fleet.kill()
            self._wait(interval_s)

    def _wait(self, interval_s: float) -> None:
        """A pause that a signal cuts short, and the end of the last node too."""
        until_s, signals = time.monotonic() + interval_s, self._signals
        while self._fleet.running() and time.monotonic() < until_s and self._signals == signals:
            time.sleep(0.1)  # no Event: setting it in our signal handler waits for a lock that we may hold

    def _start_failed(self) -> bool:
        """A node that ended badly before its first step: the others would wait for it, or fail alike."""
        ended = (m for m in self._fleet.members if m.exit_code not in {None, 0})
        return any(not m.status.get("env_steps") for m in ended)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        def count(number: int, _frame: object) -> None:
            self._signals += 1
            self._interrupted = self._interrupted or number == signal.SIGINT

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _rows(self) -> list[dict[str, Any]]:
        return [member.row() for member in self._fleet.members]

    def _newest(self) -> dict[str, Any]:
        """The status that saw the most of the swarm: its end, or the most steps."""
        statuses = [member.status for member in self._fleet.members if member.status]

        def seen(status: dict[str, Any]) -> tuple[bool, float]:
            stop = status.get("stop")
            ended = isinstance(stop, dict) and bool(stop.get("reached"))
            return ended, as_number(status.get("swarm_env_steps")) or 0.0

        return max(statuses, key=seen, default={})

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        from p2pdrl.cli.tables import swarm_view

        view = swarm_view(self._newest(), self._rows(), time.monotonic() - self._started_s)
        hint = f"more: p2pdrl status {self._reach}"
        if self._signals:
            hint = f"leaving, {len(self._fleet.running())} to go; Ctrl-C again ends them at once"
        return Group(view, Text(f"\n{hint}", style="dim"))

    def print_result(self, as_json: bool) -> None:
        """Print how each node ended, on standard output."""
        from rich.text import Text

        from p2pdrl.cli.tables import RESULTS, console, members_table, outcome, progress_line

        newest, seconds = self._newest(), self._ended_s - self._started_s
        if as_json:
            click.echo(json.dumps({"seconds": seconds, "swarm": newest, "nodes": self._rows()}, indent=2))
            return
        out = console()
        out.print(Text(progress_line(newest, seconds, nodes=len(self._fleet.members))))
        if why := outcome(newest):
            out.print(Text(why))
        out.print()
        out.print(members_table(self._rows(), RESULTS))

    def raise_for_failures(self) -> None:
        """End with 1 when a node failed, and with 130 when Ctrl-C ended the swarm before it was done.

        With 2 when all that failed did: what they were told can be mended.

        Raises:
            KeyboardInterrupt: it did.
            WorkerError: names the nodes that failed, and the last words of the first; or says why they were
                ended.
        """
        if self._trouble:
            raise WorkerError(self._trouble)
        if self._interrupted and any(member.ending != "done" for member in self._fleet.members):
            raise KeyboardInterrupt
        failed = [member for member in self._fleet.members if member.ending == "failed"]
        if not failed:
            return
        names = ", ".join(f"{member.name} with {member.exit_code}" for member in failed)
        first = next((m for m in failed if m.exit_code is not None and m.exit_code > 0), failed[0])
        words = clean(first.last_words(), 500)
        blamed = [member for member in failed if not member.leaving] or failed
        mendable = all(member.exit_code == UsageError.exit_code for member in blamed)
        raise (UsageError if mendable else WorkerError)(
            f"{len(failed)} of {len(self._fleet.members)} nodes failed ({names})"
            + (f"; {first.name} said: {words}" if words else "")
        )
