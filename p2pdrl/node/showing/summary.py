"""The account of a whole run that a node leaves in its data folder as it ends: ``summary.json``.

Modes in their order, what each strategy cost and brought, steps and return. Each run replaces the last
one's; ``boot`` and ``status.pid`` tell whose it is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from p2pdrl.node.parts import Parts
from p2pdrl.node.showing.figures import Figures
from p2pdrl.node.states.atomic import storage_error, write_atomic

__all__ = ["NAME", "summary", "write_summary"]

NAME = "summary.json"


def summary(parts: Parts, figures: Figures, reason: str) -> dict[str, object]:
    """The document, as JSON types.

    Args:
        parts: the node.
        figures: its figures.
        reason: why it ended.
    """
    status = figures.status()
    ended = parts.clock.wall()
    training = parts.training
    return {
        "name": parts.name,
        "id": parts.node_id,
        "boot": parts.boot,
        "began": ended - (parts.clock.monotonic() - parts.began_s),
        "ended": ended,
        "reason": reason,
        "env_steps": status["env_steps"],
        "swarm_env_steps": status["swarm_env_steps"],
        "updates": status["updates"],
        "episodes": status["episodes"],
        "mean_return": status["mean_return"],
        "modes": [] if training is None else training.accounting.walk(),
        "accounting": status["accounting"],
        "exchanges": status["exchanges"],
        "status": status,
    }


async def write_summary(parts: Parts, figures: Figures, reason: str) -> None:
    """Write it; a disk that doesn't take it is told and does no other harm."""
    path = Path(parts.data_dir) / NAME
    content = msgspec.json.format(msgspec.json.encode(summary(parts, figures, reason)), indent=2) + b"\n"
    try:
        await asyncio.to_thread(write_atomic, path, content)
    except OSError as error:
        told = storage_error("write the summary", path, error)
        parts.events.emit("summary-failed", str(told), level="warning")
