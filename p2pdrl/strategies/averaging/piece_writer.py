"""Writes the pieces of a contribution for their owners; what compression loses is given the next time.

Pieces change with every view, so what was lost is kept for the whole vector and not in the codecs (error
feedback: Karimireddy 2019, arXiv 1901.09847): ``given = vector + lost``, ``lost ← given − sent`` once the
round has counted. A round that is done again gives the same.

Shapes: every vector is flat, of D elements (all parameters) or of a piece; names carry no suffix.
"""

from __future__ import annotations

import numpy as np

from p2pdrl.config.strategy_bases import Compressed
from p2pdrl.tensors import wire
from p2pdrl.tensors.compression import Codec, make_codec
from p2pdrl.tensors.layout import Float32Array

__all__ = ["PieceWriter", "is_lossy", "piece_codec"]


def is_lossy(config: Compressed) -> bool:
    """Whether so much is lost at once that it has to be kept for the next time."""
    return config.compression not in ("none", "bf16")


def piece_codec(config: Compressed, size: int, *, raw: bool) -> Codec:
    """Return the codec for a piece.

    Args:
        config: which compression.
        size: elements.
        raw: float32 whatever the config says.
    """
    kind = "none" if raw else config.compression
    return make_codec(kind, size, keep=config.keep, threshold=config.threshold, feedback=False)


class PieceWriter:
    """One node's stream of contributions, through all views of a strategy.

    Args:
        config: which compression.
        size: D.
    """

    def __init__(self, config: Compressed, size: int) -> None:
        self._config = config
        self._raw = False
        self._keeps = is_lossy(config)
        self._codecs: dict[int, tuple[Codec, memoryview]] = {}
        self._written: dict[int, int] = {}
        self._whole = memoryview(bytearray(2 * size)) if config.compression == "bf16" else memoryview(b"")
        kept = size if self._keeps else 0
        self._lost: Float32Array = np.zeros(kept, np.float32)
        self._given: Float32Array = np.zeros(kept, np.float32)
        self._sent: Float32Array = np.zeros(kept, np.float32)
        self._counted = False
        self._vector: Float32Array = np.empty(0, np.float32)

    def load(self, vector: Float32Array, *, raw: bool) -> None:
        """Begin a contribution; ``vector`` stays unchanged until the last piece is written and sent.

        Args:
            vector: what is contributed.
            raw: write float32, and leave what is kept alone.
        """
        self._raw, self._vector = raw, vector
        if raw or not self._keeps:
            return
        if self._counted:
            np.subtract(self._given, self._sent, out=self._lost)
            self._counted = False
        np.add(vector, self._lost, out=self._given)
        np.copyto(self._sent, self._given)  # our own piece loses nothing
        self._vector = self._given

    def own(self, span: slice) -> Float32Array:
        """Our own piece, as it counts."""
        return self._vector[span]

    def encode(self, span: slice) -> memoryview:
        """Return the bytes of one piece; valid until the next `load`."""
        piece = self._vector[span]
        if self._raw or self._config.compression == "none":
            return piece.data.cast("B")
        if not self._keeps:
            room = self._whole[2 * span.start : 2 * span.stop]
            wire.encode(piece, "bf16", room)
            return room
        codec, room = self._codec(span)
        written = room[: codec.encode(piece, room)]
        codec.decode(written, self._sent[span])
        self._written[span.start] = written.nbytes
        return written

    def _codec(self, span: slice) -> tuple[Codec, memoryview]:
        """Each piece has its own: several may be written at a time, in threads."""
        if span.start not in self._codecs:
            codec = piece_codec(self._config, span.stop - span.start, raw=False)
            self._codecs[span.start] = codec, memoryview(bytearray(codec.max_nbytes))
        return self._codecs[span.start]

    def nbytes(self, span: slice, *, raw: bool) -> int:
        """Bytes that a piece took on the wire; of a sparse kind, when it was last written."""
        if raw or self._config.compression == "none":
            return int(4 * (span.stop - span.start))
        if not self._keeps:
            return int(2 * (span.stop - span.start))
        return self._written.get(span.start, 0)

    def counted(self) -> None:
        """The round that the contribution was for has ended with it."""
        self._counted = self._keeps and not self._raw

    def recut(self) -> None:
        """A new view began: free the room of the old one's pieces."""
        self._codecs.clear()
        self._written.clear()

    def reset(self) -> None:
        """Forget what was kept: the parameters were replaced."""
        self._lost[:] = 0
        self._counted = False
