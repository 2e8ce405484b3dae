"""How a vector is written on the wire by each kind of compression, behind one interface.

Called by the strategies. Kinds, bytes for each of D elements, and what is lost:

| kind | bytes | lost |
|---|---|---|
| ``none`` | 4 | nothing |
| ``bf16`` | 2 | 16 bits of the fraction; nothing is kept for later |
| ``int8`` | 1.001 | rounding to 1/127 of the largest of 4,096; kept for later |
| ``topk`` | 4 for each entry sent | all but the largest ``keep · D`` entries; kept for later |
| ``threshold`` | 2.1 for each entry sent | all beyond one ±τ for each entry above τ; kept for later |

What is kept is added to the next vector (error feedback: Seide 2014, "1-bit SGD", Interspeech, section 3;
Karimireddy 2019, arXiv 1901.09847), so the sum of what was sent follows the sum of what was given. This makes
sense for gradients and differences, not for parameters. A codec that keeps something belongs to one stream of
vectors. Messages are little-endian.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix; R rows of 4,096.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Compression
from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors import positions as wire_positions
from p2pdrl.tensors import wire
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.positions import Positions, gather_beyond
from p2pdrl.tensors.wire import CHUNK, spans

__all__ = [
    "ROW",
    "Codec",
    "Int8Codec",
    "PlainCodec",
    "ThresholdCodec",
    "ThresholdResidual",
    "TopkCodec",
    "add_message",
    "entries_in",
    "make_codec",
    "max_message_nbytes",
]

ROW = 1 << 12
"""Elements that share a scale of ``int8``."""

_TOP = 127
_NORMAL = float(np.finfo(np.float32).smallest_normal)
_MAX_SCALE = float(np.finfo(np.float32).max) / _TOP
_TINY = float(np.finfo(np.float32).smallest_subnormal)
_SAMPLES = 1 << 14
_TOPK_HEADER = struct.Struct("<I")
_THRESHOLD_HEADER = struct.Struct("<fI")


class Codec(ABC):
    """Writes vectors of D elements as bytes, and reads them; not for several threads at once.

    Attributes:
        max_nbytes: the most bytes that a message takes.
    """

    max_nbytes: int

    @abstractmethod
    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """Write ``vector``, and what was kept from earlier ones, into ``out``; return how many bytes.

        ``out`` has at least ``max_nbytes`` bytes; ``vector`` stays unchanged.

        Raises:
            PoisonedVectorError: a kind that keeps something met NaN or infinity; nothing is kept then.
        """

    @abstractmethod
    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """Write the vector in ``buffer``, which is one whole message, into ``out``, every element of it.

        ``none`` and ``bf16`` let NaN and infinity through: `mix.check_finite` is for what came of them.

        Raises:
            WireError: the message is malformed; ``out`` is unchanged.
        """

    @abstractmethod
    def take_back(self, buffer: memoryview) -> None:
        """Keep what `encode` wrote into ``buffer`` for the next time: it reached nobody."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was kept: the parameters were replaced."""


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


class PlainCodec(Codec):
    """``none`` and ``bf16``: every element, nothing kept."""

    def __init__(self, size: int, dtype: wire.WireDtype) -> None:
        self._size = size
        self._dtype = dtype
        self.max_nbytes = wire.encoded_nbytes(size, dtype)

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """See `Codec`; the bytes are ``max_nbytes``."""
        check_vector(vector, self._size, "the vector to send")
        _check_room(out, self.max_nbytes)
        wire.encode(vector, self._dtype, memoryview(out).cast("B")[: self.max_nbytes])
        return self.max_nbytes

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """See `Codec`."""
        check_vector(out, self._size, "the vector to receive into")
        wire.decode(buffer, self._dtype, out)

    def take_back(self, buffer: memoryview) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""


