"""The nodes of ``p2pdrl swarm up --hosts``: one on each machine, started and asked over plain ssh.

One ``ssh`` a host carries all: the swarm's key and the configuration files go in by standard input, never by
a command line; the node's log comes out by standard error, its summary by standard output; and a port on this
machine leads to the node's API. When that input ends the node leaves, however we ended, so none is left
behind; with ``--detach`` it stays, and `end_nodes` ends it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import p2pdrl
from p2pdrl.api.client import NodeClient
from p2pdrl.cli.fleet import Fleet
from p2pdrl.cli.formats import clean
from p2pdrl.errors import P2PDRLError, UsageError, WorkerError
from p2pdrl.library.node_process import NodeProcess
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.protocol import Address

__all__ = ["RemoteFleet", "Ssh", "SshHost", "check_hosts", "end_nodes", "files_to_send", "parse_hosts"]

_CONNECT_S = 10
_OPTIONS = (
    "BatchMode=yes", f"ConnectTimeout={_CONNECT_S}", "ServerAliveInterval=15", "ServerAliveCountMax=3",
    "ExitOnForwardFailure=yes", "ControlPath=none",
)  # fmt: skip
_COMMAND_S = 60.0
"""Connecting and starting Python there, which on a cold disk takes its time."""
_END_S = 60.0
_FOLDER = "~/.local/share/p2pdrl/swarm-up"
_MOST_SENT_BYTES = 60_000
"""What fits into a pipe whose reader isn't there yet."""
_SSH_FAILED, _NOT_FOUND, _RUNS, _NO_FOLDER, _CUT = 255, 127, 98, 97, 96
_TARGET = re.compile(r"(?:[A-Za-z0-9._][\w.-]*@)?(?:[A-Za-z0-9._][\w.-]*|\[[0-9A-Fa-f:.]+\])", re.ASCII)

_FIRST = 4
"""Any of so many hosts may be the first to be up: all are told of them."""

_IS_NODE = """
is_node() {
  grep -q p2pdrl "/proc/$1/cmdline" 2>/dev/null || ps -ww -o args= -p "$1" 2>/dev/null | grep -q p2pdrl
}"""
"""Whether the process with a number that was noted is still the one that was meant."""

# Arguments: NAME FOLDER DETACH KEEP COUNT (FILE BYTES)… COMMAND…  Exit codes: those above, else the node's.
# Standard input stays open as long as the node is wanted; a last word "leave" ends one that was to stay.
_START = (
    _IS_NODE
    + """
name=$1 base=$2 detach=$3 keep=$4 count=$5; shift 5
umask 077
case $base in "~") base=$HOME;; "~/"*) base=$HOME/${base#"~/"};; /*) ;; *) base=$HOME/$base;; esac
home=$base/$name
[ -s "$home/pid" ] && is_node "$(cat "$home/pid")" && exit 98
[ "$keep" = 1 ] || rm -rf "$home"
mkdir -p "$home" || exit 97
while [ "$count" -gt 0 ]; do
  rm -f "$home/$1"
  dd bs=1 count="$2" of="$home/$1" 2>/dev/null
  [ "$(wc -c < "$home/$1")" -eq "$2" ] || exit 96
  shift 2; count=$((count - 1))
done
program=$1; shift
case $program in "~/"*) program=$HOME/${program#"~/"};; /*) ;; */*) program=$PWD/$program;; esac
cd "$home" || exit 97
rm -f data/summary.json
exec 3<&0
trap "" HUP
set -- "$program" "$@" --data-dir "$home/data"
if [ "$detach" = 1 ]; then "$@" >> log 2>&1 < /dev/null &
else "$@" >&2 < /dev/null &
fi
pid=$!
echo "$pid" > pid
trap "exit 0" USR1
( word=$(cat <&3)
  if [ "$detach" = 1 ]; then [ "$word" = leave ] || { kill -USR1 $$; exit; }; fi
  kill -TERM "$pid"; n=0
  while [ "$n" -lt 25 ] && kill -0 "$pid"; do sleep 1; n=$((n + 1)); done
  kill -KILL "$pid" ) > /dev/null 2>&1 &
watcher=$!
wait "$pid"
code=$?
kill "$watcher" 2>/dev/null
[ "$detach" = 1 ] && tail -n 40 log >&2
cat data/summary.json 2>/dev/null
rm -f pid swarm.key
[ "$keep" = 1 ] || { cd /; rm -rf "$home"; }
exit "$code"
"""
)

