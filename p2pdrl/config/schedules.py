"""Names of the pipelines' schedules and bounds, for commands that plan and import no msgspec."""

from __future__ import annotations

from typing import Literal

__all__ = ["MAX_CHUNKS", "MAX_STAGES", "ScheduleName"]

MAX_STAGES = 64
"""Peers of one pipeline."""
MAX_CHUNKS = 8
"""Stages that each of them holds."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
