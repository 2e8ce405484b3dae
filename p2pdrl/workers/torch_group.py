"""One member of a torch.distributed group: meet the others, average, leave. Imports torch.

Members find each other as `torch_meeting` says. Headers (round, weight, …) travel over gloo. Vectors travel
over NCCL where each member has a CUDA device of its own, else over gloo, too.

gloo's and NCCL's all-reduce add each piece of the vector up in one place and hand out copies of the sum, so
all members get the same bits (Patarasu and Yuan 2009).

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it lists no exports

from p2pdrl.errors import WorkerError
from p2pdrl.workers.group_protocol import Host, Hosting, Join, Joined, Reduce, Reduced, Row
from p2pdrl.workers.torch_meeting import find_store, join, leave, open_store

__all__ = ["TorchGroup"]

_NORM_SPAN = 1 << 18
"""Entries that are added up at once: in float64 a vector beyond the cache takes torch ten times as long."""


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
        self._store, port = open_store(order.others, order.timeout_s)
        return Hosting(port)

    def join(self, order: Join) -> Joined:
        """Meet the others; gives up after the order's timeout.

        Raises:
            OSError: no such address.
            RuntimeError: they didn't come in time, or one is gone.
            WorkerError: we are to host the group and have no store.
        """
        if order.rank > 0:
            self.leave()
            self._store = find_store(order.host, order.port, order.timeout_s)
        if self._store is None:
            raise WorkerError("the first member opens the store before it joins")
        self._nccl = join(
            self._store,
            order.rank,
            order.size,
            host=order.host,
            timeout_s=order.timeout_s,
            device=self._device,
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
            norm=_norm(result),
            sound=-bound <= float(least) and float(most) <= bound,
        )

    def leave(self) -> None:
        """Leave the group, if there is one; calling it again does nothing."""
        self._size = 0
        leave()
        self._store = None

    def _gather(self, order: Reduce) -> list[list[float]]:
        """Everybody's round, weight, policy version, squared norm, bound, learning rate and ``left``."""
        square = 0.0
        if order.spread and order.weight:
            square = _norm(self._own) ** 2
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


def _norm(vector: Tensor) -> float:
    """‖vector‖, added up in float64."""
    spans = torch.split(vector, _NORM_SPAN)
    return float(torch.stack([torch.linalg.vector_norm(span, dtype=torch.float64) for span in spans]).norm())
