"""Bytes of a vector on the wire."""

from __future__ import annotations

from p2pdrl.config.strategy import Compression
from p2pdrl.tensors.positions import encoded_nbytes

__all__ = ["dense_nbytes", "payload_nbytes", "sparse_nbytes"]

INT8_ROW = 1024
"""Elements that share one float32 scale, about."""
HEAD_BYTES = 8.0
"""Before the positions of a sparse message."""


def dense_nbytes(size: int, compression: Compression) -> float:
    """What an average or a copy of parameters takes: float32 with ``none``, else bf16."""
    return (4.0 if compression == "none" else 2.0) * size


def sparse_nbytes(size: int, moved: float) -> float:
    """A message of ±τ about ``moved`` of ``size`` entries."""
    count = max(1, round(moved * size))
    return HEAD_BYTES + encoded_nbytes(count, size) + -(-count // 8)


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
        count = max(1, round(keep * size))
        return HEAD_BYTES + encoded_nbytes(count, size) + 2.0 * count
    if compression == "threshold":
        return sparse_nbytes(size, moved)
    return dense_nbytes(size, compression)
