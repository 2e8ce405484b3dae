"""One member of a torch.distributed group: meet the others, average, leave. Imports torch.

The group meets at a `TCPStore` that the first member opens on a free port of the address which the others
reach it at. Headers (round, weight, …) travel over gloo. Vectors travel over NCCL where each member has a
CUDA device of its own, else over gloo, too.

gloo's and NCCL's all-reduce add each piece of the vector up in one place and hand out copies of the sum, so
all members get the same bits (Patarasu and Yuan 2009).

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it lists no exports

from p2pdrl.errors import WorkerError
from p2pdrl.workers.group_protocol import Host, Hosting, Join, Joined, Reduce, Reduced, Row

__all__ = ["TorchGroup", "cuda_device", "local_address"]

_INTERFACES = tuple(name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ)
"""Set by us; what a person has set stays."""
_ANY = "0.0.0.0"  # noqa: S104 - only where members reach us at several addresses; see `_bind_address`
_NO_DEVICE = "cpu"


class TorchGroup:
    """This process' place in a group, and the next one's, one after another.

    Args:
        own: D float32 of this member, shared with the daemon.
        result: D float32, where means go.
        device: CUDA device that vectors may travel from; None for none.
    """

    def __init__(self, own: Tensor, result: Tensor, device: torch.device | None) -> None:
        self._own, self._result, self._device = own, result, device
        self._store: TCPStore | None = None
        self._size = 0
        self._nccl = False

    def host(self, order: Host) -> Hosting:
        """Open a store.

        Raises:
            OSError: no such address, no free port.
            RuntimeError: torch says no.
        """
        self.leave()
        address = _bind_address(order.others)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            "127.0.0.1" if address == _ANY else address,
            port,
            None,
            True,
            timedelta(seconds=order.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return Hosting(port)

    def join(self, order: Join) -> Joined:
        """Meet the others; gives up after the order's timeout.

        Raises:
            OSError: no such address.
            RuntimeError: they didn't come in time, or one is gone.
            WorkerError: we are to host the group and have no store.
        """
        timeout = timedelta(seconds=order.timeout_s)
        if order.rank > 0:
            self.leave()
            self._store = TCPStore(
                order.host,
                order.port,
                None,
                False,
                timeout,
                wait_for_workers=False,
            )
        store = self._store
        if store is None:
            raise WorkerError("the first member opens the store before it joins")
        _use_interface_towards(order.host)
        self._nccl = self._all_have_devices(store, order)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._nccl else "gloo",
            store=store,
            rank=order.rank,
            world_size=order.size,
            timeout=timeout,
        )
        self._size = order.size
        return Joined("nccl" if self._nccl else "gloo")

    def reduce(self, order: Reduce) -> Reduced:
        """Average with all members.

        Raises:
            RuntimeError: one is gone or too late.
            WorkerError: one does another round.
        """
        if not self._size:
            raise WorkerError("a group is joined before it averages")
        rows = self._gather(order)
        if any(row[0] != order.number for row in rows):
            raise WorkerError(f"not all members do round {order.number}")
        total, bound = sum(row[1] for row in rows), min(row[4] for row in rows)
        result = self._result
        if order.weight:
            torch.mul(self._own, order.weight / total, out=result)
        else:
            result.zero_()
        if total:
            self._sum(torch.bfloat16 if order.bf16 else torch.float32)
        least, most = torch.aminmax(result)
        return Reduced(
            rows=tuple(Row(row[1], int(row[2]), row[5], row[3], int(row[6])) for row in rows),
            norm=float(torch.linalg.vector_norm(result, dtype=torch.float64)),
            sound=-bound <= float(least) and float(most) <= bound,
        )

    def leave(self) -> None:
        """Leave the group, if there is one; calling it again does nothing."""
        self._size = 0
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _gather(self, order: Reduce) -> list[list[float]]:
        """Everybody's round, weight, policy version, squared norm, bound, learning rate and ``left``."""
        square = 0.0
        if order.spread and order.weight:
            square = float(torch.linalg.vector_norm(self._own, dtype=torch.float64)) ** 2
        mine = [
            float(order.number),
            order.weight,
            float(order.policy_version),
            square,
            order.max_abs,
            order.learning_rate,
            float(order.left),
        ]
        rows = [torch.empty(len(mine), dtype=torch.float64) for _ in range(self._size)]
        dist.all_gather(rows, torch.tensor(mine, dtype=torch.float64))
        return [row.tolist() for row in rows]

    def _sum(self, dtype: torch.dtype) -> None:
        """Replace what is in the result by the sum of all members'."""
        device = self._device if self._nccl else None
        if device is None and dtype == torch.float32:
            dist.all_reduce(self._result)
            return
        travelling = self._result.to(device=device, dtype=dtype)
        dist.all_reduce(travelling)
        self._result.copy_(travelling)

    def _all_have_devices(self, store: TCPStore, order: Join) -> bool:
        """Whether NCCL can carry the vectors: it wants a GPU of its own for each member."""
        own = _NO_DEVICE if self._device is None or not dist.is_nccl_available() else _identity(self._device)
        store.set(f"device/{order.rank}", own)
        devices = [store.get(f"device/{rank}").decode() for rank in range(order.size)]
        return _NO_DEVICE not in devices and len(set(devices)) == order.size


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


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
