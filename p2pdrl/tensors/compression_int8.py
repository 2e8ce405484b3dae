"""Eight bits for each element: a scale per 4,096 elements, symmetric, rounded to nearest even.

What rounding loses is kept and added to the next vector (Seide 2014, "1-bit SGD", Interspeech, section
3: error feedback). One kind of `compression`.

A message, little-endian: a scale (float32) per 4,096 elements, then D signed bytes from −127 to 127. The
error of an element is at most half its scale, which is 1/127 of the largest magnitude beside it.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix; R rows of 4,096.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.wire import CHUNK, spans

__all__ = ["ROW", "Int8Codec"]

ROW = 1 << 12
"""Elements that share a scale."""

_TOP = 127
_NORMAL = float(np.finfo(np.float32).smallest_normal)
_MAX_SCALE = float(np.finfo(np.float32).max) / _TOP


class Int8Codec:
    """One signed byte for each element; see `compression.Codec`. Not for several threads at once.

    Args:
        size: D, elements of each vector.
        feedback: whether what rounding lost is kept and added to the next vector.
    """

    def __init__(self, size: int, *, feedback: bool = True) -> None:
        self._feedback = feedback
        self._rows = -(-size // ROW)
        self.residual: Float32Array = np.zeros(size, np.float32)
        self.max_nbytes = 4 * self._rows + size

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """Write ``vector`` and what was kept into ``out``; return the bytes, which are ``max_nbytes``.

        Args:
            vector: D elements; unchanged.
            out: of at least ``max_nbytes`` bytes.

        Raises:
            PoisonedVectorError: the vector holds NaN or infinity; what was kept has been set to zero.
            LayoutMismatchError: ``vector`` isn't a float32 vector of D elements, or ``out`` is too short.
        """
        check_vector(vector, self.residual.size, "the vector to send")
        if out.nbytes < self.max_nbytes:
            raise LayoutMismatchError(f"this message takes {self.max_nbytes} bytes, not {out.nbytes}")
        scales: Float32Array = np.frombuffer(out, "<f4", self._rows)
        levels: npt.NDArray[np.int8] = np.frombuffer(out, np.int8, vector.size, 4 * self._rows)
        work = np.empty(min(CHUNK, vector.size), np.float32)
        for span in _whole_rows(vector.size):
            piece = self.residual[span]
            with np.errstate(over="ignore", invalid="ignore"):  # found out in _quantise
                np.add(piece, vector[span], out=piece)
            width = min(ROW, piece.size)
            rows_RW = piece.reshape(-1, width)
            here_R = scales[span.start // ROW :][: len(rows_RW)]
            self._quantise(rows_RW, work[: piece.size].reshape(-1, width), here_R, levels[span])
        if not self._feedback:
            self.reset()
        return self.max_nbytes

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """Write the vector in ``buffer`` into ``out``.

        Raises:
            WireError: the length doesn't fit, or a scale is negative, NaN or beyond bounds; ``out`` is
                unchanged.
            LayoutMismatchError: ``out`` isn't a float32 vector of D elements.
        """
        check_vector(out, self.residual.size, "the vector to receive into")
        for span, rows_RW, scales_R1 in self._read(buffer):
            np.multiply(rows_RW, scales_R1, out=out[span].reshape(rows_RW.shape))

    def take_back(self, buffer: memoryview) -> None:
        """Keep what ``buffer`` carries for the next time: it reached nobody."""
        if self._feedback:
            for span, rows_RW, scales_R1 in self._read(buffer):
                piece_RW = self.residual[span].reshape(rows_RW.shape)
                np.add(piece_RW, rows_RW * scales_R1, out=piece_RW)

    def reset(self) -> None:
        """Forget what rounding lost."""
        self.residual.fill(0.0)

    def _quantise(
        self,
        rows_RW: Float32Array,
        work_RW: Float32Array,
        scales_R: Float32Array,
        levels: npt.NDArray[np.int8],
    ) -> None:
        """Write scales and levels of some rows, and leave in the rows what they lose."""
        np.abs(rows_RW, out=work_RW)
        scale_R = work_RW.max(axis=1)
        if not float(scale_R.max()) < np.inf:  # NaN passes through max, and no comparison with it is true
            self.reset()
            raise PoisonedVectorError(
                "the vector to send holds NaN or infinity; it was not sent, and what was kept is lost"
            )
        scale_R /= _TOP
        # A subnormal scale has too few bits: 127 of it might not reach the largest element.
        scale_R[scale_R < _NORMAL] = 0.0
        np.copyto(scales_R, scale_R)
        np.divide(rows_RW, np.where(scale_R > 0, scale_R, np.inf)[:, None], out=work_RW)
        np.rint(work_RW, out=work_RW)
        np.copyto(levels, work_RW.reshape(-1), casting="unsafe")
        np.multiply(work_RW, scale_R[:, None], out=work_RW)
        np.subtract(rows_RW, work_RW, out=rows_RW)

    def _read(self, buffer: memoryview) -> Iterator[tuple[slice, npt.NDArray[np.int8], Float32Array]]:
        """Yield spans of whole rows, their levels, and a column of their scales."""
        size = self.residual.size
        if buffer.nbytes != self.max_nbytes:
            raise WireError(f"int8 of {size} elements takes {self.max_nbytes} bytes, {buffer.nbytes} came")
        scales: Float32Array = np.frombuffer(buffer, "<f4", self._rows)
        if size and not (float(scales.min()) >= 0 and float(scales.max()) <= _MAX_SCALE):
            raise WireError("an int8 message holds a scale that is negative, NaN or too large")
        levels: npt.NDArray[np.int8] = np.frombuffer(buffer, np.int8, size, 4 * self._rows)
        if size and int(levels.min()) < -_TOP:
            raise WireError(f"an int8 message holds a level beyond {_TOP}")
        for span in _whole_rows(size):
            rows_RW = levels[span].reshape(-1, min(ROW, span.stop - span.start))
            yield span, rows_RW, scales[span.start // ROW :][: len(rows_RW), None]


def _whole_rows(size: int) -> Iterator[slice]:
    """Yield cache-sized spans of whole rows, then the last row when it is shorter."""
    whole = size // ROW * ROW
    yield from spans(whole)
    if whole < size:
        yield slice(whole, size)
