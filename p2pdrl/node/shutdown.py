"""Leaves the swarm in good order and in good time: each step has its share of the ten seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from p2pdrl.node.events import EventLog
from p2pdrl.node.parts import NodeParts
from p2pdrl.node.status.meters import write_summary
from p2pdrl.node.status.reporter import StatusReporter

__all__ = ["WITHIN_S", "shutdown"]

WITHIN_S = 10.0
"""A node that was asked to leave is gone after this, whatever hangs."""
TRAINING_S = 5.0
CHECKPOINT_S = 2.0
FIGURES_S = 1.0
SUMMARY_S = 0.5
GOODBYE_S = 1.0


async def shutdown(parts: NodeParts, figures: StatusReporter, reason: str) -> None:
    """Finish the exchange in flight, stop the learner, save, tell the last figures, say goodbye.

    Args:
        parts: the node.
        figures: its figures.
        reason: why it leaves, in plain words.
    """
    events, training, saving = parts.events, parts.training, parts.saving
    events.emit("leaving", f"leaves: {reason}")
    parts.state = "stopping"
    if training is not None:
        await _within(TRAINING_S, training.stop(), "stopping the learner", events)
        if saving is not None and training.ready:
            await _within(CHECKPOINT_S, saving.try_save(), "the last checkpoint", events)
    await _within(FIGURES_S, _tell_figures(parts), "telling the last figures", events)
    await _within(SUMMARY_S, write_summary(parts, figures, parts.halted or reason), "the summary", events)
    heard = await parts.membership.leave(timeout_s=GOODBYE_S)
    parts.state = "stopped"
    events.emit("left", f"left; {heard} members heard the goodbye")


async def _tell_figures(parts: NodeParts) -> None:
    gossip = parts.gossip
    if gossip is None:
        return
    gossip.refresh()
    alive = parts.alive()
    await asyncio.gather(*(gossip.tell(peer, alive[peer]) for peer in sorted(alive)[:2]))


async def _within(seconds: float, step: Awaitable[object], what: str, events: EventLog) -> None:
    try:
        async with asyncio.timeout(seconds):
            await step
    except TimeoutError:
        events.emit("slow-shutdown", f"{what} took over {seconds:g} s; goes on without", level="warning")
