"""Where bytes that arrive are put."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.transport.auth import MAC_BYTES, PieceMac, SwarmKeys
from p2pdrl.transport.framing import STAGE_BYTES, Filling, UnreadBytes, batches
from p2pdrl.transport.limits import PIECE_BYTES

KEYS = SwarmKeys(b"key")
NONCES = "1" * 32, "2" * 32


def mac() -> PieceMac:
    return KEYS.stream(*NONCES)[0]


def joined(first: bytes, parts: list[memoryview], keyed: bool) -> bytes:
    lists = list(batches(first, parts, mac() if keyed else None))
    assert all(lists)
    return b"".join(bytes(buffer) for batch in lists for buffer in batch)


@given(st.data())
def test_a_buffer_fills_whatever_the_portions(data: st.DataObject) -> None:
    keyed = data.draw(st.booleans())
    nbytes = data.draw(st.sampled_from([1, 50, PIECE_BYTES, PIECE_BYTES + 1]))
    vector = np.random.default_rng(nbytes).bytes(nbytes)
    raw = memoryview(joined(b"x", [memoryview(vector)], keyed))[1 + (MAC_BYTES if keyed else 0) :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    check = mac()
    check.skip(1)
    out = memoryview(bytearray(nbytes))
    filling = Filling(out, check if keyed else None)
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


@given(st.integers(0, 2 * PIECE_BYTES + 10 + 3 * MAC_BYTES - 1))
def test_a_changed_byte_is_noticed(at: int) -> None:
    vector = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 10)
    raw = bytearray(joined(b"x", [memoryview(vector)], True)[1 + MAC_BYTES :])
    raw[at] ^= 1
    check = mac()
    check.skip(1)
    with pytest.raises(WireError, match="isn't authentic"):
        Filling(memoryview(bytearray(len(vector))), check).copy(memoryview(raw))


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


def test_a_stage_pours_what_a_filling_needs() -> None:
    vector = bytes(range(100))
    stage = UnreadBytes(joined(b"x", [memoryview(vector)], True)[1 + MAC_BYTES :] + b"next")
    check = mac()
    check.skip(1)
    filling = Filling(memoryview(bytearray(100)), check)
    stage.pour(filling)
    assert filling.full
    assert filling.out == vector
    assert stage.take(4) == b"next"
    assert not stage
