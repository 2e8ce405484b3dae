"""How much memory a stage may take on this machine."""

from __future__ import annotations

import psutil

__all__ = ["usable_bytes"]

PART = 0.8
"""Of what is available; the rest is for what nobody has counted, and for other processes."""


def usable_bytes(device: str) -> int:
    """Return the bytes that a stage may take on a device now; 0 where nobody knows, which is no limit.

    Nodes that share a machine see the same bytes, each of them all.

    Args:
        device: where the learner computes, as torch writes it.
    """
    if device != "cpu":
        return 0
    return int(PART * psutil.virtual_memory().available)