_END = (
    _IS_NODE
    + """
base=$1
case $base in "~") base=$HOME;; "~/"*) base=$HOME/${base#"~/"};; /*) ;; *) base=$HOME/$base;; esac
for file in "$base"/*/pid; do
  [ -s "$file" ] || continue
  pid=$(cat "$file")
  home=${file%/pid}
  rm -f "$home/swarm.key" "$file"
  is_node "$pid" || continue
  kill -TERM "$pid"; n=0; how=left
  while kill -0 "$pid" 2>/dev/null; do
    if [ "$n" -ge 30 ]; then kill -KILL "$pid"; how=killed; break; fi
    sleep 1; n=$((n + 1))
  done
  echo "$how ${home##*/}"
done
"""
)


_NOWHERE = Address("", 0)


@dataclass(frozen=True)
class SshHost:
    """One machine.

    Attributes:
        target: as ssh takes it, with a user or not.
        ssh_port: None for ssh's own choice.
        name: of its node.
        address: where other nodes reach that.
    """

    target: str
    ssh_port: int | None
    name: str
    address: Address = _NOWHERE


def parse_hosts(texts: Sequence[str]) -> list[SshHost]:
    """Read ``a,b,user@c:2222``; each host's node is named after it.

    Raises:
        UsageError: one isn't written so.
    """
    hosts: list[SshHost] = []
    for text in (part.strip() for one in texts for part in one.split(",")):
        if not text:
            continue
        target, port = text, None
        if (found := re.fullmatch(r"(.+?):([0-9]{1,5})", text)) and not text.endswith("]"):
            target, port = found[1], int(found[2])
        if _TARGET.fullmatch(target) is None or (port is not None and not 1 <= port <= 65535):
            raise UsageError(f"{text[:80]!r} is no host: write NAME, USER@NAME or USER@NAME:SSH_PORT")
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", target.rpartition("@")[2].strip("[]"))
        same = sum(re.sub(r"~[0-9]+$", "", host.name) == plain for host in hosts)
        hosts.append(SshHost(target, port, f"{plain}~{same + 1}" if same else plain))
    if not hosts:
        raise UsageError("--hosts names no host: write --hosts a,b,user@c:2222")
    return hosts


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached, and how p2pdrl is called there.

    Attributes:
        options: further ``-o`` options of ssh.
        program: the command's first words there.
        folder: on each host, with a folder a node.
    """

    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ("p2pdrl",)
    folder: str = _FOLDER

    @property
    def keeps(self) -> bool:
        """Whether somebody has named the folder, and what is there stays."""
        return self.folder != _FOLDER

    def command(self, host: SshHost, *options: str, remote: Sequence[str] = ()) -> list[str]:
        """The command line; what the host's shell gets is quoted."""
        words = ["ssh", "-T", *(part for option in (*self.options, *_OPTIONS) for part in ("-o", option))]
        words += [] if host.ssh_port is None else ["-p", str(host.ssh_port)]
        return [*words, *options, "--", host.target, *([shlex.join(remote)] if remote else [])]

    def run(
        self, host: SshHost, *remote: str, within_s: float = _COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there.

        Raises:
            WorkerError: ssh isn't here, doesn't get there, or the command takes too long.
        """
        done = _run(self.command(host, remote=remote), host, within_s)
        if done.returncode == _SSH_FAILED:
            raise WorkerError(_unreachable(host, done.stderr))
        return done

    def resolved(self, host: SshHost, port: int) -> SshHost:
        """``host`` with the address at which other nodes reach its node: the name that ssh would dial."""
        done = _run(self.command(host, "-G"), host, _COMMAND_S)
        words = (line.split(maxsplit=1) for line in done.stdout.splitlines())
        named = next((pair[1].strip() for pair in words if len(pair) == 2 and pair[0] == "hostname"), "")
        if done.returncode or not named:
            raise WorkerError(_unreachable(host, done.stderr))
        return replace(host, address=Address(named, port))


def _run(command: list[str], host: SshHost, within_s: float) -> subprocess.CompletedProcess[str]:
    try:
        # Only ssh itself: what goes through the host's shell is quoted.
        return subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=within_s, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise WorkerError("there is no ssh on this machine's PATH: install OpenSSH's client") from None
    except subprocess.TimeoutExpired:
        raise WorkerError(f"{host.target} didn't answer within {within_s:g} s") from None


def _unreachable(host: SshHost, said: str) -> str:
    """What it means that ssh failed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    why = clean(lines[-1] if lines else "ssh gives no reason", 200)
    port = "" if host.ssh_port is None else f" -p {host.ssh_port}"
    hint = f"see that `ssh{port} {host.target} true` works without asking anything"
    return f"{host.target} can't be reached by ssh ({why}): {hint}"


def check_hosts(hosts: Sequence[SshHost], ssh: Ssh, base_port: int, *, any_release: bool) -> list[SshHost]:
    """See that every host can be reached and has p2pdrl, of the same release as here; return where they are.

    Raises:
        WorkerError: what is wrong, host by host.
    """

    def check(host: SshHost) -> str:
        done = ssh.run(host, *ssh.program, "--version")
        said = clean((done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2], 200)
        called = shlex.join(ssh.program)
        if done.returncode in (_NOT_FOUND, 126) or "No module named p2pdrl" in done.stderr:
            return (
                f"{host.target} has no {called!r} for commands that ssh runs ({said}): install it there with "
                "`pip install p2pdrl`, or say where it is by --remote-command or --python"
            )
        if done.returncode:
            return f"{host.target}: `{called} --version` ended with {done.returncode}: {said}"
        release = done.stdout.strip().rpartition("\n")[2].removeprefix("p2pdrl ")
        if release != p2pdrl.__version__ and not any_release:
            return (
                f"{host.target} has p2pdrl {clean(release, 40)}, this machine {p2pdrl.__version__}: install "
                "the same on all, or add --any-release"
            )
        return ""

    def checked(host: SshHost) -> tuple[SshHost, str]:
        try:
            return ssh.resolved(host, base_port), check(host)
        except WorkerError as error:
            return host, str(error)

    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="ssh") as threads:
        found = list(threads.map(checked, hosts))
    wrong = [why for _, why in found if why]
    if wrong:
        raise WorkerError("; ".join(wrong))
    return _with_ports([host for host, _ in found])


