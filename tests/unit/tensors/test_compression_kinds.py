"""What each kind of compression promises by itself, against plain references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.compression import (
    ROW,
    Int8Codec,
    ThresholdResidual,
    TopkCodec,
    add_message,
    entries_in,
    make_codec,
)
from p2pdrl.tensors.wire import CHUNK

finite = st.floats(-(2.0**60), 2.0**60, width=32)
vectors = st.integers(1, 80).flatmap(lambda n: arrays(np.float32, n, elements=finite))


def message(codec: Int8Codec | TopkCodec, vector: np.ndarray) -> bytearray:
    out = bytearray(codec.max_nbytes)
    return out[: codec.encode(vector, memoryview(out))]


def received(codec: Int8Codec | TopkCodec, buffer: bytes | bytearray, size: int) -> np.ndarray:
    out = np.full(size, np.nan, np.float32)
    codec.decode(memoryview(buffer), out)
    return out


# int8


@given(vectors)
def test_int8_is_off_by_half_a_step_at_most(vector: np.ndarray) -> None:
    got = received(Int8Codec(vector.size), message(Int8Codec(vector.size), vector), vector.size)
    scale = np.float32(np.abs(vector).max()) / np.float32(127)
    if scale < np.finfo(np.float32).smallest_normal:
        assert not got.any()
    else:
        assert (np.abs(got.astype(float) - vector) <= float(scale) / 2 * (1 + 1e-5)).all()


def test_int8_scales_each_row_by_itself() -> None:
    rng = np.random.default_rng(3)
    size = CHUNK + 2 * ROW + 17
    vector = rng.standard_normal(size, dtype=np.float32)
    magnitude = 10.0 ** rng.integers(-6, 6, -(-size // ROW))
    vector *= np.repeat(magnitude, ROW)[:size].astype(np.float32)
    got = received(Int8Codec(size), message(Int8Codec(size), vector), size)
    for start in range(0, size, ROW):
        row = vector[start : start + ROW]
        scale = np.abs(row).max() / np.float32(127)
        np.testing.assert_array_equal(got[start : start + ROW], np.rint(row / scale) * scale)


def test_int8_rounds_halves_to_even() -> None:
    vector = np.array([127, 0.5, 1.5, -2.5, -127], np.float32)
    got = received(Int8Codec(5), message(Int8Codec(5), vector), 5)
    assert got.tolist() == [127.0, 0.0, 2.0, -2.0, -127.0]


@pytest.mark.parametrize("value", [1e-45, 1e-43, 1e-37, 1e-30, 3.4e38])
def test_int8_at_the_ends_of_float32(value: float) -> None:
    vector = np.array([value, -value, 0], np.float32)
    codec = Int8Codec(3)
    got = received(codec, message(codec, vector), 3)
    assert got.tolist() == pytest.approx(vector.tolist(), rel=1e-6, abs=1.5e-36)
    np.testing.assert_allclose(got + codec.residual, vector, rtol=1e-6)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 3e38])
def test_int8_refuses_bad_scales(scale: float) -> None:
    buffer = message(Int8Codec(3), np.ones(3, np.float32))
    buffer[:4] = np.float32(scale).tobytes()
    with pytest.raises(WireError, match="scale"):
        received(Int8Codec(3), buffer, 3)


def test_int8_refuses_the_level_that_no_encoder_writes() -> None:
    buffer = message(Int8Codec(3), np.ones(3, np.float32))
    buffer[4] = 0x80
    with pytest.raises(WireError, match="level"):
        received(Int8Codec(3), buffer, 3)


# top-k


@given(vectors, st.floats(0.01, 1))
def test_topk_sends_the_largest(vector: np.ndarray, keep: float) -> None:
    most = int(np.ceil(keep * vector.size))
    codec = TopkCodec(vector.size, keep)
    sent = received(codec, message(codec, vector), vector.size)
    order = np.argsort(-np.abs(vector), kind="stable")[:most]
    golden = np.zeros_like(vector)
    golden[order] = vector[order]
    np.testing.assert_allclose(sent, golden, rtol=2.0**-8, atol=1e-40)
    assert np.count_nonzero(sent) <= most


@pytest.mark.parametrize("keep", [0.0001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("shape", ["normal", "ties", "mostly zero", "sorted", "at the sampled places"])
def test_topk_of_long_vectors_is_exact_however_the_sample_falls(keep: float, shape: str) -> None:
    size = 3 * CHUNK + 11
    rng = np.random.default_rng(5)
    vector = rng.standard_normal(size, dtype=np.float32)
    if shape == "ties":
        vector = rng.integers(-3, 4, size).astype(np.float32)
    elif shape == "mostly zero":
        vector[rng.random(size) < 0.999] = 0
    elif shape == "sorted":
        vector.sort()
    elif shape == "at the sampled places":
        vector[:: size // (1 << 14)] *= 1e6
    codec = TopkCodec(size, keep)
    sent = received(codec, message(codec, vector), size)
    order = np.argsort(-np.abs(vector), kind="stable")[: int(np.ceil(keep * size))]
    golden = np.zeros(size, np.bool_)
    golden[order[vector[order] != 0]] = True
    np.testing.assert_array_equal(sent != 0, golden)


def test_topk_keeps_what_the_rounding_loses() -> None:
    codec, vector = TopkCodec(2, 0.5), np.array([1.0 + 2.0**-10, 0.25], np.float32)
    assert received(codec, message(codec, vector), 2).tolist() == [1.0, 0.0]
    assert codec.residual.tolist() == [2.0**-10, 0.25]


def test_topk_sends_nothing_of_nothing() -> None:
    codec = TopkCodec(9, 0.5)
    buffer = message(codec, np.zeros(9, np.float32))
    assert not received(codec, buffer, 9).any()


def test_topk_takes_four_bytes_an_entry() -> None:
    size = 1 << 20
    buffer = message(TopkCodec(size, 0.01), np.random.default_rng(0).standard_normal(size, dtype=np.float32))
    assert len(buffer) == 4 + 4 * 16 + 4 * int(np.ceil(0.01 * size))


def test_topk_refuses_what_bfloat16_cannot_hold() -> None:
    codec = TopkCodec(2, 1.0)
    with pytest.raises(PoisonedVectorError):
        message(codec, np.full(2, np.finfo(np.float32).max))
    assert not codec.residual.any()


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFC1])
def test_topk_refuses_values_that_are_no_numbers(bits: int) -> None:
    buffer = message(TopkCodec(9, 0.5), np.arange(9, dtype=np.float32))
    buffer[-2:] = bits.to_bytes(2, "little")
    with pytest.raises(WireError, match="NaN"):
        received(TopkCodec(9, 0.5), buffer, 9)


def test_topk_refuses_more_entries_than_agreed() -> None:
    buffer = message(TopkCodec(9, 1.0), np.arange(1, 10, dtype=np.float32))
    with pytest.raises(WireError, match="at most"):
        received(TopkCodec(9, 0.5), buffer, 9)


# threshold


def strom_reference(updates: np.ndarray, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Strom 2015, section 2, entry by entry in float64: what is sent each time, and what stays."""
    residual = np.zeros(updates.shape[1])
    sent = np.zeros_like(updates, dtype=float)
    for step, update in enumerate(updates):
        residual += update
        for at, value in enumerate(residual):
            if abs(value) >= tau:
                sent[step, at] = tau if value > 0 else -tau
        residual -= sent[step]
    return sent, residual


