"""This node's parameters as an exchange sees them: read off the board, and moved by deltas.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import numpy as np

from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array

__all__ = ["OwnVector"]


class OwnVector:
    """A copy of what is on the board.

    Args:
        board: where the learner's vector is.
        size: D.
    """

    def __init__(self, board: DaemonBoard, size: int) -> None:
        self._board = board
        self._sets = board.sets
        self._followed = board.sets
        self.vector: Float32Array = np.zeros(size, np.float32)
        self.policy_version = 0

    def read(self) -> None:
        """Copy the vector as it is now.

        Raises:
            TensorError: there is none, or it can't be read now.
        """
        snapshot = self._board.now(self.vector)
        self._sets, self.policy_version = snapshot.sets, snapshot.policy_version

    def add(self, delta: Float32Array, policy_version: int) -> bool:
        """Move the learner's vector by ``delta``; False when it was replaced since `read`."""
        return self._board.post_delta(delta, policy_version, sets=self._sets)

    def replaced(self) -> bool:
        """Whether it was replaced by another since the last time this was asked."""
        before, self._followed = self._followed, self._board.sets
        return before != self._followed
