"""Bytes of a vector on the wire."""

from __future__ import annotations

from p2pdrl.config.strategy import Compression

__all__ = ["dense_nbytes", "payload_nbytes", "sparse_nbytes"]

INT8_ROW = 1024
"""Elements that share one float32 scale, about."""
POSITION_BYTES = 2.1
"""Of one entry of a threshold message at 1 %, its sign included; see `tensors.compression_threshold`."""


def dense_nbytes(size: int, compression: Compression) -> float:
    """What an average or a copy of parameters takes: float32 with ``none``, else bf16."""
    return (4.0 if compression == "none" else 2.0) * size


def sparse_nbytes(size: int, moved: float) -> float:
    """A message of ±τ about ``moved`` of ``size`` entries."""
    return 8.0 + POSITION_BYTES * max(1.0, moved * size)


def payload_nbytes(size: int, compression: Compression, *, keep: float, moved: float) -> float:
    """What a gradient or difference takes.

    Args:
        size: elements.
        compression: the strategy's.
        keep: share of the entries that ``topk`` sends.
        moved: share of the entries that ``threshold`` sends.
    """
    if compression == "int8":
        return size + 4.0 * -(-size // INT8_ROW)
    if compression == "topk":
        return 8.0 + (POSITION_BYTES + 2.0) * max(1.0, keep * size)
    if compression == "threshold":
        return sparse_nbytes(size, moved)
    return dense_nbytes(size, compression)
