"""How a vector is written on the wire by each kind of compression, behind one interface.

Called by the strategies. Kinds, bytes for each of D elements, and what is lost:

| kind | bytes | lost |
|---|---|---|
| ``none`` | 4 | nothing |
| ``bf16`` | 2 | 16 bits of the fraction; nothing is kept for later |
| ``int8`` | 1.001 | rounding to 1/127 of the largest of 4,096; kept for later |
| ``topk`` | 4 for each entry sent | all but the largest ``keep · D`` entries; kept for later |
| ``threshold`` | 2.1 for each entry sent | all beyond one ±τ for each entry above τ; kept for later |

What is kept is added to the next vector (error feedback: Seide 2014; Karimireddy 2019, arXiv 1901.09847),
so the sum of what was sent follows the sum of what was given. This makes sense for gradients and
differences, not for parameters. A codec that keeps something belongs to one stream of vectors.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from typing import Protocol

from p2pdrl.config.strategy import Compression
from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors import wire
from p2pdrl.tensors.compression_int8 import Int8Codec
from p2pdrl.tensors.compression_threshold import ThresholdCodec
from p2pdrl.tensors.compression_topk import TopkCodec
from p2pdrl.tensors.layout import Float32Array, check_vector

__all__ = ["Codec", "PlainCodec", "make_codec"]


class Codec(Protocol):
    """Writes vectors of D elements as bytes, and reads them; not for several threads at once.

    Attributes:
        max_nbytes: the most bytes that a message takes.
    """

    max_nbytes: int

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """Write ``vector``, and what was kept from earlier ones, into ``out``; return how many bytes.

        Args:
            vector: D elements; unchanged.
            out: of at least ``max_nbytes`` bytes.

        Raises:
            PoisonedVectorError: a kind that keeps something met NaN or infinity; nothing is kept then.
            LayoutMismatchError: ``vector`` isn't a float32 vector of D elements, or ``out`` is too short.
        """
        ...

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """Write the vector in ``buffer``, which is one whole message, into ``out``, every element of it.

        ``none`` and ``bf16`` let NaN and infinity through: `mix.check_finite` is for what came of them.

        Raises:
            WireError: the message is malformed; ``out`` is unchanged.
            LayoutMismatchError: ``out`` isn't a float32 vector of D elements.
        """
        ...

    def take_back(self, buffer: memoryview) -> None:
        """Keep what `encode` wrote into ``buffer`` for the next time: it reached nobody."""
        ...

    def reset(self) -> None:
        """Forget what was kept: the parameters were replaced."""
        ...


class PlainCodec:
    """``none`` and ``bf16``: every element, nothing kept.

    Args:
        size: D, elements of each vector.
        dtype: how an element is written.
    """

    def __init__(self, size: int, dtype: wire.WireDtype) -> None:
        self._size = size
        self._dtype = dtype
        self.max_nbytes = wire.encoded_nbytes(size, dtype)

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """Write ``vector`` into ``out``; return the bytes, which are ``max_nbytes``."""
        check_vector(vector, self._size, "the vector to send")
        if out.nbytes < self.max_nbytes:
            raise LayoutMismatchError(f"this message takes {self.max_nbytes} bytes, not {out.nbytes}")
        wire.encode(vector, self._dtype, memoryview(out).cast("B")[: self.max_nbytes])
        return self.max_nbytes

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """Write the vector in ``buffer`` into ``out``; NaN and infinity pass."""
        check_vector(out, self._size, "the vector to receive into")
        wire.decode(buffer, self._dtype, out)

    def take_back(self, buffer: memoryview) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""


def make_codec(
    kind: Compression, size: int, *, keep: float = 0.01, threshold: float = 1e-3, feedback: bool = True
) -> Codec:
    """Return a codec for vectors of ``size`` elements.

    Args:
        kind: see the module's table.
        size: D.
        keep: share of the entries that ``topk`` sends, in (0, 1].
        threshold: τ of ``threshold``, above zero; both sides need the same.
        feedback: whether ``int8``, ``topk`` and ``threshold`` keep what they lose for the next time.

    Raises:
        ValueError: ``keep`` or ``threshold`` is out of its range.
        LayoutMismatchError: a sparse kind was asked for no element at all, or for more than 2^31.
    """
    match kind:
        case "none":
            return PlainCodec(size, "float32")
        case "bf16":
            return PlainCodec(size, "bf16")
        case "int8":
            return Int8Codec(size, feedback=feedback)
        case "topk":
            return TopkCodec(size, keep, feedback=feedback)
        case "threshold":
            return ThresholdCodec(size, threshold, feedback=feedback)
