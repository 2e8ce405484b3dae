"""Where the few entries lie that a sparse message carries: sorted positions, on the wire.

Called by `compression`. Two forms; which one it is follows from how many
there are, so that both sides know the length beforehand and none is told:

- sparse: per block of 2^16 elements its count (u32), then per position its offset in the block (u16);
- dense: one bit per element, from the lowest bit of the first byte on.

So a position takes two bytes where it is rare (four as a plain u32), and never more than an eighth of a
byte per element of the vector.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import CHUNK, spans

__all__ = [
    "MAX_SIZE",
    "Positions",
    "check_size",
    "decode",
    "encode",
    "encoded_nbytes",
    "gather_beyond",
    "max_encoded_nbytes",
]

Positions = npt.NDArray[np.int64]

MAX_SIZE = 1 << 31
"""Elements of the longest vector that has positions."""

_BLOCK = 1 << 16


def check_size(size: int) -> None:
    """Check that a vector of ``size`` elements can be sent sparsely.

    Raises:
        LayoutMismatchError: it has none, or more than `MAX_SIZE`.
    """
    if not 1 <= size <= MAX_SIZE:
        raise LayoutMismatchError(f"a compressed vector has 1 to {MAX_SIZE} elements, not {size}")


def encoded_nbytes(count: int, size: int) -> int:
    """Bytes that ``count`` positions in a vector of ``size`` elements take."""
    return min(_sparse_nbytes(count, size), _dense_nbytes(size))


def max_encoded_nbytes(size: int) -> int:
    """The most bytes that positions in a vector of ``size`` elements take."""
    return _dense_nbytes(size)


def gather_beyond(vector: Float32Array, bound: float, *, add: Float32Array | None = None) -> Positions:
    """Add ``add`` to ``vector`` in place; return where its magnitude is at least ``bound``, above zero.

    Takes 8 bytes of memory for each position found, and two cache-sized pieces.

    Raises:
        PoisonedVectorError: an element is NaN or infinite; ``vector`` is changed up to there.
    """
    magnitudes = np.empty(min(CHUNK, vector.size), np.float32)
    beyond = np.empty(magnitudes.size, np.bool_)
    limit = np.float32(bound)
    found: list[Positions] = [np.empty(0, np.int64)]
    for span in spans(vector.size):
        piece = vector[span]
        if add is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # found out below
                np.add(piece, add[span], out=piece)
        size = piece.size
        np.abs(piece, out=magnitudes[:size])
        top = magnitudes[:size].max()
        if not top < np.inf:  # NaN passes through max, and no comparison with it is true
            raise PoisonedVectorError(
                f"elements {span.start} to {span.stop - 1} of the vector to send hold {top:g}; "
                "it was not sent, and what was kept from earlier ones is lost"
            )
        if top >= limit:
            np.greater_equal(magnitudes[:size], limit, out=beyond[:size])
            here = np.flatnonzero(beyond[:size])
            here += span.start
            found.append(here)
    return np.concatenate(found)


def encode(positions: Positions, size: int, out: memoryview) -> int:
    """Write ascending ``positions``, none twice, into ``out``; return how many bytes that took."""
    nbytes = encoded_nbytes(positions.size, size)
    if out.nbytes < nbytes:
        raise LayoutMismatchError(f"{positions.size} positions take {nbytes} bytes, not {out.nbytes}")
    if nbytes < _dense_nbytes(size):
        blocks = _blocks(size)
        counts = np.bincount(positions >> 16, minlength=blocks)
        np.copyto(np.frombuffer(out, "<u4", blocks), counts, casting="unsafe")
        offsets = np.frombuffer(out, "<u2", positions.size, 4 * blocks)
        np.copyto(offsets, positions, casting="unsafe")  # the lower 16 bits
        return nbytes
    bits = np.frombuffer(out, np.uint8, nbytes)
    edges = np.searchsorted(positions, [*range(0, size, CHUNK), size])
    for number, span in enumerate(spans(size)):
        flags = np.zeros(span.stop - span.start, np.bool_)
        flags[positions[edges[number] : edges[number + 1]] - span.start] = True
        packed = np.packbits(flags, bitorder="little")
        bits[span.start // 8 : span.start // 8 + packed.size] = packed
    return nbytes


def decode(buffer: memoryview, count: int, size: int) -> Positions:
    """Read ``count`` positions from ``buffer``, which has exactly `encoded_nbytes` bytes; they ascend.

    Raises:
        WireError: the length doesn't fit, a position is beyond the vector, or they don't ascend.
    """
    nbytes = encoded_nbytes(count, size)
    if not 0 <= count <= size or buffer.nbytes != nbytes:
        raise WireError(f"{count} positions of {size} take {nbytes} bytes, {buffer.nbytes} came")
    if nbytes == _dense_nbytes(size):
        return _decode_dense(buffer, count, size)
    blocks = _blocks(size)
    counts = np.frombuffer(buffer, "<u4", blocks).astype(np.int64)
    if int(counts.sum()) != count:
        raise WireError(f"{count} positions were announced, the blocks count {int(counts.sum())}")
    positions = np.repeat(np.arange(0, blocks * _BLOCK, _BLOCK, dtype=np.int64), counts)
    positions += np.frombuffer(buffer, "<u2", count, 4 * blocks)
    if count and (int(positions[-1]) >= size or not bool(np.all(positions[1:] > positions[:-1]))):
        raise WireError(f"positions in a vector of {size} elements don't ascend to its end")
    return positions


def _decode_dense(buffer: memoryview, count: int, size: int) -> Positions:
    bits = np.frombuffer(buffer, np.uint8)
    if size % 8 and int(bits[-1]) >> size % 8:
        raise WireError(f"a position lies beyond the {size} elements of the vector")
    found: list[Positions] = []
    for span in spans(size):
        flags = np.unpackbits(
            bits[span.start // 8 : -(-span.stop // 8)], count=span.stop - span.start, bitorder="little"
        )
        here = np.flatnonzero(flags.view(np.bool_))
        here += span.start
        found.append(here)
    positions = np.concatenate(found)
    if positions.size != count:
        raise WireError(f"{count} positions were announced, {positions.size} bits are set")
    return positions


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def _sparse_nbytes(count: int, size: int) -> int:
    return 4 * _blocks(size) + 2 * count


def _dense_nbytes(size: int) -> int:
    return -(-size // 8)
