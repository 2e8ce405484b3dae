"""One node as a child process of this one, and free ports on loopback for it.

A port that is free when it is looked at may be taken a second later by the nodes of another ``swarm up``.
So each port is claimed by a name in Linux's abstract socket namespace, which the kernel frees however
we end, and which reaches as far as the ports do (one network namespace). Elsewhere there are no claims.

`cli.fleet` starts many of them, `library.run` one.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from p2pdrl.atomic import storage_error
from p2pdrl.errors import UsageError
from p2pdrl.transport.protocol import Address

__all__ = ["NodeProcess", "reserved_ports"]

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

_LOG_TAIL_BYTES = 16384
_ERROR = "p2pdrl: "
"""What a line begins with in which the command line says why it ends."""


@dataclass
class NodeProcess:
    """One node.

    Attributes:
        log: file of everything it writes.
        status: its newest ``/v1/status``; empty before the first.
        leaving: it was asked to leave.
    """

    name: str
    address: Address
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    status: dict[str, Any] = field(default_factory=dict)
    leaving: bool = False

    @classmethod
    def start(
        cls,
        address: Address,
        folder: Path,
        log: Path,
        arguments: Sequence[str],
        *,
        name: str,
        listen: Address | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> NodeProcess:
        """Start ``p2pdrl node``, in a process group of its own, so that Ctrl-C reaches us alone.

        Args:
            folder: of its data.
            arguments: further ones.
            listen: where it listens, if not at ``address``, where it is asked.
            environ: its environment variables; None for ours.

        Raises:
            StorageError: its log can't be written.
        """
        command = [*PROGRAM, "node", "--name", name, "--listen", str(listen or address)]
        command += ["--data-dir", str(folder)]
        try:
            out = log.open("ab")
        except OSError as error:
            raise storage_error("write the log", log, error) from error
        with out:
            # Only the program itself with arguments that are ours: nothing goes through a shell.
            process = subprocess.Popen(  # noqa: S603
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=environ,
            )
        return cls(name, address, folder, log, process)

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def ending(self) -> Literal["done", "left", "failed"]:
        """What an exit means: its swarm is done, it left as it was asked to, or neither."""
        code = self.exit_code
        stop = self.status.get("stop")
        reached = isinstance(stop, dict) and bool(stop.get("reached"))
        if self.leaving and not reached and code in (0, -signal.SIGTERM):  # a start that SIGTERM cuts short
            return "left"
        return "done" if code == 0 else "failed"

    def row(self) -> dict[str, Any]:
        """The member for a table: its status, and how its process ended."""
        code = self.exit_code
        row = {"name": self.name, "address": str(self.address), "state": "starting", **self.status}
        if code is not None:
            well = self.ending != "failed"
            row.update(state=self.ending, exit_code=code, loop_lag_s=None)
            row.update(healthy=well, reasons=[] if well else [f"ended with {code}: {self.last_words()}"])
        return row

    def last_words(self) -> str:
        """The error that it ended with, or the last line of its log, in plain words."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        ends = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
        if ends:  # an error may have several lines
            return " ".join(" ".join(lines[ends[-1] :]).split()).removeprefix(_ERROR)
        line = next((line for line in reversed(lines) if line.strip()), "")
        try:
            document = json.loads(line)
        except ValueError:
            return line
        return str(document.get("event", line)) if isinstance(document, dict) else line

    def summary(self) -> dict[str, Any] | None:
        """What it wrote about itself just before it ended; that of an earlier run isn't meant."""
        try:
            found = json.loads((self.folder / "summary.json").read_bytes())
            pid = found["status"]["pid"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if pid == self.process.pid else None
