"""Threshold compression: ±τ for each entry that has grown beyond τ, the rest stays for later (Strom 2015).

N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015,
section 2. `ThresholdCodec` is one kind of `compression`; the ``strom`` strategy keeps a
`ThresholdResidual` itself, and adds what others send with `add_message`.

A message, little-endian: τ (float32), count (u32), the positions (see `positions`), then one bit for each
of them, set where it is −τ. At 1 % of the entries this is 2.1 bytes for each entry sent.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors import positions as wire_positions
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.positions import Positions, gather_beyond

__all__ = ["ThresholdCodec", "ThresholdResidual", "add_message", "entries_in", "max_message_nbytes"]

_HEADER = struct.Struct("<fI")


def max_message_nbytes(size: int) -> int:
    """The most bytes that a message about ``size`` elements takes: about a quarter byte for each."""
    return _HEADER.size + wire_positions.max_encoded_nbytes(size) + -(-size // 8)


class ThresholdResidual:
    """What this node's parameters moved by and nobody was told yet.

    Not for several threads at once.

    Args:
        size: D, elements of the vector.
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
        """Count ``update`` in; the next `take` sends what has grown beyond τ.

        Raises:
            LayoutMismatchError: it isn't a float32 vector of D elements.
        """
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
            LayoutMismatchError: ``out`` is too short, or ``add`` isn't a float32 vector of D elements.
        """
        if add is not None:
            check_vector(add, self.residual.size, "the update")
        if out.nbytes < self.max_nbytes:
            raise LayoutMismatchError(f"this message takes up to {self.max_nbytes} bytes, not {out.nbytes}")
        try:
            found = gather_beyond(self.residual, self.tau, add=add)
        except PoisonedVectorError:
            self.reset()
            raise
        values = self.residual[found]
        nbytes = _write(found, np.signbit(values), self.tau, self.residual.size, out)
        self.residual[found] = values - np.copysign(np.float32(self.tau), values)
        return nbytes

    def take_back(self, message: memoryview) -> None:
        """Add what `take` wrote into ``message`` to the residual again: it reached nobody."""
        add_message(message, self.tau, self.residual)

    def reset(self) -> None:
        """Forget what wasn't sent: the parameters were replaced."""
        self.residual.fill(0.0)


class ThresholdCodec:
    """`ThresholdResidual` behind the interface of `compression.Codec`.

    Args:
        size: D, elements of each vector.
        tau: τ above zero.
        feedback: whether what wasn't sent is kept and added to the next vector.
    """

    def __init__(self, size: int, tau: float, *, feedback: bool = True) -> None:
        self._kept = ThresholdResidual(size, tau)
        self._feedback = feedback
        self.max_nbytes = self._kept.max_nbytes

    @property
    def residual(self) -> Float32Array:
        """What wasn't sent yet."""
        return self._kept.residual

    def encode(self, vector: Float32Array, out: memoryview) -> int:
        """Write the message of ``vector`` and what was kept; see `ThresholdResidual.take`."""
        nbytes = self._kept.take(out, add=vector)
        if not self._feedback:
            self._kept.reset()
        return nbytes

    def decode(self, buffer: memoryview, out: Float32Array) -> None:
        """Write the vector in ``buffer`` into ``out``: ±τ, and zero where nothing was sent.

        Raises:
            WireError: the message is malformed, or of another τ; ``out`` is unchanged.
            LayoutMismatchError: ``out`` isn't a float32 vector of D elements.
        """
        check_vector(out, self._kept.residual.size, "the vector to receive into")
        found, values = _read(buffer, self._kept.tau, out.size)
        out.fill(0.0)
        out[found] = values

    def take_back(self, buffer: memoryview) -> None:
        """Keep what ``buffer`` carries for the next time: it reached nobody."""
        if self._feedback:
            self._kept.take_back(buffer)

    def reset(self) -> None:
        """Forget what wasn't sent."""
        self._kept.reset()


def add_message(buffer: memoryview, tau: float, target: Float32Array) -> None:
    """Add the ±τ entries in ``buffer`` to ``target``, touching no other entry.

    Raises:
        WireError: the message is malformed, or of another τ; ``target`` is unchanged.
        LayoutMismatchError: ``target`` isn't a float32 vector.
    """
    check_vector(target, target.size, "the vector to add to")
    found, values = _read(buffer, _usable(tau), target.size)
    target[found] += values  # no position occurs twice


def entries_in(buffer: memoryview) -> int:
    """How many entries a message says that it carries.

    Raises:
        WireError: it is too short to say so.
    """
    if buffer.nbytes < _HEADER.size:
        raise WireError(f"a threshold message has at least {_HEADER.size} bytes, {buffer.nbytes} came")
    return int(_HEADER.unpack_from(buffer)[1])


def _usable(tau: float) -> float:
    """τ as float32 holds it, which is what travels and what is taken off."""
    rounded = float(np.float32(tau))
    if not 0 < rounded < math.inf:
        raise ValueError(f"tau must be above zero and finite, not {tau}")
    return rounded


def _write(found: Positions, negative: npt.NDArray[np.bool_], tau: float, size: int, out: memoryview) -> int:
    out = memoryview(out).cast("B")
    at = _HEADER.size
    at += wire_positions.encode(found, size, out[at:])
    signs = np.packbits(negative, bitorder="little")
    np.copyto(np.frombuffer(out, np.uint8, signs.size, at), signs)
    _HEADER.pack_into(out, 0, tau, found.size)
    return at + signs.size


def _read(buffer: memoryview, tau: float, size: int) -> tuple[Positions, Float32Array]:
    buffer = memoryview(buffer).cast("B")
    count = entries_in(buffer)
    if count > size:
        raise WireError(f"{count} entries were announced for a vector of {size} elements")
    theirs = _HEADER.unpack_from(buffer)[0]
    if theirs != tau:
        raise WireError(f"a threshold message of tau {theirs:g} came, this node's tau is {tau:g}")
    start = _HEADER.size
    middle = start + wire_positions.encoded_nbytes(count, size)
    end = middle + -(-count // 8)
    if buffer.nbytes != end:
        raise WireError(f"a message of {count} entries takes {end} bytes, {buffer.nbytes} came")
    found = wire_positions.decode(buffer[start:middle], count, size)
    signs = np.frombuffer(buffer, np.uint8, end - middle, middle)
    negative = np.unpackbits(signs, count=count, bitorder="little")
    values = np.array([tau, -tau], np.float32)[negative]
    return found, values