def test_threshold_is_stroms() -> None:
    updates = np.random.default_rng(2).integers(-40, 41, (30, 50)).astype(np.float32) / 16  # exact in float32
    golden, left = strom_reference(updates, 0.75)
    kept = ThresholdResidual(50, 0.75)
    for update, sent in zip(updates, golden, strict=True):
        got = np.zeros(50, np.float32)
        kept.add(update)
        out = memoryview(bytearray(kept.max_nbytes))
        nbytes = kept.take(out)
        assert entries_in(out) == np.count_nonzero(sent)
        add_message(out[:nbytes], 0.75, got)
        np.testing.assert_array_equal(got, sent)
    np.testing.assert_array_equal(kept.residual, left)


def test_an_entry_of_several_tau_is_sent_in_several_messages() -> None:
    kept = ThresholdResidual(2, 1.0)
    kept.add(np.array([3.5, -0.5], np.float32))
    out = memoryview(bytearray(kept.max_nbytes))
    counts = []
    for _ in range(5):
        kept.take(out)
        counts.append(entries_in(out))
    assert counts == [1, 1, 1, 0, 0]
    assert kept.residual.tolist() == [0.5, -0.5]


def test_sent_and_kept_stay_equal_to_the_sum_over_many_steps() -> None:
    """The relative error in norm after 200 steps of float32; single steps are bounded in test_compression."""
    size, tau = 20_000, 0.01
    rng = np.random.default_rng(7)
    kept, total, sent = ThresholdResidual(size, tau), np.zeros(size), np.zeros(size)
    out = memoryview(bytearray(kept.max_nbytes))
    got = np.zeros(size, np.float32)
    for _ in range(200):
        update = rng.standard_normal(size, dtype=np.float32) * np.float32(2e-3)
        total += update
        got.fill(0)
        nbytes = kept.take(out, add=update)
        add_message(out[:nbytes], tau, got)
        sent += got
    error = np.linalg.norm(sent + kept.residual - total) / np.linalg.norm(total)
    assert error < 2e-8 * 200**0.5
    assert (np.abs(kept.residual) < 2 * tau).all()