def _is_here(name: str) -> bool:
    return name == "localhost" or is_loopback(name)


def _with_ports(hosts: Sequence[SshHost]) -> list[SshHost]:
    """Give each host on the same machine a port of its own, as far as names tell."""
    taken: Counter[tuple[str, int]] = Counter()
    placed = []
    for host in hosts:
        name, port = host.address.host, host.address.port
        machine = "localhost" if _is_here(name) else name, port
        placed.append(replace(host, address=Address(name, port + taken[machine])))
        taken[machine] += 1
    return placed


class _RemoteNode(NodeProcess):
    """A node behind ssh: its process is ssh's."""

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal, which a shell tells as 128 and more."""
        code = self.process.poll()
        return 128 - code if code is not None and 128 < code < _SSH_FAILED else code

    def summary(self) -> dict[str, Any] | None:
        """What it wrote about itself just before it ended."""
        try:
            found = json.loads((self.folder / "summary.json").read_bytes())
            return found if isinstance(found["status"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def last_words(self) -> str:
        """Why it ended, in plain words."""
        known = {
            _SSH_FAILED: f"the connection by ssh ended: {super().last_words()}",
            _RUNS: f"a node of an earlier run is still there: p2pdrl swarm down --hosts {self.name}",
            _NO_FOLDER: "its folder can't be made there: name another by --remote-dir",
            _CUT: "what is sent to it didn't arrive whole",
        }
        return known.get(self.exit_code or 0) or super().last_words()


class RemoteFleet(Fleet):
    """The nodes of several hosts, as `Fleet`.

    Args:
        folder: gets a log per node, and its summary.
        local_ports: one per host, free on this machine.
        arguments: further ones of each ``p2pdrl node``.
        roles: of each node, as `Fleet` takes them.
        hosts: of `check_hosts`.
        files: that go to every host, by name there.
        swarm_key: to ask nodes with.
        detach: whether they stay when we go.
        within_s: how long they may take to become one swarm.
    """

    def __init__(
        self,
        folder: Path,
        local_ports: Sequence[int],
        arguments: Sequence[str],
        roles: Sequence[str] = (),
        *,
        hosts: Sequence[SshHost],
        ssh: Ssh,
        files: dict[str, bytes],
        swarm_key: bytes,
        detach: bool,
        within_s: float,
    ) -> None:
        super().__init__(folder, local_ports, arguments, roles)
        self._hosts, self._ssh = hosts, ssh
        self._files, self._swarm_key = files, swarm_key
        self._stays, self._within_s = detach, within_s
        self._assembled = False

    @property
    def may_detach(self) -> bool:
        """Whether the nodes shall stay, and are one swarm."""
        return self._stays and self._assembled

    @property
    def hosts(self) -> list[SshHost]:
        """Where the nodes are."""
        return list(self._hosts)

    def leave(self) -> None:
        """Have every running node leave the swarm and end."""
        for member in self.running():
            member.leaving = True
            self._tell(member, b"leave", last=True)

    def kill(self) -> None:
        """End every running ssh at once, upon which the nodes leave."""
        super().kill()
        for member in self.members:
            self._tell(member, b"", last=True)

    def detach(self) -> None:
        """Let go of the nodes, which stay; waits until each is.

        Raises:
            WorkerError: one couldn't be let go of.
        """
        for member in self.running():
            self._tell(member, b"", last=True)
        until_s = time.monotonic() + _COMMAND_S
        for member in self.members:
            try:
                member.process.wait(max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise WorkerError(f"{member.name} couldn't be let go of: its ssh doesn't end") from None

    def trouble(self, elapsed_s: float) -> str:
        """Say why the nodes aren't one swarm in time; empty while there is time, and once they were."""
        statuses = [member.status for member in self.members]
        whole = len(self.members)
        counts = [(status.get("members") or {}).get("alive") for status in statuses]
        lineages = {status.get("lineage") for status in statuses}
        self._assembled = self._assembled or (
            counts == [whole] * whole and len(lineages) == 1 and None not in lineages
        )
        if self._assembled or elapsed_s < self._within_s:
            return ""
        silent = [member.name for member in self.members if not member.status]
        alone = [
            f"{member.name} sees {count or 0} of {whole}"
            for member, count in zip(self.members, counts, strict=True)
            if member.status and count != whole
        ]
        said = ([f"{', '.join(silent)} doesn't answer"] if silent else []) + alone
        ports = ", ".join(str(host.address) for host in self._hosts)
        return (
            f"the nodes aren't one swarm after {self._within_s:g} s ({'; '.join(said) or 'several swarms'}): "
            f"can the hosts reach each other at {ports}?"
        )

    def _start(self, name: str, port: int) -> NodeProcess:
        host = self._hosts[len(self.members)]
        name, address = host.name, host.address
        listen = Address("127.0.0.1" if _is_here(address.host) else "0.0.0.0", address.port)  # noqa: S104
        node = [*self._ssh.program, "node", "--name", name, "--listen", str(listen)]
        node += ["--advertise", str(address), *self._arguments]
        for first in self._hosts[:_FIRST]:
            node += ["--peers", str(first.address)]
        if self._roles:
            node += ["--roles", self._roles[len(self.members)]]
        sizes = [part for file, data in self._files.items() for part in (file, str(len(data)))]
        keeps = self._stays or self._ssh.keeps
        flags = [name, self._ssh.folder, "1" if self._stays else "0", "1" if keeps else "0"]
        remote = ["sh", "-c", _START, "sh", *flags, str(len(self._files)), *sizes, *node]
        tunnel = f"127.0.0.1:{port}:127.0.0.1:{address.port}"
        folder, log = self._folder / name, self._folder / f"{name}.log"
        folder.mkdir(mode=0o700, exist_ok=True)
        with log.open("ab") as err, (folder / "summary.json").open("wb") as out:
            process = subprocess.Popen(  # noqa: S603
                self._ssh.command(host, "-L", tunnel, remote=remote),
                stdin=subprocess.PIPE, stdout=out, stderr=err, process_group=0, bufsize=0,
            )  # fmt: skip
        member = _RemoteNode(name, Address("127.0.0.1", port), folder, log, process)
        self._tell(member, b"".join(self._files.values()))
        return member

    def _status(self, member: NodeProcess) -> dict[str, Any] | None:
        if member.exit_code is not None:
            summary = member.summary()
            return None if summary is None else summary["status"]
        try:
            return NodeClient(member.address, swarm_key=self._swarm_key, timeout_s=2.0).status()
        except P2PDRLError:
            return None

    @staticmethod
    def _tell(member: NodeProcess, words: bytes, *, last: bool = False) -> None:
        """Send something by ssh's standard input; where ssh has ended, its exit code says more."""
        stdin = member.process.stdin
        if stdin is None or stdin.closed:
            return
        with suppress(BrokenPipeError):
            stdin.write(words)
        if last:
            with suppress(BrokenPipeError):
                stdin.close()


