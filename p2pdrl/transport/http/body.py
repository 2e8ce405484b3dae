"""Bodies of posted calls and of their answers, as aiohttp takes and gives them; see `framing`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.framing import Filling, OverlongError, cut
from p2pdrl.transport.rate import Allowance, Rate

__all__ = ["BodyReader", "body_chunks"]

_BROKEN = (ConnectionError, aiohttp.ClientError, RequestPayloadError, HttpProcessingError)


async def body_chunks(
    meta: bytes, views: Sequence[memoryview], rate: Rate | None = None
) -> AsyncIterator[bytes | memoryview]:
    """Yield a body; the event loop gets its turn after each piece, and the vector waits for ``rate``."""
    if rate is not None:
        rate.charge(len(meta))
    yield meta
    for piece in cut(views):
        if rate is None:
            yield piece
        else:
            async for part in _in_time(piece, rate):
                yield part
        await asyncio.sleep(0)


async def _in_time(piece: memoryview, rate: Rate) -> AsyncIterator[memoryview]:
    """Yield a piece in parts, each when its time has come."""
    allowance = Allowance(rate)
    while piece:
        nbytes = await allowance.take(len(piece))
        yield piece[:nbytes]
        piece = piece[nbytes:]


class BodyReader:
    """Reads one body: `meta` once, then `vector_into` or `end` at most once.

    All of them raise `PeerTimeoutError` when no byte comes for ``stall_s``.

    Args:
        source: where bytes come from; only its ``readany`` is used.
        stall_s: seconds without a byte after which the peer counts as stalled.
        rate: what is read of a vector waits for it, while the peer is held back by what lies unread.

    Attributes:
        nbytes: body bytes read so far.
    """

    def __init__(self, source: aiohttp.StreamReader, stall_s: float, rate: Rate | None = None) -> None:
        self._rate = rate
        self._source = source
        self._stall_s = stall_s
        self._rest = memoryview(b"")
        self.nbytes = 0

    async def meta(self, nbytes: int) -> bytes:
        """Read the metadata, ``nbytes`` long.

        Raises:
            WireError: truncated.
        """
        meta = bytearray(nbytes)
        async with _Progress(self._stall_s) as progress:
            await self._fill(Filling(memoryview(meta)), progress)
        return bytes(meta)

    async def vector_into(self, out: memoryview) -> None:
        """Fill ``out``, then see that the body ends there.

        Raises:
            WireError: truncated or overlong.
        """
        async with _Progress(self._stall_s) as progress:
            await self._fill(Filling(out), progress, bulk=True)
            await self._end(progress)

    async def end(self) -> None:
        """See that nothing follows the metadata.

        Raises:
            OverlongError: something does.
        """
        async with _Progress(self._stall_s) as progress:
            await self._end(progress)

    async def _end(self, progress: _Progress) -> None:
        if self._rest or await self._next(progress):
            raise OverlongError("the body is longer than its header says")

    async def _fill(self, filling: Filling, progress: _Progress, *, bulk: bool = False) -> None:
        while not filling.full:
            if not self._rest and not await self._next(progress, bulk=bulk):
                raise WireError("the body is shorter than its header says")
            self._rest = self._rest[filling.copy(self._rest) :]

    async def _next(self, progress: _Progress, *, bulk: bool = False) -> int:
        try:
            self._rest = memoryview(await self._source.readany())
        except _BROKEN as error:
            raise WireError(f"the body broke off: {error}") from error
        self.nbytes += len(self._rest)
        progress.made()
        if self._rate is not None:
            await self._count(len(self._rest), self._rate, progress, bulk=bulk)
        return len(self._rest)

    @staticmethod
    async def _count(nbytes: int, rate: Rate, progress: _Progress, *, bulk: bool) -> None:
        """Count bytes that came, and wait until they may have; the peer isn't to blame for that wait."""
        if not bulk:
            rate.charge(nbytes)
            return
        allowance = Allowance(rate)
        while nbytes > 0:
            nbytes -= await allowance.take(nbytes)
            progress.made()


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
