"""Numbers that change as training goes on: learning rates, exploration.

``algorithms`` read them before each update. Annealing follows the swarm's way towards its last environment
step; exploration follows the absolute number of steps that the swarm has made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LinearSchedule", "annealed"]


def annealed(start: float, how: Literal["none", "linear"], progress: float) -> float:
    """Return a number that stays, or falls to zero with the swarm's progress (0 … 1)."""
    return start * (1.0 - progress if how == "linear" else 1.0)


@dataclass(frozen=True)
class LinearSchedule:
    """A number that walks from one value to another within so many environment steps, and stays there.

    Attributes:
        start: at step 0.
        end: from ``steps`` on.
        steps: of the whole swarm.
    """

    start: float
    end: float
    steps: int

    def at(self, env_steps: int) -> float:
        """Return its value when the swarm has made ``env_steps``."""
        if env_steps >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * (max(env_steps, 0) / self.steps)
