"""Writing and reading bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.framing import OverlongError, views_of
from p2pdrl.transport.http.body import BodyReader, body_chunks
from p2pdrl.transport.limits import PIECE_BYTES


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


async def written(meta: bytes, *parts: bytes) -> list[bytes]:
    chunks = body_chunks(meta, views_of([memoryview(part) for part in parts]))
    return [bytes(chunk) async for chunk in chunks]


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1])
@pytest.mark.parametrize("portion", [65537, 1 << 30])
async def test_what_is_written_is_read(nbytes: int, portion: int) -> None:
    vector = np.random.default_rng(3).bytes(nbytes)
    body = b"".join(await written(b"meta", vector))
    assert body == b"meta" + vector
    source = Source([body[i : i + portion] for i in range(0, len(body), portion)])
    reader = BodyReader(source, 1.0)
    out = bytearray(nbytes)
    assert await reader.meta(4) == b"meta"
    await reader.vector_into(memoryview(out))
    assert out == vector
    assert reader.nbytes == len(body)


async def test_a_body_is_written_piece_by_piece() -> None:
    parts = [np.random.default_rng(seed).bytes(PIECE_BYTES - 1) for seed in range(3)]
    meta, *pieces = await written(b"meta", *parts)
    assert meta == b"meta"
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES - 3]
    assert b"".join(pieces) == b"".join(parts)


async def test_single_bytes_make_a_body_too() -> None:
    body = b"".join(await written(b"meta", b"vector"))
    reader = BodyReader(Source([bytes([byte]) for byte in body]), 1.0)
    out = bytearray(6)
    assert await reader.meta(4) == b"meta"
    await reader.vector_into(memoryview(out))
    assert out == b"vector"


async def test_truncated_and_overlong_bodies() -> None:
    body = b"metavector"
    cases = [
        (body[:-1], WireError, "shorter"),
        (body[:4], WireError, "shorter"),
        (body + b"x", OverlongError, "longer"),
    ]
    for bad, kind, word in cases:
        reader = BodyReader(Source([bad]), 1.0)
        assert await reader.meta(4) == b"meta"
        with pytest.raises(kind, match=word):
            await reader.vector_into(memoryview(bytearray(6)))
    with pytest.raises(WireError, match="shorter"):
        await BodyReader(Source([b"met"]), 1.0).meta(4)
    for portions in ([b"metax"], [b"meta", b"x"]):
        reader = BodyReader(Source(portions), 1.0)
        await reader.meta(4)
        with pytest.raises(OverlongError):
            await reader.end()


async def test_silence_is_a_timeout() -> None:
    reader = BodyReader(Source([b"me"], silent=True), 0.01)
    with pytest.raises(PeerTimeoutError, match="no byte"):
        await reader.meta(4)


async def test_a_connection_that_breaks_is_a_wire_error() -> None:
    class Broken:
        async def readany(self) -> bytes:
            raise ConnectionResetError("gone")

    with pytest.raises(WireError, match="broke off"):
        await BodyReader(Broken(), 1.0).meta(4)
