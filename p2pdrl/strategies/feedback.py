"""Compressed gradients whose losses are kept for the next one, but only once somebody got them.

``message = C(gradient + kept)``, and ``kept ← gradient + kept − message`` when the message was delivered
(error feedback: Karimireddy 2019, arXiv 1901.09847). A gradient that reached nobody stays its learner's
own and leaves nothing behind: what a codec would keep by itself would then count it twice.

Shape suffixes: ``_D`` all parameters, flat.
"""

from __future__ import annotations

import numpy as np

from p2pdrl.config.strategy import Compression
from p2pdrl.tensors import mix
from p2pdrl.tensors.compression import make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import spans

__all__ = ["FeedbackEncoder"]

_KEEPING = ("int8", "topk", "threshold")


class FeedbackEncoder:
    """One node's stream of gradients.

    Args:
        keep: share of the entries that ``topk`` sends.
        threshold: τ of ``threshold``.
        max_abs: largest entry that peers accept.
    """

    def __init__(
        self, kind: Compression, size: int, *, keep: float, threshold: float, max_abs: float
    ) -> None:
        self._codec = make_codec(kind, size, keep=keep, threshold=threshold, feedback=False)
        self._max_abs = max_abs
        self._buffer = memoryview(bytearray(self._codec.max_nbytes))
        self._used = 0
        self.sent_D: Float32Array = np.zeros(size, np.float32)
        """What the peer decodes from `message`."""
        keeps = size if kind in _KEEPING else 0
        self._kept_D: Float32Array = np.zeros(keeps, np.float32)
        self._next_D: Float32Array = np.zeros(keeps, np.float32)

    @property
    def max_nbytes(self) -> int:
        """The most bytes that a message takes, ours or a peer's."""
        return self._codec.max_nbytes

    @property
    def message(self) -> memoryview:
        """What was encoded last."""
        return self._buffer[: self._used]

    def encode(self, gradient_D: Float32Array) -> None:
        """Write ``gradient_D`` into `message`; nothing is kept before `delivered`.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """
        self._used = 0
        mix.check_finite(gradient_D, self._max_abs)
        given_D = gradient_D
        if self._next_D.size:
            np.add(gradient_D, self._kept_D, out=self._next_D)
            given_D = self._next_D
        used = self._codec.encode(given_D, self._buffer)
        self._codec.decode(self._buffer[:used], self.sent_D)
        mix.check_finite(self.sent_D, self._max_abs)
        for span in spans(self._next_D.size):
            np.subtract(self._next_D[span], self.sent_D[span], out=self._next_D[span])
        self._used = used

    def delivered(self) -> None:
        """Keep what the last message lost for the next one."""
        self._kept_D, self._next_D = self._next_D, self._kept_D

    def decode(self, message: memoryview, out: Float32Array) -> None:
        """Read a peer's message.

        Raises:
            WireError: it is malformed.
        """
        self._codec.decode(message, out)
