"""Vectors that workers send to a server: read off the network, decoded, checked.

Shapes: every vector is flat, of the shard's length; names carry no suffix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from p2pdrl.config.strategy_bases import Served
from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.strategies.heavy import heavy
from p2pdrl.tensors import mix
from p2pdrl.tensors.compression import make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Incoming, Refusal

__all__ = ["Inbox", "Parcel"]

READERS = 8
"""Vectors that are read at a time; other senders wait."""


class Parcel:
    """What comes with a push: a peer's vector, or the local worker's.

    Args:
        incoming: a peer's call.
        vector: the local worker's; unchanged until the push is answered.
    """

    def __init__(self, incoming: Incoming | None, vector: Float32Array | None = None) -> None:
        self.incoming = incoming
        self.vector = vector
        self.read = False
        """Whether the vector was read off the network."""


class Inbox:
    """Reads the vectors of one shard's pushes.

    Args:
        config: compression.
        size: entries of the shard.
        max_abs: greatest entry accepted.
        strike: notes that a peer sent something poisoned.
    """

    def __init__(self, config: Served, size: int, max_abs: float, strike: Callable[[str, str], None]) -> None:
        self._size = size
        self._max_abs = max_abs
        self._strike = strike
        self._whole = make_codec("none", size)
        self._codec = make_codec(
            config.compression, size, keep=config.keep, threshold=config.threshold, feedback=False
        )
        self._decoding = asyncio.Lock()
        self._room = asyncio.Semaphore(READERS)
        self._buffers: list[memoryview] = []

    @asynccontextmanager
    async def received(self, parcel: Parcel, *, whole: bool) -> AsyncIterator[memoryview | Float32Array]:
        """Read a parcel; what it gives is good for `decode` until the block ends.

        Args:
            parcel: what came.
            whole: whether it is parameters, which travel as float32; else a gradient.

        Raises:
            Refusal: its length is impossible (422).
            WireError: truncated, or altered on the way.
            PeerTimeoutError: the peer stopped sending.
        """
        incoming = parcel.incoming
        if incoming is None:
            if parcel.vector is None or parcel.vector.size != self._size:
                raise Refusal(422, "the push brings no vector of this shard's length")
            yield parcel.vector
            return
        nbytes, most = incoming.vector_nbytes, (self._whole if whole else self._codec).max_nbytes
        if not 0 < nbytes <= most:
            self._strike(incoming.sender, f"a vector of {nbytes} bytes, at most {most} are possible")
            raise Refusal(422, "the vector has an impossible length")
        async with self._room:
            room = max(self._whole.max_nbytes, self._codec.max_nbytes)
            buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(room))
            try:
                parcel.read = True
                await incoming.read_vector_into(buffer[:nbytes])
                yield buffer[:nbytes]
            finally:
                self._buffers.append(buffer)

    async def drain(self, parcel: Parcel) -> None:
        """Read what nobody needed: a connection with an unread vector can't be used again."""
        if parcel.incoming is not None and parcel.incoming.vector_nbytes and not parcel.read:
            async with self.received(parcel, whole=True):
                pass

    async def decode(
        self, sender: str, data: memoryview | Float32Array, out: Float32Array, *, whole: bool
    ) -> None:
        """Write what was received into ``out``.

        Raises:
            PoisonedVectorError: malformed, NaN or an entry beyond the bound; the sender has its strike.
        """
        async with self._decoding:
            await heavy(8 * self._size, lambda: self.decode_now(sender, data, out, whole=whole))

    def decode_now(
        self, sender: str, data: memoryview | Float32Array, out: Float32Array, *, whole: bool
    ) -> None:
        """The same, here and now; one at a time."""
        try:
            if isinstance(data, memoryview):
                (self._whole if whole else self._codec).decode(data, out)
            else:
                np.copyto(out, data)
            mix.check_finite(out, self._max_abs)
        except (WireError, PoisonedVectorError) as error:
            self._strike(sender, str(error))
            raise PoisonedVectorError(str(error)) from error
