"""Names of the pipelines' schedules, for those who need no more of the configuration."""

from __future__ import annotations

from typing import Literal

__all__ = ["ScheduleName"]

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
