"""Real nodes whose network, clocks, disks and processes a campaign breaks and mends; a thread watches each.

On Linux as root each node is a machine of a `PacketNetwork`; elsewhere all are on loopback, each behind a
`FaultProxy`, and what only packets can show can't be done (`FaultSwarm.no_packets` says why).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from p2pdrl.api.client import NodeClient
from p2pdrl.api.keyfile import write_swarm_key
from p2pdrl.errors import P2PDRLError
from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.testing.packet_network import PacketNetwork
from p2pdrl.transport.protocol import Address
from support.local_swarm import free_ports
from support.proxies import Proxies

__all__ = ["FaultSwarm", "Look", "Run", "Slot", "Usage"]

R = TypeVar("R")

POLL_S = 0.5
USAGE_EVERY_S = 5.0
DISK = "4m"
CLOCK = '''"""Moves this process' wall clock by the seconds that a file holds, as Python sees it."""

import mmap
import os
import struct
import time

with open(os.environ["P2PDRL_CHAOS_CLOCK"], "r+b") as _file:
    _room = mmap.mmap(_file.fileno(), 8)
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + struct.unpack("d", _room[:8])[0]
time.time_ns = lambda: _time_ns() + int(1e9 * struct.unpack("d", _room[:8])[0])
'''


@dataclass(frozen=True)
class Look:
    """What a node said at one moment.

    Attributes:
        at_s: monotonic time.
        status: the document of its status.
        peers: of its peers, by id.
    """

    at_s: float
    status: dict[str, Any]
    peers: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Usage:
    """What a daemon held of its machine at one moment."""

    at_s: float
    rss_bytes: int
    files: int
    sockets: int
    threads: int
    children: int
    tasks: float


@dataclass
class Run:
    """One process of a node, from its start to its end.

    Attributes:
        began_s: monotonic.
        trained_s: when it was first seen to train.
        ended_s: when it was gone, or told to be.
        id: of the node; empty until it is known.
        moves: times at which its count of updates was seen to have grown.
        told: environment steps that it was last seen to have made, over all its runs.
    """

    process: subprocess.Popen[bytes]
    began_s: float
    trained_s: float = math.inf
    ended_s: float = math.inf
    id: str = ""
    moves: list[float] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    told: int = 0
    updates: int = -1

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None


class Slot:
    """One place for a node: a machine with a data folder, on which nodes run one after the other.

    Args:
        number: from 0.
        folder: of everything that it writes.
        extra: arguments that only it gets.
    """

    def __init__(self, number: int, folder: Path, extra: Sequence[str]) -> None:
        self.number = number
        self.name = f"n{number}"
        self.extra = list(extra)
        self.root = folder
        self.data = folder / f"{self.name}-0"
        self.log = folder / f"{self.name}.log"
        self.runs: list[Run] = []
        self.look: Look | None = None
        self.own_clock: Path | None = None
        self.own_disk: Path | None = None
        self.has_actors = False

    @property
    def run(self) -> Run:
        """The newest process."""
        return self.runs[-1]

    @property
    def running(self) -> bool:
        """Whether a process is there."""
        return bool(self.runs) and self.run.running

    @property
    def status(self) -> dict[str, Any]:
        """What it said last; empty when that is long ago."""
        look = self.look
        return look.status if look is not None and time.monotonic() - look.at_s < 4 * POLL_S else {}

    def events(self, kinds: Iterable[str] = ()) -> list[dict[str, Any]]:
        """What is in its log, of some kinds, oldest first."""
        wanted = set(kinds)
        found = []
        for line in self.text().splitlines():
            if not line.startswith("{"):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("kind") in wanted or not wanted:
                found.append(event)
        return found

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """The daemon's children."""
        try:
            return psutil.Process(self.run.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def fresh(self) -> None:
        """Take another data folder: whoever starts next is a stranger."""
        self.data = self.data.with_name(f"{self.name}-{len(self.runs)}")


class FaultSwarm:
    """A context manager over slots; `start` puts a node on one.

    Args:
        count: slots.
        folder: an empty one.
        arguments: of every node.
        actors: numbers of slots whose nodes have an actor process.
        seed: of the network's losses and delays.
        proxies: True keeps away from namespaces even where there could be some.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        arguments: Sequence[str],
        *,
        actors: Sequence[int] = (),
        seed: int = 0,
        proxies: bool = False,
    ) -> None:
        self.folder = folder
        self.slots = [Slot(number, folder, []) for number in range(count)]
        for number in actors:
            self.slots[number].extra.append("--set=node.actors.count=1")
            self.slots[number].has_actors = True
        self._arguments = list(arguments)
        self._seed = seed
        self._stack = ExitStack()
        self._over = threading.Event()
        self.no_packets = "asked for proxies" if proxies else PacketNetwork.missing()
        self.network: PacketNetwork | None = None
        self.proxies: Proxies | None = None
        self.temporary = folder / "tmp"
        self._ports: list[int] = []
        self._watchers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self.temporary.mkdir(parents=True)
        write_swarm_key(self.folder / "key")
        if not self.no_packets:
            try:
                network = PacketNetwork(len(self.slots), seed=self._seed)
                self.network = self._stack.enter_context(network)
            except OSError as error:
                self.no_packets = str(error)
        if self.network is None:
            self._ports = free_ports(len(self.slots))
            targets = [Address("127.0.0.1", port) for port in self._ports]
            self.proxies = self._stack.enter_context(Proxies(targets))
        for slot in self.slots:
            thread = threading.Thread(
                target=self._watch, args=(slot,), name=f"watch {slot.name}", daemon=True
            )
            self._watchers.append(thread)
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._watchers:
            thread.join(10)
        for slot in self.slots:
            if slot.running:
                for process in (*slot.processes(), slot.run.process):
                    process.send_signal(signal.SIGKILL)
                slot.run.process.wait(10)
        self._stack.close()

    # Nodes

    def give_clock(self, number: int) -> None:
        """Let a slot's nodes have a wall clock that `set_clock` moves."""
        slot = self.slots[number]
        folder = self.folder / "clock"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(CLOCK)
        slot.own_clock = self.folder / f"{slot.name}.clock"
        slot.own_clock.write_bytes(struct.pack("d", 0.0))

    def give_disk(self, number: int) -> str:
        """Let a slot's nodes have a small disk of their own; return why not, empty when it worked."""
        if os.geteuid() != 0 or shutil.which("mount") is None:
            return "mounting a small disk wants root"
        slot = self.slots[number]
        disk = self.folder / f"{slot.name}-disk"
        disk.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(disk)]
        if subprocess.run(words, check=False, capture_output=True).returncode:
            return "this machine lets nobody mount a tmpfs"
        self._stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        slot.own_disk = disk
        slot.data = disk / slot.data.name
        return ""

    def address(self, number: int) -> str:
        """Where others reach a slot's node."""
        if self.network is not None:
            return f"{self.network.host(number)}:7700"
        if self.proxies is None:
            raise RuntimeError("the swarm wasn't entered")
        return str(self.proxies.addresses[number])

    def start(self, number: int, peers: Sequence[int] = ()) -> None:
        """Start a node, with these slots' addresses to join through."""
        slot = self.slots[number]
        command = [sys.executable, "-m", "p2pdrl", "node", "--name", slot.name, "--data-dir", str(slot.data)]
        if self.network is not None:
            command = [*self.network.prefix(number), *command]
            command += ["--listen", "0.0.0.0:7700", "--advertise", self.address(number)]
        else:
            command += ["--listen", f"127.0.0.1:{self._ports[number]}", "--advertise", self.address(number)]
        command += ["--swarm-key-file", str(self.folder / "key"), "--parent-pid", str(os.getpid())]
        for peer in peers:
            command += ["--peers", self.address(peer)]
        environment = os.environ | {"TMPDIR": str(self.temporary)}
        if slot.own_clock is not None:
            path = os.pathsep.join(filter(None, [str(self.folder / "clock"), os.environ.get("PYTHONPATH")]))
            environment |= {"PYTHONPATH": path, "P2PDRL_CHAOS_CLOCK": str(slot.own_clock)}
        with slot.log.open("ab") as out:
            process = subprocess.Popen(
                [*command, *self._arguments, *slot.extra],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
            )
        slot.look = None
        slot.runs.append(Run(process, time.monotonic()))

    def on(self, number: int, do: Callable[[NodeClient], R]) -> R:
        """Do something with the client of a slot's node, where that can be reached."""

        def there() -> R:
            if self.network is not None:
                self.network.enter(number)
            return do(self._client(number))

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(there).result()

    def _client(self, number: int) -> NodeClient:
        port = 7700 if self.network is not None else self._ports[number]
        return NodeClient(Address("127.0.0.1", port), data_dir=str(self.slots[number].data), timeout_s=5.0)

    # Faults

    def send(self, number: int, what: signal.Signals, *, children: bool = True) -> None:
        """Send a signal to a slot's daemon, and with ``children`` to those first."""
        slot = self.slots[number]
        for process in slot.processes() if children else ():
            try:
                process.send_signal(what)
            except psutil.Error:
                pass  # it ends just now
        if slot.running:
            slot.run.process.send_signal(what)

    def kill(self, number: int) -> None:
        """As kill -9 of the daemon; its children notice and end."""
        run = self.slots[number].run
        run.ended_s = time.monotonic()
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(20)

    def kill_child(self, number: int, role: str, how: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal to a slot's learner or actor; tell whether there was one."""
        for process in self.slots[number].processes():
            try:
                words = process.cmdline()
                if any(f"workers.{role}" in word or word == role for word in words):
                    process.send_signal(how)
                    return True
            except psutil.Error:
                continue
        return False

    def set_clock(self, number: int, offset_s: float) -> None:
        """Move a slot's wall clock to so much after the machine's."""
        clock = self.slots[number].own_clock
        if clock is None:
            raise RuntimeError(f"slot {number} has no clock of its own")
        with clock.open("r+b") as file:
            file.write(struct.pack("d", offset_s))

    def fill_disk(self, number: int) -> None:
        """Leave no room on a slot's disk."""
        disk = self.slots[number].own_disk
        if disk is None:
            raise RuntimeError(f"slot {number} has no disk of its own")
        with (disk / "filler").open("wb", buffering=0) as out:
            try:
                while True:
                    out.write(b"\0" * 4096)
            except OSError:
                return

    def empty_disk(self, number: int) -> None:
        """Make room again."""
        disk = self.slots[number].own_disk
        if disk is not None:
            (disk / "filler").unlink(missing_ok=True)

    def proxy(self, number: int, act: Callable[[FaultProxy], None]) -> None:
        """Change what stands before a slot's node."""
        if self.proxies is not None:
            self.proxies.do(act, number)

    def mend(self) -> None:
        """Make the network whole."""
        if self.network is not None:
            self.network.mend()
        if self.proxies is not None:

            def heal(proxy: FaultProxy) -> None:
                for flow in (proxy.up, proxy.down):
                    flow.delay_s = flow.jitter_s = 0.0
                proxy.heal()

            self.proxies.do(heal)

    # What is seen

    def _watch(self, slot: Slot) -> None:
        if self.network is not None:
            self.network.enter(slot.number)
        used_s = 0.0
        while not self._over.wait(POLL_S):
            if not slot.running:
                continue
            run, client = slot.run, self._client(slot.number)
            try:
                status = client.status()
                peers = {row["id"]: row for row in client.peers()}
            except P2PDRLError:
                continue
            now_s = time.monotonic()
            slot.look = Look(now_s, status, peers)
            run.id = status["id"]
            run.told = max(run.told, int(status["env_steps"] or 0))
            if status["state"] == "training" and run.trained_s == math.inf:
                run.trained_s = now_s
            if status["updates"] > run.updates:
                run.updates = status["updates"]
                run.moves.append(now_s)
            if now_s >= used_s + USAGE_EVERY_S:
                used_s = now_s
                self._use(run, client)

    def _use(self, run: Run, client: NodeClient) -> None:
        try:
            process = psutil.Process(run.process.pid)
            links = []
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                try:
                    links.append(str(entry.readlink()))
                except OSError:
                    continue  # closed just now
            sockets = sum(link.startswith("socket:") for link in links)
            run.usage.append(
                Usage(
                    time.monotonic(),
                    process.memory_info().rss,
                    len(links) - sockets,
                    sockets,
                    process.num_threads(),
                    len(process.children(recursive=True)),
                    _tasks(client),
                )
            )
        except (psutil.Error, OSError, P2PDRLError):
            pass  # it ends just now


def _tasks(client: NodeClient) -> float:
    """Tasks of its event loop, as its metrics tell."""
    for line in client.lines("/metrics", silence_s=5.0):
        if line.startswith(b"p2pdrl_tasks "):
            return float(line.split()[1])
    return math.nan
