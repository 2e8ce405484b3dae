"""Real nodes on loopback for the benchmarks: started, switched, slowed, killed and measured together.

with LocalSwarm(4, ["--set", "task.strategy.name=local"]) as swarm:
    swarm.ready()
    swarm.mode("gossip", protocol="sgp")
    before = swarm.snapshot()
    time.sleep(10)
    rate = (swarm.snapshot() - before).steps_per_s
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import psutil

from p2pdrl.api.client import NodeClient
from p2pdrl.api.keyfile import write_swarm_key
from p2pdrl.errors import P2PDRLError
from p2pdrl.transport.protocol import Address

__all__ = ["LocalSwarm", "Meter", "Node", "Snapshot", "free_ports", "processors_busy"]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@dataclass(frozen=True)
class Snapshot:
    """Figures of all living nodes at one moment, or (a difference) between two.

    Attributes:
        seconds: monotonic time.
        env_steps: of each node, by name.
        updates: of each node's learner.
        cpu_s: processor time of all processes of each node.
        bytes_out: sent by each node.
        bytes_in: received by each node.
    """

    seconds: float
    env_steps: dict[str, float]
    updates: dict[str, float]
    cpu_s: dict[str, float]
    bytes_out: dict[str, float]
    bytes_in: dict[str, float]

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        """What happened since ``earlier``, on the nodes that both know."""

        def less(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {name: value - then[name] for name, value in now.items() if name in then}

        return Snapshot(
            self.seconds - earlier.seconds,
            less(self.env_steps, earlier.env_steps),
            less(self.updates, earlier.updates),
            less(self.cpu_s, earlier.cpu_s),
            less(self.bytes_out, earlier.bytes_out),
            less(self.bytes_in, earlier.bytes_in),
        )

    @property
    def steps_per_s(self) -> float:
        """Environment steps a second of all nodes, of a difference."""
        return sum(self.env_steps.values()) / self.seconds

    @property
    def steps_per_cpu_s(self) -> float:
        """Environment steps per second of processor time, of a difference."""
        return sum(self.env_steps.values()) / max(sum(self.cpu_s.values()), 1e-9)


@dataclass
class Node:
    """One node.

    Attributes:
        name: as it calls itself.
        address: where it listens.
        folder: its data folder.
        process: the daemon.
        extra: arguments that it alone was given.
    """

    name: str
    address: Address
    folder: Path
    process: subprocess.Popen[bytes]
    extra: tuple[str, ...] = ()

    @property
    def client(self) -> NodeClient:
        """Talks to it."""
        folder = str(self.folder) if (self.folder / "token").exists() else None
        return NodeClient(self.address, data_dir=folder, timeout_s=5.0)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    def status(self) -> dict[str, Any]:
        """Its status; empty while it doesn't answer."""
        try:
            return self.client.status()
        except P2PDRLError:
            return {}

    def cpu_s(self) -> float:
        """Processor time of the daemon and its children, dead ones included."""
        total = 0.0
        try:
            daemon = psutil.Process(self.process.pid)
            times = daemon.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
            for child in daemon.children(recursive=True):
                times = child.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            pass  # it ends just now
        return total

    def children_compute(self) -> bool:
        """Whether a process of it beside the daemon computes, or waits for a core, at this moment."""
        working = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
            return any(child.status() in working for child in children)
        except psutil.Error:
            return False  # it ends just now


