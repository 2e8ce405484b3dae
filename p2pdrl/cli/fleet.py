"""The node processes of ``p2pdrl swarm up``, and free ports for them.

A port that is free when it is looked at may be taken a second later by the nodes of another ``swarm up``.
So each port is claimed by a name in Linux's abstract socket namespace, which the kernel frees however
we end, and which reaches as far as the ports do (one network namespace). Elsewhere there are no claims.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from p2pdrl.cli.client import NodeClient
from p2pdrl.errors import P2PDRLError, UsageError
from p2pdrl.transport.protocol import Address

__all__ = ["Fleet", "FleetNode", "reserved_ports"]

_LAST_PORT = 65535


@contextmanager
def reserved_ports(count: int, first: int) -> Iterator[list[int]]:
    """``count`` ports on loopback, the first from ``first`` on that nobody else uses.

    Raises:
        UsageError: there aren't that many.
    """
    with ExitStack() as claims:
        ports: list[int] = []
        for port in range(first, _LAST_PORT + 1):
            if len(ports) == count:
                break
            if (claim := _claim(port)) is not None:
                claims.enter_context(claim)
                ports.append(port)
        if len(ports) < count:
            raise UsageError(f"there aren't {count} free ports from {first}: end what listens there")
        yield ports


def _claim(port: int) -> socket.socket | None:
    """The claim on a port, or None where somebody listens there or has claimed it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0p2pdrl port {port}")
        # With SO_REUSEADDR, as nodes do: connections that ended a moment ago don't keep a port.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
    except OSError:
        claim.close()
        return None
    return claim


PROGRAM = (sys.executable, "-m", "p2pdrl")
"""How a node is started; tests put a fake in its place."""

_ASK_S = 2.0
_KILL_S = 10.0
_LOG_TAIL_BYTES = 16384


@dataclass
class FleetNode:
    """One node.

    Attributes:
        log: file of everything it writes.
        status: its newest ``/v1/status``; empty before the first.
    """

    name: str
    address: Address
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    status: dict[str, Any]

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self.process.poll()

    def row(self) -> dict[str, Any]:
        """The member for a table: its status, and how its process ended."""
        code = self.exit_code
        row = {"name": self.name, "address": str(self.address), "state": "starting", **self.status}
        if code is not None:
            row.update(state="done" if code == 0 else "failed", exit_code=code, loop_lag_s=None)
            row.update(
                healthy=code == 0, reasons=[] if code == 0 else [f"ended with {code}: {self.last_words()}"]
            )
        return row

    def last_words(self) -> str:
        """The last line of its log, in plain words."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        line = next((line for line in reversed(lines) if line.strip()), "")
        try:
            document = json.loads(line)
        except ValueError:
            return line.removeprefix("p2pdrl: ")
        return str(document.get("event", line)) if isinstance(document, dict) else line


class Fleet:
    """Context manager over all nodes; leaving it ends those that still run.

    No node outlives us: each is told our process id and has the kernel kill it when we die, ``kill -9``
    included. Each runs in a process group of its own, so that Ctrl-C reaches us alone and the nodes leave the
    swarm in good order.

    Args:
        folder: gets a data folder and a log per node.
        ports: one per node.
        arguments: further arguments of each ``p2pdrl node``.
        roles: of each node; none are all that the task needs.
    """

    def __init__(
        self, folder: Path, ports: Sequence[int], arguments: Sequence[str], roles: Sequence[str] = ()
    ) -> None:
        self.members: list[FleetNode] = []
        self._folder = folder
        self._ports = ports
        self._arguments = list(arguments)
        self._roles = roles
        self._askers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="ask")

    def __enter__(self) -> Self:
        try:
            for number, port in enumerate(self._ports, start=1):
                self.members.append(self._start(f"node-{number}", port))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._askers.shutdown(cancel_futures=True)

    def running(self) -> list[FleetNode]:
        """The nodes that haven't ended."""
        return [member for member in self.members if member.exit_code is None]

    def ask(self) -> None:
        """Refresh the status of every running node; one that doesn't answer keeps its last."""
        for member, status in zip(self.members, self._askers.map(self._status, self.members), strict=True):
            member.status = status or member.status

    def leave(self) -> None:
        """Ask every running node to leave the swarm and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every running node at once, and wait for that."""
        self._signal(signal.SIGKILL)
        for member in self.members:
            member.process.wait(_KILL_S)

    def _signal(self, number: signal.Signals) -> None:
        for member in self.running():
            member.process.send_signal(number)

    def _start(self, name: str, port: int) -> FleetNode:
        folder, log = self._folder / name, self._folder / f"{name}.log"
        address = Address("127.0.0.1", port)
        command = [*PROGRAM, "node", "--name", name, "--listen", str(address)]
        command += ["--data-dir", str(folder), "--parent-pid", str(os.getpid()), *self._arguments]
        if self._roles:
            command += ["--roles", self._roles[len(self.members)]]
        if self.members:
            command += ["--peers", str(self.members[0].address)]
        with log.open("ab") as out:
            # Only the program itself with arguments that are ours: nothing goes through a shell.
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, process_group=0
            )
        return FleetNode(name, address, folder, log, process, {})

    def _status(self, member: FleetNode) -> dict[str, Any] | None:
        if member.exit_code is not None:
            return _final_status(member)
        # Its token only counts where a swarm key closes the API; before the node is up there is none.
        folder = str(member.folder) if (member.folder / "token").exists() else None
        try:
            return NodeClient(member.address, data_dir=folder, timeout_s=_ASK_S).status()
        except P2PDRLError:
            return None


def _final_status(member: FleetNode) -> dict[str, Any] | None:
    """What a node wrote about itself just before it ended; that of an earlier run isn't meant."""
    try:
        status = json.loads((member.folder / "summary.json").read_bytes())["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return status if isinstance(status, dict) and status.get("pid") == member.process.pid else None
