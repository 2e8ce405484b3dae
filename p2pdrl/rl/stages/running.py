"""What computes one rank's part of a minibatch: ``runner`` by links, ``torch_runner`` by torch.distributed.

Sums, steps, slices and the order of minibatches go over links with either (``rank``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from p2pdrl.rl.gradients import Minibatch
from p2pdrl.rl.stages.messages import Opening
from p2pdrl.rl.stages.recorder import Recorder
from p2pdrl.rl.stages.rows import Slot

__all__ = ["Running"]


class Running(Protocol):
    """Computes the gradients of one share, minibatch by minibatch.

    Attributes:
        waited_s: seconds spent waiting for neighbours, since its rank set it to 0.
        ran_s: seconds that minibatches took, waiting included, since then.
        recorder: told of each action, with what it keeps. Its rank sets it.
    """

    waited_s: float
    ran_s: float
    recorder: Recorder

    def begin(self, opening: Opening, batches: Sequence[Minibatch] = ()) -> None:
        """Forget the minibatch before and prepare for another.

        Args:
            opening: says what it is like.
            batches: its microbatches, where this is the first rank.

        Raises:
            WireError: this is the last rank, and the opening doesn't say what its objective is.
        """
        ...

    def room(self, stage: int, microbatch: int) -> list[Slot]:
        """Return where the tensors go that come with the message which brings the opening.

        Args:
            stage: this rank's first.
            microbatch: 0.
        """
        ...

    def run(self) -> Tensor | None:
        """Do all that is to be done; the gradients are in the share then.

        Returns:
            The objective's terms, where this is the last rank.

        Raises:
            TransportError: a neighbour is gone, late or talks nonsense.
        """
        ...

    def forget(self) -> None:
        """Let go of all that a minibatch keeps, wherever it was broken off: no other follows."""
        ...
