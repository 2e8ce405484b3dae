"""Noise that hides: its bits, its distribution, and the grid that sums lie on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from p2pdrl.strategies.allreduce.federated import KEY_BYTES, SecretNoise, grid_of

KEY = bytes(range(KEY_BYTES))


def added(size: int, deviation: float = 1.0, *, value: float = 0.0, key: bytes | None = KEY) -> np.ndarray:
    vector = np.full(size, value, np.float32)
    SecretNoise(key).add_to(vector, deviation)
    return vector.astype(np.float64)


def test_it_is_box_and_mullers_transform_of_aes_in_counter_mode() -> None:
    """Written out anew, block by block in ECB."""
    size = 999
    ecb = Cipher(algorithms.AES256(KEY), modes.ECB()).encryptor()
    blocks = b"".join(ecb.update(number.to_bytes(16, "big")) for number in range(size // 2 + 1))
    bits = np.frombuffer(blocks, "<u8")
    first, second = (bits.astype(np.longdouble) / np.longdouble(2**64)).reshape(2, -1)
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    golden = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:size]
    assert np.abs(added(size, 3.0) - 3.0 * golden.astype(np.float64)).max() <= 0.51 * grid_of(3.0)


def test_its_moments_and_tails_are_a_gaussians() -> None:
    noise, size = added(1_000_000, 2.5) / 2.5, 1_000_000
    assert abs(noise.mean()) < 5 / math.sqrt(size)
    assert abs((noise**2).mean() - 1) < 5 * math.sqrt(2 / size)
    assert abs((noise**4).mean() - 3) < 5 * math.sqrt(96 / size)
    for bound in (-3.0, -1.0, 0.0, 0.5, 2.0, 4.0):
        chance = 0.5 * math.erfc(-bound / math.sqrt(2))
        assert abs((noise < bound).mean() - chance) < 5 * math.sqrt(chance * (1 - chance) / size)


def test_entries_are_independent() -> None:
    """Neighbours, the two halves of a piece, and the same places of two pieces."""
    noise = added(1 << 18)
    for lag in (1, 2, 1 << 15, 1 << 16):
        a, b = noise[:-lag], noise[lag:]
        for left, right in ((a, b), (a**2 - 1, b**2 - 1)):
            assert abs((left * right).mean()) < 5 * left.std() * right.std() / math.sqrt(a.size)


def test_no_two_streams_and_no_two_calls_are_alike() -> None:
    assert not np.array_equal(added(100, key=None), added(100, key=None))
    stream, first, second = SecretNoise(KEY), np.zeros(100, np.float32), np.zeros(100, np.float32)
    stream.add_to(first, 1.0)
    stream.add_to(second, 1.0)
    assert not np.isin(first, second).any()


@pytest.mark.parametrize("deviation", [1e-3, 0.7, 1.0, 300.0])
@pytest.mark.parametrize("value", [0.0, 1e-7, 0.1, -1 / 3])
def test_sums_lie_on_one_grid_whatever_was_hidden(deviation: float, value: float) -> None:
    """Else their last bits would tell values apart, however much noise there is."""
    grid = grid_of(deviation)
    assert math.log2(grid) == int(math.log2(grid))
    assert 2**-17 < grid / deviation <= 2**-16
    steps = added(10_000, deviation, value=value * deviation) / grid
    assert np.array_equal(steps, np.rint(steps))


def test_small_numbers_of_entries() -> None:
    whole = added(5)
    assert whole.size == 5
    assert added(0).size == 0
    assert added(1).size == 1
