"""What a strategy needs of the process in which torch.distributed runs; the node has one to offer.

Strategies import neither the node nor torch. See `torch_averager` for the one who uses this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from p2pdrl.tensors.layout import Float32Array

__all__ = ["GroupProcess", "GroupRank", "Sum", "SumOrder"]


class GroupRank(NamedTuple):
    """One rank of a group of processes.

    Args:
        rank: 0 for the one that hosts.
        host: where the one that hosts is; for that one itself, where any other member is.
    """

    rank: int
    size: int
    host: str
    port: int


class SumOrder(NamedTuple):
    """What to average.

    Args:
        number: of the round; the same at all members.
        vector: ours, D float32; None for nothing.
        weight: how much it counts for; 0 exactly when there is no vector.
        learning_rate: at which this member would step.
        max_abs: greatest entry that we take.
        bf16: whether numbers travel as bfloat16; the same at all members.
        spread: whether the members' squared norms are wanted; the same at all members.
        left: gradients of this member's update that come after this one.
    """

    number: int
    vector: Float32Array | None
    weight: float
    policy_version: int
    learning_rate: float
    max_abs: float
    bf16: bool
    spread: bool
    left: int = 0


class Sum(NamedTuple):
    """What the members' vectors came to.

    Args:
        weights: of the members, by rank.
        versions: their policy versions.
        learning_rates: at which they would step.
        squares: their squared norms, where they were wanted.
        lefts: gradients of their updates that come after these.
        norm: of the mean.
        sound: whether all entries are finite and within the least of the members' bounds.
    """

    weights: tuple[float, ...]
    versions: tuple[int, ...]
    learning_rates: tuple[float, ...]
    squares: tuple[float, ...]
    lefts: tuple[int, ...]
    norm: float
    sound: bool


class GroupProcess(Protocol):
    """A child process of the node that averages with those of the other members.

    One thing at a time. What fails raises `WorkerError`; `join` begins anew after that, and after `leave`.
    """

    async def start(self, size: int, timeout_s: float) -> None:
        """Have a process made, in the background.

        Args:
            timeout_s: how long one operation waits for other members.

        Raises:
            ConfigError: there is no memory for it.
        """

    async def host(self, others: Sequence[str]) -> int:
        """Open a store where a new group meets; return its port.

        Args:
            others: hosts of the other members: it listens where they reach us, if that is one address.

        Raises:
            WorkerError: it can't.
        """

    async def join(self, place: GroupRank) -> str:
        """Meet the others; return what carries vectors (``gloo``, ``nccl``).

        Raises:
            WorkerError: they didn't come, or one is gone.
        """

    async def sum(self, order: SumOrder, out: Float32Array) -> Sum:
        """Average with the others; the mean is in ``out`` afterwards, the same bits at all members.

        Raises:
            WorkerError: one is gone, or late.
        """

    async def leave(self) -> None:
        """Have nothing more to do with that group; ends a process that still waits for somebody."""

    async def stop(self) -> None:
        """End all processes; calling it again does nothing."""
