"""The node processes of ``p2pdrl swarm up``."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from p2pdrl.api.client import NodeClient
from p2pdrl.errors import P2PDRLError
from p2pdrl.library.node_process import NodeProcess
from p2pdrl.transport.protocol import Address

__all__ = ["Fleet"]

_ASK_S = 2.0
_KILL_S = 10.0


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
        self.members: list[NodeProcess] = []
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

    def running(self) -> list[NodeProcess]:
        """The nodes that haven't ended."""
        return [member for member in self.members if member.exit_code is None]

    @property
    def may_detach(self) -> bool:
        """Whether the nodes shall stay when we go, and can by now."""
        return False

    def trouble(self, elapsed_s: float) -> str:
        """Say why there is no use in waiting any longer, so many seconds after the start; empty for none."""
        return ""

    def ask(self) -> None:
        """Refresh the status of every running node; one that doesn't answer keeps its last."""
        for member, status in zip(self.members, self._askers.map(self._status, self.members), strict=True):
            member.status = status or member.status

    def leave(self) -> None:
        """Ask every running node to leave the swarm and end."""
        for member in self.running():
            member.leaving = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every running node at once, and wait for that."""
        self._signal(signal.SIGKILL)
        for member in self.members:
            member.process.wait(_KILL_S)

    def _signal(self, number: signal.Signals) -> None:
        for member in self.running():
            member.process.send_signal(number)

    def _start(self, name: str, port: int) -> NodeProcess:
        folder, log = self._folder / name, self._folder / f"{name}.log"
        arguments = ["--parent-pid", str(os.getpid()), *self._arguments]
        if self._roles:
            arguments += ["--roles", self._roles[len(self.members)]]
        if self.members:
            arguments += ["--peers", str(self.members[0].address)]
        return NodeProcess.start(Address("127.0.0.1", port), folder, log, arguments, name=name)

    def _status(self, member: NodeProcess) -> dict[str, Any] | None:
        if member.exit_code is not None:
            summary = member.summary()
            return None if summary is None else summary["status"]
        # Its token only counts where a swarm key closes the API; before the node is up there is none.
        folder = str(member.folder) if (member.folder / "token").exists() else None
        try:
            return NodeClient(member.address, data_dir=folder, timeout_s=_ASK_S).status()
        except P2PDRLError:
            return None
