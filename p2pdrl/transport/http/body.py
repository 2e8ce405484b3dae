"""Bodies of posted calls and of their answers, as aiohttp takes and gives them.

    body = metadata [mac] piece_1 [mac] piece_2 [mac] ...

Pieces are those of `pieces`; without a swarm key there are no MACs. `body_chunks` feeds aiohttp,
`BodyReader` drains it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.auth import MAC_BYTES, PieceMac
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.pieces import cut

__all__ = ["BodyReader", "ByteSource", "OverlongError", "body_chunks"]

_BROKEN = (ConnectionError, aiohttp.ClientError, RequestPayloadError, HttpProcessingError)


class OverlongError(WireError):
    """More bytes came than the header announced."""


class ByteSource(Protocol):
    """The part of ``aiohttp.StreamReader`` that is used."""

    async def readany(self) -> bytes:
        """Return what has arrived, at least one byte; nothing at the end."""
        ...


async def body_chunks(
    meta: bytes, views: Sequence[memoryview], mac: PieceMac | None
) -> AsyncIterator[bytes | memoryview]:
    """Yield a body, the loop getting its turn between pieces."""
    yield meta + (mac.of(0, meta) if mac is not None else b"")
    for index, piece in enumerate(cut(views), start=1):
        yield piece
        if mac is not None:
            yield mac.of(index, piece)
        await asyncio.sleep(0)


class BodyReader:
    """Reads one body: `meta` once, then `vector_into` at most once.

    Args:
        source: where bytes come from.
        mac: checks pieces; None without a swarm key.
        stall_s: seconds without a byte after which the peer counts as stalled.

    Attributes:
        nbytes: body bytes read so far.
    """

    def __init__(self, source: ByteSource, mac: PieceMac | None, stall_s: float) -> None:
        self._source = source
        self._mac = mac
        self._stall_s = stall_s
        self._rest = memoryview(b"")
        self.nbytes = 0

    async def meta(self, nbytes: int) -> bytes:
        """Read and check the metadata, ``nbytes`` long.

        Raises:
            WireError: truncated, or not authentic.
            PeerTimeoutError: nothing came for ``stall_s``.
        """
        out = bytearray(nbytes)
        async with _Progress(self._stall_s) as progress:
            await self._piece(memoryview(out), 0, progress)
        return bytes(out)

    async def vector_into(self, out: memoryview) -> None:
        """Fill ``out`` and check every piece, then see that the body ends there.

        Raises:
            WireError: truncated, overlong, or a piece isn't authentic.
            PeerTimeoutError: nothing came for ``stall_s``.
        """
        async with _Progress(self._stall_s) as progress:
            for index, start in enumerate(range(0, len(out), PIECE_BYTES), start=1):
                await self._piece(out[start : start + PIECE_BYTES], index, progress)
            await self._end(progress)

    async def end(self) -> None:
        """See that nothing follows the metadata.

        Raises:
            OverlongError: something does.
            PeerTimeoutError: nothing came for ``stall_s``.
        """
        async with _Progress(self._stall_s) as progress:
            await self._end(progress)

    async def _end(self, progress: _Progress) -> None:
        if self._rest or await self._next(progress):
            raise OverlongError("the body is longer than its header says")

    async def _piece(self, out: memoryview, index: int, progress: _Progress) -> None:
        await self._fill(out, progress)
        if self._mac is None:
            return
        mac = bytearray(MAC_BYTES)
        await self._fill(memoryview(mac), progress)
        if not self._mac.good(index, out, mac):
            raise WireError(f"piece {index} of the body isn't authentic")

    async def _fill(self, out: memoryview, progress: _Progress) -> None:
        start, size = 0, len(out)
        while start < size:
            if not self._rest and not await self._next(progress):
                raise WireError("the body is shorter than its header says")
            take = min(size - start, len(self._rest))
            out[start : start + take] = self._rest[:take]
            self._rest = self._rest[take:]
            start += take

    async def _next(self, progress: _Progress) -> int:
        try:
            self._rest = memoryview(await self._source.readany())
        except _BROKEN as error:
            raise WireError(f"the body broke off: {error}") from error
        self.nbytes += len(self._rest)
        progress.made()
        return len(self._rest)


class _Progress:
    """A deadline that moves on with every chunk that arrives."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(stall_s)

    def made(self) -> None:
        """Put the deadline off."""
        if not self._timeout.expired():
            self._timeout.reschedule(self._loop.time() + self._stall_s)

    async def __aenter__(self) -> _Progress:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._timeout.__aexit__(*exc_info)  # type: ignore[arg-type]
        except TimeoutError as error:
            raise PeerTimeoutError(f"no byte came for {self._stall_s:g} s") from error