class Int8Codec(Codec):
    """A scale (float32) per 4,096 elements, then D signed bytes from −127 to 127, rounded to nearest even.

    The error of an element is at most half its scale, which is 1/127 of the largest magnitude beside it.

    Args:
        feedback: whether what rounding lost is kept and added to the next vector.
    """

    def __init__(self, size: int, *, feedback: bool = True) -> None:
        self._feedback = feedback
        self._rows = -(-size // ROW)
        self.residual: Float32Array = np.zeros(size, np.float32)
        self.max_nbytes = 4 * self._rows + size

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """See `Codec`; the bytes are ``max_nbytes``."""
        check_vector(vector, self.residual.size, "the vector to send")
        _check_room(out, self.max_nbytes)
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
        """See `Codec`: a scale that is negative, NaN or too large is malformed."""
        check_vector(out, self.residual.size, "the vector to receive into")
        for span, rows_RW, scales_R1 in self._read(buffer):
            np.multiply(rows_RW, scales_R1, out=out[span].reshape(rows_RW.shape))

    def take_back(self, buffer: memoryview) -> None:
        """See `Codec`."""
        if self._feedback:
            for span, rows_RW, scales_R1 in self._read(buffer):
                piece_RW = self.residual[span].reshape(rows_RW.shape)
                np.add(piece_RW, rows_RW * scales_R1, out=piece_RW)

    def reset(self) -> None:
        """See `Codec`."""
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


class TopkCodec(Codec):
    """Sends the ``keep · D`` entries of largest magnitude, as bfloat16; what rounding loses stays too.

    Aji and Heafield 2017, "Sparse communication for distributed gradient descent" (arXiv 1704.05021); with
    error feedback it converges as plain SGD does (Stich 2018, arXiv 1809.07599). A message: count (u32), the
    positions (see `positions`), then the values. Fewer are sent when fewer differ from zero; of entries of
    the same magnitude the first.

    Args:
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
            _TOPK_HEADER.size
            + wire_positions.encoded_nbytes(self._most, size)
            + wire.encoded_nbytes(self._most, "bf16")
        )

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """See `Codec`; an element beyond what bfloat16 holds is an error as NaN is."""
        size = self.residual.size
        check_vector(vector, size, "the vector to send")
        out = memoryview(out).cast("B")
        _check_room(out, self.max_nbytes)
        try:
            found = self._largest(vector)
            values = self.residual[found]
            sent = _rounded(values)
        except PoisonedVectorError:
            self.reset()
            raise
        at = _TOPK_HEADER.size
        at += wire_positions.encode(found, size, out[at:])
        end = at + wire.encoded_nbytes(found.size, "bf16")
        wire.encode(sent, "bf16", out[at:end])
        _TOPK_HEADER.pack_into(out, 0, found.size)
        if self._feedback:
            self.residual[found] = values - sent
        else:
            self.reset()
        return end

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """See `Codec`: zero where nothing was sent."""
        check_vector(out, self.residual.size, "the vector to receive into")
        found, values = self._read(buffer)
        out.fill(0.0)
        out[found] = values

    def take_back(self, buffer: memoryview) -> None:
        """See `Codec`."""
        if self._feedback:
            found, values = self._read(buffer)
            self.residual[found] += values

    def reset(self) -> None:
        """See `Codec`."""
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
        if buffer.nbytes < _TOPK_HEADER.size:
            raise WireError(f"a top-k message has at least {_TOPK_HEADER.size} bytes, {buffer.nbytes} came")
        size, count = self.residual.size, int(_TOPK_HEADER.unpack_from(buffer)[0])
        if count > self._most:
            raise WireError(f"{count} entries came, a message carries at most {self._most}")
        start = _TOPK_HEADER.size
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


def max_message_nbytes(size: int) -> int:
    """The most bytes that a message about ``size`` elements takes: about a quarter byte for each."""
    return _THRESHOLD_HEADER.size + wire_positions.max_encoded_nbytes(size) + -(-size // 8)


class ThresholdResidual:
    """What this node's parameters moved by and wasn't sent yet, of which ±τ travels for each entry beyond τ.

    N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015,
    section 2. A message: τ (float32), count (u32), the positions (see `positions`), then one bit for each of
    them, set where it is −τ. The ``strom`` strategy keeps one itself. Not for several threads at once.

    Args:
        tau: τ above zero: an entry travels, as ±τ, once it has grown to so much.

    Example:
        >>> kept = ThresholdResidual(3, tau=1.0)
        >>> kept.add(np.array([0.5, 2.5, -1.0], np.float32))
        >>> message = memoryview(bytearray(kept.max_nbytes))
        >>> nbytes = kept.take(message)
        >>> kept.residual.tolist()
        [0.5, 1.5, 0.0]
    """

    def __init__(self, size: int, tau: float) -> None:
        wire_positions.check_size(size)
        self.tau = _usable(tau)
        self.max_nbytes = max_message_nbytes(size)
        self.residual: Float32Array = np.zeros(size, np.float32)

    def add(self, update: Float32Array) -> None:
        """Count ``update`` in; the next `take` sends what has grown beyond τ."""
        check_vector(update, self.residual.size, "the update")
        np.add(self.residual, update, out=self.residual)

    def take(self, out: memoryview, *, add: Float32Array | None = None) -> int:
        """Write one ±τ for each entry of magnitude τ or more into ``out``, and take it off the residual.

        An entry beyond 2τ sends one τ now and the rest with later messages, so an entry's magnitude
        bounds how many messages it needs.

        Args:
            out: of at least ``max_nbytes`` bytes.
            add: an update to count in first, in the same pass.

        Returns:
            Bytes of the message; `entries_in` tells whether it carries anything.

        Raises:
            PoisonedVectorError: the residual holds NaN or infinity; it has been set to zero.
        """
        if add is not None:
            check_vector(add, self.residual.size, "the update")
        _check_room(out, self.max_nbytes)
        try:
            found = gather_beyond(self.residual, self.tau, add=add)
        except PoisonedVectorError:
            self.reset()
            raise
        values = self.residual[found]
        nbytes = _write_threshold(found, np.signbit(values), self.tau, self.residual.size, out)
        self.residual[found] = values - np.copysign(np.float32(self.tau), values)
        return nbytes

    def take_back(self, buffer: memoryview) -> None:
        """Add what `take` wrote into ``buffer`` to the residual again: it reached nobody."""
        add_message(buffer, self.tau, self.residual)

    def reset(self) -> None:
        """Forget what wasn't sent: the parameters were replaced."""
        self.residual.fill(0.0)


class ThresholdCodec(ThresholdResidual, Codec):
    """`ThresholdResidual` behind the interface of `Codec`.

    Args:
        tau: τ above zero.
        feedback: whether what wasn't sent is kept and added to the next vector.
    """

    def __init__(self, size: int, tau: float, *, feedback: bool = True) -> None:
        super().__init__(size, tau)
        self._feedback = feedback

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """See `Codec`, and `ThresholdResidual.take`."""
        nbytes = self.take(out, add=vector)
        if not self._feedback:
            self.reset()
        return nbytes

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """See `Codec`: ±τ, and zero where nothing was sent; a message of another τ is malformed."""
        check_vector(out, self.residual.size, "the vector to receive into")
        found, values = _read_threshold(buffer, self.tau, out.size)
        out.fill(0.0)
        out[found] = values

    def take_back(self, buffer: memoryview) -> None:
        """See `Codec`."""
        if self._feedback:
            super().take_back(buffer)


def add_message(buffer: memoryview, tau: float, target: Float32Array) -> None:
    """Add the ±τ entries in ``buffer`` to ``target``, touching no other entry.

    Raises:
        WireError: the message is malformed, or of another τ; ``target`` is unchanged.
    """
    check_vector(target, target.size, "the vector to add to")
    found, values = _read_threshold(buffer, _usable(tau), target.size)
    target[found] += values  # no position occurs twice


def entries_in(buffer: memoryview) -> int:
    """How many entries a message says that it carries.

    Raises:
        WireError: it is too short to say so.
    """
    if buffer.nbytes < _THRESHOLD_HEADER.size:
        raise WireError(
            f"a threshold message has at least {_THRESHOLD_HEADER.size} bytes, {buffer.nbytes} came"
        )
    return int(_THRESHOLD_HEADER.unpack_from(buffer)[1])


def _usable(tau: float) -> float:
    """τ as float32 holds it, which is what travels and what is taken off."""
    rounded = float(np.float32(tau))
    if not 0 < rounded < math.inf:
        raise ValueError(f"tau must be above zero and finite, not {tau}")
    return rounded


def _write_threshold(
    found: Positions, negative: npt.NDArray[np.bool_], tau: float, size: int, out: memoryview
) -> int:
    out = memoryview(out).cast("B")
    at = _THRESHOLD_HEADER.size
    at += wire_positions.encode(found, size, out[at:])
    signs = np.packbits(negative, bitorder="little")
    np.copyto(np.frombuffer(out, np.uint8, signs.size, at), signs)
    _THRESHOLD_HEADER.pack_into(out, 0, tau, found.size)
    return at + signs.size


def _read_threshold(buffer: memoryview, tau: float, size: int) -> tuple[Positions, Float32Array]:
    buffer = memoryview(buffer).cast("B")
    count = entries_in(buffer)
    if count > size:
        raise WireError(f"{count} entries were announced for a vector of {size} elements")
    theirs = _THRESHOLD_HEADER.unpack_from(buffer)[0]
    if theirs != tau:
        raise WireError(f"a threshold message of tau {theirs:g} came, this node's tau is {tau:g}")
    start = _THRESHOLD_HEADER.size
    middle = start + wire_positions.encoded_nbytes(count, size)
    end = middle + -(-count // 8)
    if buffer.nbytes != end:
        raise WireError(f"a message of {count} entries takes {end} bytes, {buffer.nbytes} came")
    found = wire_positions.decode(buffer[start:middle], count, size)
    signs = np.frombuffer(buffer, np.uint8, end - middle, middle)
    negative = np.unpackbits(signs, count=count, bitorder="little")
    values = np.array([tau, -tau], np.float32)[negative]
    return found, values


def _check_room(out: memoryview, nbytes: int) -> None:
    if out.nbytes < nbytes:
        raise LayoutMismatchError(f"this message takes up to {nbytes} bytes, not {out.nbytes}")
