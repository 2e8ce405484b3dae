from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors import positions
from p2pdrl.tensors.wire import CHUNK

LONG = 2 * CHUNK + 3


def encoded(where: np.ndarray, size: int) -> bytearray:
    out = bytearray(positions.encoded_nbytes(where.size, size) + 5)
    nbytes = positions.encode(where.astype(np.int64), size, memoryview(out))
    assert nbytes == positions.encoded_nbytes(where.size, size) <= positions.max_encoded_nbytes(size)
    assert bytes(out[nbytes:]) == bytes(5)
    return out[:nbytes]


def decoded(buffer: bytes | bytearray, count: int, size: int) -> np.ndarray:
    return positions.decode(memoryview(buffer), count, size)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_what_was_written_is_read(case: tuple[int, set[int]]) -> None:
    size, chosen = case
    where = np.array(sorted(chosen), np.int64)
    np.testing.assert_array_equal(decoded(encoded(where, size), where.size, size), where)


@pytest.mark.parametrize("size", [1, 8, 65_536, 65_537, CHUNK, CHUNK + 1, LONG])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.07, 0.5, 1.0])
def test_around_blocks_and_both_forms(size: int, share: float) -> None:
    where = np.flatnonzero(np.random.default_rng(size).random(size) < share)
    np.testing.assert_array_equal(decoded(encoded(where, size), where.size, size), where)


def test_the_form_on_the_wire_is_fixed() -> None:
    sparse = encoded(np.array([1, 65_535, 65_536]), 70_000)
    assert sparse.hex() == "02000000010000000100ffff0000"
    dense = encoded(np.array([0, 3, 8]), 9)
    assert dense.hex() == "0901"


@pytest.mark.parametrize(
    "offsets",
    [(5, 5), (6, 5)],
    ids=["twice", "descending"],
)
def test_positions_that_do_not_ascend_are_refused(offsets: tuple[int, int]) -> None:
    bad = np.array([2], "<u4").tobytes() + np.array(offsets, "<u2").tobytes()
    with pytest.raises(WireError, match="ascend"):
        decoded(bad, 2, 60_000)


def test_positions_beyond_the_vector_are_refused() -> None:
    with pytest.raises(WireError, match="ascend to its end"):
        decoded(np.array([1], "<u4").tobytes() + np.array([60_000], "<u2").tobytes(), 1, 60_000)
    with pytest.raises(WireError, match="beyond"):
        decoded(bytes([0, 0b10]), 1, 9)


def test_counts_and_lengths_that_lie_are_refused() -> None:
    good = encoded(np.array([1, 2, 3]), 60_000)
    for buffer, count in ((good, 2), (good, 4), (good[:-1], 3), (good + b"\0", 3), (b"", 0)):
        with pytest.raises(WireError):
            decoded(buffer, count, 60_000)
    for total in (0, 2, 2**32 - 1):
        with pytest.raises(WireError, match="the blocks count"):
            decoded(np.array([total], "<u4").tobytes() + good[4:], 3, 60_000)
    with pytest.raises(WireError):
        decoded(bytes(2), 1, 9)
    with pytest.raises(WireError):
        decoded(bytes(2), 10, 9)


@given(st.binary(max_size=60), st.integers(0, 40), st.sampled_from([1, 9, 100, 60_000, 140_000]))
def test_rubbish_is_refused_or_read_as_valid_positions(data: bytes, count: int, size: int) -> None:
    try:
        where = decoded(data, count, size)
    except WireError:
        return
    assert where.size == count
    assert bool(np.all(np.diff(where) > 0))
    assert where.size == 0 or (where[0] >= 0 and where[-1] < size)


def test_gathering_adds_in_the_same_pass() -> None:
    rng = np.random.default_rng(1)
    vector, update = rng.standard_normal((2, LONG), dtype=np.float32)
    golden = vector + update
    where = positions.gather_beyond(vector, 2.0, add=update)
    np.testing.assert_array_equal(vector, golden)
    np.testing.assert_array_equal(where, np.flatnonzero(np.abs(golden) >= np.float32(2.0)))
    assert positions.gather_beyond(vector, 1e9).size == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_poison_is_found(bad: float) -> None:
    vector = np.zeros(LONG, np.float32)
    vector[-1] = bad
    with pytest.raises(PoisonedVectorError):
        positions.gather_beyond(vector, 1.0)


def test_a_sum_that_overflows_is_poison() -> None:
    with pytest.raises(PoisonedVectorError):
        positions.gather_beyond(np.full(3, 3e38, np.float32), 1.0, add=np.full(3, 3e38, np.float32))


def test_bounds_of_our_own_side() -> None:
    with pytest.raises(LayoutMismatchError):
        positions.encode(np.arange(3), 60_000, memoryview(bytearray(9)))
    for size in (0, positions.MAX_SIZE + 1):
        with pytest.raises(LayoutMismatchError):
            positions.check_size(size)
