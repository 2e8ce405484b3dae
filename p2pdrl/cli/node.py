"""``p2pdrl node`` runs the daemon in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.cli.options import config_options, split_addresses
from p2pdrl.errors import UsageError

if TYPE_CHECKING:
    from p2pdrl.config.node import NodeConfig
    from p2pdrl.membership.invites import InviteLine

__all__ = ["end_with_parent", "node"]

_WATCH_S = 0.5
_LAN = "lan"
"""In place of an address: look on the local network."""


@click.command()
@click.option(
    "--peers",
    multiple=True,
    metavar="HOST:PORT[,…]",
    help="Any members of the swarm to join, or lan to look on the local network. Repeatable. Without it this "
    "node founds a swarm.",
)
@config_options
@click.option("--name", metavar="TEXT", help="What people call this node.")
@click.option("--listen", metavar="HOST:PORT", help="Default: 127.0.0.1 and the first free port from 7700.")
@click.option(
    "--advertise", metavar="HOST:PORT", help="Where others reach it, when that differs from --listen."
)
@click.option("--data-dir", metavar="FOLDER", help="Identity, checkpoints and token of this node.")
@click.option(
    "--swarm-key-file",
    envvar="P2PDRL_SWARM_KEY_FILE",
    metavar="FILE",
    help="The swarm's secret (see `p2pdrl keygen`).  [env: P2PDRL_SWARM_KEY_FILE]",
)
@click.option(
    "--join",
    envvar="P2PDRL_JOIN",
    metavar="LINE",
    help="An invite (see `p2pdrl invite`) in place of --peers and key; redeemed once. Others on this machine "
    "can see a command line, so --join-file or the variable is safer.  [env: P2PDRL_JOIN]",
)
@click.option(
    "--join-file", metavar="FILE", help="The same, from the first line of a file, or - for standard input."
)
@click.option("--swarm", metavar="NAME", help="Name of a swarm without a key, on this machine only.")
@click.option(
    "--from",
    "start_from",
    metavar="CHECKPOINT",
    help="Found a swarm with the parameters of a checkpoint: a file, a node's data folder, or HOST:PORT.",
)
@click.option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 …")
@click.option("--actors", metavar="N", help="Processes that act for the learner: 0 (itself), a number, auto.")
@click.option(
    "--roles",
    metavar="LIST",
    help="What it does: actor, learner, or both (actor,learner). Default: all that the task needs.",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: info.")
@click.option(
    "--mode-from-config",
    is_flag=True,
    default=None,
    help="When no other node runs, begin in the configuration's mode, not in the swarm's last one.",
)
@click.option("--keep-running", is_flag=True, default=None, help="Stay up when the stop condition is met.")
@click.option(
    "--insecure",
    is_flag=True,
    default=None,
    help="Listen beyond loopback without a swarm key: anyone who reaches the port can take part.",
)
@click.option(
    "--allow-import",
    is_flag=True,
    default=None,
    help="Import the module:name that this node's own options name, which runs its code.",
)
@click.option("--parent-pid", type=int, hidden=True, help="End when this parent process ends.")
@click.option("--leave-with", type=int, hidden=True, help="Leave the swarm when this parent process ends.")
def node(
    *,
    peers: tuple[str, ...],
    files: tuple[str, ...],
    sets: tuple[str, ...],
    parent_pid: int | None,
    leave_with: int | None,
    roles: str | None,
    join: str | None,
    join_file: str | None,
    **given: Any,
) -> None:
    """Run a node in the foreground: join the swarm and train.

    A newcomer needs no configuration: it takes the task from the swarm. Ctrl-C leaves the swarm properly.
    Started by torchrun, srun or mpirun it finds the others by what these tell it.
    """
    from p2pdrl.config.environments import require_runnable
    from p2pdrl.config.loader import resolve

    if parent_pid is not None:
        end_with_parent(parent_pid)
    if leave_with is not None:
        _watch_parent(leave_with, lambda: os.kill(os.getpid(), signal.SIGTERM))
    invite = _invite(join, join_file)
    flags = {_KEYS[option]: value for option, value in given.items()}
    seeds = split_addresses(peers)
    given_seeds = [seed for seed in seeds if seed != _LAN]
    flags["node.peers"] = given_seeds or (list(invite.seeds) if invite is not None else None)
    flags["node.discover"] = True if _LAN in seeds else None
    flags["node.roles"] = None if roles is None else [word.strip() for word in roles.split(",")]
    resolved = resolve(files=files, sets=sets, flags=flags, environ=os.environ)
    if launched := _launched(resolved.config.node, alone=invite is not None or _LAN in seeds):
        resolved = resolve(files=files, sets=sets, flags=flags | launched, environ=os.environ)
    require_runnable(resolved.config.task, resolved.config)
    from p2pdrl.workers.child import made_for_good

    with made_for_good():
        from p2pdrl.node.daemon import run

    raise SystemExit(run(resolved, invite))


def _launched(given: NodeConfig, *, alone: bool) -> dict[str, Any]:
    """What a launcher says that nobody else has: name, peers, and where to listen.

    Raises:
        UsageError: the launcher doesn't tell where the others are.
    """
    from p2pdrl.cli.launchers import find_launch

    launch = find_launch(os.environ)
    if launch is None or alone or (given.peers and given.listen is not None):
        return {}
    if not given.peers and not launch.peers:
        raise UsageError(
            f"{launch.launcher} doesn't tell where rank 0 runs: set MASTER_ADDR, or give --peers HOST:PORT"
        )
    peers = list(given.peers) or list(launch.peers)
    listen = launch.listen if given.listen is None else given.listen
    rank = f"rank {launch.rank} of {launch.count}"
    click.echo(
        f"{launch.launcher} started this node as {rank}: it listens at {listen} and joins {', '.join(peers)}",
        err=True,
    )
    return {"node.name": given.name or launch.name, "node.peers": peers, "node.listen": listen}


def _invite(line: str | None, file: str | None) -> InviteLine | None:
    """Read the invite, wherever it is given.

    Raises:
        UsageError: it isn't one, or is given twice.
    """
    os.environ.pop("P2PDRL_JOIN", None)  # no child of ours shall inherit the secret
    if line is None and file is None:
        return None
    if line is not None and file is not None:
        raise UsageError("--join and --join-file (or P2PDRL_JOIN) are given: one invite is enough")
    from p2pdrl.membership.invites import LONGEST_LINE, InviteLine

    if file is not None:
        try:
            with click.open_file(file, encoding="ascii", errors="replace") as opened:
                line = opened.readline(LONGEST_LINE)
        except OSError as error:
            raise UsageError(f"can't read the invite in {file}: {error.strerror}") from None
    return InviteLine.parse(line or "")


_KEYS = {
    "name": "node.name",
    "listen": "node.listen",
    "advertise": "node.advertise",
    "data_dir": "node.data_dir",
    "swarm_key_file": "node.swarm_key_file",
    "swarm": "node.swarm",
    "start_from": "node.start_from",
    "device": "node.learner.device",
    "actors": "node.actors.count",
    "log_level": "node.log.level",
    "mode_from_config": "node.mode_from_config",
    "keep_running": "node.keep_running",
    "insecure": "node.insecure",
    "allow_import": "node.allow_import",
}


def end_with_parent(parent_pid: int) -> None:
    """Never outlive the process that started this one, however that ends (``kill -9`` included).

    Linux kills us itself; elsewhere a thread looks whether the parent is still the same.
    """
    from p2pdrl.workers.child import die_with_parent

    die_with_parent(parent_pid)
    if sys.platform != "linux":
        _watch_parent(parent_pid, lambda: os._exit(1))


def _watch_parent(parent_pid: int, act: Callable[[], object]) -> None:
    """Have a thread look whether the parent is still the same, and act when it isn't.

    Unlike Linux's signal it doesn't mind that a thread of the parent's ends, the one that started us.
    """

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == parent_pid:
            pause.wait(_WATCH_S)
        act()

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
