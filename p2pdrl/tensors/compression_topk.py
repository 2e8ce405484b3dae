"""Top-k compression: the k entries of largest magnitude, as bfloat16; the rest stays for later.

Aji and Heafield 2017, "Sparse communication for distributed gradient descent" (arXiv 1704.05021); with
error feedback it converges as plain SGD does (Stich 2018, arXiv 1809.07599). One kind of `compression`.

A message, little-endian: count (u32), the positions (see `positions`), then the values. At 1 % of the
entries this is 4 bytes for each entry sent. What the rounding of a value to bfloat16 loses stays too.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors import positions as wire_positions
from p2pdrl.tensors import wire
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.positions import Positions, gather_beyond

__all__ = ["TopkCodec"]

_HEADER = struct.Struct("<I")
_SAMPLES = 1 << 14
_TINY = float(np.finfo(np.float32).smallest_subnormal)


class TopkCodec:
    """Sends the ``keep · D`` entries of largest magnitude; see `compression.Codec`.

    Fewer are sent when fewer differ from zero. Of entries of the same magnitude the first are sent.
    Not for several threads at once.

    Args:
        size: D, elements of each vector.
        keep: share of the entries that is sent, in (0, 1]; at least one entry is.
        feedback: whether what wasn't sent is kept and added to the next vector.
    """

    def __init__(self, size: int, keep: float, *, feedback: bool = True) -> None:
        wire_positions.check_size(size)
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1, not {keep}")
        self._most = min(size, math.ceil(keep * size))
        self._feedback = feedback
        self.residual: Float32Array = np.zeros(size, np.float32)
        self.max_nbytes = (
            _HEADER.size
            + wire_positions.encoded_nbytes(self._most, size)
            + wire.encoded_nbytes(self._most, "bf16")
        )

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """Write the message of ``vector`` and what was kept; return its bytes.

        Args:
            vector: D elements; unchanged.
            out: of at least ``max_nbytes`` bytes.

        Raises:
            PoisonedVectorError: the vector holds NaN, infinity or what bfloat16 can't hold; what was
                kept has been set to zero.
            LayoutMismatchError: ``vector`` isn't a float32 vector of D elements, or ``out`` is too short.
        """
        size = self.residual.size
        check_vector(vector, size, "the vector to send")
        out = memoryview(out).cast("B")
        if out.nbytes < self.max_nbytes:
            raise LayoutMismatchError(f"this message takes up to {self.max_nbytes} bytes, not {out.nbytes}")
        try:
            found = self._largest(vector)
            values = self.residual[found]
            sent = _rounded(values)
        except PoisonedVectorError:
            self.reset()
            raise
        at = _HEADER.size
        at += wire_positions.encode(found, size, out[at:])
        end = at + wire.encoded_nbytes(found.size, "bf16")
        wire.encode(sent, "bf16", out[at:end])
        _HEADER.pack_into(out, 0, found.size)
        if self._feedback:
            self.residual[found] = values - sent
        else:
            self.reset()
        return end

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """Write the vector in ``buffer`` into ``out``: zero where nothing was sent.

        Raises:
            WireError: the message is malformed; ``out`` is unchanged.
            LayoutMismatchError: ``out`` isn't a float32 vector of D elements.
        """
        check_vector(out, self.residual.size, "the vector to receive into")
        found, values = self._read(buffer)
        out.fill(0.0)
        out[found] = values

    def take_back(self, buffer: memoryview) -> None:
        """Keep what ``buffer`` carries for the next time: it reached nobody."""
        if self._feedback:
            found, values = self._read(buffer)
            self.residual[found] += values

    def reset(self) -> None:
        """Forget what wasn't sent."""
        self.residual.fill(0.0)

    def _largest(self, vector: Float32Array) -> Positions:
        """Add ``vector`` to the residual and return where its largest entries lie.

        A bound read from a sample leaves few candidates to select from, in one pass; the selection
        among them is exact. A sample that misleads (too few candidates) costs a second pass.
        """
        bound = self._guess(vector)
        found = gather_beyond(self.residual, bound, add=vector)
        if found.size < self._most and bound > _TINY:
            found = gather_beyond(self.residual, _TINY)
        surplus = found.size - self._most
        if surplus <= 0:
            return found
        magnitudes = np.abs(self.residual[found])
        least = np.partition(magnitudes, surplus)[surplus]
        chosen = magnitudes > least
        ties = np.flatnonzero(magnitudes == least)
        chosen[ties[: self._most - int(np.count_nonzero(chosen))]] = True
        largest: Positions = found[chosen]
        return largest

    def _guess(self, vector: Float32Array) -> float:
        """A bound that somewhat more than the wanted number of entries exceed, by a regular sample."""
        stride = max(1, vector.size // _SAMPLES)
        with np.errstate(over="ignore", invalid="ignore"):  # found out when all are added
            sample = np.abs(self.residual[::stride] + vector[::stride])
        wanted = min(sample.size, math.ceil(1.25 * self._most / stride) + 16)
        bound = float(np.partition(sample, sample.size - wanted)[sample.size - wanted])
        return bound if _TINY <= bound < math.inf else _TINY

    def _read(self, buffer: memoryview) -> tuple[Positions, Float32Array]:
        buffer = memoryview(buffer).cast("B")
        if buffer.nbytes < _HEADER.size:
            raise WireError(f"a top-k message has at least {_HEADER.size} bytes, {buffer.nbytes} came")
        size, count = self.residual.size, int(_HEADER.unpack_from(buffer)[0])
        if count > self._most:
            raise WireError(f"{count} entries came, a message carries at most {self._most}")
        start = _HEADER.size
        middle = start + wire_positions.encoded_nbytes(count, size)
        end = middle + wire.encoded_nbytes(count, "bf16")
        if buffer.nbytes != end:
            raise WireError(f"a message of {count} entries takes {end} bytes, {buffer.nbytes} came")
        found = wire_positions.decode(buffer[start:middle], count, size)
        values = np.empty(count, np.float32)
        wire.decode(buffer[middle:end], "bf16", values)
        if not bool(np.isfinite(values).all()):
            raise WireError("a top-k message holds NaN or infinity")
        return found, values


def _rounded(values: Float32Array) -> Float32Array:
    sent = np.empty_like(values)
    wire.round_trip(values, "bf16", sent)
    if not bool(np.isfinite(sent).all()):
        raise PoisonedVectorError(
            "an element of the vector to send is beyond what bfloat16 holds; it was not sent"
        )
    return sent
