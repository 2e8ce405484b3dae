from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.tensors import wire
from p2pdrl.tensors.wire import CHUNK, WALK, spans

torch.set_num_threads(1)


def interesting() -> np.ndarray:
    """Every sign, exponent and kept fraction, with low halves around the ties; NaN, infinities."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)


def encoded(vector: np.ndarray, dtype: wire.WireDtype) -> bytearray:
    out = bytearray(wire.encoded_nbytes(vector.size, dtype))
    wire.encode(vector, dtype, out)
    return out


def decoded(buffer: bytes | bytearray, size: int, dtype: wire.WireDtype) -> np.ndarray:
    out = np.empty(size, np.float32)
    wire.decode(buffer, dtype, out)
    return out


def test_bf16_is_torchs_for_every_exponent_and_tie() -> None:
    vector = interesting()
    golden = torch.from_numpy(vector.copy()).to(torch.bfloat16)
    nan = np.isnan(vector)
    bits = np.frombuffer(encoded(vector, "bf16"), "<u2")
    np.testing.assert_array_equal(bits[~nan], golden.view(torch.uint16).numpy()[~nan])
    back = decoded(encoded(vector, "bf16"), vector.size, "bf16")
    np.testing.assert_array_equal(back[~nan], golden.to(torch.float32).numpy()[~nan])
    assert np.isnan(back[nan]).all()
    np.testing.assert_array_equal(np.signbit(back[nan]), np.signbit(vector[nan]))


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_round_trip_is_what_the_peer_decodes(dtype: wire.WireDtype) -> None:
    vector = interesting()
    theirs = decoded(encoded(vector, dtype), vector.size, dtype)
    mine = np.empty_like(vector)
    wire.round_trip(vector, dtype, mine)
    np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))
    wire.round_trip(vector, dtype, vector)
    np.testing.assert_array_equal(vector.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_lengths_around_the_chunk(size: int) -> None:
    vector = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
    golden = torch.from_numpy(vector).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(decoded(encoded(vector, "bf16"), size, "bf16"), golden)
    np.testing.assert_array_equal(decoded(encoded(vector, "float32"), size, "float32"), vector)


def test_a_slice_of_a_larger_buffer_can_be_written() -> None:
    buffer = bytearray(10)
    wire.encode(np.array([1.0, -2.0], np.float32), "bf16", memoryview(buffer)[4:8])
    assert buffer.hex() == "00000000803f00c00000"


def test_lengths_and_types_that_do_not_fit_are_refused() -> None:
    vector = np.zeros(3, np.float32)
    with pytest.raises(LayoutMismatchError):
        wire.encode(vector, "bf16", bytearray(12))
    with pytest.raises(WireError):
        wire.decode(bytes(12), "bf16", vector)
    with pytest.raises(WireError):
        wire.encoded_nbytes(3, "float16")  # type: ignore[arg-type]
    with pytest.raises(WireError):
        wire.round_trip(vector, "int8", vector)  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatchError):
        wire.round_trip(vector, "bf16", np.zeros(3))


def test_encoding_with_rounding_leaves_what_the_peer_decodes() -> None:
    vector = np.random.default_rng(5).standard_normal(70_001).astype(np.float32)
    vector[7] = np.nan
    plain, rounding = encoded(vector, "bf16"), bytearray(wire.encoded_nbytes(vector.size, "bf16"))
    target = wire.as_wire(rounding, "bf16", vector.size)
    for span in spans(vector.size, WALK):
        wire.encode_rounding_span(vector[span], target[span])
    decoded = np.empty_like(vector)
    wire.decode(rounding, "bf16", decoded)
    assert rounding == plain
    assert np.array_equal(vector, decoded, equal_nan=True)
