"""Writing and reading bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.auth import MAC_BYTES, NO_MACS, PieceMac, SwarmKeys
from p2pdrl.transport.framing import OverlongError, body_nbytes, views_of
from p2pdrl.transport.http.body import BodyReader, body_chunks
from p2pdrl.transport.limits import PIECE_BYTES


def mac() -> PieceMac:
    return SwarmKeys(b"key").request_pieces("0" * 32)


class Source:
    """Bytes that arrive in given portions; then the end, or silence for ever."""

    def __init__(self, portions: Sequence[bytes], silent: bool = False) -> None:
        self.portions = list(portions)
        self.silent = silent

    async def readany(self) -> bytes:
        if self.portions:
            return self.portions.pop(0)
        if self.silent:
            await asyncio.Event().wait()
        return b""


async def written(meta: bytes, vector: bytes, keyed: bool = True) -> bytes:
    chunks = body_chunks(meta, views_of(memoryview(vector)), mac() if keyed else NO_MACS)

    return b"".join([bytes(chunk) async for chunk in chunks])


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1])
@pytest.mark.parametrize("portion", [65537, 1 << 30])
async def test_what_is_written_is_read(keyed: bool, nbytes: int, portion: int) -> None:
    vector = np.random.default_rng(3).bytes(nbytes)
    body = await written(b"meta", vector, keyed)
    assert len(body) == body_nbytes(4, nbytes, MAC_BYTES if keyed else 0)
    source = Source([body[i : i + portion] for i in range(0, len(body), portion)])
    reader = BodyReader(source, mac() if keyed else NO_MACS, 1.0)
    out = bytearray(nbytes)
    assert await reader.meta(4) == b"meta"
    await reader.vector_into(memoryview(out))
    assert out == vector
    assert reader.nbytes == len(body)


async def test_single_bytes_make_a_body_too() -> None:
    body = await written(b"meta", b"vector")
    reader = BodyReader(Source([bytes([byte]) for byte in body]), mac(), 1.0)
    out = bytearray(6)
    assert await reader.meta(4) == b"meta"
    await reader.vector_into(memoryview(out))
    assert out == b"vector"


async def test_truncated_overlong_and_changed_bodies() -> None:
    body = await written(b"meta", b"vector")
    cases = [
        (body[:-1], WireError, "shorter"),
        (body[: 4 + MAC_BYTES], WireError, "shorter"),
        (body + b"x", OverlongError, "longer"),
        (body[:20] + b"V" + body[21:], WireError, "piece 1"),
    ]
    for bad, kind, word in cases:
        reader = BodyReader(Source([bad]), mac(), 1.0)
        assert await reader.meta(4) == b"meta"
        with pytest.raises(kind, match=word):
            await reader.vector_into(memoryview(bytearray(6)))
    with pytest.raises(WireError, match="metadata isn't authentic"):
        await BodyReader(Source([b"M" + body[1:]]), mac(), 1.0).meta(4)
    reader = BodyReader(Source([await written(b"meta", b""), b"x"]), mac(), 1.0)
    await reader.meta(4)
    with pytest.raises(OverlongError):
        await reader.end()


async def test_silence_is_a_timeout() -> None:
    reader = BodyReader(Source([b"me"], silent=True), mac(), 0.01)
    with pytest.raises(PeerTimeoutError, match="no byte"):
        await reader.meta(4)


async def test_a_connection_that_breaks_is_a_wire_error() -> None:
    class Broken:
        async def readany(self) -> bytes:
            raise ConnectionResetError("gone")

    with pytest.raises(WireError, match="broke off"):
        await BodyReader(Broken(), mac(), 1.0).meta(4)
