"""What this node's learner has moved by, and how much of it was told: the arithmetic of `strom`.

    own progress      u = now − expected            (whatever its optimizer is)
    residual          r ← r + u;  where |r| ≥ τ: send ±τ, r ← r ∓ τ
    a peer's message  delta: now ← now ± τ,  expected ← expected ± τ

``expected`` is kept in float64, so that what a learner's float32 additions round off counts as own progress:
it is told to all, and replicas don't drift apart by rounding. Then ``now − r`` is the same at all nodes that
have the same messages, up to a rounding of now − r itself (2⁻²⁴ of each entry, not growing).

All methods are work for a thread, one at a time. Shapes: every vector is flat, of D elements.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.chunks import WALK, spans
from p2pdrl.tensors.compression_threshold import ThresholdResidual, add_message, entries_in
from p2pdrl.tensors.layout import Float32Array

__all__ = ["StromState"]


class StromState:
    """Own progress, residual and what was absorbed.

    Args:
        board: where the learner's vector is, and deltas go.
        size: D.
        tau: τ.
        max_abs: largest entry that may be.
        max_distance: largest ratio of a peer's norm to ours.
    """

    def __init__(
        self, board: DaemonBoard, size: int, tau: float, *, max_abs: float, max_distance: float
    ) -> None:
        self._board, self._max_abs, self._max_distance = board, max_abs, max_distance
        self._kept = ThresholdResidual(size, tau)
        self.tau = self._kept.tau
        self.max_nbytes = self._kept.max_nbytes
        self._message = memoryview(bytearray(self.max_nbytes))
        self._expected: npt.NDArray[np.float64] = np.zeros(size, np.float64)
        self._now: Float32Array = np.zeros(size, np.float32)
        self._work: Float32Array = np.zeros(size, np.float32)
        self._sets = -1
        self.replaced = 0
        """How often the learner's vector was replaced by somebody else."""
        self.residual_norm = 0.0
        self.entries = 0
        """Sent by the last `contribute`."""

    @property
    def residual(self) -> Float32Array:
        """The residual r."""
        return self._kept.residual

    def look(self) -> bool:
        """Count what the learner did since the last look into the residual.

        Returns:
            False when its vector was replaced: the residual is gone with the old one.

        Raises:
            PoisonedVectorError: its vector holds NaN, infinity or a huge entry.
        """
        sets = self._board.now(self._now).sets
        mix.check_finite(self._now, self._max_abs)
        if sets != self._sets:
            self._sets, self.replaced = sets, self.replaced + 1
            self._kept.reset()
            np.copyto(self._expected, self._now)
            return False
        residual = self._kept.residual
        for span in spans(self._now.size, WALK):
            progress = self._work[span]
            np.subtract(self._now[span], self._expected[span], out=progress, casting="same_kind")
            np.add(residual[span], progress, out=residual[span])
            np.copyto(self._expected[span], self._now[span])
        return True

    def contribute(self) -> tuple[bytes, bool]:
        """Take one τ off each entry that has grown to it.

        Returns:
            The message, empty when there is none; and whether entries of τ or more are left.
        """
        residual = self._kept.residual
        nbytes = self._kept.take(self._message)
        self.entries = entries_in(self._message)
        self.residual_norm = mix.norm(residual)
        more = max(float(residual.max()), -float(residual.min())) >= self.tau
        return (bytes(self._message[:nbytes]) if self.entries else b""), more

    def absorb(self, messages: Iterable[bytes], policy_version: int) -> bool:
        """Add peers' messages to the learner's vector.

        Returns:
            False when that vector was replaced meanwhile; nothing was added.

        Raises:
            WireError: one is malformed; nothing was added.
        """
        self._work.fill(0.0)
        for message in messages:
            add_message(memoryview(message), self.tau, self._work)
        return self._post(policy_version)

    def base(self) -> Float32Array:
        """Return now − r, after a `look`: a new vector."""
        return self._now - self._kept.residual

    def rebase(self, base: Float32Array, again: Iterable[bytes], policy_version: int) -> bool:
        """Move the learner to a peer's base, our own messages that it lacks, and our residual.

        Call `look` first, and `check` the base.

        Returns:
            False when the learner's vector was replaced meanwhile.
        """
        for message in again:
            add_message(memoryview(message), self.tau, base)
        np.subtract(base, self._now, out=self._work)
        np.add(self._work, self._kept.residual, out=self._work)
        return self._post(policy_version)

    def check(self, base: Float32Array) -> None:
        """Check a peer's base.

        Raises:
            PoisonedVectorError: it holds NaN, infinity, a huge entry, or its norm is out of proportion.
        """
        mix.check_finite(base, self._max_abs)
        theirs, bound = mix.norm(base), self._max_distance * (1.0 + mix.norm(self._now))
        if theirs > bound:
            raise PoisonedVectorError(f"norm {theirs:.3g} is beyond the bound {bound:.3g}")

    def fold(self) -> None:
        """Nobody is there to be told: what wasn't sent belongs to our base."""
        self._kept.reset()

    def _post(self, policy_version: int) -> bool:
        if not self._board.post_delta(self._work, policy_version, sets=self._sets):
            return False
        np.add(self._expected, self._work, out=self._expected)
        return True
