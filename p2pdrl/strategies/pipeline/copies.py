"""How many bytes a copy of the whole state moves: slices come up the chain of ranks, the whole goes down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.order import StageOrder
from p2pdrl.tensors.board import BoardSpec

__all__ = ["Moved", "copy_bytes", "state_vectors"]


class Moved(NamedTuple):
    """What one rank sends and gets.

    Args:
        bytes_out: to both neighbours.
        bytes_in: from both.
    """

    bytes_out: int = 0
    bytes_in: int = 0


def state_vectors(spec: BoardSpec) -> int:
    """Return how many vectors as long as the parameters the state has: they and the optimizer's."""
    whole = (spec.layout.size,)
    return 1 + sum(item.name.startswith("optimizer.") and item.shape == whole for item in spec.sidecar.items)


def copy_bytes(order: StageOrder, layers: Sequence[Layer], vectors: int) -> Moved:
    """Return what one state copy moves at a rank; payload alone, headers aren't counted.

    Each rank sends its own slice up, and those from below behind it; the whole passes down from rank to rank.

    Args:
        order: of the rank.
        layers: all blocks.
        vectors: that the state has.
    """
    plan, rank = order.plan, order.rank
    slices = [
        vectors * sum(layers[number].parameter_bytes for number in plan.numbers(one))
        for one in range(plan.ranks)
    ]
    below, whole = sum(slices[rank + 1 :]), sum(slices)
    up = slices[rank] + below if rank > 0 else 0.0
    down_out, down_in = (whole if rank < plan.ranks - 1 else 0.0), (whole if rank > 0 else 0.0)
    return Moved(int(up + down_out), int(below + down_in))
