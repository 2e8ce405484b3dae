"""What an owner computes, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.strategy import GradAverageConfig
from p2pdrl.strategies.allreduce.reduce_scatter import CHUNK, reduce_piece
from p2pdrl.tensors import wire

MEAN = GradAverageConfig()
SIZE = CHUNK + 77


def vectors(count=4, size=SIZE, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


def reduced(parts, weights, rule=MEAN, dtype="float32", **options):
    out = np.full(SIZE if not parts else parts[0].size, np.nan, np.float32)
    encoded = memoryview(bytearray(2 * out.size))
    figures = reduce_piece(parts, weights, rule, dtype, out=out, encoded=encoded, **options)
    return out, encoded, figures


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (3, 1, 4, 1.5), (1e-3, 1e9, 1, 7)])
def test_the_mean_is_weighted(weights):
    parts = vectors()
    out, _, figures = reduced(parts, weights, spread=True)
    expected = np.average(np.array(parts, np.float64), axis=0, weights=weights)
    assert np.abs(out - expected).max() < 1e-6
    assert figures.square == pytest.approx(float(expected @ expected), rel=1e-5)
    spread = sum(w * ((p - expected) ** 2).sum() for p, w in zip(parts, weights, strict=True)) / sum(weights)
    assert figures.spread == pytest.approx(spread, rel=1e-3, abs=1e-2)


def test_everybody_decodes_what_the_owner_holds():
    out, encoded, _ = reduced(vectors(), (1, 2, 3, 4), dtype="bf16")
    decoded = np.empty_like(out)
    wire.decode(encoded, "bf16", decoded)
    assert np.array_equal(out, decoded)
    exact, _, _ = reduced(vectors(), (1, 2, 3, 4))
    assert np.abs(out - exact).max() <= 2**-8 * np.abs(exact).max()


def test_equal_vectors_come_out_as_they_went_in():
    part = vectors(1)[0]
    out, _, figures = reduced([part] * 4, (1, 1, 1, 1), spread=True)
    assert np.array_equal(out, part)
    assert figures.spread == pytest.approx(0, abs=1e-2)


def test_of_nobody_it_is_zero():
    out, _, figures = reduced([], [], spread=True)
    assert not out.any()
    assert figures == (0.0, 0.0)


def test_robust_rules_keep_one_bad_member_out():
    good = vectors(5)
    bad = np.full(SIZE, 1e5, np.float32)
    for rule in (GradAverageConfig(mixing="trimmed"), GradAverageConfig(mixing="clipped")):
        out, _, _ = reduced([*good, bad], (1,) * 6, rule)
        assert np.abs(out).max() < 6
