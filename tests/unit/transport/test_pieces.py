"""Cutting vectors, and putting them together again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.transport.auth import MAC_BYTES, PieceMac, SwarmKeys
from p2pdrl.transport.framing import (
    Filling,
    batches,
    body_nbytes,
    cut,
    join_views,
    pieces_of,
    unsent,
    views_of,
)
from p2pdrl.transport.limits import PIECE_BYTES


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


KEYS = SwarmKeys(b"key")
NONCES = "1" * 32, "2" * 32


def mac(way: int = 0) -> PieceMac:
    return KEYS.stream(*NONCES)[way]


views = st.lists(st.binary(max_size=40), max_size=6)


def joined(first: bytes, parts: list[memoryview], keyed: bool) -> bytes:
    lists = list(batches(first, parts, mac() if keyed else None))
    assert all(lists)
    return b"".join(bytes(buffer) for batch in lists for buffer in batch)


@given(st.binary(min_size=1, max_size=30), views, st.booleans())
def test_a_frame_is_its_parts_and_macs(first: bytes, parts: list[bytes], keyed: bool) -> None:
    vector = b"".join(parts)
    wanted, serial = first, mac()
    if keyed:
        wanted += serial.of(first) + (vector + serial.of(vector) if vector else b"")
    else:
        wanted += vector
    assert joined(first, [memoryview(part) for part in parts if part], keyed) == wanted


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("sizes", [[3 * PIECE_BYTES + 5], [PIECE_BYTES, 7, PIECE_BYTES], [3] * 200])
def test_long_frames_are_cut(sizes: list[int], keyed: bool) -> None:
    rng = np.random.default_rng(5)
    parts = [memoryview(rng.bytes(size)) for size in sizes]
    lists = list(batches(b"first", parts, mac() if keyed else None))
    assert all(sum(map(len, batch)) <= 2 * PIECE_BYTES for batch in lists)
    assert all(len(batch) <= 64 for batch in lists)
    raw = b"".join(bytes(buffer) for batch in lists for buffer in batch)
    assert len(raw) == body_nbytes(5, sum(sizes), keyed)
    out = memoryview(bytearray(sum(sizes)))
    check = mac()
    if keyed:
        assert check.good(b"first", raw[5 : 5 + MAC_BYTES])
    filling = Filling(out, check if keyed else None)
    assert filling.copy(memoryview(raw)[5 + (MAC_BYTES if keyed else 0) :]) == filling.taken_nbytes
    assert filling.full
    assert out == b"".join(parts)


def test_pieces_cannot_be_repeated_left_out_or_taken_from_the_other_way() -> None:
    calls, answers = KEYS.stream(*NONCES)
    macs = [calls.of(b"same") for _ in range(3)]
    assert len(set(macs)) == 3
    check = mac()
    assert check.good(b"same", macs[0])
    assert not check.good(b"same", macs[0]), "a replay"
    check = mac()
    assert not check.good(b"same", macs[1]), "one was left out"
    assert not mac(1).good(b"same", macs[0]), "a reflection"
    assert answers.of(b"same") != macs[0]
    for other in (KEYS.stream("3" * 32, NONCES[1]), KEYS.stream(NONCES[0], "3" * 32)):
        assert not other[0].good(b"same", macs[0]), "another stream"
    assert not SwarmKeys(b"other").stream(*NONCES)[0].good(b"same", macs[0])


def test_pieces_are_counted() -> None:
    assert [pieces_of(n) for n in (0, 1, PIECE_BYTES, PIECE_BYTES + 1)] == [0, 1, 1, 2]


@given(views, st.data())
def test_what_is_unsent_is_the_rest(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    sent_nbytes = data.draw(st.integers(0, len(whole)))
    rest = unsent(parts, sent_nbytes)
    assert b"".join(map(bytes, rest)) == whole[sent_nbytes:]
    assert bool(rest) == (sent_nbytes < len(whole)) or not any(rest)
