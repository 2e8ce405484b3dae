"""A learner's copy of the policy, and its way to and from the board.

The policy version is a Lamport count: it grows by one with each update that the learner makes by itself (one
`Trainer.step`, however many gradient steps that takes); a delta or a set carries its sender's, and of a
delta's and our own the greater stays. Where a server steps, only sets move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import WorkerError
from p2pdrl.tensors.board import LearnerBoard

if TYPE_CHECKING:
    from p2pdrl.rl.trainer import Trainer

__all__ = ["Replica"]

Vector = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


class Replica:
    """Parameters, optimizer state and policy version of one learner.

    Args:
        trainer: holds parameters and optimizer.
        board: the learner's end; None for a Hogwild worker, whose parameters are another learner's.
    """

    def __init__(self, trainer: Trainer, board: LearnerBoard | None) -> None:
        self.trainer = trainer
        self._board = board
        self._changed = True
        self._offloaded = False
        self._version = 0
        self.publications = 0
        """How often something new was published."""

    @property
    def version(self) -> int:
        """Of the policy; the trainer knows it, too."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = self.trainer.policy_version = version

    @property
    def taken_id(self) -> int:
        """Id of the last content that was taken from the board."""
        return 0 if self._board is None else self._board.taken_id

    def restore(self) -> None:
        """Load the state that was last published.

        Raises:
            WorkerError: there is none.
        """
        restored = None if self._board is None else self._board.restore()
        if restored is None:
            raise WorkerError("the board holds no readable state to restore")
        vector, sidecar, self.version = restored
        self.trainer.set_state(vector, sidecar, own=True)
        if sidecar is None:  # target networks aren't what they were for other parameters
            self.trainer.reset_targets()

    def take(self) -> bool:
        """Add the delta or load the set in the board's slot; return whether there was one."""
        taken = None if self._board is None else self._board.take()
        if taken is None:
            return False
        if taken.kind == "set":
            self.trainer.set_state(taken.vector, taken.sidecar)
            self.version = taken.policy_version
        else:
            self.trainer.add_delta(taken.vector)
            self.version = max(self.version, taken.policy_version)
        self._changed = True
        return True

    def become(self, vector_D: Vector, state: Mapping[str, Array], version: int, position: int) -> None:
        """Load what a pipeline computed.

        Args:
            vector_D: parameters.
            state: those arrays of the sidecar that it knows.
            version: of the policy.
            position: in the data.
        """
        self.trainer.set_state(vector_D, {**self.trainer.sidecar(), **state})
        self.trainer.position = position
        self.version = version
        self._changed = True

    def moved(self, *, versions: int) -> None:
        """Note that training changed the state, and by how many versions."""
        self.version += versions
        self._changed = True

    def publish(self, *, always: bool = False) -> None:
        """Copy parameters and sidecar to the board, if they changed since the last time."""
        if self._board is not None and (self._changed or always):
            self._board.publish(self.trainer.flat, self.trainer.sidecar(), self.version)
            self._changed = False
            self.publications += 1
            if self._offloaded:
                self._read_from_board()

    def offload(self) -> None:
        """Free the gradients and optimizer state while a pipeline holds them.

        Meanwhile the optimizer's state is only on the board, as it was published last; the board keeps that
        until the next one is complete.
        """
        self._offloaded = True
        self.trainer.offload()
        self._read_from_board()

    def reload(self) -> None:
        """Allocate gradients and optimizer state again."""
        self._offloaded = False
        self.trainer.reload()

    def _read_from_board(self) -> None:
        published = None if self._board is None else self._board.restore()
        if published is not None and published.sidecar is not None:
            self.trainer.offload_to(published.sidecar)