def files_to_send(key_file: Path, configs: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    """Read the swarm's key and the configuration files; return them, and ``--config`` arguments for there.

    Raises:
        UsageError: one can't be read, or all together are too long.
    """
    from p2pdrl.config.loader import is_preset_name

    files: dict[str, bytes] = {}
    arguments = ["--swarm-key-file", "swarm.key"]
    try:
        files["swarm.key"] = key_file.read_bytes()
        for number, config in enumerate(configs):
            if is_preset_name(config):
                arguments += ["--config", config]
            else:
                files[f"config-{number}.toml"] = Path(config).read_bytes()
                arguments += ["--config", f"config-{number}.toml"]
    except OSError as error:
        raise UsageError(f"can't read {error.filename}: {error.strerror}") from None
    if sum(map(len, files.values())) > _MOST_SENT_BYTES:
        raise UsageError(
            f"the configuration files are longer than {_MOST_SENT_BYTES} bytes: too long to send"
        )
    return files, arguments


def end_nodes(hosts: Sequence[SshHost], ssh: Ssh) -> list[dict[str, Any]]:
    """Have the nodes of an earlier ``swarm up --hosts`` leave; return a row for each host.

    A row has ``host``, the ``nodes`` that left, those that had to be ``killed``, and an ``error`` or None.
    """

    def end(host: SshHost) -> dict[str, Any]:
        row: dict[str, Any] = {"host": host.target, "nodes": [], "killed": [], "error": None}
        try:
            done = ssh.run(host, "sh", "-c", _END, "sh", ssh.folder, within_s=_END_S)
        except WorkerError as error:
            return row | {"error": str(error)}
        for line in done.stdout.splitlines():
            how, _, name = line.partition(" ")
            row["killed" if how == "killed" else "nodes"].append(clean(name, 80))
        return row

    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="ssh") as threads:
        return list(threads.map(end, hosts))
