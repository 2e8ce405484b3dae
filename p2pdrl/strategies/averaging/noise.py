"""Gaussian noise that hides what a member gave: from a cryptographic generator, onto a fixed grid.

`federated` adds it. A statistical generator won't do: PCG's state can be computed from what it gave out
(Bouillaguet 2020, "Practical seed-recovery for the PCG pseudo-random number generator"), and who knows a
member's noise of one round could subtract that of all its others.

**Bits**: the keystream of AES-256 in counter mode, under a key from the operating system that is drawn for
each `SecretNoise` and leaves the process nowhere. Nothing of it repeats before 2^128 blocks.
**Gaussians**: Box and Muller (1958), in float64, 64 bits for the radius and 64 for the angle; the tails end
at 9.5 deviations, beyond which the chance is 3e-21.
**Grid**: floating-point Gaussians have gaps, and which numbers ``value + noise`` can be says something about
``value`` (Mironov 2012, "On significance of the least significant bits"; Jin 2022, arXiv 2112.05307). So the
sum, made in float64, is rounded to multiples of 2^-16 of the deviation, or a little less, the same whatever
the value: some 2^36 float64 sums fall on each point near the middle, and to round is post-processing.

What isn't claimed: no proof bounds the distance from the ideal sum (discrete mechanisms have one: Canonne
2020, arXiv 2004.00010); far out in the tails points have fewer sums; time and memory accesses depend on the
values; and whoever reads this process's memory has the key.

Shapes: every vector is flat; names carry no suffix.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from p2pdrl.tensors.chunks import WALK, spans
from p2pdrl.tensors.layout import Float32Array

__all__ = ["KEY_BYTES", "SecretNoise"]

KEY_BYTES = 32
GRID_BITS = 16
"""The grid is so many halvings finer than the deviation."""


class SecretNoise:
    """One stream of noise.

    Args:
        key: `KEY_BYTES` of secret, never used for another stream; None draws one. Give one in tests only.
    """

    def __init__(self, key: bytes | None = None) -> None:
        key = secrets.token_bytes(KEY_BYTES) if key is None else key
        self._stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        self._zeros = bytes(8 * WALK)
        self._bits: npt.NDArray[np.uint64] = np.empty(WALK + 2, np.uint64)  # the cipher wants room to spare

    def add_to(self, vector: Float32Array, deviation: float) -> None:
        """Add independent Gaussians of mean 0 to all entries, and round to the grid; in place."""
        grid = grid_of(deviation)
        for span in spans(vector.size, WALK):
            piece = vector[span]
            total = self._gaussians(piece.size)
            total *= deviation
            total += piece
            total /= grid  # a power of two, so exact
            np.rint(total, out=total)
            total *= grid
            piece[:] = total

    def _gaussians(self, count: int) -> npt.NDArray[np.float64]:
        """At most `WALK` of mean 0 and deviation 1."""
        pairs = (count + 1) // 2
        self._stream.update_into(memoryview(self._zeros)[: 16 * pairs], self._bits.data.cast("B"))
        # In (0, 1): never 0, and down to 2^-65 for the radius.
        uniform = self._bits[: 2 * pairs].astype(np.float64)
        uniform += 0.5
        uniform *= 2.0**-64
        radius, angle = uniform[:pairs], uniform[pairs:]
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        angle *= 2 * math.pi
        sine = np.sin(angle)
        np.cos(angle, out=angle)
        angle *= radius
        sine *= radius
        return np.concatenate((angle, sine))[:count]


def grid_of(deviation: float) -> float:
    """Distance between neighbouring points of the grid: a power of two."""
    return 2.0 ** (math.floor(math.log2(deviation)) - GRID_BITS)