def test_messages_add_up_in_any_order() -> None:
    rng = np.random.default_rng(9)
    updates = rng.standard_normal((6, 1000), dtype=np.float32)
    messages = []
    for update in updates:
        kept = ThresholdResidual(1000, 0.5)
        out = bytearray(kept.max_nbytes)
        messages.append(out[: kept.take(memoryview(out), add=update)])
    forth, back = np.zeros((2, 1000), np.float32)
    for buffer in messages:
        add_message(memoryview(buffer), 0.5, forth)
    for buffer in reversed(messages):
        add_message(memoryview(buffer), 0.5, back)
    np.testing.assert_array_equal(forth, back)


def test_a_threshold_message_on_the_wire_is_fixed() -> None:
    kept = ThresholdResidual(9, 0.5)
    out = bytearray(kept.max_nbytes)
    nbytes = kept.take(memoryview(out), add=np.array([1, 0, -1, 0, 0, 0, 0, 0, 0.5], np.float32))
    assert out[:nbytes].hex() == "0000003f03000000050102"


def test_one_percent_takes_about_two_bytes_an_entry() -> None:
    size = 1 << 20
    kept = ThresholdResidual(size, 2.5758)
    out = memoryview(bytearray(kept.max_nbytes))
    nbytes = kept.take(out, add=np.random.default_rng(0).standard_normal(size, dtype=np.float32))
    assert entries_in(out) == pytest.approx(0.01 * size, rel=0.05)
    assert nbytes == pytest.approx(2.125 * entries_in(out), rel=0.01)
    assert kept.max_nbytes == pytest.approx(size / 4, rel=1e-3)


def test_another_tau_is_refused() -> None:
    kept = ThresholdResidual(3, 0.5)
    out = bytearray(kept.max_nbytes)
    nbytes = kept.take(memoryview(out), add=np.ones(3, np.float32))
    target = np.zeros(3, np.float32)
    for bad in (0.25, np.nan, -0.5):
        out[:4] = np.float32(bad).tobytes()
        with pytest.raises(WireError, match="tau"):
            add_message(memoryview(out)[:nbytes], 0.5, target)
    with pytest.raises(WireError, match="announced"):
        add_message(memoryview(np.float32(0.5).tobytes() + b"\xff" * 30), 0.5, target)
    with pytest.raises(WireError):
        entries_in(memoryview(b"1234567"))
    assert not target.any()


def test_the_residual_refuses_what_does_not_fit() -> None:
    kept = ThresholdResidual(3, 0.5)
    with pytest.raises(LayoutMismatchError):
        kept.add(np.zeros(4, np.float32))
    with pytest.raises(LayoutMismatchError):
        kept.take(memoryview(bytearray(kept.max_nbytes)), add=np.zeros(3))
    with pytest.raises(LayoutMismatchError):
        kept.take(memoryview(bytearray(kept.max_nbytes - 1)))
    with pytest.raises(LayoutMismatchError):
        add_message(memoryview(b""), 0.5, np.zeros(3))


def test_codec_and_residual_write_the_same() -> None:
    update = np.random.default_rng(4).standard_normal(100, dtype=np.float32)
    kept, codec = ThresholdResidual(100, 1.0), make_codec("threshold", 100, threshold=1.0)
    a, b = bytearray(kept.max_nbytes), bytearray(codec.max_nbytes)
    kept.add(update)
    assert kept.take(memoryview(a)) == codec.encode(update, memoryview(b))
    assert a == b