class LocalSwarm:
    """Context manager over nodes; leaving it kills those that still run.

    Args:
        count: nodes.
        arguments: of every ``p2pdrl node``.
        each: further arguments of single nodes, by number from 0.
        key: whether the swarm has a key.
    """

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        each: Mapping[int, Sequence[str]] | None = None,
        *,
        key: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="p2pdrl-bench-")
        self.root = Path(self._folder.name)
        self._arguments = list(arguments)
        if key:
            write_swarm_key(self.root / "key")
            self._arguments += ["--swarm-key-file", str(self.root / "key")]
        self._each = each or {}
        self.ports = free_ports(count)
        """Where the nodes listen, known before they start."""
        self._advertised: list[Address] = []
        self.nodes: list[Node] = []

    def advertise(self, addresses: Sequence[Address]) -> None:
        """Let the nodes, not started yet, tell these addresses (of proxies, say) instead of their own."""
        self._advertised = list(addresses)

    def __enter__(self) -> Self:
        for number, port in enumerate(self.ports):
            extra = list(self._each.get(number, ()))
            if self._advertised:
                extra += ["--advertise", str(self._advertised[number])]
            self.nodes.append(self._start(f"node-{number + 1}", port, tuple(extra)))
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.alive:
                node.process.send_signal(signal.SIGKILL)
            node.process.wait(20)
        self._folder.cleanup()

    def _start(self, name: str, port: int, extra: tuple[str, ...]) -> Node:
        address, folder = Address("127.0.0.1", port), self.root / name
        command = [sys.executable, "-m", "p2pdrl", "node", "--name", name, "--listen", str(address)]
        command += ["--data-dir", str(folder), "--parent-pid", str(os.getpid()), *self._arguments, *extra]
        if self.nodes:
            others = [node for node in self.nodes if node.name != name and node.alive]
            for node in others[:3]:
                seed = self._advertised[self.nodes.index(node)] if self._advertised else node.address
                command += ["--peers", str(seed)]
        with (self.root / f"{name}.log").open("ab") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        return Node(name, address, folder, process, extra)

    @property
    def living(self) -> list[Node]:
        """Nodes whose process runs."""
        return [node for node in self.nodes if node.alive]

    def ready(self, timeout_s: float = 120.0) -> None:
        """Wait until all train and everybody sees everybody."""
        self.wait(
            lambda: all(
                (status := node.status()).get("state") == "training"
                and status["members"]["alive"] >= len(self.living)
                for node in self.living
            ),
            timeout_s,
            "all nodes train",
        )

    def wait(self, condition: Any, timeout_s: float, what: str) -> None:
        """Poll until ``condition()`` is true.

        Raises:
            SystemExit: it isn't in time; the tails of the logs are printed.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.2)
        for node in self.nodes:
            text = (self.root / f"{node.name}.log").read_text(errors="replace")
            print(f"--- {node.name}\n{text[-1500:]}", file=sys.stderr)
        raise SystemExit(f"after {timeout_s:g} s still not: {what}")

    def mode(self, mode: str, timeout_s: float = 30.0, **options: object) -> None:
        """Change the mode of the whole swarm and wait until all follow."""
        words = [f"--set={key}={value}" for key, value in options.items()]
        node = self.living[0]
        command = [sys.executable, "-m", "p2pdrl", "mode", "set", mode, "--api", str(node.address)]
        command += ["--data-dir", str(node.folder), "--wait", str(timeout_s), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"mode set {mode} {words}: {done.stderr.strip()[-800:]}")

    def get(self, path: str, node: Node | None = None, **query: object) -> Any:
        """Ask a node for a document."""
        client = (node or self.living[0]).client
        return client.get(path + (f"?{urlencode(query)}" if query else ""))

    def snapshot(self) -> Snapshot:
        """Figures of all living nodes now."""
        found = {node.name: (node.status(), node.cpu_s()) for node in self.living}

        def column(key: str) -> dict[str, float]:
            return {name: float(status.get(key) or 0) for name, (status, _) in found.items() if status}

        return Snapshot(
            time.monotonic(),
            column("env_steps"),
            column("updates"),
            {name: cpu_s for name, (status, cpu_s) in found.items() if status},
            column("bytes_out"),
            column("bytes_in"),
        )

    def kill(self, number: int) -> None:
        """Kill a node as a power cut does."""
        self.nodes[number].process.send_signal(signal.SIGKILL)
        self.nodes[number].process.wait(20)

    def restart(self, number: int) -> None:
        """Start a killed node again on its data folder."""
        node = self.nodes[number]
        self.nodes[number] = self._start(node.name, node.address.port, node.extra)


class Meter:
    """What nodes used and made since the meter began, through deaths and new starts.

    Args:
        swarm: whose nodes.
    """

    def __init__(self, swarm: LocalSwarm) -> None:
        self._swarm = swarm
        self.totals: dict[str, dict[str, float]] = {key: {} for key in ("env_steps", "cpu_s", "bytes_out")}
        """Since the beginning, by figure and node."""
        self._last = self._read()
        self.began_s = time.monotonic()

    def _read(self) -> dict[str, dict[str, float]]:
        snapshot = self._swarm.snapshot()
        return {key: getattr(snapshot, key) for key in self.totals}

    def sample(self) -> dict[str, Any]:
        """One point of the course."""
        now = self._read()
        for key, values in now.items():
            for name, value in values.items():
                last = self._last[key].get(name, 0.0)
                # A figure that fell is of a new process, and all of it is new.
                more = value - last if value >= last else value
                if key == "env_steps":  # goes on from the checkpoint: what was lost is made again
                    more = max(value - last, 0.0)
                self.totals[key][name] = self.totals[key].get(name, 0.0) + more
                self._last[key][name] = value
        return {
            "seconds": time.monotonic() - self.began_s,
            "mean_return": self._mean_return(),
            "cpu_s": sum(self.totals["cpu_s"].values()),
            "bytes": sum(self.totals["bytes_out"].values()),
            "env_steps": sum(self.totals["env_steps"].values()),
        }

    def _mean_return(self) -> float | None:
        """Mean over living nodes of their mean returns."""
        found = [status.get("mean_return") for status in (node.status() for node in self._swarm.living)]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else None


def processors_busy() -> float:
    """Share of time for which the processors that we may run on were busy since the last call."""
    shares = psutil.cpu_percent(percpu=True)
    return statistics.fmean(shares[number] for number in os.sched_getaffinity(0)) / 100
