"""The arithmetic of pushed parameters, on preallocated buffers; work for a thread, one piece at a time.

Shape suffixes: ``_D`` all parameters, flat.
"""

from __future__ import annotations

import numpy as np

from p2pdrl.strategies.pairwise.pair import Bounds, Step, pair_step
from p2pdrl.strategies.reading import read_now
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.wire import WireDtype, decode, encode, encoded_nbytes

__all__ = ["PushVectors"]


class PushVectors:
    """Reads our vector, writes it for the wire, moves it towards one that came.

    Args:
        board: where our vector is.
        size: D, float32 parameters.
        wire: number format.
        bounds: what is accepted of peers.
    """

    def __init__(self, board: DaemonBoard, size: int, wire: WireDtype, bounds: Bounds) -> None:
        self._board = board
        self._wire: WireDtype = wire
        self._bounds = bounds
        self._mine_D = np.zeros(size, np.float32)
        self._theirs_D = np.zeros(size, np.float32)
        self._sets = 0
        self._version = 0
        self.nbytes = encoded_nbytes(size, wire)

    @property
    def sets(self) -> int:
        """Sets on the board when it was last read."""
        return self._sets

    def read(self) -> None:
        """Take our vector off the board.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
            TensorError: it can't be read now.
        """
        snapshot = read_now(self._board, self._mine_D, self._bounds.max_abs)
        self._sets, self._version = snapshot.sets, snapshot.policy_version

    def pack(self, out: memoryview, ratio: float) -> None:
        """Write what was read for the wire.

        What the wire rounds off stays ours: x = w·z loses m·round(z), so that z moves by
        m / (w − m) · (z − round(z)).

        Args:
            out: of `nbytes`.
            ratio: m / (w − m); above 1 it would amplify the rounding, so no more than 1 is applied.

        Raises:
            PoisonedVectorError: rounded, it is beyond the bound: its peer would refuse it and strike us.
        """
        encode(self._mine_D, self._wire, out)
        if self._wire == "float32":
            return
        decode(out, self._wire, self._theirs_D)
        mix.check_finite(self._theirs_D, self._bounds.max_abs)
        mix.pair_delta(self._theirs_D, self._mine_D, min(ratio, 1.0), out=self._theirs_D)
        self._board.post_delta(self._theirs_D, self._version, sets=self._sets)

    def merge(self, message: memoryview, factor: float, policy_version: int) -> Step | None:
        """Move our vector, as it was read, by ``factor`` towards the one that came.

        Returns:
            What was done; None when our vector was replaced since it was read.

        Raises:
            PoisonedVectorError: what came is unusable.
            WireError: it is malformed.
        """
        decode(message, self._wire, self._theirs_D)
        step = pair_step(self._mine_D, self._theirs_D, factor, self._bounds)
        posted = self._board.post_delta(self._theirs_D, policy_version, sets=self._sets)
        return step if posted else None

    def regain(self, message: memoryview, factor: float) -> None:
        """Move our vector, as it was read, by ``factor`` towards what we sent in vain."""
        decode(message, self._wire, self._theirs_D)
        mix.pair_delta(self._mine_D, self._theirs_D, factor, out=self._theirs_D)
        self._board.post_delta(self._theirs_D, self._version, sets=self._sets)
