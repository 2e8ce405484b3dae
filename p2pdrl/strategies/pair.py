"""The arithmetic of one pairwise exchange, on preallocated buffers, and its messages.

One `PairScratch` serves a node: it takes part in one exchange at a time, in either role.

    initiator a                            responder b
    encode(now_a) ── ExchangeHead, a ──▶   decode a; encode(now_b)
    decode b      ◀── ExchangeHead, b ──
    inbox += w (b − a)                     inbox += w (a − b)      once the answer is written

Both sides subtract the same two rounded vectors, so what one gains the other loses. The learner
may publish in between: the delta is added to whatever it has by then.

Shape suffixes: ``_D`` all parameters, flat.
"""

from __future__ import annotations

import msgspec
import numpy as np

from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.strategies.judgement import Summary
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import WireDtype, decode, encode, encoded_nbytes
from p2pdrl.transport import codec

__all__ = ["ExchangeHead", "PairScratch", "decode_head"]


class ExchangeHead(msgspec.Struct, frozen=True):
    """What goes before the vector, in both directions."""

    exchange_id: str
    wire: WireDtype
    summary: Summary
    verdict: str = "mix"
    """In an answer: what the responder does (a `judgement.Verdict`); a vector follows only for ``mix``."""


def decode_head(meta: bytes) -> ExchangeHead | None:
    """Read what a peer put before its vector; None when it can't be read."""
    try:
        head: ExchangeHead = codec.decode(meta, ExchangeHead)
    except WireError:
        return None
    return head


class PairScratch:
    """Buffers and arithmetic of one exchange at a time.

    Args:
        size: D, float32 parameters.
        wire: number format on the wire.
        weight: how far each side moves towards the other.
        max_abs: largest entry accepted.
        max_distance: largest ratio of the peer's norm to ours accepted.
    """

    def __init__(
        self, size: int, wire: WireDtype, weight: float, max_abs: float, max_distance: float
    ) -> None:
        self._wire: WireDtype = wire
        self._weight = weight
        self._max_abs = max_abs
        self._max_distance = max_distance
        self._mine_D = np.zeros(size, np.float32)
        self._theirs_D = np.zeros(size, np.float32)
        self.outgoing = memoryview(bytearray(encoded_nbytes(size, wire)))
        self.incoming = memoryview(bytearray(encoded_nbytes(size, wire)))
        self._sets = 0
        self.distance = 0.0
        """‖theirs − mine‖ of the last exchange."""

    @property
    def nbytes(self) -> int:
        """Length of the vector on the wire."""
        return len(self.outgoing)

    def load(self, board: DaemonBoard) -> None:
        """Read our vector off the board, rounded as the wire rounds it, into ``outgoing``.

        Raises:
            PoisonedVectorError: our own vector holds NaN, infinity or a huge entry; peers would strike
                us for it.
        """
        self._sets = board.now(self._mine_D).sets
        encode(self._mine_D, self._wire, self.outgoing)
        if self._wire != "float32":
            decode(self.outgoing, self._wire, self._mine_D)
        mix.check_finite(self._mine_D, self._max_abs)

    def mix(self) -> Float32Array:
        """Check what is in ``incoming`` and return what our side adds; valid until the next `load`.

        Raises:
            PoisonedVectorError: the peer's vector holds NaN, infinity, a huge entry, or its norm
                is out of proportion to ours.
        """
        decode(self.incoming, self._wire, self._theirs_D)
        mix.check_finite(self._theirs_D, self._max_abs)
        bound = self._max_distance * (1.0 + mix.norm(self._mine_D))
        length = mix.norm(self._theirs_D)
        if length > bound:
            raise PoisonedVectorError(f"norm {length:.3g} is beyond the bound {bound:.3g}")
        mix.pair_delta(self._mine_D, self._theirs_D, self._weight, out=self._theirs_D)
        self.distance = mix.norm(self._theirs_D) / self._weight
        return self._theirs_D

    def commit(self, board: DaemonBoard, delta_D: Float32Array, policy_version: int) -> bool:
        """Hand our side's delta to the learner.

        Returns:
            False when our vector was replaced since `load`, so that the delta has lost its meaning.
        """
        return board.post_delta(delta_D, policy_version, sets=self._sets)
