"""What every kind of compression has in common."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2pdrl.config.strategy import Compression
from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.compression import Codec, make_codec
from p2pdrl.tensors.wire import CHUNK

KINDS = get_args(Compression)
KEEPING = ("int8", "topk", "threshold")
SIZES = (1, 7, 4096, 4097, CHUNK + 5000)


def made(kind: Compression, size: int, *, feedback: bool = True) -> Codec:
    return make_codec(kind, size, keep=0.1, threshold=0.5, feedback=feedback)


def message(codec: Codec, vector: np.ndarray) -> bytearray:
    out = bytearray(codec.max_nbytes + 3)
    before = vector.copy()
    nbytes = codec.encode(vector, memoryview(out))
    np.testing.assert_array_equal(vector, before)
    assert nbytes <= codec.max_nbytes
    return out[:nbytes]


def received(codec: Codec, buffer: bytes | bytearray, size: int) -> np.ndarray:
    out = np.full(size, np.nan, np.float32)
    codec.decode(memoryview(buffer), out)
    return out


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_another_codec_of_the_same_make_reads_it(kind: Compression, size: int) -> None:
    codec, vector = made(kind, size), normal(size)
    got = received(made(kind, size), message(codec, vector), size)
    assert np.isfinite(got).all()
    if kind == "none":
        np.testing.assert_array_equal(got, vector)
    if size > 4096:
        assert np.corrcoef(got, vector)[0, 1] > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_vectors_make_the_same_bytes(kind: Compression) -> None:
    codecs = made(kind, 5000), made(kind, 5000)
    for step in range(3):
        a, b = (message(codec, normal(5000, step)) for codec in codecs)
        assert a == b


@pytest.mark.parametrize("kind", KEEPING)
@pytest.mark.parametrize("size", SIZES)
def test_sent_and_kept_add_up_to_what_was_given(kind: Compression, size: int) -> None:
    """The error of a step is float32's rounding of a value of the residual's magnitude."""
    codec = made(kind, size)
    given_sum, sent_sum = np.zeros(size), np.zeros(size)
    bound = np.zeros(size)
    for step in range(20):
        vector = normal(size, step)
        given_sum += vector
        bound += 2.0**-23 * (np.abs(codec.residual) + np.abs(vector))
        sent_sum += received(codec, message(codec, vector), size)
    assert (np.abs(sent_sum + codec.residual - given_sum) <= bound).all()
    if kind == "threshold":
        total = np.linalg.norm(given_sum)
        assert np.linalg.norm(sent_sum + codec.residual - given_sum) <= 1e-6 * total


@pytest.mark.parametrize("kind", KEEPING)
def test_without_feedback_nothing_is_kept(kind: Compression) -> None:
    codec = made(kind, 5000, feedback=False)
    first = message(codec, normal(5000))
    assert not codec.residual.any()
    assert message(codec, normal(5000)) == first
    codec.take_back(memoryview(first))
    assert not codec.residual.any()


@pytest.mark.parametrize("kind", KEEPING)
def test_a_message_that_reached_nobody_is_taken_back(kind: Compression) -> None:
    codec, vector = made(kind, 5000), normal(5000)
    codec.take_back(memoryview(message(codec, vector)))
    np.testing.assert_allclose(codec.residual, vector, atol=1e-6)
    codec.reset()
    assert not codec.residual.any()


@pytest.mark.parametrize("kind", KEEPING)
def test_a_constant_gradient_arrives_in_the_end(kind: Compression) -> None:
    """Error feedback: the mean of what was sent tends to what was given, each time the same."""
    codec, vector = make_codec(kind, 300, keep=0.02, threshold=1.0), normal(300) / 4
    total = np.zeros(300)
    for _ in range(400):
        total += received(codec, message(codec, vector), 300)
    np.testing.assert_allclose(total / 400, vector, atol=0.03)


@pytest.mark.parametrize("kind", KEEPING)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_our_own_poison_is_refused_and_leaves_nothing_behind(kind: Compression, bad: float) -> None:
    codec = made(kind, CHUNK + 9)
    message(codec, normal(CHUNK + 9))
    vector = normal(CHUNK + 9)
    vector[-1] = bad
    with pytest.raises(PoisonedVectorError):
        codec.encode(vector, memoryview(bytearray(codec.max_nbytes)))
    assert not codec.residual.any()
    vector[-1] = 0
    assert np.isfinite(received(codec, message(codec, vector), vector.size)).all()


@pytest.mark.parametrize("kind", KEEPING)
def test_what_float32_cannot_add_is_poison(kind: Compression) -> None:
    codec, huge = make_codec(kind, 2, keep=0.5), np.array([3e38, -3e38], np.float32)
    codec.residual[:] = huge
    with pytest.raises(PoisonedVectorError):
        codec.encode(huge, memoryview(bytearray(codec.max_nbytes)))
    assert not codec.residual.any()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_lengths_are_refused(kind: Compression) -> None:
    codec, vector = made(kind, 5000), normal(5000)
    good = message(codec, vector)
    out = np.zeros(5000, np.float32)
    for bad in (b"", good[:3], good[:-1], good + b"\0"):
        with pytest.raises(WireError):
            codec.decode(memoryview(bad), out)
    assert not out.any()
    with pytest.raises(LayoutMismatchError):
        codec.decode(memoryview(good), out[:-1])
    with pytest.raises(LayoutMismatchError):
        codec.encode(vector[:-1], memoryview(bytearray(codec.max_nbytes)))
    codec.reset()
    with pytest.raises(LayoutMismatchError):
        codec.encode(vector, memoryview(bytearray(codec.max_nbytes - 1)))
    assert message(codec, vector) == good, "a refused call keeps nothing"


@given(st.sampled_from(KEEPING), st.binary(max_size=80), st.sampled_from([1, 9, 40]))
def test_rubbish_is_refused_or_read_as_finite_numbers(kind: Compression, data: bytes, size: int) -> None:
    codec = made(kind, size)
    out = np.full(size, 7, np.float32)
    try:
        codec.decode(memoryview(data), out)
    except WireError:
        assert (out == 7).all()
    else:
        assert np.isfinite(out).all()


@given(
    st.sampled_from(KEEPING),
    st.integers(1, 60).flatmap(lambda n: arrays(np.float32, (3, n), elements=st.floats(-8, 8, width=32))),
    st.data(),
)
def test_a_changed_byte_never_gives_nan(kind: Compression, vectors: np.ndarray, data: st.DataObject) -> None:
    size = vectors.shape[1]
    codec = made(kind, size)
    for vector in vectors:
        buffer = message(codec, vector)
    at = data.draw(st.integers(0, len(buffer) - 1))
    buffer[at] ^= data.draw(st.integers(1, 255))
    try:
        assert np.isfinite(received(codec, buffer, size)).all()
    except WireError:
        pass


def test_options_out_of_range_are_refused() -> None:
    for options in ({"keep": 0.0}, {"keep": 1.1}, {"keep": float("nan")}):
        with pytest.raises(ValueError, match="keep"):
            make_codec("topk", 3, **options)
    for tau in (0.0, -1.0, float("nan"), float("inf"), 1e-60):
        with pytest.raises(ValueError, match="tau"):
            make_codec("threshold", 3, threshold=tau)
    for kind in ("topk", "threshold"):
        with pytest.raises(LayoutMismatchError):
            make_codec(kind, 0)
    for kind in ("none", "bf16", "int8"):
        empty = np.zeros(0, np.float32)
        assert received(made(kind, 0), message(made(kind, 0), empty), 0).size == 0
