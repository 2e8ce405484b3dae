"""Where the processes of a torch.distributed group meet, and how they find each other. Imports torch.

They meet at a `TCPStore` that the first of them opens on a free port of the address which the others reach it
at. What torch opens afterwards has neither keys nor encryption: groups are for networks that are trusted.

What is on the CPU travels over gloo, what is on a GPU over NCCL, which wants one of its own for each process.
A process is in one group at a time. One that failed is left, and then another one joined.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it lists no exports

from p2pdrl.workers.pipeline.measure import identity

__all__ = [
    "abort_group",
    "bounded",
    "connect_store",
    "cuda_device",
    "cut_connections",
    "join",
    "leave",
    "local_address",
    "open_store",
    "wait_for_all",
]

_INTERFACES = tuple(name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ)
"""Set by us; what a person has set stays."""
_ANY = "0.0.0.0"  # noqa: S104 - only where members reach us at several addresses; see `_bind_address`
_NO_DEVICE = "cpu"
POLL_S = 0.02
_UNUSED_TAG = 4711


def open_store(others: Sequence[str], timeout_s: float) -> tuple[TCPStore, int]:
    """Open a store that ``others`` reach, and return it with its port. It lasts as long as the object.

    Raises:
        OSError: no such address, no free port.
        RuntimeError: torch says no.
    """
    address = _bind_address(others)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=128)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        "127.0.0.1" if address == _ANY else address,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store that the first one opened.

    Raises:
        RuntimeError: there is none, or it doesn't answer in time.
    """
    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


@contextlib.contextmanager
def bounded(port: int, timeout_s: float) -> Iterator[None]:
    """Bound all waits for the store in here: by itself torch waits forever for a frozen process.

    After ``timeout_s`` the connections to the store, at ``port`` of another process, are cut off.
    """
    timer = threading.Timer(timeout_s, cut_connections, [port])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def wait_for_all(
    store: TCPStore,
    rank: int,
    size: int,
    *,
    within_s: float,
    bound: Callable[[], contextlib.AbstractContextManager[None]],
    wanted: Callable[[], bool],
) -> bool:
    """Wait until all have come to the store; return whether they have, ``within_s``.

    ``bound`` bounds each question to the store (`bounded`), whose host is to answer at once. The wait ends
    once this process is ``wanted`` elsewhere.

    Raises:
        RuntimeError: the store is gone.
    """
    until_s = time.monotonic() + within_s
    everybody = [f"here/{other}" for other in range(size)]
    with bound():
        store.set(everybody[rank], "")
    while True:
        with bound():
            if store.check(everybody):
                return True
        if wanted() or time.monotonic() >= until_s:
            return False
        time.sleep(POLL_S)


def join(
    store: TCPStore, rank: int, size: int, *, host: str, timeout_s: float, device: torch.device | None
) -> bool:
    """Meet the others in a group, which is this process' default one from then on.

    ``host`` is the store's; for rank 0, which opened it, that of any other. ``timeout_s`` bounds this and
    each operation of the group.

    Returns:
        Whether what is on CUDA devices can travel: everybody has one of its own.

    Raises:
        OSError: no such address.
        RuntimeError: they didn't come in time, or one is gone.
    """
    _use_interface_towards(host)
    own = _NO_DEVICE if device is None or not dist.is_nccl_available() else identity(device)
    store.set(f"device/{rank}", own)
    devices = set(store.multi_get([f"device/{other}" for other in range(size)]))
    nccl = _NO_DEVICE.encode() not in devices and len(devices) == size
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return nccl


def abort_group() -> bool:
    """Break the group, if there is one: all its waits end at once, here and at the others. From any thread.

    NCCL can be told to. gloo can't, but closes all connections when a wait takes too long.
    """
    world = dist.group.WORLD
    if world is None:
        return False
    if dist.get_world_size() == 1:
        return True
    with contextlib.suppress(RuntimeError):
        world.abort()
    other = (dist.get_rank() + 1) % dist.get_world_size()
    with contextlib.suppress(RuntimeError):  # its purpose
        never = dist.irecv(torch.zeros(1), other, tag=_UNUSED_TAG)
        if never is not None:
            never.wait(timedelta(milliseconds=1))
    return True


def leave() -> None:
    """Leave the group, if there is one; calling it again does nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


def cuda_device(name: str) -> torch.device | None:
    """The CUDA device that ``name`` (of ``node.learner.device``) means here; None for another kind."""
    if (name != "auto" and not name.startswith("cuda")) or not torch.cuda.is_available():
        return None
    device = torch.device("cuda" if name == "auto" else name)
    torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def local_address(peer: str) -> str:
    """The address from which this machine reaches ``peer``; sends nothing.

    Raises:
        OSError: unknown, or unreachable.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _bind_address(others: Sequence[str]) -> str:
    """Where to listen: the one address that all others reach us at, or all where they are several."""
    addresses = {local_address(other) for other in others}
    return addresses.pop() if len(addresses) == 1 else _ANY


def _use_interface_towards(peer: str) -> None:
    """Let gloo and NCCL listen where the swarm does: by themselves they take what the host's name means."""
    local = local_address(peer)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == local for address in addresses):
            for name in _INTERFACES:
                os.environ[name] = interface
            return


def cut_connections(port: int) -> None:
    """End this process' connections to a store, and so all waits for it. From any thread."""
    for connection in psutil.Process().net_connections("tcp"):
        if getattr(connection.raddr, "port", None) == port and connection.fd >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
