"""How a learner works under a strategy: what it sends, whether it waits, who steps.

Each strategy's options say it (`strategy.StrategyOptions.learner_mode`), so that daemon and learner can't
disagree. The node sends the mode to its learner process; the strategy answers the learner's requests.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["FREE", "LearnerMode"]


class LearnerMode(msgspec.Struct, frozen=True):
    """What a learner does between two of its steps."""

    sends: Literal["nothing", "parameters", "gradients"] = "nothing"
    """``nothing``: it publishes, and takes what comes; ``parameters``: every ``every`` updates it says that
    it is ready and waits; ``gradients``: each gradient goes out before (or instead of) a step."""
    every: int = 1
    """Updates (``parameters``) or gradients (``gradients``, whose sum is sent) to one request."""
    ahead: int = 0
    """Requests that may be unanswered while the learner goes on; 0 waits for the answer to each."""
    steps: bool = True
    """Whether the learner's own optimizer steps; else parameters come back as a set."""
    clip: Literal["before", "after"] = "after"
    """Whether a gradient's norm is clipped before it is sent, or after the answer was merged."""
    learners: int = 1
    """Processes that share one vector."""
    shared_statistics: bool = False
    """Whether they share their optimizers' state, too."""
    preempted: bool = False
    """Whether what it collects may be cut short because others wait for its next gradient."""
    stages: bool = False
    """Whether the learner trains as a stage of a pipeline only: it stands still until it is told which."""

    @property
    def slots(self) -> int:
        """Gradients that the shared ring holds."""
        return self.ahead + 1 if self.sends == "gradients" else 0


FREE = LearnerMode()
"""The learner trains by itself; deltas and sets come by the board."""
