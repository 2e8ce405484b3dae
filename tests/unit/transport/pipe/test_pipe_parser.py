"""Messages of a pipe, without sockets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.transport.cipher import TAG_BYTES, Cipher
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.pipe.frames import (
    HEAD_BYTES,
    MAX_META_BYTES,
    PipeBuffer,
    PipeMessage,
    PipeParser,
    pack_head,
    unpack_head,
)

from ..pipes import THEIRS, Writer, anywhere

MOST_NBYTES = 4 * PIECE_BYTES


WAYS: dict[str, tuple[bytes | None, bool]] = {
    "in the open": (None, False),
    "proven": (THEIRS, False),
    "hidden": (THEIRS, True),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)
SEALED = pytest.mark.parametrize("way", ["proven", "hidden"])


def parser(way: str = "hidden", first: bytes = b"", into: PipeBuffer = anywhere) -> PipeParser:
    key, hides = WAYS[way]
    return PipeParser(Cipher(key, hides=hides), first, into, MOST_NBYTES)


def writer_of(way: str) -> Writer:
    key, hides = WAYS[way]
    return Writer(key, hides=hides)


def feed(made: PipeParser, data: bytes) -> list[PipeMessage]:
    """Give a parser bytes as a socket would: never more than it has room for."""
    found, left = [], memoryview(data)
    while True:
        while (message := made.next()) is not None:
            found.append(message)
        if not left:
            return found
        took = 0
        for room in made.room():
            count = min(len(room), len(left) - took)
            room[:count] = left[took : took + count]
            took += count
        assert took
        made.came(took)
        left = left[took:]


def plain(message: PipeMessage) -> tuple[int, bytes, bytes]:
    return message.kind, message.meta, bytes(message.vector) if message.vector is not None else b""


@given(st.integers(0, 65535), st.integers(1, 2**64 - 1), st.integers(0, 65536), st.integers(0, 10**15))
def test_heads_go_there_and_back(kind: int, number: int, meta: int, vector: int) -> None:
    head = pack_head(kind, number, meta, vector)
    assert len(head) == HEAD_BYTES
    assert unpack_head(head, number) == (kind, meta, vector)
    with pytest.raises(WireError, match="in place of"):
        unpack_head(head, number - 1)


@pytest.mark.parametrize(
    ("kind", "meta", "vector"), [(-1, 0, 0), (65536, 0, 0), (1, 65537, 0), (1, 0, 10**15 + 1)]
)
def test_what_a_head_cannot_say(kind: int, meta: int, vector: int) -> None:
    with pytest.raises(ValueError, match="message"):
        pack_head(kind, 1, meta, vector)


@given(
    st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES)
    | st.binary(min_size=22, max_size=22).map(b"pM".__add__)
)
def test_any_bytes_are_a_sound_head_or_a_wire_error(data: bytes) -> None:
    number = int.from_bytes(data[-8:], "big")
    try:
        kind, meta, vector = unpack_head(data, number)
    except WireError:
        return
    assert meta <= MAX_META_BYTES
    assert pack_head(kind, number, meta, vector) == data


SIZES = [0, 1, 100, 40_000, PIECE_BYTES, 2 * PIECE_BYTES + 7]


@given(st.data())
def test_messages_come_as_they_were_sent_whatever_the_portions(data: st.DataObject) -> None:
    way = data.draw(st.sampled_from([*WAYS]))
    writer, rng = writer_of(way), np.random.default_rng(data.draw(st.integers(0, 9)))
    sent = [
        (data.draw(st.integers(0, 9)), rng.bytes(data.draw(st.sampled_from([0, 3, 65536]))), rng.bytes(size))
        for size in data.draw(st.lists(st.sampled_from(SIZES), max_size=4))
    ]
    raw = b"".join(writer.message(*message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    first = cuts[0] if cuts and cuts[0] <= 65536 else 0
    made = parser(way, raw[:first])
    got = [message for at, end in pairwise([first, *cuts, len(raw)]) for message in feed(made, raw[at:end])]
    assert list(map(plain, got)) == sent
    assert made.between
    assert not made.greedy


@EACH_WAY
def test_single_bytes_make_messages_too(way: str) -> None:
    writer = writer_of(way)
    raw = writer.message(7, b"meta", b"vector") + writer.message(8)
    made = parser(way)
    assert made.between
    got = [message for byte in raw for message in feed(made, bytes([byte]))]
    assert list(map(plain, got)) == [(7, b"meta", b"vector"), (8, b"", b"")]


def test_vectors_are_received_where_they_belong() -> None:
    out = memoryview(bytearray(50_000))
    asked: list[tuple[int, bytes, int]] = []

    def into(*head: object) -> memoryview:
        asked.append(head)  # type: ignore[arg-type]
        return out

    vector = np.random.default_rng(1).bytes(50_000)
    (message,) = feed(parser(into=into), Writer().message(5, b"where", vector))
    assert message.vector is out
    assert out == vector
    assert asked == [(5, b"where", 50_000)]


def test_a_buffer_of_floats_will_do() -> None:
    out = np.zeros(1000, np.float32)
    vector = np.arange(1000, dtype=np.float32)
    feed(parser(into=lambda *_: memoryview(out)), Writer().message(vector=vector.tobytes()))
    assert np.array_equal(out, vector)


@SEALED
def test_every_flipped_bit_is_noticed_before_anything_is_used(way: str) -> None:
    raw = writer_of(way).message(3, b"meta", bytes(60))
    asked: list[int] = []

    def into(kind: int, meta: bytes, nbytes: int) -> memoryview:
        asked.append(kind)
        return anywhere(kind, meta, nbytes)

    for at in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[at // 8] ^= 1 << at % 8
        got: list[PipeMessage] = []
        asked.clear()
        try:
            got = feed(parser(way, into=into), bytes(bad))
        except WireError:
            pass
        assert not got, f"bit {at}"
        assert not asked or at // 8 >= HEAD_BYTES + 4 + TAG_BYTES, "the head was believed"


@SEALED
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_flipped_bit_in_a_late_piece_is_noticed(piece: int, way: str) -> None:
    raw = bytearray(writer_of(way).message(vector=bytes(2 * PIECE_BYTES + 50)))
    raw[HEAD_BYTES + TAG_BYTES + piece * (PIECE_BYTES + TAG_BYTES) + 17] ^= 1
    with pytest.raises(WireError, match=f"piece {piece + 1} "):
        feed(parser(way), bytes(raw))


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [1, 0]], ids=["repeated", "late", "a gap", "swapped"])
@EACH_WAY
def test_messages_cannot_be_repeated_left_out_or_swapped(order: list[int], way: str) -> None:
    writer = writer_of(way)
    messages = [writer.message(kind, b"meta") for kind in range(3)]
    with pytest.raises(WireError, match="in place of message"):
        feed(parser(way), b"".join(messages[at] for at in order))


@SEALED
def test_numbers_alone_do_not_help_a_forger(way: str) -> None:
    """A message with the right number and the tag of another is refused as well."""
    writer = writer_of(way)
    first, second = (writer.message(kind, b"meta") for kind in (1, 2))
    forged = pack_head(2, 1, 4, 0) + second[HEAD_BYTES:]
    for raw in (forged, first[:HEAD_BYTES] + second[HEAD_BYTES:]):
        with pytest.raises(WireError, match="isn't authentic"):
            feed(parser(way), raw)


@SEALED
def test_pieces_cannot_be_swapped(way: str) -> None:
    raw = writer_of(way).message(vector=bytes(PIECE_BYTES) + b"x" * PIECE_BYTES)
    start, length = HEAD_BYTES + TAG_BYTES, PIECE_BYTES + TAG_BYTES
    swapped = raw[:start] + raw[start + length :] + raw[start : start + length]
    with pytest.raises(WireError, match="piece 1 "):
        feed(parser(way), swapped)


@pytest.mark.parametrize("key", [None, bytes(32)])
def test_other_keys_and_none(key: bytes | None) -> None:
    with pytest.raises(WireError, match="isn't authentic"):
        feed(parser(), Writer(key).message(1, b"meta", bytes(100)))


@EACH_WAY
@pytest.mark.parametrize(
    "head",
    [
        b"pM" + b"\xff" * 14 + (1).to_bytes(8, "big"),
        b"pM\0\1" + b"\xff" * 4 + bytes(8) + (1).to_bytes(8, "big"),
        pack_head(1, 1, 0, MOST_NBYTES + 1),
        pack_head(1, 1, 0, 10**15),
        b"pC" + bytes(22),
        bytes(24),
    ],
)
def test_lengths_are_bounded_before_anything_is_made(head: bytes, way: str) -> None:
    def never(*_: object) -> memoryview:
        raise AssertionError

    with pytest.raises(WireError):
        feed(parser(way, into=never), writer_of(way).message(head=head))


def test_a_vector_that_is_not_wanted() -> None:
    with pytest.raises(WireError, match="isn't wanted"):
        feed(parser(into=lambda *_: None), Writer().message(vector=b"vector"))
    assert feed(parser(into=lambda *_: None), Writer().message(meta=b"without one"))


def test_a_buffer_of_another_length_is_a_bug() -> None:
    with pytest.raises(ValueError, match="7 bytes, the vector has 6"):
        feed(parser(into=lambda *_: memoryview(bytearray(7))), Writer().message(vector=b"vector"))
