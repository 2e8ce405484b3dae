"""This node's own vector as its peers see it: read off the board, checked, rounded as the wire rounds it."""

from __future__ import annotations

import numpy as np

from p2pdrl.tensors.board import DaemonBoard, Snapshot
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import check_finite
from p2pdrl.tensors.wire import WireDtype, as_wire, encode_rounding_span

__all__ = ["read_now"]


def read_now(
    board: DaemonBoard,
    out: Float32Array,
    max_abs: float,
    wire: WireDtype = "float32",
    message: memoryview | None = None,
) -> Snapshot:
    """Write the vector as it is now, as the peer will see it, into ``out``.

    Args:
        out: D float32.
        max_abs: largest entry that peers accept.
        wire: number format that it is rounded to.
        message: what goes to the peer is written there; None where float32 goes straight from ``out``.

    Raises:
        PoisonedVectorError: it holds NaN, infinity or a huge entry; peers would strike us for it.
        TensorError: there is nothing to read.
    """
    target = None if message is None else as_wire(message, wire, out.size)

    def finish(span: slice) -> None:
        piece = out[span]
        if target is not None and wire == "bf16":
            encode_rounding_span(piece, target[span])
        elif target is not None:
            np.copyto(target[span], piece)
        check_finite(piece, max_abs)  # once rounded, for that is what peers check

    return board.now(out, finish)
