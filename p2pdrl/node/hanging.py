"""Ends a learner that hangs, so that `supervisor` starts another from the board.

Learners bound their waits; libraries don't all: torch.distributed waits without end for a process that froze
while a group met. Only a learner that was ordered to be a stage, and hasn't said a word since, is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from p2pdrl.node.events import EventLog

__all__ = ["HANGS_S", "kill_if_it_hangs"]

HANGS_S = 75.0
"""After so long. To import torch and to meet takes far less; a first unroll of a slow environment may not."""


async def kill_if_it_hangs(pid: int, silent_s: Callable[[], float], events: EventLog) -> None:
    """Watch a learner until it hangs, and kill it then; cancelled when it ends before.

    Args:
        pid: of the process.
        silent_s: seconds since it was given an order that it hasn't answered, or since it said anything after
            that; 0 without such an order.
        events: where it is told.
    """
    while (silent := silent_s()) < HANGS_S:  # noqa: ASYNC110 - nothing tells of silence
        await asyncio.sleep(HANGS_S / 4)
    text = f"the learner was to be a stage and has said nothing for {silent:.0f} s; it is killed"
    events.emit("learner-hangs", text, level="warning")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
