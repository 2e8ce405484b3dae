"""What a learner says of the GPU that it computes on, for `block_measuring`. Imports torch."""

from __future__ import annotations

import torch

__all__ = ["identity", "nccl_identity", "usable_bytes"]


def usable_bytes(device: torch.device, kept: float = 0.0) -> int:
    """Return the bytes of a device that a stage of this process may take.

    Those are the free ones, and what the process holds itself but for its copy of the parameters: torch keeps
    some to give out again, and in a pipeline's seat gradients and the optimizer's state are given up.

    Args:
        device: any; of others than CUDA devices nothing is known, which is 0.
        kept: bytes that stay what they are.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(free + torch.cuda.memory_reserved(device) - kept))


def identity(device: torch.device) -> str:
    """Return what a CUDA device is told from all others by, on whichever machine they are."""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_identity(device: torch.device) -> str:
    """Return the same where NCCL can move tensors from and to a device; empty where it can't."""
    if device.type != "cuda":
        return ""
    from torch import distributed

    return identity(device) if distributed.is_available() and distributed.is_nccl_available() else ""
