"""What a learner says of the GPU that it computes on. Imports torch."""

from __future__ import annotations

import torch

__all__ = ["identity", "nccl_identity", "usable_bytes"]


def usable_bytes(device: torch.device) -> int:
    """Return the bytes of a device that this process may come to hold: free ones, and those it has already.

    The latter are the parameters, what the optimizer keeps, and what torch keeps to give out again: a stage
    that trains these parameters takes no others for them.

    Args:
        device: any; of others than CUDA devices nothing is known, which is 0.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device))


def identity(device: torch.device) -> str:
    """Return what a CUDA device is told from all others by, on whichever machine they are."""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_identity(device: torch.device) -> str:
    """Return the same where NCCL can move tensors from and to a device; empty where it can't."""
    if device.type != "cuda":
        return ""
    from torch import distributed

    return identity(device) if distributed.is_available() and distributed.is_nccl_available() else ""
