"""How much memory a stage may take on this machine."""

from __future__ import annotations

import psutil

__all__ = ["usable_bytes"]

PART = 0.8
"""Of what is available; the rest is for what nobody has counted, and for other processes."""
HOST = "cpu"


def usable_bytes(device: str, on_gpu: int = 0) -> int:
    """Return the bytes that a stage may take on a device now; 0 where nobody knows, which is no limit.

    Nodes that share a machine or a GPU see the same bytes, each of them all.

    Args:
        device: where the learner computes, as torch writes it.
        on_gpu: what it said of its GPU's memory when it was asked last, in bytes; 0 where it knows nothing.
    """
    available = psutil.virtual_memory().available if device == HOST else on_gpu
    return int(PART * available)
