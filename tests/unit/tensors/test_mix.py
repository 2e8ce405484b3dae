from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError
from p2pdrl.tensors import mix
from p2pdrl.tensors.wire import CHUNK, WireDtype, encode, encoded_nbytes, round_trip

values = st.floats(-(2.0**99), 2.0**99, width=32)
pairs = st.integers(0, 40).flatmap(
    lambda n: st.tuples(arrays(np.float32, n, elements=values), arrays(np.float32, n, elements=values))
)


@given(pairs, st.just(0.0) | st.floats(0.001, 1))
def test_the_two_sides_of_a_pair_are_opposite_bit_for_bit(
    pair: tuple[np.ndarray, np.ndarray], weight: float
) -> None:
    a, b = pair
    to_a, to_b = np.empty_like(a), np.empty_like(a)
    mix.pair_delta(a, b, weight, out=to_a)
    mix.pair_delta(b, a, weight, out=to_b)
    np.testing.assert_array_equal(to_a, -to_b)
    np.testing.assert_allclose(to_a, weight * (b.astype(float) - a), rtol=3e-7, atol=1e-44)


def test_long_vectors_are_walked_to_their_end() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2 * CHUNK + 17), dtype=np.float32)
    out = np.empty_like(a)
    mix.pair_delta(a, b, out=out)
    np.testing.assert_array_equal(out, np.float32(0.5) * (b - a))
    assert mix.norm(a) == pytest.approx(np.linalg.norm(a.astype(float)), rel=1e-12)
    assert mix.distance(a, b) == pytest.approx(np.linalg.norm(a.astype(float) - b), rel=1e-7)


@pytest.mark.parametrize("which", ["mine", "theirs"])
def test_output_may_be_an_input(which: str) -> None:
    vectors = {"mine": np.array([1, 2], np.float32), "theirs": np.array([3, 6], np.float32)}
    mix.pair_delta(vectors["mine"], vectors["theirs"], out=vectors[which])
    assert vectors[which].tolist() == [1.0, 2.0]


def test_norm_of_many_small_values_is_summed_in_float64() -> None:
    assert mix.norm(np.full(1_000_000, 0.1, np.float32)) == pytest.approx(
        100 * float(np.float32(0.1)) * 10, rel=1e-9
    )


def test_nothing_of_the_vectors_length_is_allocated() -> None:
    a, b, out = np.ones((3, 4 * CHUNK), np.float32)
    mix.norm(a)  # the thread's scratch
    tracemalloc.start()
    try:
        mix.pair_delta(a, b, out=out)
        mix.distance(a, b)
        mix.norm(a)
        mix.check_finite(a, 1e6)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < CHUNK


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 11.0, -11.0])
@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, CHUNK + 4])
def test_poison_is_found_wherever_it_lies(bad: float, at: int) -> None:
    vector = np.zeros(CHUNK + 5, np.float32)
    mix.check_finite(vector, 10.0)
    vector[at] = bad
    with pytest.raises(PoisonedVectorError):
        mix.check_finite(vector, 10.0)


def test_vectors_that_differ_are_refused() -> None:
    three, four, doubles = np.zeros(3, np.float32), np.zeros(4, np.float32), np.zeros(3)
    for args in (
        (three, four, three),
        (three, three, four),
        (doubles, three, three),
        (three, three, doubles),
    ):
        with pytest.raises(LayoutMismatchError):
            mix.pair_delta(args[0], args[1], out=args[2])
    with pytest.raises(LayoutMismatchError):
        mix.distance(three, four)
    with pytest.raises(ValueError, match="weight"):
        mix.pair_delta(three, three, 1.5, out=three)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("size", [1, 8191, 3 * 65536 + 5])
def test_a_pair_step_is_decoding_the_delta_and_the_norms_in_one(size: int, dtype: WireDtype) -> None:
    rng = np.random.default_rng(3)
    mine, theirs = rng.standard_normal((2, size), dtype=np.float32)
    buffer = bytearray(encoded_nbytes(size, dtype))
    encode(theirs, dtype, buffer)
    round_trip(theirs, dtype, theirs)
    expected, out = np.empty(size, np.float32), np.empty(size, np.float32)
    mix.pair_delta(mine, theirs, 0.25, out=expected)
    figures = mix.pair_step(mine, buffer, dtype, 0.25, 1e6, out=out)
    assert np.array_equal(out, expected)
    assert figures == pytest.approx((mix.norm(mine), mix.norm(theirs), mix.distance(mine, theirs)), rel=2e-6)


def test_a_pair_step_may_write_where_the_vector_arrived() -> None:
    mine, theirs = np.ones(70_000, np.float32), np.full(70_000, 3.0, np.float32)
    mix.pair_step(mine, memoryview(theirs).cast("B"), "float32", 0.5, 1e6, out=theirs)
    assert np.array_equal(theirs, np.ones(70_000, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e6, 1e30])
def test_a_pair_step_refuses_poison(bad: float) -> None:
    mine, theirs = np.zeros(20_000, np.float32), np.ones(20_000, np.float32)
    theirs[12_345] = bad
    with pytest.raises(PoisonedVectorError):
        mix.pair_step(mine, theirs.tobytes(), "float32", 0.5, 1e6, out=np.empty_like(mine))


def test_a_pair_step_takes_long_vectors_within_the_bound() -> None:
    mine, theirs = np.zeros(10_000, np.float32), np.full(10_000, 9e5, np.float32)
    figures = mix.pair_step(mine, theirs.tobytes(), "float32", 0.5, 1e6, out=np.empty_like(mine))
    assert figures.theirs == pytest.approx(9e7)
