"""Machines on a network whose every packet can be delayed, lost or cut, for real nodes. Wants root.

Each machine is a network namespace of Linux with one interface, a TUN device, whose packets this process
passes on. So TCP meets what it meets on bad links (retransmission, silence, a path that works one way only),
which a proxy before a listener can't show; and no module of the kernel for it is needed (``netem`` isn't in
every one)::

    with PacketNetwork(2) as network:
        subprocess.Popen([*network.prefix(0), "p2pdrl", "node", "--listen", f"{network.host(0)}:7700", …])
        network.link(0, 1).loss = 0.2            # from 0 to 1; the way back is whole
        network.link(0, 1).delay_s = (0.05, 0.15)
        network.part([0], [1])
        network.mend()

`enter` moves the calling thread to a machine, so that it can talk to who listens there.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import ipaddress
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = ["Link", "PacketNetwork"]

_NETWORK = ipaddress.IPv4Network("10.77.0.0/24")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LARGEST_PACKET = 65_535
_QUEUE_PACKETS = 20_000
"""What is under way at most; more is lost, as in any network."""
_IPV4 = 4


@dataclass
class Link:
    """The way from one machine to another; may be changed at any time.

    Attributes:
        cut: nothing arrives.
        loss: share of packets that don't arrive.
        delay_s: least and greatest time of the way; order is kept.
        packets: that came to it.
        lost: of these, those that didn't arrive.
    """

    cut: bool = False
    loss: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    packets: int = 0
    lost: int = 0
    busy_until_s: float = 0.0


class PacketNetwork:
    """A context manager over ``count`` machines with addresses of their own.

    Args:
        count: machines, 250 at most.
        seed: of losses and delays.

    Raises:
        OSError: on entering, when this machine lets us make no namespaces or TUN devices (see `missing`).
    """

    def __init__(self, count: int, *, seed: int = 0) -> None:
        self.count = count
        self._rng = random.Random(seed)
        self._names = [f"p2p{os.getpid()}m{number}" for number in range(count)]
        self._links = {(a, b): Link() for a in range(count) for b in range(count) if a != b}
        self._devices: list[int] = []
        self._made: list[str] = []
        self._due: list[tuple[float, int, int, bytes]] = []
        self._serial = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="packets", daemon=True)

    @staticmethod
    def missing() -> str:
        """Why there can be no such network here; empty when there can."""
        if not sys.platform.startswith("linux"):
            return "network namespaces are Linux'"
        if os.geteuid() != 0:
            return "network namespaces want root"
        if shutil.which("ip") is None:
            return "there is no `ip` command (iproute2)"
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            return "there is no /dev/net/tun"
        return ""

    def __enter__(self) -> Self:
        try:
            for number in range(self.count):
                self._build(number)
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(5)
        self._remove()

    # Machines

    def host(self, machine: int) -> str:
        """Its address."""
        return str(_NETWORK[machine + 1])

    def prefix(self, machine: int) -> list[str]:
        """What comes before a command that is to run there; the process is the command's own."""
        return ["ip", "netns", "exec", self._names[machine]]

    def enter(self, machine: int) -> None:
        """Move the calling thread to a machine, for good: only threads of one's own should."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{self._names[machine]}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(descriptor)

    def _build(self, number: int) -> None:
        name = self._names[number]
        _ip("netns", "add", name)
        self._made.append(name)
        found: list[int | OSError] = []

        def open_device() -> None:
            try:
                self.enter(number)
                found.append(_tun("eth0"))
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=open_device)
        thread.start()
        thread.join()
        if isinstance(found[0], OSError):
            raise found[0]
        self._devices.append(found[0])
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{self.host(number)}/{_NETWORK.prefixlen}", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up", "txqueuelen", "2000")

    def _remove(self) -> None:
        for device in self._devices:
            os.close(device)
        self._devices.clear()
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # noqa: S603, S607
        self._made.clear()

    # Faults

    def link(self, source: int, target: int) -> Link:
        """The way from one machine to another."""
        return self._links[source, target]

    def each_link(self, change: Callable[[Link], None]) -> None:
        """Change all links alike."""
        for link in self._links.values():
            change(link)

    def part(self, *sides: Iterable[int]) -> None:
        """Cut every link between machines of different sides, both ways."""
        of = {machine: side for side, machines in enumerate(sides) for machine in machines}
        for (source, target), link in self._links.items():
            if source in of and target in of:
                link.cut = of[source] != of[target]

    def mend(self) -> None:
        """End all cuts, losses and delays."""
        for link in self._links.values():
            link.cut, link.loss, link.delay_s = False, 0.0, (0.0, 0.0)

    # Packets

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, device in enumerate(self._devices):
                selector.register(device, selectors.EVENT_READ, number)
            while not self._over.is_set():
                wait_s = 0.2 if not self._due else min(0.2, max(0.0, self._due[0][0] - time.monotonic()))
                for key, _ in selector.select(wait_s):
                    self._read(key.data)
                self._deliver(time.monotonic())

    def _read(self, source: int) -> None:
        for _ in range(64):  # the others' turn comes, too
            try:
                packet = os.read(self._devices[source], _LARGEST_PACKET)
            except BlockingIOError:
                return
            except OSError:
                return  # the device is down
            if len(packet) < 20 or packet[0] >> 4 != _IPV4:
                continue  # neighbours are looked for by IPv6 even where nobody speaks it
            target = packet[19] - 1
            link = self._links.get((source, target))
            if packet[16:19] != _NETWORK.network_address.packed[:3] or link is None:
                continue
            link.packets += 1
            if link.cut or len(self._due) >= _QUEUE_PACKETS or self._rng.random() < link.loss:
                link.lost += 1
                continue
            now_s = time.monotonic()
            due_s = max(link.busy_until_s, now_s + self._rng.uniform(*link.delay_s))
            link.busy_until_s = due_s
            if due_s <= now_s:
                self._write(target, packet)
                continue
            self._serial += 1
            heapq.heappush(self._due, (due_s, self._serial, target, packet))

    def _deliver(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self._due)
            self._write(target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._devices[target], packet)
        except OSError:
            pass  # its queue is full, or it is down: a lost packet


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)  # noqa: S603, S607
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}`: {done.stderr.strip()}")


def _tun(name: str) -> int:
    """Open a TUN device of the calling thread's namespace."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
