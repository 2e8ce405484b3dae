"""The bytes of messages: heads, pieces, and where those that arrive are put."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.transport.cipher import OPEN, TAG_BYTES, Cipher
from p2pdrl.transport.framing import (
    HEAD_BYTES,
    STAGE_BYTES,
    AnswerFrame,
    CallFrame,
    Filling,
    UnreadBytes,
    batches,
    body_nbytes,
    cut,
    join_views,
    pieces_of,
    unsent,
    views_of,
)
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.pipe.frames import pack_head

# Heads


def test_heads_on_the_wire() -> None:
    """As two bytes, a byte and a zero or 16 bits, 32 bits and 64 bits, big-endian."""
    lengths = b"\0\0\1\2" + b"\0\0\0\0\0\3\4\5"
    assert CallFrame(4, 0x102, 0x30405).encode() == b"pC\4\0" + lengths
    assert AnswerFrame(200, 0x102, 0x30405, False).encode() == b"pA\0\xc8" + lengths
    assert AnswerFrame(429, 0x102, 0x30405, True).encode() == b"pA\x81\xad" + lengths
    assert pack_head(0x607, 0x809, 0x102, 0x30405) == b"pM\6\7" + lengths + b"\0\0\0\0\0\0\x08\x09"


@given(st.integers(1, 131), st.integers(0, 2**32 - 1), st.integers(0, 10**15))
def test_heads_of_calls_go_there_and_back(route: int, meta: int, vector: int) -> None:
    frame = CallFrame(route, meta, vector)
    assert len(frame.encode()) == HEAD_BYTES
    assert CallFrame.decode(frame.encode()) == frame


@given(st.just(200) | st.integers(400, 599), st.integers(0, 2**32 - 1), st.integers(0, 10**15), st.booleans())
def test_heads_of_answers_go_there_and_back(status: int, meta: int, vector: int, last: bool) -> None:
    frame = AnswerFrame(status, meta, vector, last)
    assert len(frame.encode()) == HEAD_BYTES
    assert AnswerFrame.decode(frame.encode()) == frame


@pytest.mark.parametrize("frame", [CallFrame(1, 2**32, 0), CallFrame(1, 0, 10**15 + 1)])
def test_what_a_head_cannot_say(frame: CallFrame) -> None:
    with pytest.raises(ValueError, match="too long"):
        frame.encode()
    with pytest.raises(ValueError, match="too long"):
        AnswerFrame(200, frame.meta_nbytes, frame.vector_nbytes, False).encode()


marks = st.sampled_from([b"pC", b"pA"])
heads = st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES)


@given(heads | st.builds(lambda mark, rest: mark + rest[2:], marks, heads))
def test_any_bytes_are_a_sound_head_or_a_wire_error(data: bytes) -> None:
    try:
        call = CallFrame.decode(data)
    except WireError:
        pass
    else:
        assert 1 <= call.route_nbytes <= 131
        assert call.vector_nbytes <= 10**15
        assert call.encode() == data
    try:
        answer = AnswerFrame.decode(data)
    except WireError:
        pass
    else:
        assert answer.status == 200 or 400 <= answer.status <= 599
        assert answer.encode() == data


# Writing


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 16))
def test_cutting_keeps_the_bytes_and_the_sizes(parts: list[bytes], size: int) -> None:
    pieces = [bytes(piece) for piece in cut([memoryview(part) for part in parts], size)]
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(pieces)


def test_cutting_one_view_copies_nothing() -> None:
    whole = memoryview(bytearray(10))
    for piece in cut([whole], 5):
        piece[0] = 7
    assert bytes(whole) == b"\7\0\0\0\0" * 2


def test_only_contiguous_vectors_are_taken() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        views_of(memoryview(np.zeros((4, 4), np.float32)[:, ::2]))
    assert join_views(memoryview(np.zeros((2, 2), np.float32))) == bytes(16)


KEY = bytes(range(32))
WAYS = ["in the open", "proven", "hidden"]
EACH_WAY = pytest.mark.parametrize("way", WAYS)


def cipher(way: str, skip: int = 0) -> Cipher:
    """Of one end; both ends have one of their own."""
    made = Cipher(None if way == "in the open" else KEY, hides=way == "hidden")
    made.skip(skip)
    return made


views = st.lists(st.binary(max_size=40), max_size=6)


def joined(head: bytes, meta: bytes, parts: list[memoryview], way: str) -> bytes:
    """A frame as it is sent: what a list holds is gone before the next list is asked for."""
    raw = b""
    for batch in batches(head, meta, parts, cipher(way)):
        assert batch
        raw += b"".join(bytes(buffer) for buffer in batch)
    return raw


@given(st.binary(min_size=1, max_size=30), st.binary(max_size=30), views, st.sampled_from(WAYS))
def test_a_frame_is_its_parts_sealed(head: bytes, meta: bytes, parts: list[bytes], way: str) -> None:
    vector, serial = b"".join(parts), cipher(way)
    wanted = head + serial.seal(meta, head)
    if vector:
        wanted += b"".join(map(bytes, serial.seal_piece(vector)))
    raw = joined(head, meta, [memoryview(part) for part in parts if part], way)
    assert raw == wanted
    assert len(raw) == len(head) + body_nbytes(len(meta), len(vector), serial.nbytes)
    if way == "in the open":
        assert raw == head + meta + vector


@EACH_WAY
@pytest.mark.parametrize("sizes", [[3 * PIECE_BYTES + 5], [PIECE_BYTES, 7, PIECE_BYTES], [3] * 200])
def test_long_frames_are_cut(sizes: list[int], way: str) -> None:
    rng = np.random.default_rng(5)
    parts = [memoryview(rng.bytes(size)) for size in sizes]
    raw = b""
    for batch in batches(b"first", b"meta", parts, cipher(way)):
        assert sum(map(len, batch)) <= 2 * PIECE_BYTES
        assert len(batch) <= 64
        raw += b"".join(bytes(buffer) for buffer in batch)
    check = cipher(way)
    assert len(raw) == 5 + body_nbytes(4, sum(sizes), check.nbytes)
    start = 5 + 4 + check.nbytes
    assert check.unseal(raw[5:start], raw[:5], "it") == b"meta"
    out = memoryview(bytearray(sum(sizes)))
    filling = Filling(out, check)
    assert filling.copy(memoryview(raw)[start:]) == filling.taken_nbytes == len(raw) - start
    assert filling.full
    assert out == b"".join(parts)


def test_the_open_copies_nothing() -> None:
    part = memoryview(bytearray(3 * PIECE_BYTES))
    (_, *buffers), *lists = batches(b"head", b"meta", [part], OPEN)
    assert all(buffer.obj is part.obj for batch in (buffers, *lists) for buffer in batch)  # type: ignore[union-attr]


def test_pieces_are_counted() -> None:
    assert [pieces_of(n) for n in (0, 1, PIECE_BYTES, PIECE_BYTES + 1)] == [0, 1, 1, 2]


@given(views, st.data())
def test_what_is_unsent_is_the_rest(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    sent_nbytes = data.draw(st.integers(0, len(whole)))
    rest = unsent(parts, sent_nbytes)
    assert b"".join(map(bytes, rest)) == whole[sent_nbytes:]
    assert bool(rest) == (sent_nbytes < len(whole)) or not any(rest)


# Parsing


@given(st.data())
def test_a_buffer_fills_whatever_the_portions(data: st.DataObject) -> None:
    way = data.draw(st.sampled_from(WAYS))
    nbytes = data.draw(st.sampled_from([1, 50, PIECE_BYTES, PIECE_BYTES + 1]))
    vector = np.random.default_rng(nbytes).bytes(nbytes)
    check = cipher(way, skip=1)
    raw = memoryview(joined(b"x", b"", [memoryview(vector)], way))[1 + check.nbytes :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    out = memoryview(bytearray(nbytes))
    filling = Filling(out, check)
    for start, end in pairwise([0, *cuts, len(raw)]):
        portion = raw[start:end]
        while portion:  # as a socket would: at most what there is room for
            room = filling.room()
            took = 0
            for place in room:
                count = min(len(place), len(portion) - took)
                place[:count] = portion[took : took + count]
                took += count
            filling.took(took)
            portion = portion[took:]
    assert filling.full
    assert out == vector
    assert filling.taken_nbytes == len(raw)


@pytest.mark.parametrize("way", ["proven", "hidden"])
@given(at=st.integers(0, 2 * PIECE_BYTES + 10 + 3 * TAG_BYTES - 1))
def test_a_changed_byte_is_noticed(way: str, at: int) -> None:
    vector = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 10)
    raw = bytearray(joined(b"x", b"", [memoryview(vector)], way)[1 + TAG_BYTES :])
    raw[at] ^= 1
    with pytest.raises(WireError, match="isn't authentic"):
        Filling(memoryview(bytearray(len(vector))), cipher(way, skip=1)).copy(memoryview(raw))


def test_a_bad_piece_is_named_and_spoils_none_before_it() -> None:
    out = memoryview(bytearray(2 * PIECE_BYTES))
    raw = bytearray(joined(b"x", b"", [memoryview(b"\1" * len(out))], "hidden")[1 + TAG_BYTES :])
    raw[-1] ^= 1
    filling = Filling(out, cipher("hidden", skip=1))
    with pytest.raises(WireError, match="piece 2 "):
        filling.copy(memoryview(raw))
    assert out[:PIECE_BYTES] == b"\1" * PIECE_BYTES
    assert not filling.full


@pytest.mark.parametrize("seed", range(5))
def test_a_stage_gives_what_it_took(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.bytes(20 * STAGE_BYTES)
    came = int(rng.integers(STAGE_BYTES + 1))
    stage, taken = UnreadBytes(source[:came]), 0
    while taken < 15 * STAGE_BYTES:
        wanted = int(rng.integers(STAGE_BYTES + 1))
        while len(stage) < wanted:
            room = stage.room(wanted)
            count = int(rng.integers(1, len(room) + 1))
            room[:count] = source[came : came + count]
            stage.came(count)
            came += count
        assert stage.peek() == source[taken:came]
        assert stage.take(wanted) == source[taken : taken + wanted]
        taken += wanted
        assert len(stage) == came - taken


@EACH_WAY
def test_a_stage_pours_what_a_filling_needs(way: str) -> None:
    vector = bytes(range(100))
    check = cipher(way, skip=1)
    stage = UnreadBytes(joined(b"x", b"", [memoryview(vector)], way)[1 + check.nbytes :] + b"next")
    filling = Filling(memoryview(bytearray(100)), check)
    stage.pour(filling)
    assert filling.full
    assert filling.out == vector
    assert stage.take(4) == b"next"
    assert not stage
