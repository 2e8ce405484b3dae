"""Tie a child's life to its parent's: a daemon that dies takes its children with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies.

    Elsewhere the closed socket pair is what ends the child. The parent may have died before
    the call; ``parent_pid`` tells.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
