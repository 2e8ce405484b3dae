"""Tokens for connections, and connections that begin with one."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.cipher import KEY_BYTES, OPEN, Cipher
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import (
    HELLO,
    OPENED,
    TOKEN_BYTES,
    ConnectionOpening,
    NotConnectedError,
    Opener,
    PendingConnections,
)
from p2pdrl.transport.pipe.server import PipeAnswer
from p2pdrl.transport.protocol import Address

from .liars import listening

TOKEN, OTHER = b"1" * TOKEN_BYTES, b"2" * TOKEN_BYTES


# What a caller is told


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("hides", [True, False])
def test_openings_go_there_and_back(sealed: bool, hides: bool) -> None:
    opening = ConnectionOpening.new(sealed=sealed, hides=hides)
    assert ConnectionOpening.decode(opening.encode()) == opening
    assert (opening.keys is not None, opening.hides) == (sealed, hides)
    answer = PipeAnswer(opening, b"meta")
    assert PipeAnswer.decode(answer.encode()) == answer


def test_openings_are_fresh_and_keep_their_keys_to_themselves() -> None:
    one, other = (ConnectionOpening.new(sealed=True, hides=True) for _ in range(2))
    assert one.token != other.token
    assert one.keys is not None
    assert other.keys is not None
    assert len({*one.keys, *other.keys}) == 4
    assert repr(one) == "ConnectionOpening(with keys)"
    assert repr(ConnectionOpening.new(sealed=False, hides=True)) == "ConnectionOpening(without keys)"


@pytest.mark.parametrize("hides", [True, False])
def test_both_ends_have_the_ciphers_of_both_ways(hides: bool) -> None:
    opening = ConnectionOpening.new(sealed=True, hides=hides)
    ours, theirs = opening.ciphers(), ConnectionOpening.decode(opening.encode()).ciphers()
    for out, into in zip(ours, theirs, strict=True):
        assert (out.hides, into.hides) == (hides, hides)
        assert into.unseal(out.seal(b"meta", b"head"), b"head", "it") == b"meta"
    with pytest.raises(WireError):
        theirs[1].unseal(ours[0].seal(b"meta"), b"", "it")
    assert [cipher.nbytes for cipher in ConnectionOpening(TOKEN, None, hides).ciphers()] == [OPEN.nbytes] * 2


keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
openings = st.builds(
    ConnectionOpening,
    st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES),
    st.none() | st.tuples(keys, keys),
    st.booleans(),
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=40)
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "token": st.binary(max_size=TOKEN_BYTES + 1) | anything,
        "keys": st.lists(st.binary(min_size=31, max_size=33), max_size=3) | anything,
        "hides": anything,
        "opening": anything,
        "meta": anything,
    },
)


@given(st.binary(max_size=120) | fields.map(msgspec.msgpack.encode) | anything.map(msgspec.msgpack.encode))
def test_any_bytes_are_an_opening_or_a_wire_error(data: bytes) -> None:
    try:
        found = ConnectionOpening.decode(data)
    except WireError:
        pass
    else:
        assert len(found.token) == TOKEN_BYTES
        assert found.keys is None or [len(key) for key in found.keys] == [KEY_BYTES] * 2
        assert isinstance(found.ciphers()[0], Cipher)
    with pytest.raises(WireError):
        PipeAnswer.decode(data)


@given(openings, st.data())
def test_an_opening_that_was_cut_is_a_wire_error(opening: ConnectionOpening, data: st.DataObject) -> None:
    for raw, kind in (
        (opening.encode(), ConnectionOpening),
        (PipeAnswer(opening, b"meta").encode(), PipeAnswer),
    ):
        with pytest.raises(WireError):
            kind.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])


@pytest.mark.parametrize("token", [b"", TOKEN[:-1], TOKEN + b"1"])
def test_tokens_have_one_length(token: bytes) -> None:
    with pytest.raises(WireError, match="opening of a connection"):
        ConnectionOpening.decode(ConnectionOpening(token, None, True).encode())


# Tokens


class Promise:
    """What was promised, and how often it was told that nobody came."""

    def __init__(self) -> None:
        self.lost = 0

    def lose(self) -> None:
        self.lost += 1


@pytest.mark.looptime
async def test_a_token_is_good_once() -> None:
    pending: PendingConnections[Promise] = PendingConnections()
    one, two = Promise(), Promise()
    pending.add(TOKEN, one, one.lose)
    pending.add(OTHER, two, two.lose)
    assert len(pending) == 2
    assert pending.redeem(b"3" * TOKEN_BYTES) is None
    assert pending.redeem(TOKEN) is one
    assert pending.redeem(TOKEN) is None
    await asyncio.sleep(60)
    assert (one.lost, two.lost) == (0, 1)
    assert len(pending) == 0


@pytest.mark.looptime
async def test_a_token_expires_after_a_while() -> None:
    pending: PendingConnections[Promise] = PendingConnections(open_within_s=3.0)
    promises = [Promise(), Promise()]
    for token, promise in zip((TOKEN, OTHER), promises, strict=True):
        pending.add(token, promise, promise.lose)
        await asyncio.sleep(1.0)
    await asyncio.sleep(0.9)
    assert [promise.lost for promise in promises] == [0, 0]
    await asyncio.sleep(0.2)
    assert [promise.lost for promise in promises] == [1, 0]
    assert pending.redeem(TOKEN) is None
    assert pending.redeem(OTHER) is promises[1]
    await asyncio.sleep(60)
    assert [promise.lost for promise in promises] == [1, 0]


@pytest.mark.looptime
async def test_tokens_last_for_seconds() -> None:
    pending: PendingConnections[Promise] = PendingConnections()
    promise = Promise()
    pending.add(TOKEN, promise, promise.lose)
    await asyncio.sleep(4.9)
    assert not promise.lost
    await asyncio.sleep(0.2)
    assert promise.lost


@pytest.mark.looptime
async def test_what_is_given_up_is_told_once() -> None:
    pending: PendingConnections[Promise] = PendingConnections()
    promises = [Promise(), Promise()]
    for token, promise in zip((TOKEN, OTHER), promises, strict=True):
        pending.add(token, promise, promise.lose)
    for _ in range(2):
        pending.drop(TOKEN)
        assert [promise.lost for promise in promises] == [1, 0]
        assert len(pending) == 1
    for _ in range(2):
        pending.close()
        assert [promise.lost for promise in promises] == [1, 1]
    assert pending.redeem(TOKEN) is None
    assert pending.redeem(OTHER) is None
    await asyncio.sleep(60)
    assert [promise.lost for promise in promises] == [1, 1]


# Connections

LIMITS = TransportLimits(stall_deadline_s=0.1)


async def welcomed(welcome: bytes, then: str = "silence") -> tuple[bytes, bytes]:
    """What a callee is sent, and what the caller has beside its welcome."""
    came: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.readexactly(len(HELLO) + TOKEN_BYTES))
        writer.write(welcome)
        if then == "end":
            writer.close()

    async with listening(talk, tls=None) as to, Opener(LIMITS).open(to, TOKEN) as sock:
        rest = await sock.read(len(welcome) - 1, 1.0)
        sock.close()
    return came[0], rest


async def test_a_connection_begins_with_its_token() -> None:
    assert await welcomed(OPENED) == (HELLO + TOKEN, b"")


async def test_what_follows_the_welcome_is_kept() -> None:
    assert await welcomed(OPENED + b"first words") == (HELLO + TOKEN, b"first words")


def test_a_hello_is_neither_http_nor_tls() -> None:
    assert HELLO[0] not in {0x16, 0x80}
    assert not HELLO[:1].isalpha()


@pytest.mark.parametrize("welcome", [b"\0", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_another_welcome_is_a_wire_error(welcome: bytes) -> None:
    with pytest.raises(WireError, match="another protocol"):
        await welcomed(welcome)


async def test_no_welcome() -> None:
    with pytest.raises(PeerTimeoutError):
        await welcomed(b"")
    with pytest.raises(ConnectionError):
        await welcomed(b"", "end")


async def test_nobody_there() -> None:
    async with listening(lambda _r, _w: asyncio.sleep(0), tls=None) as to:
        pass
    for address in (to, Address("::1", to.port)):
        with pytest.raises(NotConnectedError):
            async with Opener(LIMITS).open(address, TOKEN):
                pass


async def test_what_fails_inside_closes_the_connection() -> None:
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HELLO) + TOKEN_BYTES)
        writer.write(OPENED)
        assert await reader.read() == b""
        ended.set()

    async with listening(talk, tls=None) as to:
        with pytest.raises(KeyError):
            async with Opener(LIMITS).open(to, TOKEN):
                raise KeyError
        await asyncio.wait_for(ended.wait(), 5)


async def test_closing_ends_what_is_being_opened() -> None:
    opener = Opener(TransportLimits(stall_deadline_s=60.0))
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HELLO) + TOKEN_BYTES)
        asked.set()
        await reader.read()

    async def opened(to: Address) -> None:
        async with opener.open(to, TOKEN):
            pass

    async with listening(talk, tls=None) as to:
        opening = asyncio.create_task(opened(to))
        await asyncio.wait_for(asked.wait(), 5)
        opener.close()
        with pytest.raises(ConnectionError):
            await opening
